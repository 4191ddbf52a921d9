"""Globals that an encoder's code reads, changed at any depth after the encoder was wrapped: known items and
new ones come from the encoder as it is, and nothing is kept under the key of the encoder as it was.
"""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from castore import Store
from castore.adapters.embeddings import CachedEncoder
from castore.adapters.noted_globals import reached_bindings
from castore.errors import CacheWarning
from tests.adapters.embeddings.models import features


@dataclasses.dataclass
class Inner:
    table: dict[str, float]


class Holder:
    scale = 1.0
    table: dict[str, float]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4).requires_grad_(False)


CONFIG: dict[str, Any] = {}
NAMESPACE = types.SimpleNamespace()
MODULES: list[Any] = []


def through_modules(x: torch.Tensor) -> Any:
    return MODULES[0](x)


def set_up() -> None:
    CONFIG.clear()
    CONFIG.update(
        model={"scale": 1.0, "layers": [1.0, 2.0]},
        inner=Inner({"a": 1.0}),
        tensors={"k": torch.ones(4)},
        array={"mean": np.ones(4, dtype=np.float32)},
    )
    NAMESPACE.inner = types.SimpleNamespace(k=1.0)
    MODULES[:] = [linear()]
    Holder.scale, Holder.table = 1.0, {"a": 1.0}


#: A function of an encoder, and a change of the global that it reads.
_CASES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[], object]]] = {
    "a dict in a dict": (
        lambda x: x * CONFIG["model"]["scale"],
        lambda: CONFIG["model"].update(scale=3.0),
    ),
    "a list in a dict": (
        lambda x: x * CONFIG["model"]["layers"][1],
        lambda: CONFIG["model"]["layers"].__setitem__(1, 3.0),
    ),
    "a namespace in a namespace": (
        lambda x: x * NAMESPACE.inner.k,
        lambda: setattr(NAMESPACE.inner, "k", 3.0),
    ),
    "a dict in an object": (
        lambda x: x * CONFIG["inner"].table["a"],
        lambda: CONFIG["inner"].table.update(a=3.0),
    ),
    "an attribute of a class": (lambda x: x * Holder.scale, lambda: setattr(Holder, "scale", 3.0)),
    "a dict in a class": (lambda x: x * Holder.table["a"], lambda: Holder.table.update(a=3.0)),
    "a tensor in a dict": (lambda x: x * CONFIG["tensors"]["k"], lambda: CONFIG["tensors"]["k"].mul_(3)),
    "an array in a dict": (
        lambda x: x * torch.from_numpy(CONFIG["array"]["mean"]),
        lambda: np.multiply(CONFIG["array"]["mean"], 3, out=CONFIG["array"]["mean"]),
    ),
    "weights in a list": (through_modules, lambda: MODULES[0].weight.mul_(3)),
    "other weights in a list": (
        through_modules,
        lambda: MODULES[0].load_state_dict(nn.Linear(4, 4).state_dict()),
    ),
}


class Reading(nn.Module):
    """Reads globals through a function that it holds."""

    def __init__(self, read: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(8, 4).requires_grad_(False), read
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor) -> Any:
        return self.read(self.layer(x))


def closing_over(read: Callable[[torch.Tensor], Any]) -> nn.Module:
    """A module whose class has a method that closes over a function."""

    class Closing(Reading):
        def forward(self, x: torch.Tensor) -> Any:
            return read(self.layer(x))

    return Closing(lambda x: x)


class Named(nn.Module):
    """Reads one setting of a global config, by name or from the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x[:, :4]) * NAMESPACE.inner.k


class HandsOn(Named):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x[:, :4]) * inner_of(NAMESPACE).k


def inner_of(config: Any) -> Any:
    return config.inner


def keys_in(store: Store) -> set[str]:
    """The folders of embeddings, one for each key of an encoder."""
    return {entry.name.split("/")[1] for entry in store.entries()}


@pytest.mark.parametrize("make", [Named, HandsOn])
def test_a_global_that_is_handed_on_and_changes_again_and_again_is_told_once(
    store: Store, make: type[Named]
) -> None:
    """A setting that the encoder does not name, as the number of the step, is none of its business."""
    set_up()
    encoder = make()
    cached = CachedEncoder(encoder, store=store)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(6):
            NAMESPACE.step = step
            assert torch.allclose(cached(features(4)), encoder(features(4)), atol=1e-5)
    told = [str(one.message) for one in warned if one.category is CacheWarning]
    if make is Named:
        assert told == []
        assert len(keys_in(store)) == 1, "another step gave another key"
        NAMESPACE.inner.k = 7
        assert torch.allclose(cached(features(4)), encoder(features(4)), atol=1e-5)
        assert len(keys_in(store)) == 2
    else:
        assert len(told) == 1
        assert "for the 3rd time" in told[0]
        assert f"the global 'NAMESPACE' of {__name__}" in told[0]


def test_settings_that_code_does_not_name_do_not_look_changed() -> None:
    """Else an encoder, with all its weights, would be hashed anew at each step."""
    set_up()
    read: list[Any] = [Named.forward, HandsOn.forward]
    noted, whole = (reached_bindings([function]) for function in read)
    NAMESPACE.step = 7
    assert [any(one.is_old() for one in bindings) for bindings in (noted, whole)] == [False, True]
    NAMESPACE.inner.k = 7
    assert any(one.is_old() for one in noted)


def alone(read: Callable[[torch.Tensor], Any]) -> Any:
    return lambda x: read(x[:, :4])


@pytest.mark.parametrize("make", [Reading, closing_over, alone])
@pytest.mark.parametrize("name", _CASES)
def test_a_change_of_a_global_at_any_depth_is_noticed(store: Store, name: str, make: Any) -> None:
    read, change = _CASES[name]
    set_up()
    encoder, known, new = make(read), features(4), features(8)[4:]
    cached = CachedEncoder(encoder, store=store)
    cached(known)
    change()
    for inputs in (known, new):
        assert torch.allclose(cached(inputs), encoder(inputs), atol=1e-5)
    set_up()
    again = make(read)
    assert torch.allclose(CachedEncoder(again, store=store)(new), again(new), atol=1e-5)
