"""cache_embeddings: each item is encoded once, training goes as without it, and what changed is noticed."""

from __future__ import annotations

import multiprocessing
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from castore import Store
from castore.adapters.embeddings import CacheConfig, CachedEncoder, CacheType, Keys, cache_embeddings
from castore.errors import InvalidValueError, UnhashableError
from tests.embeddings.models import BATCH, ITEMS, Encoder, Made, Model, data, features, fill, loader, losses

CONFIG = CacheConfig(batch_size=BATCH)


def cached(
    model: nn.Module, batches: DataLoader[Any], store: Any, config: CacheConfig = CONFIG, **more: Any
) -> Any:
    return cache_embeddings(model, batches, config=config, store=store, **more)[0]


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
    assert torch.equal(torch.cat([model(x) for x, _ in first]), Model()(features()))
    assert torch.equal(torch.cat([model(x) for x, _ in second]), Model()(features(20, seed=5)))


def test_an_error_leaves_the_model_as_it_was(store: Store) -> None:
    model = Model()
    with pytest.raises(InvalidValueError, match=r"no batch\['nothing'\]"):
        cached(model, loader(Made(lambda i: {"x": features()[i]})), store, encoders={"encoder": "nothing"})
    assert isinstance(model.encoder, Encoder)


# What changes a key, and what does not


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


# Encoders and their inputs


class Two(nn.Module):
    """Two encoders over one batch with names."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Encoder(seed=1), Encoder(seed=2)
        self.head = nn.Linear(8, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.cat([self.text(batch["text"]), self.image(batch["image"])], 1))
        return out


def named_sample(i: int) -> dict[str, Any]:
    return {"text": features()[i], "image": features(seed=4)[i], "label": i % 3, "id": f"item {i}"}


def same_batches(raw: DataLoader[Any], kept: DataLoader[Any], names: list[str]) -> None:
    for expected, batch in zip(raw, kept, strict=True):
        assert list(expected) == list(batch)
        for name in names:
            assert (
                torch.equal(torch.as_tensor(expected[name]), torch.as_tensor(batch[name]))
                if name != "id"
                else (expected[name] == batch[name])
            )


def test_each_encoder_takes_its_own_place_of_a_batch_with_names(store: Store) -> None:
    model, raw = Two(), loader(Made(named_sample), shuffle=False)
    expected = [model(batch) for batch in raw]
    kept = cached(model, raw, store, encoders={"text": "text", "image": lambda batch: batch["image"]})
    for batch, out in zip(kept, expected, strict=True):
        assert torch.equal(model(batch), out)
    same_batches(raw, kept, ["label", "id"])


def test_a_batch_with_names_needs_to_be_told_the_places(store: Store) -> None:
    with pytest.raises(InvalidValueError, match=r"say which feeds the encoder: encoders={'text': \.\.\.}"):
        cached(Two(), loader(Made(named_sample)), store)


def test_a_place_that_is_made_from_the_batch_is_refused(store: Store) -> None:
    with pytest.raises(InvalidValueError, match="is no part of the batch, but made from it"):
        cached(Two(), loader(Made(named_sample)), store, encoders={"text": lambda batch: batch["text"] * 2})


def test_one_encoder_may_stay_as_it_is_and_gets_raw_features(store: Store) -> None:
    model, raw = Two(), loader(Made(named_sample), shuffle=False)
    model.image.requires_grad_(True)
    expected = [model(batch) for batch in raw]
    places = {"text": "text", "image": "image"}
    config = CacheConfig(mapping={"image": CacheType.NONE})
    kept = cached(model, raw, store, config, encoders=places)
    model.image.encoded = 0
    for batch, out in zip(kept, expected, strict=True):
        assert type(batch["image"]) is torch.Tensor
        assert torch.allclose(model(batch), out, atol=1e-6)
    assert model.image.encoded == 20


def test_a_feature_that_feeds_a_cached_and_a_trainable_encoder_is_refused(store: Store) -> None:
    config = CacheConfig(mapping={"image": CacheType.NONE})
    with pytest.raises(
        InvalidValueError,
        match=r"batch\['text'\] feeds the encoder 'text', which is cached, and one that is not",
    ):
        cached(Two(), loader(Made(named_sample)), store, config, encoders={"text": "text", "image": "text"})


def test_two_encoders_share_a_feature(store: Store) -> None:
    class Both(Two):
        def forward(self, x: Any) -> torch.Tensor:
            out: torch.Tensor = self.head(torch.cat([self.text(x), self.image(x)], 1))
            return out

    model, raw = Both(), loader(shuffle=False)
    expected = [model(x) for x, _ in raw]
    for (x, _), out in zip(cached(model, raw, store), expected, strict=True):
        assert torch.allclose(model(x), out, atol=1e-6)


def test_one_encoder_is_called_for_the_query_and_for_the_document(store: Store) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, batch: Any) -> torch.Tensor:
            out: torch.Tensor = self.encoder(batch["query"]) - self.encoder(batch["document"])
            return out

    def pair(i: int) -> Any:
        return {"query": features()[i], "document": features(seed=4)[i]}

    model, raw = Pairs(), loader(Made(pair), shuffle=False)
    expected = [model(batch) for batch in raw]
    model.encoder.encoded = 0
    kept = cached(model, raw, store, encoders={"encoder": ["query", "document"]})
    assert model.encoder.encoded == 40
    for batch, out in zip(kept, expected, strict=True):
        assert torch.allclose(model(batch), out, atol=1e-6)


def test_an_encoder_of_several_inputs_is_fed_by_keyword(store: Store) -> None:
    class Masked(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            assert mask is not None
            return super().forward(ids * mask)

    class Inputs(Model):
        def forward(self, batch: Any) -> torch.Tensor:
            out: torch.Tensor = self.head(self.encoder(batch["ids"], mask=batch["mask"]))
            return out

    raw = loader(
        Made(lambda i: {"ids": features()[i], "mask": features(seed=4)[i] > 0, "y": i}), shuffle=False
    )
    model = Inputs(Masked())
    expected = [model(batch) for batch in raw]
    kept = cached(model, raw, store, encoders={"encoder": {"ids": "ids", "mask": "mask"}})
    for batch, out in zip(kept, expected, strict=True):
        assert torch.equal(model(batch), out)


def test_an_encoder_deep_in_the_model_is_named_with_dots(store: Store) -> None:
    model = nn.Sequential(nn.Sequential(Encoder(), nn.Tanh()), nn.Linear(4, 3))
    raw = loader(shuffle=False)
    expected = [model(x) for x, _ in raw]
    kept = cached(model, raw, store, encoders="0.0")
    for (x, _), out in zip(kept, expected, strict=True):
        assert torch.equal(model(x), out)


def test_names_that_do_not_exist_are_answered_with_the_nearest(store: Store) -> None:
    with pytest.raises(InvalidValueError, match="do you mean 'encoder'"):
        cached(Model(), loader(), store, encoders="encodr")
    with pytest.raises(InvalidValueError, match=r"mapping names 'encodr'.*do you mean 'encoder'"):
        cached(Model(), loader(), store, CacheConfig(mapping={"encodr": CacheType.CPU}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((data(),), "the train loader is a TensorDataset; give a DataLoader"),
        ((loader(), CONFIG), "the val loader is a CacheConfig; give a DataLoader"),
        ((loader(), None, {"batch_size": 3}), "config is a dict; give a CacheConfig"),
        ((loader(), None, CONFIG, 0), "encoders holds a int; give names: 'encoder', 'encoder.layer', 'head'"),
        ((loader(), None, CONFIG, [Encoder()]), "encoders holds a Encoder; give names"),
    ],
)
def test_arguments_of_another_kind_are_answered_with_what_to_give(
    store: Store, arguments: Any, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        cache_embeddings(*(Model(), *arguments, *[None] * (4 - len(arguments)), store))


def test_a_model_without_frozen_children_says_which_parameters_are_trained(store: Store) -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.ReLU())
    with pytest.raises(
        InvalidValueError,
        match=r"no child of the model is frozen: '0' \(its parameter 'weight' requires grad",
    ):
        cached(model, loader(), store)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (nn.Linear(8, 4), "its parameter 'weight' requires grad"),
        (
            nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)).requires_grad_(False),
            r"its module '1' \(Dropout\) is in train mode",
        ),
        (
            nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).requires_grad_(False),
            r"its module '1' \(BatchNorm1d\)",
        ),
        (
            nn.TransformerEncoderLayer(8, 2).requires_grad_(False),
            r"its module 'self_attn' \(MultiheadAttention\)",
        ),
    ],
)
def test_an_encoder_that_trains_or_is_random_is_refused_by_name(
    store: Store, encoder: nn.Module, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        cached(Model(encoder), loader(), store, encoders="encoder")


def test_dropout_that_nobody_can_see_is_noticed(store: Store) -> None:
    class Hidden(Encoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, training=True)

    with pytest.raises(InvalidValueError, match="the encoder 'encoder' draws random numbers"):
        fill(data(), store, encoder=Hidden())


def test_a_compiled_model_trains_on_keys(store: Store) -> None:
    model = Model()
    kept = cached(model, loader(shuffle=False), store)
    compiled = torch.compile(model, backend="eager")
    for keys, _ in kept:
        assert torch.equal(compiled(keys), model(keys))


def test_running_out_of_memory_is_not_taken_for_a_wrong_input(store: Store) -> None:
    class Large(Encoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError):
        fill(data(), store, encoder=Large())


def test_a_layer_that_is_no_encoder_cannot_compute_with_keys(store: Store) -> None:
    class Skips(Model):
        def forward(self, x: Any) -> torch.Tensor:
            return super().forward(x * 0.5)

    model = Skips()
    kept = cached(model, loader(), store)
    with pytest.raises(InvalidValueError, match="mul of Keys: this batch holds keys of cached embeddings"):
        losses(model, kept)


# Labels


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


# Which of the first items is the longest, or a later one.
@pytest.mark.parametrize("lengths", [[9, 1, 1], [1, 9, 1], [1, 1, 9], [2, 2, 2, 2, 2, 5]], ids=str)
def test_labels_that_depend_on_their_batch_are_refused_and_can_be_read_raw(
    store: Store, lengths: list[int]
) -> None:
    dataset = Made(lambda i: (features()[i], torch.arange((lengths * 4)[i])), 12)
    raw = loader(dataset, shuffle=False, batch_size=4, collate_fn=padded)
    with pytest.raises(
        InvalidValueError, match=r"the same item has another one in another batch.*labels=False"
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
        InvalidValueError, match=r"labels cannot be kept: batch\[1\] is a int that has no element"
    ):
        cached(Model(), loader(dataset, collate_fn=longest), store)


def test_labels_that_no_table_holds_are_named(store: Store) -> None:
    with pytest.raises(InvalidValueError, match=r"the labels cannot be kept: a list of <class 'dict'>"):
        cached(Model(), loader(Made(lambda i: (features()[i], {"a": i})), collate_fn=objects), store)


def test_a_dataset_of_one_sample_and_one_without_labels_are_cached(store: Store) -> None:
    model = Model()
    ((keys, label),) = cached(model, loader(data(1)), store)
    assert torch.equal(model(keys), Model()(features(1)))
    assert label.tolist() == [0]
    bare = cached(model, loader(features(), shuffle=False), store)
    assert torch.equal(torch.cat([model(x) for x in bare]), Model()(features()))


def test_subsets_and_single_samples_of_a_cached_loader(store: Store) -> None:
    model = Model()
    kept = cached(model, loader(Subset(data(), range(10, 30)), shuffle=False), store)
    keys, labels = kept.dataset[3]
    assert labels.tolist() == [13 % 3]
    assert torch.equal(model(keys), Model()(features()[13:14]))


# Outputs, storage, processes


class Tokens(Encoder):
    """A list of states for each item, as many as its first number says, and a summary."""

    def forward(self, x: torch.Tensor) -> Any:
        states = super().forward(x)
        return {
            "states": [s.repeat(1 + int(i) % 3, 1) for i, s in enumerate(states)],
            "both": (states, states.half()),
        }


def test_outputs_of_any_structure_come_back(store: Store) -> None:
    model = Model(Tokens())
    raw = loader(shuffle=False)
    kept = cached(model, raw, store)
    for (x, _), (keys, _) in zip(raw, kept, strict=True):
        expected, found = model.encoder.encoder(x), model.encoder(keys)
        assert all(map(torch.equal, expected["states"], found["states"]))
        assert all(map(torch.equal, expected["both"], found["both"]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_embeddings_are_kept_narrower_if_asked(store: Store, dtype: torch.dtype) -> None:
    model = Model()
    kept = cached(model, loader(shuffle=False), store, CacheConfig(dtype=dtype))
    found = torch.cat([model.encoder(x) for x, _ in kept])
    assert found.dtype is torch.float32
    assert torch.equal(found, Encoder()(features()).to(dtype).float())
    assert fill(data(), store) == ITEMS  # the full ones are others


@pytest.mark.parametrize("kind", [CacheType.CPU, CacheType.DISK, CacheType.AUTO, "cpu"])
def test_every_kind_of_cache_gives_the_same(store: Store, kind: Any) -> None:
    model = Model()
    kept = cached(model, loader(shuffle=False), store, CacheConfig(cache_type=kind))
    assert torch.allclose(torch.cat([model(x) for x, _ in kept]), Model()(features()), atol=1e-6)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_every_kind_join_batches(store: Store, start: str) -> None:
    model = Model()
    options = {
        "num_workers": 2,
        "multiprocessing_context": multiprocessing.get_context(start),
        "persistent_workers": True,
    }
    kept = cached(model, loader(shuffle=False, **options), store)
    for _ in range(2):
        assert torch.equal(torch.cat([model(x) for x, _ in kept]), Model()(features()))


def test_save_dir_is_the_folder_of_a_store(tmp_path: Path) -> None:
    assert fill(data(), None, CacheConfig(save_dir=tmp_path / "cache_dir")) == ITEMS
    assert fill(data(), None, CacheConfig(save_dir=tmp_path / "cache_dir")) == 0
    with Store(tmp_path / "cache_dir") as store, pytest.raises(InvalidValueError, match="not both"):
        fill(data(), store, CacheConfig(save_dir=tmp_path))


def test_without_a_folder_the_default_store_keeps_the_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTORE_DIR", str(tmp_path / "default"))
    assert fill(data(), None) == ITEMS
    assert fill(data(), None) == 0


def test_weights_are_saved_and_loaded_under_their_own_names(store: Store) -> None:
    model = Model()
    cached(model, loader(), store)
    assert list(model.state_dict()) == list(Model().state_dict())
    model.load_state_dict(Model().state_dict())
    Model().load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"head.weight": model.head.weight, "head.bias": model.head.bias})


def test_train_mode_does_not_reach_a_cached_encoder(store: Store) -> None:
    encoder = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)).requires_grad_(False).eval()
    model = Model(encoder)
    kept = cached(model, loader(shuffle=False), store, encoders="encoder")
    model.train()
    assert model.training
    assert not encoder[1].training
    first, second = (torch.cat([model(x) for x, _ in kept]) for _ in range(2))
    assert torch.equal(first, second)


class Loud(Dataset[Any]):
    """Fails at one sample."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        if index == 25:
            raise OSError("the disk is gone")
        return features()[index], index


def test_what_was_encoded_before_an_error_stays(store: Store) -> None:
    encoder = Encoder()
    with pytest.raises(OSError, match="the disk is gone"):
        fill(Loud(), store, encoder=encoder)
    assert encoder.encoded == 20
    fixed = CacheConfig(batch_size=BATCH, fingerprints={"train": "x"})
    assert fill(data(30), store, fixed) == 30


def test_weights_that_are_loaded_later_do_not_get_the_old_embeddings(store: Store) -> None:
    model, other = Model(), Model(Encoder(seed=1))
    kept = cached(model, loader(shuffle=False), store)
    model.load_state_dict(model.state_dict())
    assert torch.equal(torch.cat([model(x) for x, _ in kept]), Model()(features()))
    model.load_state_dict(other.state_dict())
    with pytest.raises(InvalidValueError, match="have changed since its embeddings were computed"):
        model(next(iter(kept))[0])
    kept = cached(model, loader(shuffle=False), store)
    assert torch.equal(torch.cat([model(x) for x, _ in kept]), other(features()))


def test_two_datasets_of_one_name_are_refused(store: Store) -> None:
    config = CacheConfig(fingerprints={"train": "mine", "val": "mine"})
    with pytest.raises(InvalidValueError, match="gives two datasets the name 'mine'"):
        cache_embeddings(Model(), loader(), loader(data(20)), config, store=store)


def test_the_progress_bar_starts_at_what_is_there(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    named = CacheConfig(fingerprints={"train": "mine"}, batch_size=BATCH)
    fill(data(30), store, named)
    assert capfd.readouterr().err == ""  # no terminal, no bar
    grown = TensorDataset(torch.cat([features(30), features(30, seed=9)]), torch.arange(60) % 3)
    cache_embeddings(Model(), loader(grown), config=named, store=store, progress=True)
    bar = capfd.readouterr().err
    assert "encoding train:  50%" in bar
    assert "| 60/60 " in bar
