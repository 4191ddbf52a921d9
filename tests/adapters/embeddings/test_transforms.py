"""Cached encoders under torch.compile, torch.func, forward-mode AD and torch.jit.trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from castore import Store
from castore.adapters.embeddings import CachedEncoder, cache_embeddings
from castore.errors import CacheWarning
from tests.adapters.embeddings.models import WIDTH, Model, features, loader


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_a_compiled_model_looks_up_batches(store: Store, is_warm: bool) -> None:
    model, inputs = Model(), features(5)
    plain = model(inputs)
    model.encoder = CachedEncoder(model.encoder, store=store)
    if is_warm:
        model(inputs)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.allclose(compiled(inputs), plain, atol=1e-5)
    assert len(model.encoder.memo) == len(inputs)


def test_a_compiled_model_looks_up_keys(store: Store) -> None:
    model = Model()
    kept, _ = cache_embeddings(model, loader(shuffle=False), store=store)
    keys, _ = next(iter(kept))
    assert torch.equal(torch.compile(model, backend="eager")(keys), model(keys))


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad of a head": lambda encode, x: torch.func.grad(lambda w: (encode(x) @ w).sum())(torch.ones(4)),
    "vmap": lambda encode, x: torch.func.vmap(encode)(x),
    "jvp": lambda encode, x: torch.func.jvp(encode, (x,), (torch.ones_like(x),)),
    "hessian of a head": lambda encode, x: torch.func.hessian(lambda w: (encode(x) @ w).pow(2).sum())(
        torch.ones(4)
    ),
}


def _forward_mode(encode: Any, x: torch.Tensor) -> Any:
    ad: Any = forward_ad
    with ad.dual_level():
        return ad.unpack_dual(encode(ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("name", [*TRANSFORMS, "forward mode"])
def test_transforms_go_through_the_encoder(store: Store, name: str) -> None:
    transform: Any = TRANSFORMS.get(name, _forward_mode)
    torch.manual_seed(0)
    encoder, inputs = nn.Linear(WIDTH, 4).requires_grad_(False), features(3)
    cached = CachedEncoder(encoder, store=store)
    cached(inputs)
    with pytest.warns(CacheWarning, match="within torch.func, forward-mode AD or a trace, which is encoded"):
        found = transform(cached, inputs)
    torch.testing.assert_close(found, transform(encoder, inputs))
    torch.testing.assert_close(cached(inputs), encoder(inputs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_has_the_encoder_in_it(store: Store) -> None:
    encoder, inputs = nn.Linear(WIDTH, 4).requires_grad_(False), features(3)
    cached = CachedEncoder(encoder, store=store)
    with pytest.warns(CacheWarning, match="a trace, which is encoded each time"):
        traced: Any = torch.jit.trace(cached, inputs)  # type: ignore[no-untyped-call]
    other = features(3, seed=9)
    torch.testing.assert_close(traced(other), encoder(other))
