"""Settings that code reads by name: those count, and no others; all count where the code does anything else.

Each form of code is run with one setting after another changed. A result that differs must have another key.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import operator
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import attrs
import msgspec
import pydantic
import pytest
from omegaconf import OmegaConf

from castore.keys.bytecode import Part
from castore.keys.encoder import Encoder, Watch
from castore.keys.objects import OBJECTS, function_fingerprint
from castore.keys.settings import parts_of
from castore.keys.tracing import encode

START = {"a": 3, "b": 5, "c": 7}


@dataclasses.dataclass
class Fields:
    a: int = 3
    b: int = 5
    c: int = 7


@dataclasses.dataclass(slots=True)
class Slots:
    a: int = 3
    b: int = 5
    c: int = 7


class Derived(Fields):
    def total(self) -> int:
        return self.a + self.b


class InClass(types.SimpleNamespace):
    b = 5
    c = 7


@attrs.define
class OfAttrs:
    a: int = 3
    b: int = 5
    c: int = 7


class OfPydantic(pydantic.BaseModel):
    a: int = 3
    b: int = 5
    c: int = 7


class OfMsgspec(msgspec.Struct):
    a: int = 3
    b: int = 5
    c: int = 7


def class_of_settings() -> Any:
    return type("CFG", (), {**START, "__module__": __name__})


KINDS: dict[str, Callable[[], Any]] = {
    "namespace": lambda: types.SimpleNamespace(**START),
    "arguments": lambda: argparse.Namespace(**START),
    "dataclass": Fields,
    "slots": Slots,
    "derived": Derived,
    "in the class": lambda: InClass(a=3),
    "class": class_of_settings,
    "dict": lambda: dict(START),
    "config": lambda: OmegaConf.create(START),
    "attrs": OfAttrs,
    "pydantic": lambda: OfPydantic(**START),
    "msgspec": OfMsgspec,
}

#: Code that reads settings by their names alone, and the names.
BY_NAME = {
    "return x + cfg.a": "a",
    "return x if cfg.a > 2 else cfg.b": "ab",
    "return [y + cfg.a for y in (x, x)]": "a",
    "return (lambda y: y * cfg.b)(x)": "b",
    'return f"{x}{cfg.c}"': "c",
    "while x < cfg.a: x += cfg.b\nreturn x": "ab",
    "return cfg.a or cfg.b": "ab",
    "return not cfg.a, -cfg.b": "ab",
    "def inner():\n    return cfg.c + x\nreturn inner()": "c",
    "return 1 < cfg.a < cfg.b": "ab",
    "return [*range(cfg.a)]": "a",
    "class Inner:\n    size = cfg.a\nreturn Inner.size": "a",
    "try:\n    return x / cfg.a\nfinally:\n    x = cfg.b": "ab",
    "return max(x, cfg.a, key=lambda y: y - cfg.b)": "ab",
    "return sum(y * cfg.a for y in range(cfg.c))": "ac",
    "return {'a': cfg.a}[str('a')]": "a",
    "assert cfg.a\nreturn x": "a",
    "return (x and cfg).c": "c",
    "model.eval()\nreturn cfg.a": "a",
    "return x.__class__(cfg.a)": "a",
}
#: Code that does something else with the settings.
AS_A_WHOLE = [
    "return read(cfg, 'a') + x",
    "return (c := cfg) and c.b + c.a",
    "c = cfg\nreturn c.a + c.b",
    "return [read(s, 'b') for s in [cfg]]",
    "s, t = cfg, cfg\nreturn s.a + t.c",
    "return (cfg and cfg).c",
    "return everything(cfg)",
    "return read(*[cfg, 'a'])",
    "return read(**{'s': cfg, 'name': 'c'})",
    "return eval('read(cfg, \"b\")') + cfg.a",
    "return read(globals().get('cfg') or cfg, 'c') + cfg.a",
    "cfg.a += 1\nresult = cfg.a\ncfg.a -= 1\nreturn result + cfg.b",
    "def inner(s=cfg):\n    return s.a\nreturn inner()",
    "return (lambda s: s.b)(cfg) + cfg.a",
    "def inner():\n    yield cfg\nreturn [s.a + s.b for s in inner()]",
    "match cfg:\n    case s:\n        return s.a + s.b",
    "return by_text('b') + cfg.a",
    "return EVAL('read(SAME, \"b\")') + cfg.a",
    "return read(sys.modules[NAME].SAME, 'b') + cfg.a",
    "return len(table.query(TEXT)) + cfg.a",
]


def read(s: Any, name: str) -> Any:
    return s[name] if isinstance(s, dict) else getattr(s, name)


def everything(s: Any) -> list[Any]:
    return [read(s, name) for name in "abc"]


#: The settings of the function that was made last.
SAME: Any = None


def by_text(name: str) -> Any:
    return read(globals()["SAME"], name)


def write_same(value: int) -> None:
    if isinstance(SAME, dict):
        SAME["a"] = value
    else:
        SAME.a = value


class Table:
    """Finds variables of its caller, as pandas does."""

    def query(self, text: str) -> range:
        return range(eval(text, sys._getframe(1).f_globals))


def change(settings: Any, name: str, value: int) -> None:
    if isinstance(settings, dict):
        settings[name] = value
    else:
        setattr(settings, name, value)


def made(body: str, settings: Any, place: str) -> Callable[[int], Any]:
    """A function with that body, which reads the settings from a global or from a closure."""
    if isinstance(settings, dict):
        body = re.sub(r"\b(cfg|c|s|t)\.([abc])\b", r"\1['\2']", body)
        body = re.sub(r"\)\.([abc])\b", r")['\1']", body)
    lines = "def f(x):\n" + textwrap.indent(body, "    ")
    if place == "closure":
        lines = "def make(cfg):\n" + textwrap.indent(lines, "    ") + "\n    return f\nf = make(cfg)"
    globals()["SAME"] = settings
    scope: dict[str, Any] = {
        "__name__": __name__, "cfg": settings, "read": read, "everything": everything, "by_text": by_text,
        "write_same": write_same, "EVAL": eval, "SAME": settings, "sys": sys, "NAME": __name__,
        "table": Table(), "TEXT": "read(SAME, 'b')", "model": types.SimpleNamespace(eval=str),
    }  # fmt: skip
    exec(lines, scope)
    function: Callable[[int], Any] = scope["f"]
    return function


def _changed(body: str, kind: str, place: str) -> tuple[set[str], set[str]]:
    """The settings that change the result, and those that change the key."""

    def run(name: str | None) -> tuple[object, str]:
        settings = KINDS[kind]()
        if name is not None:
            change(settings, name, START[name] + 1)
        function = made(body, settings, place)
        before = function_fingerprint(function)
        result = function(1)
        assert function_fingerprint(function) == before
        return result, before

    result, key = run(None)
    others = {name: run(name) for name in START}
    changing = {name for name, (other, _) in others.items() if other != result}
    return changing, {name for name, (_, other) in others.items() if other != key}


@pytest.mark.parametrize("place", ["global", "closure"])
@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_are_read_by_name_count_alone(kind: str, place: str) -> None:
    for body, names in BY_NAME.items():
        changing, counted = _changed(body, kind, place)
        assert changing <= counted == set(names), body


@pytest.mark.parametrize("place", ["global", "closure"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_settings_count_where_code_does_anything_else(kind: str, place: str) -> None:
    for body in AS_A_WHOLE:
        changing, counted = _changed(body, kind, place)
        assert changing, body
        assert counted == {"a", "b", "c"}, body


class WithProperty:
    def __init__(self) -> None:
        self.a, self.b = 1, 2

    @property
    def both(self) -> int:
        return self.a + self.b


class Lazy:
    a = 1

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return int(vars(self).get("hidden", 0)) + len(name)


class Own:
    def __init__(self) -> None:
        self.a, self.b = 1, 2

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return found + object.__getattribute__(self, "b") if name == "a" else found


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        return type.__getattribute__(cls, "b" if name == "a" else name)


class OfMeta(metaclass=Meta):
    a, b = 1, 2


class Known:
    def __init__(self) -> None:
        self.a, self.b = 1, 2

    def __castore_key__(self) -> int:
        return self.b


class Ordered(dict[str, int]):
    def __getitem__(self, key: str) -> int:
        return sum(self.values())


@pytest.mark.parametrize(
    ("settings", "body", "change"),
    [
        (WithProperty(), "return cfg.both", lambda cfg: setattr(cfg, "b", 3)),
        (Lazy(), "return cfg.anything", lambda cfg: setattr(cfg, "hidden", 3)),
        (Own(), "return cfg.a", lambda cfg: setattr(cfg, "b", 3)),
        (OfMeta, "return cfg.a", lambda cfg: setattr(cfg, "b", 3)),
        (Known(), "return cfg.a", lambda cfg: setattr(cfg, "b", 3)),
        (Ordered(a=1, b=2), "return cfg['a']", lambda cfg: cfg.update(b=3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_python_alone_does_not_find_counts_as_a_whole(
    settings: Any, body: str, change: Callable[[Any], object]
) -> None:
    function = made(body, settings, "global")
    before = function_fingerprint(function)
    change(settings)
    assert function_fingerprint(function) != before


class Pair(NamedTuple):
    a: int
    b: int

    @property
    def total(self) -> int:
        return self.a + self.b


def test_a_field_of_a_named_tuple_counts_alone() -> None:
    def key(body: str, settings: Pair) -> str:
        return function_fingerprint(made(body, settings, "global"))

    assert key("return cfg.a", Pair(1, 2)) == key("return cfg.a", Pair(1, 3))
    assert key("return cfg.a", Pair(1, 2)) != key("return cfg.a", Pair(2, 2))
    assert key("return cfg.total", Pair(1, 2)) != key("return cfg.total", Pair(1, 3))
    assert key("return cfg[0]", Pair(1, 2)) != key("return cfg[0]", Pair(1, 3))


class Computed(pydantic.BaseModel, extra="allow"):
    a: int = 1
    _hidden: int = pydantic.PrivateAttr(default=2)

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.a


@pytest.mark.parametrize("read", ["double", "_hidden", "extra"])
def test_what_a_model_computes_counts_as_a_whole(read: str) -> None:
    keys = {
        function_fingerprint(
            made(f"return cfg.{read}", Computed.model_validate({"a": a, "extra": extra}), "global")
        )
        for a, extra in ((1, 2), (2, 2), (1, 3))
    }
    assert len(keys) == 3


def test_a_setting_counts_by_all_that_lies_in_it() -> None:
    settings = types.SimpleNamespace(model={"size": 1, "layers": [1, 2]}, step=0)
    function = made("return dict(cfg.model)", settings, "global")
    before = function_fingerprint(function)
    settings.step = 1
    assert function_fingerprint(function) == before
    settings.model["layers"].append(3)
    assert function_fingerprint(function) != before


def test_a_setting_that_comes_to_be_missing_counts() -> None:
    settings = types.SimpleNamespace(a=1)
    function = made("return cfg.a if x else None", settings, "global")
    before = function_fingerprint(function)
    del settings.a
    assert function_fingerprint(function) != before


@pytest.mark.parametrize("place", ["global", "closure"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("class", "dict")])
def test_whether_two_names_have_one_object_counts_where_code_assigns_such_a_part(
    kind: str, place: str
) -> None:
    found = []
    for aliased in (True, False):
        settings = KINDS[kind]()
        function = made("write_same(9)\nreturn cfg.a", settings, place)
        if not aliased:
            globals()["SAME"] = copy.copy(settings)
        found.append((function_fingerprint(function), function(1)))
    (one, aliased_result), (other, copied_result) = found
    assert (aliased_result, copied_result) == (9, 3)
    assert one != other


class Digest:
    """Says what of it counts."""

    def __init__(self) -> None:
        self.path, self.content, self.conn = "a", 1, object()

    def __getstate__(self) -> Any:
        return {"path": self.path, "content": self.content}


def test_what_an_object_says_of_its_state_counts_and_no_more() -> None:
    settings = Digest()
    for body in ("return cfg.path", "return cfg.conn"):
        function = made(body, settings, "global")
        before = function_fingerprint(function)
        settings.conn = object()
        assert function_fingerprint(function) == before
        settings.content += 1
        assert function_fingerprint(function) != before


class Unset:
    __slots__ = ("a",)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("castore has run it")


class Proxy:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("castore has run it")


@pytest.mark.parametrize("make", [Unset, Proxy])
def test_code_of_the_users_is_not_run_to_find_a_part(make: type) -> None:
    assert parts_of(make(), {(Part("a", is_item=False),)}, set()) is None


def test_parts_of_parts_count_alone() -> None:
    settings = {"train": {"size": 1, "lr": 2}, "data": types.SimpleNamespace(path="a", seed=3)}
    function = made("return cfg['train']['size'], cfg['data'].path.upper()", settings, "global")
    before = function_fingerprint(function)
    settings["train"]["lr"] = settings["data"].seed = 9  # type: ignore[index, attr-defined]
    settings["more"] = {}
    assert function_fingerprint(function) == before
    settings["train"]["size"] = 9  # type: ignore[index]
    assert function_fingerprint(function) != before


class Counted:
    def __init__(self, size: int) -> None:
        self.size, self.lr = size, 1

    def grow(self) -> None:
        self.size += 1


class Reader:
    """Keeps a setting under the name that it has, as most classes do."""

    def __init__(self) -> None:
        self.a = SAME.a

    def read(self) -> Any:
        return self.a + SAME.b


def test_a_class_that_keeps_a_setting_under_its_own_name_counts_by_the_setting_alone() -> None:
    def run(settings: Any) -> str:
        globals()["SAME"] = settings
        return function_fingerprint(Reader.read) + function_fingerprint(Reader)

    settings = types.SimpleNamespace(**START)
    before = run(settings)
    settings.c = 9
    assert run(settings) == before
    settings.b = 9
    assert run(settings) != before


def test_what_a_method_assigns_in_its_object_counts_with_all_of_the_object() -> None:
    found = set()
    for aliased in (True, False):
        settings = Counted(3)
        function = made("SAME.grow()\nreturn cfg.size", settings, "global")
        function.__globals__["SAME"] = settings if aliased else Counted(3)
        found.add((function_fingerprint(function), function(1)))
    assert {result for _, result in found} == {3, 4}
    assert len({key for key, _ in found}) == 2


class Overridden:
    """Settings that are changed for a while, or by a property."""

    def __init__(self, size: int = 4) -> None:
        self.size = size

    @contextlib.contextmanager
    def override(self, size: int) -> Iterator[None]:
        before, self.size = self.size, size
        yield
        self.size = before

    @property
    def half(self) -> int:
        return self.size // 2

    @half.setter
    def half(self, value: int) -> None:
        self.size = 2 * value


class Trainer:
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg


def configure(cls: Any) -> None:
    cls.size = 99


@pytest.mark.parametrize("holder", ["a_trainer", "z_trainer"], ids=["met before", "met behind"])
@pytest.mark.parametrize(
    "change",
    [
        "with {}.cfg.override(99): return size()",
        "{}.cfg.half = 50\nreturn size()",
        "with mock.patch.object({}.cfg, 'size', 99): return size()",
        "configure({}.cfg)\nreturn size()",
        "update({}.cfg, 'size', 99)\nreturn size()",
        "{}.cfg.__init__(99)\nreturn size()",
    ],
)
def test_whether_a_holder_has_the_same_settings_counts(change: str, holder: str) -> None:
    """Globals are followed in the order of their names."""
    found = []
    for is_same in (True, False):
        cfg: Any = OmegaConf.create({"size": 4}) if "update" in change else Overridden()
        scope: dict[str, Any] = {
            "__name__": __name__, "cfg": cfg, holder: Trainer(cfg if is_same else copy.copy(cfg)),
            "mock": mock, "configure": configure, "update": OmegaConf.update,
        }  # fmt: skip
        body = textwrap.indent(change.format(holder), "    ")
        exec(f"def size(): return cfg.size\ndef f(x):\n{body}", scope)
        found.append((function_fingerprint(scope["f"]), scope["f"](1)))
    (one, changed), (other, unchanged) = found
    assert changed in (99, 100)
    assert unchanged == 4
    assert one != other


def test_whether_two_parts_are_one_object_counts() -> None:
    def key(train: Overridden, test: Overridden) -> str:
        cfg = types.SimpleNamespace(train=train, test=test)
        return function_fingerprint(made("return cfg.train.size, cfg.test.size", cfg, "global"))

    one, other = Overridden(), Overridden()
    assert key(one, one) == key(other, other)
    assert key(one, one) != key(one, other)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int = 1
    b: int = 2


@attrs.define
class Lazily:
    a: int = 1

    @functools.cached_property
    def area(self) -> int:
        return self.a * 3


class LazyModel(pydantic.BaseModel):
    a: int = 1

    @functools.cached_property
    def area(self) -> int:
        return self.a * 3


def test_a_frozen_dataclass_with_slots_counts_by_what_is_read() -> None:
    assert len({function_fingerprint(made("return cfg.a", Frozen(b=b), "global")) for b in (2, 3)}) == 1


@pytest.mark.parametrize("make", [Lazily, LazyModel])
@pytest.mark.parametrize("body", ["return cfg.area", "return repr(cfg)", "return cfg.a"])
def test_what_a_cached_property_has_kept_does_not_count(make: type, body: str) -> None:
    settings = make()
    function = made(body, settings, "global")
    before = function_fingerprint(function)
    assert settings.area == 3
    assert function_fingerprint(function) == before


class Holding:
    def __init__(self) -> None:
        self.names, self.opts = ["a"], {"x": 1}


@pytest.mark.parametrize(
    "write",
    [
        "SAME.names.append('b')",
        "SAME.opts.update(x=5)",
        "SAME.opts['x'] += 5",
        "SAME.opts['x'] = 5",
        "operator.setitem(SAME.opts, 'x', 5)",
        "SAME.__init__()\nread(SAME, 'opts')['x'] = 5",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_whether_two_names_have_one_object_counts(write: str, first: bool) -> None:
    """Code may write through one name and read through the other."""
    found = {}
    for aliased in (True, False):
        settings = Holding()
        reading = "cfg.opts['x'], len(cfg.names)"
        body = f"{write}\nreturn {reading}" if first else f"before = {reading}\n{write}\nreturn {reading}"
        function = made(body, settings, "global")
        function.__globals__.update(SAME=settings if aliased else copy.deepcopy(settings), operator=operator)
        found[function_fingerprint(function)] = function(1)
    assert len(found) == len({*map(str, found.values())}) == 2


def test_a_large_part_is_encoded_once_however_many_functions_read_it() -> None:
    settings = types.SimpleNamespace(table={number: str(number) for number in range(20_000)})
    scope: dict[str, Any] = {"__name__": __name__, "cfg": settings}
    names = [f"helper{number}" for number in range(200)]
    for name in names:
        exec(f"def {name}(x): return cfg.table[x]", scope)
    exec(f"def f(x): return [{', '.join(f'{name}(x)' for name in names)}]", scope)
    encoded = []

    class Noting(Watch):
        def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
            encoded.append(value is settings.table)
            return encoder.part(value, step, direct=True)

    before = function_fingerprint(scope["f"])
    encode(OBJECTS, scope["f"], "f", Noting())
    assert sum(encoded) == 1
    settings.table[7] = "another"
    assert function_fingerprint(scope["f"]) != before
