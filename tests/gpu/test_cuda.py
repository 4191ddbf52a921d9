"""castore in programs whose tensors and models lie on a CUDA device.

The device must not show in any key. Every value comes back on the CPU unless its reader says otherwise. No
worker touches the device.

Each test runs once as it stands, and once under ``torch.set_default_device("cuda")``: tensors that castore
makes for itself must then still be where it needs them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from castore import Store
from castore.adapters.datasets import operator_fingerprint
from castore.adapters.embeddings import CacheConfig, CacheType, EmbeddingCache, cache_embeddings
from castore.adapters.embeddings.devices import DeviceLookup, MappedLookup, fits_on_device
from castore.adapters.torch import BiLevelCachedDataset, CachedDataset, SharedCache, collate
from castore.adapters.tree import TreeCacheManager
from castore.errors import InvalidValueError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

ITEMS = 96


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def default_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of tensors that are made without one."""
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


def _grid(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(24, device="cpu").reshape(4, 6).to(dtype)


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "float32": _grid,
    "bfloat16": lambda: _grid(torch.bfloat16),
    "float8": lambda: _grid(torch.float8_e4m3fn),
    "bool": lambda: _grid() > 7,
    "complex": lambda: _grid(torch.complex64) * (1 + 2j),
    "transposed": lambda: _grid().T,
    "every second": lambda: _grid()[:, ::2],
    "empty": lambda: torch.zeros(0, 3, device="cpu"),
    "scalar": lambda: torch.tensor(3.5, device="cpu"),
}


# --- keys ---------------------------------------------------------------------------------------------------


def _use(x: Any, value: Any) -> Any:
    return x, value


def fingerprint(value: Any) -> str:
    """The key of a function that uses the value."""
    return operator_fingerprint(functools.partial(_use, value=value))


@pytest.mark.parametrize("kind", VALUES)
def test_a_tensor_has_one_key_on_every_device(kind: str) -> None:
    value = VALUES[kind]()
    assert fingerprint(value) == fingerprint(value.cuda())


def test_odd_tensors_have_one_key_on_every_device() -> None:
    sparse = torch.eye(4, device="cpu").to_sparse()
    assert fingerprint(sparse) == fingerprint(sparse.cuda())
    complex_ = VALUES["complex"]().conj()
    assert fingerprint(complex_) == fingerprint(complex_.cuda())
    trained = _grid().requires_grad_()
    assert fingerprint(trained) == fingerprint(_grid().cuda().requires_grad_())


def test_a_module_has_one_key_on_every_device() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3, device="cpu"), nn.BatchNorm1d(3, device="cpu")).eval()
    before = fingerprint(module)
    script = fingerprint(torch.jit.script(module))
    assert fingerprint(module.cuda()) == before
    assert fingerprint(torch.jit.script(module)) == script
    half = fingerprint(module.half())
    assert half != before


def test_a_cached_function_is_called_once_for_both_devices(store: Store, tmp_path: Path) -> None:
    log = str(tmp_path / "log")

    @store.cached
    def double(x: torch.Tensor) -> torch.Tensor:
        with open(log, "a") as file:
            file.write("called ")
        return x * 2

    first = double(_grid().cuda())
    second = double(_grid())
    assert (tmp_path / "log").read_text() == "called "
    assert torch.equal(first.cpu(), second.cpu())


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", VALUES)
def test_a_tensor_comes_back_on_the_cpu(store: Store, kind: str) -> None:
    value = VALUES[kind]()
    store.save("value", value.cuda())
    found = store.load("value")
    assert found.device.type == "cpu"
    assert found.dtype is value.dtype
    assert found.shape == value.shape
    assert torch.equal(found.to(torch.complex64), value.to(torch.complex64))


def test_nested_values_come_back_on_the_cpu(store: Store) -> None:
    value = {"a": [_grid().cuda(), (1, "two")], "b": {"mask": (_grid() > 3).cuda()}, "c": np.arange(3)}
    store.save("value", value)
    found = store.load("value")
    assert found["a"][0].device.type == found["b"]["mask"].device.type == "cpu"
    assert torch.equal(found["a"][0], _grid())
    assert torch.equal(found["b"]["mask"], _grid() > 3)
    assert found["a"][1] == (1, "two")


def test_a_state_dict_is_kept_and_loaded(store: Store) -> None:
    module = nn.Linear(5, 2).cuda()
    store.save("weights", module.state_dict())
    fresh = nn.Linear(5, 2).cuda()
    fresh.load_state_dict(store.load("weights"))
    assert torch.equal(fresh.weight, module.weight)


def test_a_tree_cache_keeps_tensors_of_a_device(tmp_path: Path) -> None:
    with TreeCacheManager(tmp_path / "tree") as cache:
        cache.put("features/one", _grid().cuda())
        found = cache.get("features/one")
        assert found is not None
        assert torch.equal(found[0].cpu(), _grid())


# --- samples ------------------------------------------------------------------------------------------------


class OnDevice(Dataset[Any]):
    """Samples that their source makes on the device."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 4), index, dtype=torch.float32, device="cuda"), index


class OnCpu(Dataset[Any]):
    """Samples as workers make them: no worker may touch the device."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 4), index, dtype=torch.float32, device="cpu"), index


def test_samples_made_on_the_device_are_kept(tmp_path: Path) -> None:
    for make in (
        lambda: BiLevelCachedDataset(OnDevice(), "4MB", "40MB", tmp_path / "levels", key="samples"),
        lambda: BiLevelCachedDataset(OnDevice(), 0, "40MB", tmp_path / "disk", key="samples"),
        lambda: CachedDataset(OnDevice(), tmp_path / "store", key="samples"),
    ):
        dataset = make()
        for _ in range(2):
            found = [dataset[index] for index in range(ITEMS)]
            assert [int(x.flatten()[5]) for x, _ in found] == list(range(ITEMS))
        assert found[0][0].device.type == "cpu"
        dataset.close()


def test_slots_take_tensors_of_the_device(tmp_path: Path) -> None:
    cache = SharedCache(0.01, ITEMS, (3, 4), torch.float32)
    cache.set_slots(range(ITEMS), [OnDevice()[index][0] for index in range(ITEMS)])
    assert cache.get_slot(7).device.type == "cpu"
    batch = cache.get_batch(range(ITEMS))
    assert batch.device.type == "cpu"
    assert batch[:, 0, 0].tolist() == list(range(ITEMS))
    assert cache.array[9, 2, 3] == 9
    cache.close()


class Shared(Dataset[Any]):
    """Whole batches out of shared slots."""

    def __init__(self, cache: SharedCache) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return ITEMS

    def __getitems__(self, indices: list[int]) -> Any:
        return self.cache.get_batch(indices)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pinned_batches_come_from_workers_born_after_the_device_was_used(method: str) -> None:
    torch.zeros(1, device="cuda")
    cache = SharedCache(0.01, ITEMS, (3, 4), torch.float32)
    cache.set_slots(range(ITEMS), [OnCpu()[index][0] for index in range(ITEMS)])
    torch.set_default_device(None)  # DataLoader's own sampler wants its generator there
    loader = DataLoader(
        Shared(cache), 16, shuffle=True, num_workers=2, multiprocessing_context=method, pin_memory=True,
        collate_fn=collate, persistent_workers=True,
    )  # fmt: skip
    for _ in range(2):
        seen = []
        for batch in loader:
            assert batch.is_pinned()
            seen += batch.to("cuda", non_blocking=True)[:, 1, 1].tolist()
        assert sorted(seen) == list(range(ITEMS))
    del loader
    cache.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_is_read_by_workers_born_after_the_device_was_used(tmp_path: Path, method: str) -> None:
    torch.zeros(1, device="cuda")
    dataset = CachedDataset(OnCpu(), tmp_path / "store", key="samples")
    torch.set_default_device(None)
    loader = DataLoader(
        dataset, 16, shuffle=True, num_workers=2, multiprocessing_context=method, pin_memory=True
    )
    for _ in range(2):
        seen = [int(x[0, 0]) for batch, _ in loader for x in batch.cuda(non_blocking=True)]
        assert sorted(seen) == list(range(ITEMS))


# --- embeddings ---------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A frozen encoder with a dropout that is called as a function, if told."""

    def __init__(self, drop: bool = False) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 5, generator=generator, device="cpu"), requires_grad=False)
        self.drop, self.rows = drop, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        out = torch.tanh(x @ self.weight)
        return nn.functional.dropout(out, 0.5, training=True) if self.drop else out


class Model(nn.Module):
    """The encoder and a head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.head = nn.Linear(5, 2)

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


def _features() -> torch.Tensor:
    return torch.randn(ITEMS, 8, generator=torch.Generator("cpu").manual_seed(2), device="cpu")


class Rows(Dataset[Any]):
    """Features and labels."""

    def __init__(self) -> None:
        self.x = _features()

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        return self.x[index], index % 2


def _loader(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator(torch.get_default_device().type)
    return DataLoader(Rows(), 16, shuffle=True, generator=generator, **options)


def _expected() -> torch.Tensor:
    return cast(torch.Tensor, Encoder()(_features()))


@pytest.mark.parametrize("kind", [CacheType.GPU, CacheType.AUTO, CacheType.CPU, CacheType.DISK])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_embeddings_equals_training_on_the_encoder(
    store: Store, kind: CacheType, workers: int
) -> None:
    model = Model(Encoder()).cuda()
    loader = _loader(num_workers=workers, pin_memory=True)
    kept, _ = cache_embeddings(model, loader, config=CacheConfig(cache_type=kind), store=store)
    assert isinstance(model.encoder._tables[0], DeviceLookup if kind.name in "GPU AUTO" else MappedLookup)
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    for _ in range(2):
        for x, labels in kept:
            out = model(x)
            assert out.device.type == "cuda"
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(out, labels.cuda())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    rows, found = zip(*((x.column(0).cpu(), model.encoder(x).cpu()) for x, _ in kept), strict=True)
    places, outputs = torch.cat(rows), torch.cat(found)
    assert sorted(places.tolist()) == list(range(ITEMS))
    assert torch.allclose(outputs, _expected()[places], atol=1e-5)


def test_a_second_run_encodes_nothing_wherever_the_encoder_is(store: Store) -> None:
    first = Encoder().cuda()
    cache_embeddings(Model(first).cuda(), _loader(), store=store)
    assert first.rows >= ITEMS
    for encoder in (Encoder().cuda(), Encoder()):
        cache_embeddings(Model(encoder), _loader(), store=store, encoders=["encoder"])
        assert encoder.rows == 0


def test_dropout_on_the_device_is_refused(store: Store) -> None:
    with pytest.raises(InvalidValueError, match="draws random numbers"):
        cache_embeddings(Model(Encoder(drop=True)).cuda(), _loader(), store=store)


def test_the_fill_leaves_the_device_s_random_numbers_as_they_were(store: Store) -> None:
    model, loader = Model(Encoder()).cuda(), _loader()
    torch.cuda.manual_seed_all(3)
    before = torch.cuda.get_rng_state_all()
    cache_embeddings(model, loader, store=store)
    assert all(map(torch.equal, before, torch.cuda.get_rng_state_all()))


def test_under_autocast_the_embeddings_are_those_of_the_encoder(store: Store) -> None:
    model = Model(Encoder()).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        config = CacheConfig(cache_type=CacheType.GPU)
        kept, _ = cache_embeddings(model, _loader(), config=config, store=store)
        rows, found = zip(*((x.column(0).cpu(), model.encoder(x).float()) for x, _ in kept), strict=True)
        plain = Encoder().cuda()(_features().cuda()).float()
    assert torch.allclose(torch.cat(found).cpu(), plain.cpu()[torch.cat(rows)], atol=2e-2)


def test_embeddings_that_are_too_large_for_the_device_stay_off_it(store: Store) -> None:
    cache = EmbeddingCache("wide", store)
    cache.fill(range(2), range(2), lambda items: torch.ones(len(items), 4096, device="cpu"))
    device = torch.device("cuda")
    free = torch.cuda.mem_get_info(device)[0] // (4 * 4096)
    row = torch.zeros(1, dtype=torch.int64, device="cpu")
    assert not fits_on_device(cache, row.expand(free), device)
    assert fits_on_device(cache, row.expand(free // 4), device)
    assert not fits_on_device(cache, row, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_look_up_on_the_device_does_not_wait_for_it(store: Store) -> None:
    model = Model(Encoder()).cuda()
    config = CacheConfig(cache_type=CacheType.GPU)
    kept, _ = cache_embeddings(model, _loader(pin_memory=True), config=config, store=store)
    keys = [x.to("cuda", non_blocking=True) for x, _ in kept]
    model.encoder(keys[0])  # the copy of the table is made here
    try:
        torch.cuda.set_sync_debug_mode("error")
        for x in keys:
            model(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_table_takes_outputs_of_the_device_and_gives_them_on_the_cpu(store: Store) -> None:
    cache = EmbeddingCache("squares", store)
    cache.fill(
        range(10), range(10), lambda items: {"square": torch.tensor(items, device="cuda") ** 2}, batch_size=4
    )
    found = cache.get([3, 9, 3])["square"]
    assert found.device.type == "cpu"
    assert found.tolist() == [9, 81, 9]


def test_half_precision_of_the_device_is_kept_as_such(store: Store) -> None:
    cache = EmbeddingCache("half", store)
    made = torch.randn(10, 4, device="cuda").bfloat16()
    cache.fill(range(10), range(10), lambda items: made[list(items)])
    assert cache.get(range(10)).dtype is torch.bfloat16
    assert torch.equal(cache.get(range(10)), made.cpu())


def test_the_fetcher_and_forks_go_on_beside_a_context_of_the_device(store: Store) -> None:
    torch.zeros(1, device="cuda")
    store.put("name", b"bytes")
    child = os.fork()
    if child == 0:
        os._exit(0 if store.get("name") == b"bytes" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
