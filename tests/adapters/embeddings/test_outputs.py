"""Outputs of every structure, their places in the store, and the effects of workers, errors and weights."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from castore import Store
from castore.adapters.embeddings import (
    CacheConfig,
    CachedEncoder,
    CacheType,
    EmbeddingCache,
    cache_embeddings,
)
from castore.errors import InvalidValueError, SerializationError
from tests.adapters.embeddings.models import (
    BATCH,
    ITEMS,
    Encoder,
    Model,
    cached,
    data,
    features,
    fill,
    in_batches,
    loader,
)


class Tokens(Encoder):
    """A list of states for each item, as long as its first number, and a summary."""

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


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    ("encode", "names"),
    [
        (lambda x: Pair(x, 2 * x), ["first", "second"]),
        (lambda x: torch.max(x, 1), ["values", "indices"]),
        (lambda x: torch.topk(x, 2), ["values", "indices"]),
    ],
    ids=["a named tuple", "max", "topk"],
)
@pytest.mark.parametrize("copied", [lambda out: out, lambda out: pickle.loads(pickle.dumps(out)), copy.copy])
def test_tuples_keep_their_names_and_can_be_sent(
    store: Store, encode: Any, names: list[str], copied: Any
) -> None:
    found, expected = copied(CachedEncoder(encode, store=store)(features(4))), encode(features(4))
    assert [*found._fields] == names
    for name, one, other in zip(names, found, expected, strict=True):
        assert getattr(found, name) is one
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_embeddings_are_kept_narrower_if_asked(store: Store, dtype: torch.dtype) -> None:
    model = Model()
    kept = cached(model, loader(shuffle=False), store, CacheConfig(dtype=dtype))
    found = torch.cat([model.encoder(x) for x, _ in kept])
    assert found.dtype is torch.float32
    assert torch.equal(found, Encoder()(features()).to(dtype).float())
    assert fill(data(), store) == ITEMS  # the full batches have other items


@pytest.mark.parametrize("kind", [CacheType.CPU, CacheType.DISK, CacheType.AUTO, "cpu"])
def test_every_kind_of_cache_gives_the_same(store: Store, kind: Any) -> None:
    model = Model()
    kept = cached(model, loader(shuffle=False), store, CacheConfig(cache_type=kind))
    assert torch.allclose(torch.cat([model(x) for x, _ in kept]), Model()(features()), atol=1e-6)


# A spawned worker imports torch for seconds, and a forkserver's has as little of its parent.
@pytest.mark.parametrize(
    ("start", "workers"), [("fork", 2), ("forkserver", 2), pytest.param("spawn", 1, marks=pytest.mark.matrix)]
)
def test_workers_of_every_kind_join_batches(store: Store, start: str, workers: int) -> None:
    model = Model()
    options = {
        "num_workers": workers,
        "multiprocessing_context": multiprocessing.get_context(start),
        "persistent_workers": True,
    }
    kept = cached(model, loader(shuffle=False, **options), store)
    for _ in range(2):
        assert torch.equal(torch.cat([model(x) for x, _ in kept]), in_batches(Model(), features()))


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
    """Raises an error at one sample."""

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
    assert torch.equal(torch.cat([model(x) for x, _ in kept]), in_batches(Model(), features()))
    model.load_state_dict(other.state_dict())
    with pytest.raises(InvalidValueError, match="have changed since its embeddings were computed"):
        model(next(iter(kept))[0])
    kept = cached(model, loader(shuffle=False), store)
    assert torch.equal(torch.cat([model(x) for x, _ in kept]), in_batches(other, features()))


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


KEPT_ARRAYS = ["float32", "float64", "float16", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", KEPT_ARRAYS)
def test_arrays_of_numpy_come_back_as_such(store: Store, dtype: str) -> None:
    def encode(texts: list[str]) -> Any:
        lengths = np.array([len(text) % (2 if dtype == "bool" else 9) for text in texts])
        states = np.tile(lengths[:, None, None], (1, 3, 2)).astype(dtype)
        return {"states": states, "turned": states[:, ::-1, 0]}

    encoder = CachedEncoder(encode, store=store)
    first = encoder(["a", "bb", "ccc"])
    encoder(["dddd", "a"])
    for found in (first, encoder(["a", "bb", "ccc"])):
        expected = encode(["a", "bb", "ccc"])
        for name, value in expected.items():
            assert type(found[name]) is np.ndarray
            assert found[name].dtype == value.dtype
            assert np.array_equal(found[name], value)
    first["states"][:] = 0
    assert np.array_equal(encoder(["bb"])["states"], encode(["bb"])["states"])
    assert len(encoder.memo) == 4


def test_arrays_may_be_kept_narrower(store: Store) -> None:
    cache = EmbeddingCache("arrays", store, dtype=torch.bfloat16)
    values = np.linspace(0, 1, 12).reshape(4, 3)
    cache.fill(["a", "b", "c", "d"], range(4), lambda places: values[places])
    again = EmbeddingCache("arrays", store, dtype=torch.bfloat16).get(["d", "a"])
    assert again.dtype == np.float64
    assert np.allclose(again, values[[3, 0]], atol=0.01)
    assert not np.array_equal(again, values[[3, 0]])


@pytest.mark.parametrize(
    "outputs",
    [np.array(["a", "b"]), np.array([1, 2], ">i4"), [np.ones(2), np.ones(2)]],
    ids=["text", "order", "list"],
)
def test_arrays_that_torch_cannot_hold_say_what_to_do(store: Store, outputs: Any) -> None:
    with pytest.raises(SerializationError, match=r"output: .*array.* cannot be kept.*torch\.from_numpy"):
        CachedEncoder(lambda texts: outputs, store=store)(["a", "b"])
