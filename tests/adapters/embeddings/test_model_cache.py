"""cache_embeddings encodes each item once, leaves the results of training the same, and notices changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from castore import Store
from castore.adapters.embeddings import CacheConfig, CachedEncoder, Keys, cache_embeddings
from castore.errors import InvalidValueError, UnhashableError
from tests.adapters.embeddings.models import (
    BATCH,
    CONFIG,
    ITEMS,
    Encoder,
    Made,
    Model,
    cached,
    data,
    features,
    fill,
    in_batches,
    loader,
    losses,
)


@pytest.mark.parametrize("workers", [0, 2])
def test_training_goes_as_without_the_cache_and_encodes_each_item_once(store: Store, workers: int) -> None:
    plain, model, again = Model(), Model(), Model()
    expected = losses(plain, loader(num_workers=workers))
    assert plain.encoder.encoded == 2 * ITEMS
    assert losses(model, cached(model, loader(num_workers=workers), store)) == expected
    assert model.encoder.encoded == ITEMS
    assert losses(again, cached(again, loader(num_workers=workers), store)) == expected
    assert again.encoder.encoded == 0


def test_caching_draws_no_random_numbers_of_the_training_run(store: Store) -> None:
    model, raw = Model(), loader()
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 - the global source is what is meant
    expected = torch.rand(3), np.random.rand(3)  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 - the global source is what is meant
    cached(model, raw, store, CacheConfig(num_workers=1))
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])  # noqa: NPY002


@pytest.mark.parametrize(
    "options",
    [
        {"drop_last": True, "batch_size": 7},
        {"shuffle": False},
        {"shuffle": False, "sampler": WeightedRandomSampler([1.0] * 30 + [5.0] * 30, 40)},
        {"generator": torch.Generator()},
        {"batch_size": 1, "shuffle": False, "drop_last": False,
         "batch_sampler": torch.utils.data.BatchSampler(range(0, 60, 2), 4, False)},
    ],
    ids=["drop_last", "in order", "weighted", "generator", "batch_sampler"],
)  # fmt: skip
def test_samplers_and_generators_stay(store: Store, options: dict[str, Any]) -> None:
    def batches(model: nn.Module | None = None) -> list[Any]:
        torch.manual_seed(4)
        if "generator" in options:
            options["generator"].manual_seed(9)
        raw = loader(**options)
        return list(raw if model is None else cached(model, raw, store))

    model = Model()
    for (x, labels), (keys, kept) in zip(batches(), batches(model), strict=True):
        assert torch.equal(labels, kept)
        assert torch.allclose(model(keys), Model()(x), atol=1e-6)


def test_validation_has_keys_too_and_the_loaders_that_were_given_stay_raw(store: Store) -> None:
    model = Model()
    train, val = loader(), loader(data(20, seed=5), shuffle=False)
    _, val_cached = cache_embeddings(model, train, val, CONFIG, store=store)
    assert val_cached is not None
    assert model.encoder.encoded == ITEMS + 20
    for (x, labels), (keys, kept) in zip(val, val_cached, strict=True):
        assert type(keys) is Keys
        assert type(x) is torch.Tensor
        assert torch.equal(labels, kept)
        assert torch.equal(model(keys), Model()(x))


def test_a_model_that_is_cached_already_takes_more_loaders(store: Store) -> None:
    model = Model()
    first = cached(model, loader(shuffle=False), store)
    second = cached(model, loader(data(20, seed=5), shuffle=False), store)
    assert isinstance(model.encoder, CachedEncoder)
    assert not isinstance(model.encoder.encoder, CachedEncoder)
    assert torch.equal(torch.cat([model(x) for x, _ in first]), in_batches(Model(), features()))
    assert torch.equal(torch.cat([model(x) for x, _ in second]), in_batches(Model(), features(20, seed=5)))


def test_the_config_and_the_store_of_a_later_call_count_from_then_on(store: Store, tmp_path: Path) -> None:
    """Regression: items that are no Keys were kept as the first call said, in its store."""
    model = Model()
    config = CacheConfig(batch_size=BATCH, fingerprints={"encoder": "mine"})
    first = cached(model, loader(shuffle=False), store, config)
    later = CacheConfig(batch_size=BATCH, dtype=torch.bfloat16)
    with Store(tmp_path / "other", memory=0) as other:
        second = cached(model, loader(data(20, seed=5), shuffle=False), other, later)
        new = features(4, seed=9)
        exact = Encoder()(new)
        assert torch.equal(model.encoder(new), exact.to(torch.bfloat16).float())
        assert not torch.equal(model.encoder(new), exact)
        seen = torch.cat([model.encoder(keys) for keys, _ in second])
        assert torch.equal(seen, Encoder()(features(20, seed=5)).to(torch.bfloat16).float())
    seen = torch.cat([model.encoder(keys) for keys, _ in first])
    assert torch.equal(seen, Encoder()(features())), "the first call's fingerprint still counts"


def test_cached_loaders_and_none_are_no_loaders_to_cache(store: Store) -> None:
    model = Model()
    made, _ = cache_embeddings(model, DataLoader(data(), batch_size=BATCH), store=store)
    with pytest.raises(InvalidValueError, match="loader comes from cache_embeddings; give the loader"):
        cache_embeddings(model, made, store=store)
    with pytest.raises(InvalidValueError, match="the train loader is a NoneType"):
        cache_embeddings(model, None, store=store)  # type: ignore[arg-type]


def test_unfreezing_an_encoder_in_the_middle_of_training_is_an_error(store: Store) -> None:
    model = Model()
    made, _ = cache_embeddings(model, DataLoader(data(), batch_size=BATCH), store=store)
    batches = iter(made)
    model(next(batches)[0])
    model.encoder.encoder.requires_grad_(True)
    with pytest.raises(InvalidValueError, match="requires grad"):
        model(next(batches)[0])


def test_a_key_extractor_without_a_return_is_refused(store: Store) -> None:
    config = CacheConfig(key_extractors=lambda x: None)
    with pytest.raises(InvalidValueError, match="a key extractor has returned None"):
        cache_embeddings(Model(), DataLoader(data(), batch_size=BATCH), config=config, store=store)


def test_an_error_leaves_the_model_as_it_was(store: Store) -> None:
    model = Model()
    with pytest.raises(InvalidValueError, match=r"no batch\['nothing'\]"):
        cached(model, loader(Made(lambda i: {"x": features()[i]})), store, encoders={"encoder": "nothing"})
    assert isinstance(model.encoder, Encoder)


# Changes that do and do not change a key


def test_another_checkpoint_misses_and_the_same_one_hits(store: Store) -> None:
    assert fill(data(), store) == ITEMS
    assert fill(data(), store) == 0
    assert fill(data(), store, encoder=Encoder(seed=1)) == ITEMS
    changed = Encoder()
    changed.layer.bias[2] += 1e-6
    assert fill(data(), store, encoder=changed) == ITEMS
    assert fill(data(), store, encoder=Encoder().eval()) == 0


def test_the_number_of_items_that_an_encoder_has_seen_does_not_change_its_key(store: Store) -> None:
    encoder = Encoder()
    assert fill(data(), store, encoder=encoder) == ITEMS
    assert encoder.encoded == ITEMS
    assert fill(data(), store, encoder=encoder) == 0


def test_other_code_of_the_encoder_misses(store: Store) -> None:
    class Other(Encoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    assert fill(data(), store) == ITEMS
    assert fill(data(), store, encoder=Other()) == ITEMS


def test_another_dataset_or_collate_function_misses_and_batch_sizes_do_not(store: Store) -> None:
    assert fill(data(), store) == ITEMS
    assert fill(data(seed=3), store) == ITEMS
    assert fill(data(), store, CacheConfig(batch_size=3, num_workers=1)) == 0

    def collate(samples: list[Any]) -> Any:
        x, labels = torch.utils.data.default_collate(samples)
        return x.round(), labels

    model = Model()
    cached(model, loader(collate_fn=collate), store)
    assert model.encoder.encoded == ITEMS


def test_what_has_no_fingerprint_is_named_and_can_be_named(store: Store) -> None:
    unhashable = Made(lambda i: (features()[i], i))
    unhashable.handle = open(__file__)  # type: ignore[attr-defined]  # noqa: SIM115
    with unhashable.handle:  # type: ignore[attr-defined]
        with pytest.raises(
            UnhashableError, match=r"the train loader's dataset\.handle.*fingerprints={'train': \.\.\.}"
        ):
            fill(unhashable, store)
        named = CacheConfig(fingerprints={"train": "mine"})
        assert fill(unhashable, store, named) == 20
        assert fill(unhashable, store, named) == 0


def test_new_items_of_a_named_dataset_cost_only_themselves(store: Store) -> None:
    named = CacheConfig(fingerprints={"train": "mine"}, batch_size=BATCH)
    assert fill(data(40), store, named) == 40
    grown = TensorDataset(torch.cat([features(40), features(20, seed=9)]), torch.arange(60) % 3)
    assert fill(grown, store, named) == 20


def test_other_masks_for_an_encoder_that_is_cached_already_are_refused(store: Store) -> None:
    """Regression: they were passed over, but the table was named as if they counted."""
    model, raw = Model(), loader(data(), shuffle=False)
    cached(model, raw, store)
    config = CacheConfig(masks={"encoder": "attention_mask"})
    with pytest.raises(InvalidValueError, match="cached already, with masks=None"):
        cache_embeddings(model, raw, encoders="encoder", store=store, config=config)
