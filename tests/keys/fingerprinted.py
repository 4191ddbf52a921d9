"""Fingerprints of compilers', libraries' and users' objects; test_values.py compares processes by them."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch

from castore.adapters.datasets import operator_fingerprint
from castore.adapters.torch import dataset_key
from castore.keys.objects import function_fingerprint

# mypy treats it as untyped.
regex: Any = importlib.import_module("regex")
numba: Any = importlib.import_module("numba")
compiler: Any = torch.compiler
tracer: Any = torch.jit.trace
typed: Any = torch.Tensor.storage


def on_tensors(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def plain(x: Any) -> Any:
    return x + 1


def into(x: Any, y: Any) -> None:
    y[0] = x[0]


def wrap(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 2)


def in_place() -> torch.nn.Module:
    model = linear()
    model.compile()
    return model


class Around(torch.nn.Module):
    """A module with parts, numbers and texts, and a method besides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.number, self.named = linear(), 2, {"a": [1, 2]}

    def forward(self, x: torch.Tensor):  # type: ignore[no-untyped-def]
        return self.inner(x) * self.number

    @torch.jit.export
    def other(self, x: torch.Tensor) -> int:
        return self.named["a"][0]


@numba.experimental.jitclass([("x", numba.int64)])
class Jitted:
    def __init__(self, x: int) -> None:
        self.x = x

    def get(self) -> int:
        return self.x


def model_of_pydantic() -> Any:
    pydantic: Any = importlib.import_module("pydantic")

    class Row(pydantic.BaseModel):  # type: ignore[misc]
        a: int = pydantic.Field(1, gt=0)
        b: list[int] | None = None

        @pydantic.field_validator("a")  # type: ignore[untyped-decorator]
        @classmethod
        def up(cls, value: int) -> int:
            return value + 1

    return lambda x: Row(a=x)


def class_of_attrs() -> Any:
    attrs: Any = importlib.import_module("attrs")
    return attrs.make_class("Made", {"a": attrs.field(type=int)}, frozen=True)


def struct_of_msgspec() -> Any:
    msgspec: Any = importlib.import_module("msgspec")

    class Row(msgspec.Struct, tag=True):  # type: ignore[call-arg, misc]
        a: Annotated[int, msgspec.Meta(ge=1)] = 1
        b: list[int] = msgspec.field(default_factory=list)

    return lambda x: Row(a=x)


def vectorizer() -> Any:
    from sklearn.feature_extraction.text import CountVectorizer

    made: Any = CountVectorizer()
    made.fit(["a bb ccc"])
    made.transform(["bb"])
    return made


def used(function: Any, *args: Any) -> Any:
    function(*args)
    return function


MADE: dict[str, Callable[[], Any]] = {
    "torch.compile": lambda: torch.compile(plain),
    "torch.compile, wrapped": lambda: wrap(torch.compile(plain)),
    "torch.compile of a model": lambda: torch.compile(linear()),
    "torch.compile of a method": lambda: torch.compile(linear().forward),
    "a model compiled in place": in_place,
    "torch.compiler.disable": lambda: compiler.disable(plain),
    "torch.no_grad": lambda: torch.no_grad()(plain),
    "torch.jit.script": lambda: torch.jit.script(on_tensors),
    "torch.jit.script of a model": lambda: torch.jit.script(Around()),
    "torch.jit.script of a model, again": lambda: [torch.jit.script(Around()) for _ in range(2)][1],
    "torch.jit.trace": lambda: tracer(linear(), torch.ones(3, 2)),
    "numba.njit": lambda: numba.njit(plain),
    "numba.njit, used": lambda: used(numba.njit(plain), 1),
    "numba.njit, wrapped": lambda: wrap(numba.njit(plain)),
    "numba.vectorize": lambda: numba.vectorize(plain),
    "numba.vectorize, typed": lambda: numba.vectorize(["float64(float64)"])(plain),
    "numba.guvectorize": lambda: numba.guvectorize(["(float64[:],float64[:])"], "(n)->(n)")(into),
    "numba.cfunc": lambda: numba.cfunc("float64(float64)")(plain),
    "numba.jitclass": lambda: Jitted,
    "lru_cache": lambda: used(functools.lru_cache(plain), 1),
    "lru_cache, wrapped": lambda: wrap(functools.lru_cache(plain)),
    "numpy.vectorize": lambda: np.vectorize(plain),
    "numpy.vectorize, used": lambda: used(np.vectorize(plain, otypes=[float]), [1]),
    # By chance one of them may be compiled alike in two processes.
    "regex": lambda: [regex.compile(rf"\p{{L}}+|\s|{number}").sub for number in range(8)],
    "a model of pydantic": model_of_pydantic,
    "a struct of msgspec": struct_of_msgspec,
    "a frozen class of attrs": class_of_attrs,
    "a used vectorizer of scikit-learn": vectorizer,
    "random.random": lambda: random.random,
    "random.choice": lambda: random.choice,
    "numpy.random.rand": lambda: np.random.rand,
    "storage of ones": lambda: torch.ones(2).untyped_storage(),
    "storage of zeros": lambda: torch.zeros(2).untyped_storage(),
    "typed storage of ones": lambda: typed(torch.ones(2)),
}


class Held(list[int]):
    """A dataset that holds another object."""


def fingerprints(made: Any) -> list[str]:
    """The fingerprints of one object, by all adapters that take it."""
    data = Held([1, 2])
    data.held = made  # type: ignore[attr-defined]
    found = [operator_fingerprint(made), function_fingerprint(lambda: made)]
    return found if made is random.random else [*found, dataset_key(data)]


def all_fingerprints() -> dict[str, list[str]]:
    """The fingerprints of every kind of object, each by all adapters that take it."""
    return {kind: fingerprints(make()) for kind, make in MADE.items()}
