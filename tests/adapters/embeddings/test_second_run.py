"""Encoders that may give another result each time run twice on their first batch, and no others do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from castore import Store
from castore.adapters.embeddings import CachedEncoder
from castore.adapters.embeddings.second_run import names_random_source, require_same
from castore.errors import InvalidValueError
from tests.adapters.embeddings.models import BATCH, ITEMS, Encoder, data, features, fill

AGAIN = "gives another result for the same batch the second time"


def noise() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng().random(4)).float()


class Noisy(Encoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.from_numpy(np.random.default_rng().random(4)).float()


class NoisyThroughAFunction(Encoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + noise()


class NoisyThroughAMethod(Encoder):
    def shift(self) -> torch.Tensor:
        generator = torch.Generator()
        generator.seed()
        return torch.rand(4, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift()


class NoisyWithoutGradients(Encoder):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.from_numpy(np.random.default_rng().random(4)).float()


class CountsBeside(Encoder):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)


class CountsInItsResult(CountsBeside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.count


class WritesItsWeights(Encoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return super().forward(x)


class SeedsItself(Encoder):
    """Has a generator of its own, and draws the same each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(4, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "kind",
    [
        Noisy,
        NoisyThroughAFunction,
        NoisyThroughAMethod,
        NoisyWithoutGradients,
        CountsInItsResult,
        WritesItsWeights,
    ],
)
def test_an_encoder_that_gives_another_result_each_time_is_refused(
    store: Store, kind: Callable[[], Encoder]
) -> None:
    with pytest.raises(InvalidValueError, match=f"the encoder 'encoder' {AGAIN}"):
        fill(data(), store, encoder=kind())


@pytest.mark.parametrize("wrap", [lambda function: function, partial])
def test_so_is_such_a_function(store: Store, wrap: Callable[..., Callable[..., torch.Tensor]]) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] + noise()

    with pytest.raises(InvalidValueError, match=AGAIN):
        CachedEncoder(wrap(shifted), store=store)(features())


@pytest.mark.parametrize("kind", [CountsBeside, SeedsItself])
def test_one_that_gives_the_same_is_taken_and_runs_twice_on_its_first_batch(
    store: Store, kind: Callable[[], Encoder]
) -> None:
    encoder = kind()
    found = CachedEncoder(encoder, store=store)
    for begin in range(0, ITEMS, BATCH):
        found(features()[begin : begin + BATCH])
    assert encoder.encoded == ITEMS + BATCH


def test_an_encoder_that_draws_for_its_weights_alone_runs_once(store: Store) -> None:
    encoder = Encoder()  # whose __init__ has a generator
    assert not names_random_source(encoder)
    CachedEncoder(encoder, store=store)(features())
    assert encoder.encoded == ITEMS


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ([1.0, 2.0], [1.0, 2.001], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 0.0], [0.0, 1e-9], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
        ([float("nan"), 1.0], [1.0, 1.0], False),
        ([float("inf"), 1.0], [float("inf"), 1.0], True),
        ([float("inf"), 1.0], [float("-inf"), 1.0], False),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ([1 + 2j], [1 + 2j], True),
        ([1 + 2j], [1 - 2j], False),
        ([], [], True),
        ([1.0], [1.0, 1.0], False),
        ([1.0], [1], False),
        ([1.0], None, False),
    ],
)
def test_results_are_the_same_but_for_what_kernels_may_make_of_them(
    one: list[complex], other: list[complex] | None, is_same: bool
) -> None:
    parts = (None if values is None else torch.tensor(values) for values in (one, other))
    results = [{"a": part, "b": (torch.ones(2),)} for part in parts]
    if is_same:
        require_same("text", *results)
    else:
        with pytest.raises(InvalidValueError, match=f"the encoder 'text' {AGAIN}"):
            require_same("text", *results)


def test_half_precision_has_more_noise() -> None:
    halves = [torch.tensor([1.0, last], dtype=torch.bfloat16) for last in (2.0, 2.03125)]
    require_same("text", *halves)
    with pytest.raises(InvalidValueError, match=AGAIN):
        require_same("text", *(half.float() for half in halves))


def test_the_source_is_found_wherever_the_code_is_that_draws() -> None:
    noisy = Noisy()
    with_hook = nn.Linear(2, 2)
    with_hook.register_forward_hook(lambda module, given, made: made + noise())
    for encoder in (
        nn.Sequential(nn.Linear(2, 2), nn.ModuleList([noisy])),
        nn.DataParallel(noisy),
        noisy.forward,
        lambda x: noisy(x),  # noqa: PLW0108 (a cell holds it)
        partial(lambda module, x: module(x), noisy),
        with_hook,
    ):
        assert names_random_source(encoder)


def test_a_module_of_torch_names_no_source() -> None:
    assert not names_random_source(nn.TransformerEncoderLayer(8, 2, dropout=0.0))
