"""Each limitation on Quaterion's page on its cache is lifted, or refused with a clear error where it cannot
be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from castore import Store
from castore.adapters.embeddings import CacheConfig, EmbeddingCache, cache_embeddings
from castore.errors import InvalidValueError, NotFoundError
from tests.adapters.embeddings.models import (
    BATCH,
    Encoder,
    Made,
    Model,
    features,
    loader,
)


def stacked(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def longest_first(samples: list[Any]) -> Any:
    return stacked(sorted(samples, key=lambda sample: -float(sample[0][0])))


def centred(samples: list[Any]) -> Any:
    x, y = stacked(samples)
    return x - x.mean(0), y


def mixed_with_the_next(samples: list[Any]) -> Any:
    x, y = stacked(samples)
    return 0.9 * x + 0.1 * x.roll(1, 0), y


@pytest.mark.parametrize("labels", [None, False])
@pytest.mark.parametrize("falling", [False, True])
def test_a_collate_function_that_sorts_is_refused(store: Store, labels: Any, falling: bool) -> None:
    inputs = features()
    if falling:
        inputs[:3, 0] = torch.tensor([9.0, 8.0, 7.0])  # the first samples are in its order already
    raw = loader(Made(lambda i: (inputs[i], i)), collate_fn=longest_first)
    with pytest.raises(InvalidValueError, match="collate function puts samples into another order"):
        cached(Model(), raw, store, labels=labels)


@pytest.mark.parametrize("collate", [centred, mixed_with_the_next])
def test_features_that_depend_on_their_batch_are_refused(store: Store, collate: Any) -> None:
    raw = loader(collate_fn=collate)
    with pytest.raises(InvalidValueError, match=r"depends on the other items of its batch|of the order in"):
        cached(Model(), raw, store)


class Floats(Encoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Lengths(nn.Module):
    """Encodes an array of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, texts: Any) -> torch.Tensor:
        return torch.tensor([[float(len(text))] for text in texts]) * self.weight


def test_features_that_a_collate_function_computes_of_each_item_are_kept(store: Store) -> None:
    weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))

    def projected(samples: list[Any]) -> Any:  # the last bits depend on the size of the batch
        x, y = stacked(samples)
        return x @ weights, y

    raw, model = loader(collate_fn=projected, shuffle=False), Model()
    for (x, _), (keys, _) in zip(raw, cached(model, raw, store), strict=True):
        assert torch.allclose(model(keys), Model()(x), atol=1e-5)
    for inputs in (
        torch.full((20, 8), torch.inf), torch.full((20, 8), torch.nan), torch.zeros(20, 8),
        torch.ones(20, 8).to(torch.float8_e4m3fn), torch.arange(160).reshape(20, 8),
    ):  # fmt: skip
        cached(Model(Floats()), loader(TensorDataset(inputs, torch.arange(20))), store)

    def texts(samples: list[Any]) -> Any:  # the dtype depends on the longest
        return np.array([x for x, _ in samples]), torch.tensor([y for _, y in samples])

    raw = loader(Made(lambda i: ("x" * (20 - i), i), 20), collate_fn=texts, shuffle=False)
    model = Model(Lengths())
    for (x, _), (keys, _) in zip(raw, cached(model, raw, store), strict=True):
        assert torch.allclose(model(keys), Model(Lengths())(x), atol=1e-5)


def test_augmentations_of_later_samples_alone_are_refused(store: Store) -> None:
    raw = loader(Made(lambda i: (features()[i] + (torch.rand(8) if i > 9 else 0), i)))
    with pytest.raises(InvalidValueError, match="the dataset draws random numbers"):
        cached(Model(), raw, store)


def symbols(feature: torch.Tensor) -> float:
    return float(feature[0])


class Counted(Made):
    """A dataset that counts its reads; the count does not count in keys."""

    def __init__(self, count: int = 20, copies: int = 1) -> None:
        super().__init__(lambda i: (features()[i // copies], i % 3), count)
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return super().__getitem__(index)

    def __getstate__(self) -> Any:
        return {**vars(self), "reads": []}


def cached(model: Model, raw: DataLoader[Any], store: Any, **options: Any) -> DataLoader[Any]:
    return cache_embeddings(model, raw, config=CacheConfig(batch_size=BATCH, **options), store=store)[0]


def check(model: Model, raw: DataLoader[Any], kept: DataLoader[Any]) -> None:
    for (x, labels), (keys, own) in zip(raw, kept, strict=True):
        assert torch.equal(labels, own)
        assert torch.allclose(model(keys), Model()(x), atol=1e-6)


def test_at_least_one_encoder_should_be_frozen_else_nothing_is_cached_and_it_is_said(store: Store) -> None:
    model = Model(Encoder().requires_grad_(True))
    with pytest.raises(InvalidValueError, match="no child of the model is frozen"):
        cached(model, loader(), store)


@pytest.mark.parametrize(
    "augment",
    [
        lambda: torch.rand(8),
        lambda: torch.tensor([random.random()] * 8),
        lambda: torch.rand(8, generator=torch.Generator().manual_seed(random.SystemRandom().getrandbits(32))),
    ],
    ids=["torch", "random", "of its own"],
)
def test_augmentations_are_refused(store: Store, augment: Any) -> None:
    with pytest.raises(
        InvalidValueError,
        match=r"the train loader's dataset (draws random|gives another).*augmentations cannot be",
    ):
        cached(
            Model(),
            loader(Made(lambda i: (features()[i] + augment(), i))),
            store,
            fingerprints={"train": "augmented"},
        )


def test_labels_are_cached_though_several_processes_fill_and_train(store: Store) -> None:
    dataset, model = Counted(), Model()
    kept = cached(model, loader(dataset, shuffle=False, num_workers=2), store, num_workers=2)
    check(model, loader(Counted(), shuffle=False), kept)
    assert model.encoder.encoded == 20
    # This process reads only the first samples; workers read the rest, and training reads none.
    assert set(dataset.reads) <= {0, 1, 2}
    again = Counted()
    kept = cached(Model(), loader(again, shuffle=False), store)
    again.reads.clear()
    assert len(list(kept)) == 2
    assert again.reads == []


def test_labels_are_cached_though_there_is_a_key_extractor(store: Store) -> None:
    for expected in (20, 0):
        dataset, model = Counted(), Model()
        kept = cached(model, loader(dataset, shuffle=False), store, key_extractors=symbols)
        assert model.encoder.encoded == expected
        dataset.reads.clear()
        check(model, loader(Counted(), shuffle=False), kept)
        assert dataset.reads == []


def test_items_of_one_key_are_encoded_once_and_keep_their_own_labels(store: Store) -> None:
    model = Model()
    raw = loader(Counted(30, copies=3), shuffle=False, batch_size=4)
    kept = cached(model, raw, store, key_extractors=symbols)
    assert model.encoder.encoded == 10
    check(model, raw, kept)


def test_another_key_extractor_misses(store: Store) -> None:
    cached(Model(), loader(Counted()), store, key_extractors=symbols)
    model = Model()
    cached(model, loader(Counted()), store, key_extractors=lambda feature: (symbols(feature), "v2"))
    assert model.encoder.encoded == 20


class Pair(Model):
    """Two encoders; the second one may be trainable."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.other = Encoder(seed=3).requires_grad_(is_trained)

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x["a"]) + self.other(x["b"]))
        return out


class Pairs(Counted):
    """Samples of two features and a label."""

    def __init__(self) -> None:
        super().__init__()
        self.make = lambda i: ({"a": features()[i], "b": features(seed=6)[i]}, i % 3)


def test_labels_are_not_cached_while_a_feature_is_read_raw(store: Store) -> None:
    # A trainable encoder needs its features, so the raw data is read; cached encoders still get Keys.
    raw = loader(Pairs(), shuffle=False)
    model = Pair(is_trained=True)
    expected = [model(x) for x, _ in raw]
    kept, _ = cache_embeddings(model, raw, encoders={"encoder": (0, "a")}, store=store)
    for (x, _), out in zip(kept, expected, strict=True):
        assert type(x["b"]) is torch.Tensor
        assert torch.allclose(model(x), out, atol=1e-6)


def test_the_raw_data_is_not_read_where_every_feature_of_a_sample_is_cached(store: Store) -> None:
    dataset, model = Pairs(), Pair(is_trained=False)
    expected = [(model(x), labels) for x, labels in loader(Pairs(), shuffle=False)]
    places = {"encoder": (0, "a"), "other": (0, "b")}
    kept, _ = cache_embeddings(model, loader(dataset, shuffle=False), encoders=places, store=store)
    dataset.reads.clear()
    for (x, labels), (out, own) in zip(kept, expected, strict=True):
        assert torch.equal(labels, own)
        assert torch.allclose(model(x), out, atol=1e-6)
    assert dataset.reads == []


class Stream(IterableDataset[Any]):
    """Items one after the other, shared out among workers."""

    def __init__(self, count: int = 30, start: int = 0) -> None:
        self.items = features(60)[start : start + count]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(info.id if info else 0, len(self.items), info.num_workers if info else 1):
            yield self.items[i], i


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets_work_with_a_key_extractor(store: Store, workers: int) -> None:
    raw = DataLoader(Stream(), batch_size=4, num_workers=workers)
    for expected in (30, 0):
        model = Model()
        kept = cached(model, raw, store, key_extractors=symbols, num_workers=workers)
        assert model.encoder.encoded == expected
        check(model, raw, kept)


def test_iterable_datasets_without_one_are_refused(store: Store) -> None:
    with pytest.raises(
        InvalidValueError,
        match="iterable, so its items have no index: give a key extractor for the encoder 'enc",
    ):
        cached(Model(), DataLoader(Stream(), batch_size=4), store)


def test_a_stream_that_gives_something_new_says_so(store: Store) -> None:
    stream = Stream()
    kept = cached(Model(), DataLoader(stream, batch_size=4), store, key_extractors=symbols)
    stream.items = features(60)
    with pytest.raises(NotFoundError, match="an item that it did not have when the cache was filled"):
        list(kept)


def test_the_defect_of_the_page_s_code_replayed(store: Store) -> None:
    # fill(['a', 'b']); fill(['a', 'c']) gave a and c one row.
    cache = EmbeddingCache("letters", store)
    for keys in (["a", "b"], ["a", "c"]):
        cache.fill(keys, keys, lambda items: torch.tensor([[float(ord(item))] for item in items]))
    assert cache.get(["a", "b", "c"]).flatten().tolist() == [97.0, 98.0, 99.0]
    assert len(set(cache.rows(["a", "b", "c"]).tolist())) == 3
