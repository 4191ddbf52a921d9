"""The names that code writes and reads are found in the bytecode of every version of Python."""

from __future__ import annotations

import dis
import textwrap
import types
from typing import Any

import pytest

from castore.keys.bytecode import (
    Outer,
    attributes_read,
    attributes_set_of,
    codes,
    handed_on,
    names_written,
    outer_reads,
    single,
    steps,
)
from castore.keys.objects import function_fingerprint

# The source of a function, and what it writes to.
WRITES: dict[str, tuple[str, set[str]]] = {
    "an attribute": ("def f(self, v): self.a = v", {".a"}),
    "an attribute in place": ("def f(self): self.a += 1", {".a"}),
    "two at once": ("def f(self, v, w): self.a, self.b = v, w", {".a", ".b"}),
    "an element of an attribute": ("def f(self, key, value): self.cache[key] = value", {".cache"}),
    "an element, with a key that is worked out": (
        "def f(self, key, value): self.cache[str(key) + 'x'] = value", {".cache"},
    ),
    "an element in place": ("def f(self, key, by): self.counts[key] += by", {".counts"}),
    "an element in place, by a key that is an attribute": (
        "def f(self): self.counts[self.key] += 1", {".counts"},
    ),
    "no element any more": ("def f(self, key): del self.cache[key]", {".cache"}),
    "a slice": ("def f(self, a, b, values): self.rows[a:b] = values", {".rows"}),
    "a slice, with ends that are worked out": (
        "def f(self, a, values): self.rows[a + 1:len(a)] = values", {".rows"},
    ),
    "a slice in place": ("def f(self, a, b, values): self.rows[a:b] += values", {".rows"}),
    "no slice any more": ("def f(self, a, b): del self.rows[a:b]", {".rows"}),
    "a list": ("def f(self, value): self.seen.append(value)", {".seen"}),
    "a default": ("def f(value, key, kept={}): kept[key] = value", {"kept"}),
    "a default in place": ("def f(key, kept={}): kept[key] += 1", {"kept"}),
    "a slice of a default": ("def f(a, b, value, kept=[]): kept[a:b] = value", {"kept"}),
    "a default's method": ("def f(value, kept=[]): kept.append(value)", {"kept"}),
    "in a comprehension": (
        "def f(self, rows): return [self.seen.add(row) for row in rows if row]", {".seen"},
    ),
    "in a function inside": ("def f(self):\n    def g(v): self.a = v\n    return g", {".a"}),
    "what is read only": (
        "def f(self, key, other): return self.cache[key], other.items(), self.rows[key:other]", set(),
    ),
    "variables of its own": ("def f(a, b):\n    c, d = a, b\n    c = [d for d in c]\n    return c, d", set()),
}  # fmt: skip


def compiled(source: str) -> Any:
    """The function ``f`` of a text."""
    scope: dict[str, Any] = {"__name__": "tests.of_bytecode"}
    exec(textwrap.dedent(source), scope)
    return scope["f"]


@pytest.mark.parametrize("case", WRITES)
def test_whatever_code_writes_to_is_found(case: str) -> None:
    source, written = WRITES[case]
    assert names_written(compiled(source).__code__) == written


M = Outer("global", "m", ())
# The source of a function, and what it hands on of the outer variable `m` and of what it imports.
HANDED_ON: dict[str, tuple[str, set[Outer]]] = {
    "an attribute": ("def f(x): return m.a(x)", {M._replace(attributes=("a",))}),
    "an attribute that is called": ("def f(x): m.a(x)", {M._replace(attributes=("a",))}),
    "an attribute that is set": ("def f(x): m.a = x", set()),
    "an attribute in place": ("def f(x): m.a += x", {M._replace(attributes=("a",))}),
    "a test": ("def f(x):\n    if m: return 1\n    return 2", set()),
    "an argument": ("def f(g): return g(m, 1)", {M}),
    "a result": ("def f(): return m", {M}),
    "an element": ("def f(): return [m]", {M}),
    "a value of an attribute": ("def f(self): self.a = m", {M}),
    "a variable of its own": (
        "def f(g):\n    n = m\n    o = n.a\n    return g(o)", {M._replace(attributes=("a",))},
    ),
    "a variable that is only read": (
        "def f(x):\n    n = m\n    return n.a.b(x)", {M._replace(attributes=("a", "b"))},
    ),
    "a variable in a loop": (
        "def f(x):\n    n = m\n    while x: n = n.a\n    return x", set(),
    ),
    "a function inside": ("def f(g):\n    n = m\n    def h(): return g(n)\n    return h", {M}),
    "an import": (
        "def f(g):\n    import a.b\n    return g(a.b)", {Outer("import", (0, "a.b", ""), ("b",))},
    ),
    "an import by another name": (
        "def f(g):\n    import a.b as c\n    return g(c)", {Outer("import", (0, "a.b", "b"), ())},
    ),
    "an import from a package": (
        "def f(g):\n    from ..a import b as c, d\n    return g(c)", {Outer("import", (2, "a", "b"), ())},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HANDED_ON)
def test_whatever_code_hands_on_is_found(case: str) -> None:
    source, expected = HANDED_ON[case]
    found = handed_on(compiled(source).__code__)
    assert {outer for outer in found if outer.kind == "import" or outer.name == "m"} == expected


def test_a_closure_that_is_written_to_is_found() -> None:
    outer = compiled(
        """
        def f(kept, count, rows):
            def inner(key, value):
                nonlocal count
                count += 1
                kept[key] = value
                rows[key:value] = kept
            return inner
        """
    )
    inner: types.FunctionType = outer({}, 0, [])
    assert names_written(inner.__code__) == {"kept", "count", "rows"}


def test_attributes_are_found_however_they_are_asked_for() -> None:
    source = """
        class A(list):
            def f(self, other, key):
                self.called(key)
                super().above(key)
                return [other.read for one in key], lambda: key.inside
        f = A.f
    """
    assert attributes_read(compiled(source).__code__) == {"called", "above", "read", "inside"}


def test_globals_and_closures_that_code_reads_are_found_in_comprehensions_too() -> None:
    source = """
        def f(kept):
            def inner(rows, sign):
                scaled = [SCALE * row + kept for row in rows if LIMITS[row] < sign]
                return scaled, {kept: BASE for kept in rows}
            return inner
    """
    inner: types.FunctionType = compiled(source)(1)
    reads = {read for code in codes(inner.__code__) for read in outer_reads(code)}
    # Before Python 3.12 a comprehension is a function inside, which reads the variables of the one around it.
    reads -= {("closure", "sign")}
    assert reads == {("global", "SCALE"), ("global", "LIMITS"), ("global", "BASE"), ("closure", "kept")}


def test_each_variable_has_an_instruction_of_its_own() -> None:
    code = compiled("def f(a, b):\n    c, d = a, b\n    for a in b: c = a\n    return c + d").__code__
    loads = [name for opname, name in steps(code) if opname == "LOAD_FAST"]
    stores = [name for opname, name in steps(code) if opname == "STORE_FAST"]
    assert loads == ["a", "b", "b", "a", "c", "d"]
    assert sorted(stores) == ["a", "c", "c", "d"]


def test_splitting_instructions_leaves_the_height_of_the_stack_as_it_was() -> None:
    for case, (source, _) in WRITES.items():
        for code in codes(compiled(source).__code__):
            whole = [row for row in dis.get_instructions(code) if row.opname != "EXTENDED_ARG"]
            heights = [
                sum(dis.stack_effect(row.opcode, row.arg, jump=False) for row in rows)
                for rows in (whole, single(code))
            ]
            assert heights[0] == heights[1], case


def test_two_variables_that_change_places_change_the_fingerprint() -> None:
    one, two = (
        compiled(f"def f(a, b):\n    c, d = a, b\n    return {ending}") for ending in ("c - d", "d - c")
    )
    assert function_fingerprint(one) != function_fingerprint(two)


def test_the_attributes_that_code_sets_of_one_variable() -> None:
    def sets(one: Any, other: Any) -> None:
        one.a = other.b = 1
        one.c += 1
        other.d += 1
        one.inner.e = 1
        one.inner.f += 1
        one.g, other.h = 1, 2
        one.items[0] = one.read
        one.i = one.read if other else one.a

    assert attributes_set_of(sets.__code__, "one") == {"a", "c", "g", "i"}
    assert attributes_set_of(sets.__code__, "other") == {"b", "d", "h"}
