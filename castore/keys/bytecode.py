"""The parts of compiled code that count: instructions with their meaning, not their positions in tables.

Lists the names, constants and calls of a code object and of the code objects inside it, as a fingerprint
takes them: line numbers, docstrings and annotations are left out. Also lists the variables and attributes
that code writes to, and the variables that it hands on. Knows nothing of functions, modules or values; runs
nothing. Bytecode differs between minor versions of Python.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

# The arguments and the kind of function; the other flags depend on the compiler and on __future__.
_FLAGS = 0xFF | 0x200
#: Names in a class body that have no part in its computation: copyreg stores __slotnames__ in a class once an
#: object of it was pickled.
BODY_NOISE = {"__doc__", "__firstlineno__", "__static_attributes__", "__slotnames__"}
# Python 3.13 fuses two neighbouring loads and stores of local variables; Python 3.14 marks loads that only
# borrow.
_FUSED = re.compile(r"(?:(?:LOAD|STORE)_FAST(?:_BORROW)?_?)+")
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_LOADS_VARIABLE = ("LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL")
# These load no variable, though their argument may be a text.
_NO_VARIABLE = {"LOAD_CONST", "LOAD_CLOSURE", *_LOADS_ATTRIBUTE}
# After these instructions, nobody else has the value that was on the stack.
_ENDS = ("POP_TOP", "POP_JUMP", "TO_BOOL", "STORE_ATTR", "DELETE_ATTR")
#: Instructions that move no value.
BESIDE = {"CACHE", "NOP", "PRECALL", "PUSH_NULL", "RESUME"}
_COPIES = {"COPY", "DUP_TOP"}
_STORES = {"STORE_FAST": "local", "STORE_DEREF": "closure", "STORE_GLOBAL": "global", "STORE_NAME": "local"}
# Enough for any chain of packages; `part = part.next` in a loop would give longer ones without end.
_LONGEST_CHAIN = 8
# These instructions rotate the computed value below the container and the key.
_TURNS = ("SWAP", "ROT_THREE", "ROT_FOUR")
# Methods that change lists, sets, dicts and deques.
_WRITING = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem",
    "popleft",
    "remove", "setdefault", "update",
})  # fmt: skip


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions, classes and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if is_code(constant):
            yield from codes(constant)


def is_code(value: object) -> bool:
    """Whether a constant is the code object of an inner function or class."""
    return isinstance(value, types.CodeType)


@functools.lru_cache(maxsize=4096)
def steps(code: types.CodeType) -> tuple[tuple[str, Any], ...]:
    """Names of instructions with the values of their arguments, so that positions in tables do not matter.

    A docstring shifts the table of constants; with values, nothing changes. The result is cached: code never
    changes, and equal code has equal instructions.
    """
    return tuple(_read_steps(code))


def _read_steps(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    for step in single(code):
        by_value = step.opcode in dis.hasconst or isinstance(step.argval, str)
        argument = step.argval if by_value else step.arg
        # dis of Python 3.11 leaves names of keyword arguments unresolved.
        yield step.opname, code.co_consts[step.arg or 0] if step.opname == "KW_NAMES" else argument


def single(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of code in every Python version alike: each load and store of a local is separate."""
    for step in dis.get_instructions(code):
        if step.opname == "EXTENDED_ARG":
            continue
        if _is_fused(step.opname):
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            for kind, name in zip(re.findall("LOAD|STORE", step.opname), names, strict=True):
                opname = f"{kind}_FAST"
                yield step._replace(opname=opname, opcode=dis.opmap[opname], argval=name)
        else:
            yield step


@functools.cache
def _is_fused(opname: str) -> bool:
    return opname not in ("LOAD_FAST", "STORE_FAST") and _FUSED.fullmatch(opname) is not None


def instructions(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """The instructions of one code object that count; the code of inner functions is listed elsewhere."""
    yield "arguments", code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield "kinds", (code.co_argcount, code.co_posonlyargcount, code.co_flags & _FLAGS)
    yield "exceptions", getattr(code, "co_exceptiontable", b"")
    rows = steps(code)
    # In the body of a class each of these names is stored from a constant.
    noise = {at for at, row in enumerate(rows) if row[0] == "STORE_NAME" and row[1] in BODY_NOISE}
    for at, (opname, argument) in enumerate(rows):
        if at not in noise and at + 1 not in noise:
            yield opname, "code" if is_code(argument) else argument


def outer_reads(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """The outer variables that code reads: ``("closure", name)`` and ``("global", name)``."""
    for opname, argument in steps(code):
        if opname.startswith("LOAD_") and argument != "__name__":
            if "DEREF" in opname:
                yield "closure", argument
            if "GLOBAL" in opname or opname == "LOAD_NAME":
                yield "global", argument


class Import(NamedTuple):
    """An import statement in code.

    Attributes:
        level: number of dots before the module's name.
        module: the module's name as it stands there.
        names: what ``from module import …`` names; empty in other imports.
        variables: each variable that is set, with the name that ``from`` takes for it, or "" for the module.
    """

    level: int
    module: str
    names: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


def imports(code: types.CodeType) -> Iterator[Import]:
    """The import statements of one code object."""
    rows = steps(code)
    for at, (opname, argument) in enumerate(rows):
        if opname == "IMPORT_NAME":
            level, names = rows[at - 2][1], rows[at - 1][1]
            yield Import(level or 0, argument, tuple(names or ()), tuple(_set_by_import(rows[at + 1 :])))


def _set_by_import(rows: tuple[tuple[str, Any], ...]) -> Iterator[tuple[str, str]]:
    """The variables that an import sets, by the instructions after it."""
    taken = ""
    for opname, argument in rows:
        if opname == "IMPORT_FROM":
            taken = argument
        elif opname in _STORES:
            yield argument, taken
            if not taken:
                return
        elif opname not in ("SWAP", "ROT_TWO", "POP_TOP"):
            return


class Part(NamedTuple):
    """A step from a value to a part of it, by a constant name: ``config.size``, ``CONFIG["size"]``.

    Attributes:
        name: of the attribute, or the key.
        is_item: whether it is the element of a key, and no attribute.
    """

    name: str
    is_item: bool


#: Steps that code takes, one after another, from a variable's value.
Parts: TypeAlias = "tuple[Part, ...]"


@functools.lru_cache(maxsize=4096)
def parts_read(code: types.CodeType) -> dict[tuple[str, str], frozenset[Parts]]:
    """The parts that code, and code inside it, reads of each outer variable's value, by kind and name as in
    `outer_reads`. A variable is left out where the code does anything else with its value than to read parts.
    """
    found: dict[tuple[str, str], frozenset[Parts]] = {}
    whole = set()
    for inner in codes(code):
        rows = [row for row in steps(inner) if row[0] not in BESIDE]
        for at, (opname, name) in enumerate(rows):
            if type(name) is not str or "FAST" in opname or opname in _NO_VARIABLE:
                continue
            kind = "closure" if "DEREF" in opname else "global"
            if opname.startswith("LOAD_"):
                parts = tuple(_parts_at(rows, at + 1))
                found[kind, name] = found.get((kind, name), frozenset[Parts]()) | {parts}
                whole |= set() if parts else {(kind, name)}
            elif opname.startswith(("STORE_DEREF", "STORE_GLOBAL", "DELETE_DEREF", "DELETE_GLOBAL")):
                whole.add((kind, name))
    return {variable: parts for variable, parts in found.items() if variable not in whole}


def _parts_at(rows: list[tuple[str, Any]], at: int) -> Iterator[Part]:
    """The steps that instructions from ``at`` on take from the value that was loaded before them."""
    while True:
        opname, argument = rows[at]
        if opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield Part(argument, is_item=False)
            at += 1
        elif opname == "LOAD_CONST" and type(argument) is str and rows[at + 1][0] == "BINARY_SUBSCR":
            yield Part(argument, is_item=True)
            at += 2
        else:
            return


@functools.lru_cache(maxsize=4096)
def parts_assigned(code: types.CodeType) -> frozenset[str]:
    """Names of the attributes and constant keys that code, or code inside it, assigns or deletes in any
    object, but for attributes of its own `self` or `cls`: see `own_assigned`.
    """
    found = set()
    for inner in codes(code):
        rows = steps(inner)
        for at, (opname, argument) in enumerate(rows):
            if opname in ("STORE_ATTR", "DELETE_ATTR") and not _is_own(inner, rows[at - 1]):
                found.add(argument)
            elif opname in ("STORE_SUBSCR", "DELETE_SUBSCR") and type(rows[at - 1][1]) is str:
                found.add(rows[at - 1][1])
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def own_assigned(code: types.CodeType) -> frozenset[str]:
    """Names of the attributes of `self`, or of `cls`, that a method's code assigns or deletes."""
    rows = steps(code)
    return frozenset(
        argument
        for at, (opname, argument) in enumerate(rows)
        if opname in ("STORE_ATTR", "DELETE_ATTR") and _is_own(code, rows[at - 1])
    )


def _is_own(code: types.CodeType, row: tuple[str, Any]) -> bool:
    """Whether an instruction loads a method's first argument, to which the method assigns nothing else."""
    opname, name = row
    return (
        opname.startswith("LOAD_FAST")
        and name in ("self", "cls")
        and code.co_argcount > 0
        and code.co_varnames[0] == name
        and ("STORE_FAST", name) not in steps(code)
    )


class Outer(NamedTuple):
    """A value from outside that code hands on as a whole: as an argument, a result, an element.

    Attributes:
        kind: "global", "closure", or "import".
        name: the variable's name; for an import, what identifies it: (level, module, name after ``from``).
        attributes: what the code reads from the variable on the way to the value, in order.
    """

    kind: str
    name: Any
    attributes: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def handed_on(code: types.CodeType) -> tuple[Outer, ...]:
    """The outer values that code, or code inside it, hands on: others may read any attribute of them.

    A value of which only attributes are read or set is not handed on. Local variables are followed.
    """
    inside = list(codes(code))
    held: dict[str, set[Outer]] = defaultdict(set)  # by the variable of the code's own
    for inner in inside:
        for statement in imports(inner):
            for own, taken in statement.variables:
                held[own].add(Outer("import", (statement.level, statement.module, taken), ()))
    loads = [load for inner in inside for load in _loads(inner)]
    found: set[Outer] = set()
    size = -1
    while size != sum(map(len, held.values())):
        size = sum(map(len, held.values()))
        for kind, name, attributes, variable in loads:
            values = held[name] | ({Outer(kind, name, ())} if kind != "local" else set())
            values = {value._replace(attributes=value.attributes + attributes) for value in values}
            values = {value for value in values if len(value.attributes) < _LONGEST_CHAIN}
            if variable is None:
                found |= values
            else:
                held[variable] |= values
    return tuple(sorted(found, key=repr))


def _loads(code: types.CodeType) -> Iterator[tuple[str, str, tuple[str, ...], str | None]]:
    """The variables that code loads: kind, name, attributes read in turn, and the variable that is set to it.

    The last is None where the value is handed on. Values that nobody keeps are left out.
    """
    rows = [row for row in steps(code) if row[0] not in BESIDE]
    for at, (opname, name) in enumerate(rows):
        if not opname.startswith("LOAD_") or type(name) is not str or opname in _NO_VARIABLE:
            continue
        kind = "closure" if "DEREF" in opname else "local" if "FAST" in opname else "global"
        after = at + 1
        attributes = []
        while rows[after][0] in (*_LOADS_ATTRIBUTE, *_COPIES):
            attributes += [rows[after][1]] if rows[after][0] not in _COPIES else []
            after += 1
        ending, argument = rows[after]
        if "__dict__" in attributes:  # any of its names may be looked up there
            yield kind, name, tuple(attributes[: attributes.index("__dict__")]), None
        elif ending in _STORES and argument != name:
            yield kind, name, tuple(attributes), argument
        elif not ending.startswith(_ENDS) and ending not in _STORES:
            yield kind, name, tuple(attributes), None


@functools.lru_cache(maxsize=4096)
def names_written(code: types.CodeType) -> frozenset[str]:
    """Names of the variables that code assigns or changes elements of; attributes begin with a dot."""
    rows = [row for inner in codes(code) for row in single(inner)]
    assigned = {f".{row.argval}" for row in rows if row.opname == "STORE_ATTR"}
    assigned |= {row.argval for row in rows if row.opname in ("STORE_DEREF", "STORE_GLOBAL")}
    return names_changed(code) | assigned


@functools.lru_cache(maxsize=4096)
def globals_written(code: types.CodeType) -> frozenset[str]:
    """Names of the globals that code assigns or changes elements of."""
    found: set[str] = set()
    for inner in codes(code):
        local = {*inner.co_varnames, *inner.co_cellvars, *inner.co_freevars}
        found |= {name for name in _changed_by(inner) if not name.startswith(".")} - local
        found |= {row.argval for row in single(inner) if row.opname == "STORE_GLOBAL"}
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def names_changed(code: types.CodeType) -> frozenset[str]:
    """Names of the variables that code changes elements of; attributes begin with a dot."""
    return frozenset(name for inner in codes(code) for name in _changed_by(inner))


def _changed_by(code: types.CodeType) -> set[str]:
    """As `names_changed`, without the code inside."""
    found: set[str] = set()
    rows = list(single(code))
    for at, row in enumerate(rows):
        if row.opname in ("STORE_SUBSCR", "STORE_SLICE") and rows[at - 1].opname in _TURNS:
            continue  # the end of `values[key] += …`, which was counted at its beginning
        if row.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") or _is_in_place(rows, at, 2):
            found |= _name_at(rows, _before(rows, at))
        elif row.opname == "STORE_SLICE" or _is_in_place(rows, at, 3):  # since Python 3.12
            found |= _name_at(rows, _before(rows, _before(rows, at)))
        elif row.opname in _LOADS_ATTRIBUTE and _writes(row.argval):
            found |= _name_at(rows, at)
    return found


def _writes(method: str) -> bool:
    """Whether a method of that name changes its object: ``append``, or torch's ``lerp_``."""
    return method in _WRITING or (method.endswith("_") and not method.startswith("_"))


@functools.lru_cache(maxsize=4096)
def attributes_set_of(code: types.CodeType, variable: str) -> frozenset[str]:
    """Names of the attributes of a variable's value that code itself assigns, ``+=`` included."""
    rows = list(single(code))
    updated = {
        row.argval
        for at, row in enumerate(rows)
        if row.opname == "STORE_ATTR"
        and rows[at - 1].opname in ("SWAP", "ROT_TWO")
        and any(_updates(rows, place, variable, row.argval) for place in range(2, at))
    }
    return attributes_replaced_of(code, variable) | updated


@functools.lru_cache(maxsize=4096)
def attributes_replaced_of(code: types.CodeType, variable: str) -> frozenset[str]:
    """As `attributes_set_of`, without those that are only updated in place (``+=``)."""
    rows = list(single(code))
    return frozenset(
        row.argval
        for at, row in enumerate(rows)
        if row.opname == "STORE_ATTR" and _loads_variable(rows, at - 1, variable)
    )


@functools.lru_cache(maxsize=4096)
def attributes_read_of(code: types.CodeType, variable: str) -> frozenset[str]:
    """Names of the attributes of a variable's value that code, or code inside it, reads, other than to update
    them in place (``+=``).
    """
    tables = [list(single(inner)) for inner in codes(code)]
    return frozenset(
        row.argval
        for rows in tables
        for at, row in enumerate(rows)
        if row.opname in _LOADS_ATTRIBUTE and _loads_variable(rows, at - 1, variable)
    )


@functools.lru_cache(maxsize=4096)
def attributes_written_of(code: types.CodeType, variable: str) -> frozenset[str]:
    """Names of the attributes of a variable's value that code, or code inside it, assigns or changes elements
    of.
    """
    changed = {f".{name}" for name in attributes_read_of(code, variable)} & names_changed(code)
    found = {name[1:] for name in changed}
    return frozenset(found.union(*(attributes_set_of(inner, variable) for inner in codes(code))))


def _loads_variable(rows: list[dis.Instruction], at: int, variable: str) -> bool:
    return rows[at].opname in _LOADS_VARIABLE and rows[at].argval == variable


def _updates(rows: list[dis.Instruction], at: int, variable: str, name: str) -> bool:
    """Whether ``variable.name += …`` reads here: the variable's load was copied."""
    return (
        rows[at].opname == "LOAD_ATTR"
        and rows[at].argval == name
        and rows[at - 1].opname in _COPIES
        and _loads_variable(rows, at - 2, variable)
    )


def attributes_read(code: types.CodeType) -> frozenset[str]:
    """Names of the attributes and methods that code reads from any object."""
    rows = [row for inner in codes(code) for row in steps(inner)]
    return frozenset(argument for opname, argument in rows if opname in _LOADS_ATTRIBUTE)


def _is_in_place(rows: list[dis.Instruction], at: int, size: int) -> bool:
    """Whether ``values[key] += …`` begins here, with both on the stack; size 3: a slice, not a key."""
    copies = [(row.opname, row.arg) for row in rows[at : at + size]]
    return copies == [("COPY", size)] * size or (size == 2 and copies[0][0] == "DUP_TOP_TWO")


def _before(rows: list[dis.Instruction], at: int) -> int:
    """The first instruction of those that compute the topmost stack value of the instruction at ``at``."""
    height = 0
    while at > 0 and height < 1:
        at -= 1
        height += dis.stack_effect(rows[at].opcode, rows[at].arg, jump=False)
    return at


def _name_at(rows: list[dis.Instruction], at: int) -> set[str]:
    """The name of the attribute or variable that the instruction before ``at`` loads."""
    if at and rows[at - 1].opname == "LOAD_ATTR":
        return {f".{rows[at - 1].argval}"}
    return {rows[at - 1].argval} if at and rows[at - 1].opname in _LOADS_VARIABLE else set()
