"""The parts of a batch besides features: cached and returned as they were collated, or refused."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from castore import Store
from castore.adapters.embeddings import CacheConfig
from castore.errors import InvalidValueError
from tests.adapters.embeddings.models import (
    BATCH,
    Made,
    Model,
    cached,
    data,
    features,
    in_batches,
    loader,
)

Pair = namedtuple("Pair", ["x", "y"])


def labelled(i: int) -> Any:
    label = {
        "class": i % 3,
        "text": f"t{i}" * (i % 4),
        "raw": bytes([i]),
        "score": i / 7,
        "vector": torch.ones(2) * i,
    }
    return Pair(features()[i], label)


def test_labels_of_every_kind_come_back_as_they_were_collated(store: Store, tmp_path: Path) -> None:
    class Watched(Made):
        seen: list[int]

        def __getitem__(self, index: int) -> Any:
            self.seen.append(index)
            return super().__getitem__(index)

        def __getstate__(self) -> Any:
            return {name: value for name, value in vars(self).items() if name != "seen"}

    dataset = Watched(labelled)
    dataset.seen = []
    raw = loader(dataset, shuffle=False, batch_size=6)
    kept = cached(Model(), raw, store)
    expected = list(raw)
    dataset.seen.clear()
    batches = list(kept)
    assert dataset.seen == []
    for one, other in zip(expected, batches, strict=True):
        assert type(other) is Pair
        for name, value in one.y.items():
            assert type(value) is type(other.y[name])
            assert (
                torch.equal(value, other.y[name])
                if isinstance(value, torch.Tensor)
                else value == other.y[name]
            )


def ragged(samples: list[Any]) -> Any:
    return (
        torch.stack([x for x, _ in samples]),
        [y for _, y in samples],
        np.array([len(y) for _, y in samples]),
        "batch",
    )


def test_ragged_labels_arrays_and_constants_are_kept(store: Store) -> None:
    dataset = Made(lambda i: (features()[i], torch.arange(i)))
    raw = loader(dataset, shuffle=False, batch_size=6, collate_fn=ragged)
    for one, other in zip(raw, cached(Model(), raw, store), strict=True):
        assert all(map(torch.equal, one[1], other[1]))
        assert isinstance(other[2], np.ndarray)
        assert np.array_equal(one[2], other[2])
        assert other[3] == "batch"


def padded(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), nn.utils.rnn.pad_sequence([y for _, y in samples], True)


# The longest item is one of the first, or a later one.
@pytest.mark.parametrize("lengths", [[9, 1, 1], [1, 9, 1], [1, 1, 9], [2, 2, 2, 2, 2, 5]], ids=str)
def test_labels_that_depend_on_their_batch_are_refused_and_can_be_read_raw(
    store: Store, lengths: list[int]
) -> None:
    dataset = Made(lambda i: (features()[i], torch.arange((lengths * 4)[i])), 12)
    raw = loader(dataset, shuffle=False, batch_size=4, collate_fn=padded)
    with pytest.raises(
        InvalidValueError, match=r"the label of an item differs between batches.*labels=False"
    ):
        cached(Model(), raw, store, CacheConfig(batch_size=4))
    model = Model()
    for one, other in zip(raw, cached(model, raw, store, CacheConfig(labels=False)), strict=True):
        assert torch.equal(one[1], other[1])
        assert torch.allclose(model(other[0]), Model()(one[0]), atol=1e-6)


def objects(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), [y for _, y in samples]


def longest(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), max(y for _, y in samples)


@pytest.mark.parametrize("place", range(3))
def test_a_number_that_tells_of_its_batch_is_no_label(store: Store, place: int) -> None:
    dataset = Made(lambda i: (features()[i], 9 if i == place else 1))
    with pytest.raises(
        InvalidValueError, match=r"labels cannot be cached: batch\[1\] is a int that has no element"
    ):
        cached(Model(), loader(dataset, collate_fn=longest), store)


def test_labels_that_no_table_holds_are_named(store: Store) -> None:
    with pytest.raises(
        InvalidValueError, match=r"the labels cannot be cached: they contain a list of <class 'dict'>"
    ):
        cached(Model(), loader(Made(lambda i: (features()[i], {"a": i})), collate_fn=objects), store)


def test_a_dataset_of_one_sample_and_one_without_labels_are_cached(store: Store) -> None:
    model = Model()
    ((keys, label),) = cached(model, loader(data(1)), store)
    assert torch.equal(model(keys), Model()(features(1)))
    assert label.tolist() == [0]
    bare = cached(model, loader(features(), shuffle=False), store)
    assert torch.equal(torch.cat([model(x) for x in bare]), in_batches(Model(), features()))


def test_subsets_and_single_samples_of_a_cached_loader(store: Store) -> None:
    model = Model()
    kept = cached(model, loader(Subset(data(), range(10, 30)), shuffle=False), store)
    keys, labels = kept.dataset[3]
    assert labels.tolist() == [13 % 3]
    plain = Model()
    encoded = plain.encoder(features()[10 : 10 + BATCH])
    assert torch.equal(model(keys), plain.head(encoded[3:4]))


def boxes_of(samples: list[Any]) -> Any:
    """As a detector's collate has them: one after the other, however many a sample has."""
    return torch.stack([features()[i] for i in samples]), torch.cat(
        [torch.full((1 if i < 5 else 2, 1), float(i)) for i in samples]
    )


def longest_of(samples: list[Any]) -> Any:
    return torch.stack([features()[i] for i in samples]), 5 if max(samples) < 5 else 9


def grown_of(samples: list[Any]) -> Any:
    return torch.stack([features()[i] for i in samples]), [1] * (2 if max(samples) < 5 else 3)


@pytest.mark.parametrize(
    ("collate", "problem"),
    [
        (boxes_of, "a batch of 10 items has a Tensor of 15 elements"),
        (longest_of, "is not the same in every batch"),
        (grown_of, "has other parts than the first samples"),
    ],
)
def test_labels_that_only_the_first_samples_show_otherwise_are_refused(
    store: Store, collate: Any, problem: str
) -> None:
    """Regression: such labels were those of other items, or of the first batch."""
    raw: Any = DataLoader(range(30), batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=problem):
        cached(Model(), raw, store)
