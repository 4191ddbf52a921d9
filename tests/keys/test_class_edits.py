"""An edit beside the statements of one's code changes the fingerprint where a result may depend on it.

Attributes of enumerations, options of dataclasses, types, docstrings and annotations that code reads.
"""

from __future__ import annotations

import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest

from castore.errors import UnhashableError
from castore.keys.objects import function_fingerprint

_HEAD = """
import dataclasses, enum, inspect, typing as t
def made(*values): return values
"""
# The source of a step, what is edited in it, and the edits. Each gives another fingerprint.
EDITS: dict[str, tuple[str, list[str]]] = {
    "an enumeration's attribute": (
        "class C(enum.Enum): A = 1\nC.table = EDIT\ndef step(x): return C(x)",
        ["1", "2", "{'a': 1}"],
    ),
    "an enumeration's private attribute": (
        "class C(enum.Enum): A = 1\nC._table = EDIT\ndef step(x): return C(x)",
        ["1", "2"],
    ),
    "a function of an enumeration": (
        "class C(enum.Enum):\n    A = 1\n    def f(self): return EDIT\ndef step(x): return C(x).f()",
        ["1", "2"],
    ),
    "a dataclass's options": (
        "@dataclasses.dataclass(EDIT)\nclass C:\n    a: int = 1\ndef step(x): return C(x)",
        [
            "", "eq=False", "order=True", "frozen=True", "repr=False", "unsafe_hash=True", "match_args=False",
            "kw_only=True", "slots=True", "init=False",
        ],
    ),
    "a field": (
        "@dataclasses.dataclass\nclass C:\n    a: EDIT\n    b: int = 1\ndef step(x): return C(x)",
        [
            "int = 1", "float = 1", "int = 2", "'list[int]' = 1", "'list[float]' = 1",
            *(
                f"int = dataclasses.field(default=1, {option})"
                for option in (
                    "compare=False", "repr=False", "hash=False", "kw_only=True", "init=False",
                    "metadata={'unit': 'm'}", "metadata={'unit': 'cm'}",
                )
            ),
        ],
    ),
    "match arguments": (
        "class C: __match_args__ = EDIT\ndef step(x): return C",
        ["('a', 'b')", "('b', 'a')"],
    ),
    **{
        f"a record in {kind}": (
            f"class R:\n    a: EDIT\n{kind}\ndef step(x): return made(x, KIND)",
            ["int", "str", "'str'", "t.Annotated[int, 1]", "t.Annotated[int, 2]", "t.Annotated[int, made]"],
        )
        for kind in (
            "KIND = R", "KIND = t.Optional[R]", "KIND = list[list[R]]", "KIND = R | None",
            "KIND = t.Callable[[R], int]", "KIND = t.Annotated[R, 1]", "KIND = t.NewType('KIND', R)",
            "KIND = t.TypeVar('KIND', bound=R)", "KIND = t.TypeVar('KIND', R, list[int])",
            "class KIND:\n    r: R", "class KIND:\n    r: 'list[R]'", "class KIND(t.NamedTuple):\n    r: R",
            "class KIND(t.TypedDict):\n    r: t.List[R]",
        )
    },
    "an enumeration in a record": (
        "class C(enum.Enum): A = EDIT\nclass R:\n    c: t.Optional[C]\ndef step(x): return made(x, R)",
        ["1", "2"],
    ),
    "a type": (
        "KIND = EDIT\ndef step(x): return KIND",
        [
            "t.Annotated[int, 1]", "t.Annotated[int, 2]", "list[t.Annotated[int, lambda: 1]]",
            "list[t.Annotated[int, lambda: 2]]", "t.NewType('K', int)", "t.NewType('K', str)",
            "t.TypeVar('K')", "t.TypeVar('K', bound=int)", "t.TypeVar('K', bound='int')",
            "t.TypeVar('K', int, str)",
        ],
    ),
    **{
        f"a docstring that is read by {reader}": (
            f"def ask(x):\n    'EDIT'\ndef doc(f): return f.__doc__\ndef step(x): return {reader}",
            ["one", "two"],
        )
        for reader in ("ask.__doc__", "doc(ask)", "inspect.getdoc(ask)", "getattr(ask, '__doc__', '')")
    },
    "a docstring that is read by vars": (
        "class A: 'EDIT'\ndef step(x): return vars(A)['__doc__']",
        ["one", "two"],
    ),
    "a name that a function was given": (
        "def ask(x): pass\nask.__name__ = 'EDIT'\ndef step(x): return ask.__name__",
        ["one", "two", "ask"],
    ),
    "a class's docstring": (
        "class A:\n    'EDIT'\n    def f(self): return self.__doc__\ndef step(x): return A().f()",
        ["one", "two"],
    ),
    "an inner function's docstring": (
        "def step(x):\n    def f():\n        'EDIT'\n    return f.__doc__",
        ["one", "two"],
    ),
    **{
        f"annotations that are read by {reader}": (
            f"class R:\n    a: int\ndef f(x: EDIT): pass\ndef step(x): return {reader}",
            ["int", "str", "list['int']", "R"],
        )
        for reader in (
            "f.__annotations__", "getattr(f, '__annotations__')", "t.get_type_hints(f)",
            "inspect.signature(f)",
        )
    },
    **{
        f"the code of a class that is called through {way}": (
            f"X = t.TypeVar('X')\nclass A:\n    def f(self): return EDIT\n{source}", ["1", "2"]
        )
        for way, source in {
            "a union": "K = A | None\ndef step(x): return t.get_args(K)[0]().f()",
            "a list": "K = list[A]\ndef step(x): return K.__args__[0]().f()",
            "an old form": "K = t.Dict[str, t.Optional[A]]\ndef step(x): return K",
            "type": "K = type[A]\ndef step(x): return K",
            "a callable": "K = t.Callable[[A], int]\ndef step(x): return K",
            "a type variable": "Y = t.TypeVar('Y', bound=A)\ndef step(x): return Y.__bound__().f()",
            "an attribute": "class B: kinds = list[A]\ndef step(x): return B.kinds.__args__[0]().f()",
            "a default": "def step(x, k=list[A]): return k.__args__[0]().f()",
            "a generic class": "class B(A, t.Generic[X]): pass\nK = B[int]\ndef step(x): return K().f()",
            "an alias of a class of one's own": "K = t.List['int']\nL = A\ndef step(x): return L().f()",
            "a base": (
                "class B(t.Generic[X]): pass\nclass C(B[A]): pass\n"
                "def step(x): return t.get_args(C.__orig_bases__[0])[0]().f()"
            ),
            "a hint": "class B: v: A\ndef step(x): return t.get_type_hints(B)['v']().f()",
            "a hint that is a text": "class B: v: 't.Optional[A]'\ndef step(x): return t.get_type_hints(B)",
            "a hint that is an alias": "K = A | None\nclass B: v: 'K'\ndef step(x): t.get_type_hints(B)",
            "a function's hint": "def g(v: A): pass\ndef step(x): return t.get_type_hints(g)['v']().f()",
            "a signature": "def g(v: A): pass\ndef step(x): return inspect.signature(g)",
            "a field": (
                "@dataclasses.dataclass\nclass B: v: list[A]\n"
                "def step(x): return dataclasses.fields(B)[0].type.__args__[0]().f()"
            ),
        }.items()
    },
}  # fmt: skip

_MODEL = "class R(pydantic.BaseModel):\n    b: int = 1\n    EDIT\ndef step(x): return R(b=x)"
_STRUCT = "class R(msgspec.Struct, EDIT):\n    b: int = 1\ndef step(x): return R(x)"
_HOOKED = (
    "class T:\n    @classmethod\n    def __get_pydantic_core_schema__(cls, source, handler):\n"
    "        return pydantic_core.core_schema.no_info_plain_validator_function(lambda v: v + EDIT)\n"
)
LIBRARIES: dict[str, tuple[str, list[str]]] = {
    "a type that pydantic asks": (
        f"import pydantic_core\n{_HOOKED}class R(pydantic.BaseModel):\n    a: T\ndef step(x): return R(a=x)",
        ["1", "2"],
    ),
    "an adapter of pydantic": (
        "class R(pydantic.BaseModel): a: EDIT\nK = pydantic.TypeAdapter(list[R])\ndef step(x): return K",
        ["int", "str"],
    ),
    "an adapter of pydantic over a function": (
        "def f(a: EDIT): return a\ndef step(x): return pydantic.TypeAdapter(f).validate_python(x)",
        ["int", "str"],
    ),
    "a validated call": (
        "class R(pydantic.BaseModel): a: int\n@pydantic.validate_call\ndef f(x: EDIT): pass\nstep = f",
        ["R", "int", "list[R]"],
    ),
    "a validated call's options": (
        "@pydantic.validate_call(EDIT)\ndef f(x: int): return x\ndef step(x): return f(x)",
        ["", "validate_return=True", "config={'strict': True}"],
    ),
    "a frozen class of attrs": (
        "@attrs.frozen\nclass R:\n    a: EDIT\ndef step(x): return {R(x)}",
        ["int", "str", "int = 1", "int = attrs.field(hash=False)"],
    ),
    "the options of a class of attrs": (
        "@attrs.define(EDIT)\nclass R:\n    a: int = 1\ndef step(x): return R(x)",
        ["", "frozen=True", "unsafe_hash=True", "order=True"],
    ),
    "a model of pydantic": (
        _MODEL,
        [
            "a: int", "a: float", "a: int = 1", "a: int = 2", "a: t.Optional[int]",
            "_a: int = 1", "_a: int = 2",
            *(
                f"a: int = pydantic.{option}"
                for option in (
                    "Field(gt=1)", "Field(gt=2)", "Field(alias='x')", "Field(default_factory=lambda: 1)",
                    "Field(default_factory=lambda: 2)",
                )
            ),
            *(f"model_config = {{'frozen': {value}}}" for value in (True, False)),
            *(
                f"@pydantic.{kind}\n    def f(cls, v): return v + {by}"
                for kind in (
                    "field_validator('b')", "field_validator('b', mode='before')", "field_serializer('b')",
                )
                for by in (1, 2)
            ),
            *(f"@pydantic.computed_field\n    def f(self) -> int: return {value}" for value in (1, 2)),
        ],
    ),
    "a model in a model": (
        "class S(pydantic.BaseModel): a: EDIT\nclass R(pydantic.BaseModel): b: t.List[S]\nstep = R",
        ["int", "float", "t.Annotated[int, pydantic.Field(gt=1)]", "t.Annotated[int, pydantic.Field(gt=2)]"],
    ),
    "a generic model": (
        "T = t.TypeVar('T')\nclass R(pydantic.BaseModel, t.Generic[T]): a: T\nK = R[EDIT]\nstep = K",
        ["int", "str", "list[int]"],
    ),
    "a dataclass of pydantic": (
        "@pydantic.dataclasses.dataclass\nclass R: a: EDIT\ndef step(x): return R(a=x)",
        ["int", "str", "int = 1", "int = 2"],
    ),
    "a model as a value": (
        "class R(pydantic.BaseModel): a: int\nR(a=0)\nV = R(a=EDIT)\ndef step(x): return V",
        ["1", "2"],
    ),
    "a struct's options": (_STRUCT, ["eq=False", "tag=True", "frozen=True", "tag='a'", "omit_defaults=True"]),
    "a field of a struct": (
        "class R(msgspec.Struct):\n    b: EDIT\ndef step(x): return R(x)",
        [
            "int", "float", "int = 1", "int = 2", "int = msgspec.field(name='x')",
            "int = msgspec.field(name='y')",
            "int = msgspec.field(default_factory=lambda: 1)",
            "int = msgspec.field(default_factory=lambda: 2)",
            "t.Annotated[int, msgspec.Meta(ge=1)]", "t.Annotated[int, msgspec.Meta(ge=2)]",
        ],
    ),
    "a class of attrs": (
        "@attrs.define\nclass R:\n    b: EDIT\ndef step(x): return R(x)",
        [
            "int", "float", "int = 1", "int = 2", "int = attrs.field(converter=lambda v: 1)",
            "int = attrs.field(converter=lambda v: 2)", "int = attrs.field(eq=False)",
        ],
    ),
}  # fmt: skip

# Two sources of a step that computes the same.
SAME = [
    (
        "class T:\n    def f(self): return 1\nclass A:\n    t: T\n    u: 'T'\ndef step(x): return A",
        "class T:\n    def f(self): return 2\nclass A:\n    t: T\n    u: 'T'\ndef step(x): return A",
    ),
    (
        "class T:\n    def f(self): return 1\nclass A(list[T]): pass\ndef step(x): return A",
        "class T:\n    def f(self): return 2\nclass A(list[T]): pass\ndef step(x): return A",
    ),
    (
        "class A:\n    'doc'\n    y: int = 1\ndef step(x: int):\n    'one'\n    return A",
        "class A:\n    y: int = 1\ndef step(x): return A",
    ),
    (
        "K = list[t.Annotated[int, {'a', 'b', 'c'}]]\ndef step(x): return K",
        "K = list[t.Annotated[int, {'c', 'b', 'a'}]]\ndef step(x): return K",
    ),
    (
        "class A:\n    y: t.Annotated[int, (n for n in ())]\ndef step(x): return A",
        "class A:\n    y: t.Annotated[int, (m for m in ())]\ndef step(x): return A",
    ),
    (
        "@dataclasses.dataclass\nclass A:\n    y: int = 1\ndef step(x): return A",
        "@dataclasses.dataclass()\nclass A: y: int = dataclasses.field(default=1)\ndef step(x): return A",
    ),
]


def step_of(source: str) -> Callable[..., Any]:
    """The function ``step`` of a source, in a module of its own that classes and functions know."""
    module = types.ModuleType("__main_of_edits__")
    sys.modules[module.__name__] = module
    exec(compile(_HEAD + textwrap.dedent(source), "edits.py", "exec", dont_inherit=True), vars(module))
    step: Callable[..., Any] = module.step
    return step


def fingerprint(source: str) -> str:
    return function_fingerprint(step_of(source))


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_that_may_change_a_result_changes_the_fingerprint(case: str) -> None:
    source, edits = EDITS[case]
    found = {edit: fingerprint(source.replace("EDIT", edit)) for edit in edits}
    assert len(set(found.values())) == len(edits), found
    assert found == {edit: fingerprint(source.replace("EDIT", edit)) for edit in edits}


@pytest.mark.parametrize("case", LIBRARIES)
def test_an_edit_of_what_a_class_declares_to_its_library_changes_the_fingerprint(case: str) -> None:
    source, edits = LIBRARIES[case]
    source = f"import attrs, msgspec, pydantic\n{source}"
    found = {edit: fingerprint(source.replace("EDIT", edit)) for edit in edits}
    assert len(set(found.values())) == len(edits), found
    assert found == {edit: fingerprint(source.replace("EDIT", edit)) for edit in edits}


@pytest.mark.parametrize(("one", "two"), SAME)
def test_an_edit_that_can_change_no_result_changes_nothing(one: str, two: str) -> None:
    assert fingerprint(one) == fingerprint(two)


def test_a_class_in_an_annotation_that_has_no_hash_is_an_error() -> None:
    source = "class T:\n    a: int\n    k = (n for n in ())\nclass A:\n    t: T\ndef step(x): return A"
    with pytest.raises(UnhashableError, match="generator"):
        fingerprint(source)


@pytest.mark.parametrize(
    "made",
    ["@dataclasses.dataclass\nclass R: a: int = 1", "@attrs.define\nclass R: a: int = 1",
     "class R(t.NamedTuple): a: int = 1", "class R(t.TypedDict): a: int"],
)  # fmt: skip
def test_a_class_counts_the_same_once_msgspec_has_used_it(made: str) -> None:
    """Regression: what msgspec keeps on the class was an error."""
    step = step_of(f"import attrs, msgspec\n{made}\ndef step(x): return msgspec.convert(x, R)")
    before = function_fingerprint(step)
    step([1] if "NamedTuple" in made else {"a": 1})
    assert function_fingerprint(step) == before


def test_an_attribute_that_is_no_member_counts() -> None:
    # Before Python 3.11 each of these is a member; then a change of it is seen too.
    source = "class C(enum.Enum):\n    A = 1\n    __weights = EDIT\ndef step(x): return C(x)"
    assert fingerprint(source.replace("EDIT", "(1, 2)")) != fingerprint(source.replace("EDIT", "(2, 1)"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no boundaries and no nonmember")
def test_boundaries_of_flags_and_nonmembers_count() -> None:
    flags = "class C(enum.Flag, boundary=enum.EDIT):\n    A = 1\ndef step(x): return C(x)"
    found = [fingerprint(flags.replace("EDIT", name)) for name in ("STRICT", "CONFORM", "EJECT", "KEEP")]
    assert len(set(found)) == 4
    assert found[0] == fingerprint("class C(enum.Flag):\n    A = 1\ndef step(x): return C(x)")
    other = "class C(enum.Enum):\n    A = 1\n    k = enum.nonmember(EDIT)\ndef step(x): return C(x)"
    assert fingerprint(other.replace("EDIT", "1")) != fingerprint(other.replace("EDIT", "2"))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is new in Python 3.12")
def test_an_alias_by_the_type_statement_counts_by_its_value() -> None:
    source = "type K = list[EDIT]\ndef step(x): return K"
    assert fingerprint(source.replace("EDIT", "int")) != fingerprint(source.replace("EDIT", "str"))
    source = (
        "class A:\n    def f(self): return EDIT\ntype J = A | list[J]\nK = list[J]\ndef step(x): return K"
    )
    assert fingerprint(source.replace("EDIT", "1")) != fingerprint(source.replace("EDIT", "2"))


@pytest.mark.skipif(sys.version_info < (3, 14), reason="new in Python 3.14")
@pytest.mark.parametrize(
    "source",
    [
        "def f(a: EDIT): pass\ndef step(x): return f.__annotate__(1)",
        "T = t'number {EDIT}'\ndef step(x): return T.strings",
        "T = t'number {1:EDIT}'\ndef step(x): return T.strings",
    ],
)
def test_late_annotations_and_template_strings_count(source: str) -> None:
    found = {edit: fingerprint(source.replace("EDIT", edit)) for edit in ("int", "str", "list")}
    assert len(set(found.values())) == 3
    assert found == {edit: fingerprint(source.replace("EDIT", edit)) for edit in found}


def test_a_part_without_a_hash_in_a_module_that_is_handed_on_says_why_the_module_counts() -> None:
    step_of("G = (n for n in ())\ndef step(x): return x")
    module: Any = sys.modules["__main_of_edits__"]

    def reads(x: object) -> object:
        return module.step(x)

    def hands_on(x: object) -> object:
        return getattr(module, str(x))

    def looks_up(x: object) -> object:
        return module.__dict__["step"](x)

    assert function_fingerprint(reads)
    with pytest.raises(UnhashableError, match="is handed on, so all of it"):
        function_fingerprint(looks_up)
    words = (
        r"hands_on.*: cannot hash a generator.* \(the module '__main_of_edits__' is handed on, so all of it"
    )
    with pytest.raises(UnhashableError, match=words):
        function_fingerprint(hands_on)
