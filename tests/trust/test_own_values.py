"""Every place that keeps a value keeps a copy: a caller's later changes to its objects reach nobody else.

This holds for the object that a caller gave, and for the object that it got.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from castore import Store
from castore.adapters.datasets import DatasetCache
from castore.adapters.embeddings import CachedEncoder, EmbeddingCache
from castore.adapters.torch import BiLevelCachedDataset, CachedDataset, LazyShardDataset, SharedCache
from castore.adapters.tree import DiskCache, MemoryCache, TreeCacheManager
from tests.helpers import LONG
from tests.serialize.test_serializers import same


def spoil(value: Any) -> None:
    """Change everything about a value that can be changed in place."""
    if isinstance(value, torch.Tensor):
        value.detach().view(torch.uint8).bitwise_not_() if value.ndim else value.detach().fill_(99)
    elif isinstance(value, np.ndarray):
        value.view(np.uint8)[...] ^= 255
    elif isinstance(value, bytearray):
        value[:] = bytes(byte ^ 255 for byte in value)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            spoil(item)
        if not isinstance(value, tuple):
            value.clear()


# --- values -------------------------------------------------------------------------------------------------

_shapes = nps.array_shapes(max_dims=2, max_side=6)
_arrays = st.sampled_from([np.float32, np.int64, np.uint8]).flatmap(
    lambda dtype: nps.arrays(dtype, _shapes, elements={"min_value": 0, "max_value": 100})
)
_tensors = _arrays.map(lambda array: torch.from_numpy(array.copy()))
_plain = st.none() | st.booleans() | st.integers(-100, 100) | st.text(max_size=5) | st.binary(max_size=5)
_nested = st.recursive(
    _plain | _arrays | _tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
#: Values that every place takes, with large ones that are loose objects in a store.
VALUES = st.one_of(
    _nested,
    st.dictionaries(st.text("abc", min_size=1, max_size=3), _tensors, min_size=1, max_size=3),
    _arrays,
    _arrays.map(lambda array: np.resize(array, (300, 300))),
)
ROWS = nps.arrays(np.float32, (3, 5), elements={"min_value": 0, "max_value": 100})
BYTES = st.binary(min_size=1, max_size=50) | st.integers(0, 255).map(lambda byte: bytes([byte]) * 300_000)


# --- places -------------------------------------------------------------------------------------------------


class Place(Protocol):
    """A place that keeps a value."""

    def keep(self, value: Any) -> Any:
        """Keep it; returns what the caller is given back."""

    def get(self) -> Any:
        """Return the kept value."""

    def close(self) -> None: ...


class Way:
    """A place made of three functions; `keep` may return anything."""

    def __init__(
        self,
        keep: Callable[[Any], Any],
        get: Callable[[], Any],
        close: Callable[[], Any] = lambda: None,
    ) -> None:
        self.keep, self.get, self.close = keep, get, close


def saved(folder: Path) -> Place:
    store = Store(folder, memory="64MB")
    return Way(lambda value: store.save("x", value), lambda: store.load("x"), store.close)


def computed(folder: Path) -> Place:
    store = Store(folder, memory="64MB")

    def never() -> Any:
        raise AssertionError("computed again")

    return Way(
        lambda value: store.get_or_compute("x", lambda: value),
        lambda: store.get_or_compute("x", never),
        store.close,
    )


class Box:
    """A value that does not count for a function's key."""

    value: Any = None

    def __castore_key__(self) -> str:
        return "box"


box = Box()


def from_the_box() -> Any:
    return box.value


def decorated(folder: Path) -> Place:
    store = Store(folder, memory="64MB")
    function = store.cached()(from_the_box)

    def keep(value: Any) -> Any:
        box.value = value
        return function()

    return Way(keep, function, store.close)


def tree(folder: Path) -> Place:
    cache = TreeCacheManager(folder)
    return Way(lambda value: cache.put("x", value), lambda: (cache.get("x") or [None])[0], cache.close)


def tree_computed(folder: Path) -> Place:
    cache = TreeCacheManager(folder)
    return Way(
        lambda value: cache.get_or_compute("x", lambda: value),
        lambda: cache.get_or_compute("x", lambda: "computed again"),
        cache.close,
    )


def on_disk(folder: Path) -> Place:
    cache = DiskCache(folder)
    return Way(lambda value: cache.put("x", value), lambda: (cache.get("x") or [None])[0], cache.close)


_memories: dict[Path, MemoryCache] = {}


def in_memory(folder: Path) -> Place:
    cache = _memories.setdefault(folder, MemoryCache())
    return Way(lambda value: cache.put("x", value), lambda: (cache.get("x") or [None])[0])


class Samples:
    """A dataset that returns the very objects that it holds."""

    def __init__(self, value: Any) -> None:
        self.values = [value] * 4

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.values[index]

    def __castore_key__(self) -> str:
        return "samples"


def wrapping(make: Callable[[Samples, Path], Any], *, lasts: bool = True) -> Callable[[Path], Place]:
    """A place made of a dataset's wrapper: one sample, alone and twice in a batch."""

    def place(folder: Path) -> Place:
        data = Samples("read again")
        wrapper = make(data, folder)

        def keep(value: Any) -> Any:
            data.values = [value] * 4
            got = [wrapper[2], *wrapper.__getitems__([2, 2])]
            assert all(same(one, got[0]) for one in got)
            if hasattr(wrapper, "flush"):
                wrapper.flush()
            return got

        def get() -> Any:
            first, second = wrapper.__getitems__([2, 2])
            spoil(first)
            spoil(wrapper[2])
            return second

        return Way(keep, get, wrapper.close)

    place.lasts = lasts  # type: ignore[attr-defined]
    return place


def embedded(folder: Path) -> Place:
    store = Store(folder)
    cache = EmbeddingCache("x", store)

    def keep(rows: Any) -> Any:
        cache.fill(range(len(rows)), rows, lambda items: torch.from_numpy(np.stack(items)), batch_size=2)

    return Way(keep, lambda: cache.get(range(3)).numpy(), store.close)


def one_buffer(folder: Path) -> Place:
    """An encoder that writes each batch into the same memory, as CUDA graphs do."""
    store = Store(folder)
    cache = EmbeddingCache("x", store)
    buffer = torch.empty(1, 5)

    def encode(items: list[Any]) -> torch.Tensor:
        buffer[0] = torch.from_numpy(items[0])
        return buffer

    def keep(rows: Any) -> Any:
        cache.fill(range(len(rows)), rows, encode, batch_size=1)
        return buffer

    return Way(keep, lambda: cache.get(range(3)).numpy(), store.close)


def remembered(folder: Path) -> Place:
    store = Store(folder)
    encoder = CachedEncoder(torch.nn.Identity(), store=store)
    asked = []

    def keep(rows: Any) -> Any:
        asked.append(rows.copy())
        return encoder(torch.from_numpy(rows))

    return Way(keep, lambda: encoder(torch.from_numpy(asked[0].copy())).numpy(), store.close)


def shared(folder: Path) -> Place:
    cache = SharedCache("1MB", 4, (5,), torch.float32)

    def keep(rows: Any) -> Any:
        tensors = [torch.from_numpy(row) for row in rows]
        cache.set_slot(0, tensors[0])
        cache.set_slots([1, 2], tensors[1:])

    def get() -> Any:
        spoil(cache.get_slot(1))
        spoil(cache.get_slots([0, 1, 1]))
        spoil(cache.array)
        return cache.get_batch(range(3)).numpy()

    return Way(keep, get, cache.close)


def by_name(folder: Path) -> Place:
    store = Store(folder, memory="64MB")
    cache = DatasetCache(store)

    def keep(rows: Any) -> Any:
        columns = {f"c{number}": pa.array(row) for number, row in enumerate(rows)}
        cache.put("x", datasets.Dataset(datasets.table.InMemoryTable(pa.table(columns))))

    def get() -> Any:
        for form in ("numpy", "torch"):
            spoil(cache.get("x").with_format(form)[:])
            spoil(cache.get("x").with_format(form)[1])
        cache.get("x").set_format("torch", columns=["c0"])
        cache.get("x").info.features.clear()
        got = cache.get("x")
        return np.stack([np.array(got[f"c{number}"][:], np.float32) for number in range(3)])

    return Way(keep, get, store.close)


def plain(folder: Path) -> Place:
    store = Store(folder, memory="64MB")
    return Way(
        lambda data: store.put("x", memoryview(data)), lambda: bytearray(store.get("x") or b""), store.close
    )


def many(put: Callable[[Store, Iterator[Any]], Any]) -> Callable[[Path], Place]:
    """One buffer, filled anew for each of many items."""

    def place(folder: Path) -> Place:
        store = Store(folder, memory="64MB")

        def keep(data: bytearray) -> Any:
            def items() -> Iterator[Any]:
                for name in "xyz":
                    yield name, memoryview(data), None
                    spoil(data)

            put(store, items())

        return Way(keep, lambda: bytearray(store.get_many(["x"])[0] or b""), store.close)

    return place


def stream(folder: Path) -> Place:
    """One sample, filled anew for each of many rows."""
    store = Store(folder)
    cache = DatasetCache(store)

    def keep(rows: Any) -> Any:
        def samples() -> Iterator[Any]:
            sample: dict[str, Any] = {}
            for row in rows:
                sample["row"] = row.tolist()
                yield sample
            sample.clear()

        cache.put("x", datasets.IterableDataset.from_generator(samples))

    return Way(keep, lambda: np.array(list(cache.dataset("x")["row"]), np.float32), store.close)


def level(**options: Any) -> Callable[[Samples, Path], Any]:
    sizes = {"memory_cache_size": "8MB", "disk_cache_size": "50MB", **options}
    return lambda data, folder: BiLevelCachedDataset(data, disk_cache_path=folder, **sizes)


def shard(data: Samples, folder: Path) -> Any:
    return LazyShardDataset(
        data,
        memory_size="8MB",
        disk_size="50MB",
        disk_cache_path=folder,
        write_through=True,
        rank=0,
        num_replicas=1,
    )


PLACES: dict[str, tuple[Callable[[Path], Place], Any]] = {
    "Store.save": (saved, VALUES),
    "Store.get_or_compute": (computed, VALUES),
    "Store.cached": (decorated, VALUES),
    "Store.put": (plain, BYTES.map(bytearray)),
    "Store.put_many": (
        many(lambda store, items: store.put_many((name, data) for name, data, _ in items)),
        BYTES.map(bytearray),
    ),
    "Store.put_if": (many(lambda store, items: store.put_if(("x", None), items)), BYTES.map(bytearray)),
    "TreeCacheManager.put": (tree, VALUES),
    "TreeCacheManager.get_or_compute": (tree_computed, VALUES),
    "DiskCache": (on_disk, VALUES),
    "MemoryCache": (in_memory, VALUES),
    "CachedDataset": (wrapping(CachedDataset), VALUES),
    "BiLevelCachedDataset": (wrapping(level()), VALUES),
    "BiLevelCachedDataset, memory": (wrapping(level(disk_cache_size=0), lasts=False), VALUES),
    "BiLevelCachedDataset, disk": (wrapping(level(memory_cache_size=0)), VALUES),
    "LazyShardDataset": (wrapping(shard), VALUES),
    "SharedCache": (shared, ROWS),
    "EmbeddingCache": (embedded, ROWS),
    "EmbeddingCache, one buffer": (one_buffer, ROWS),
    "CachedEncoder": (remembered, ROWS),
    "DatasetCache": (by_name, ROWS),
    "DatasetCache, a stream": (stream, ROWS),
}
#: Places that are gone with their object.
_PASSING = {"SharedCache", "CachedEncoder"}


@pytest.mark.torture
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * (name == "Store.put_if")) for name in PLACES]
)
def test_nothing_that_a_caller_does_changes_what_is_kept(name: str, tmp_path: Path) -> None:
    open_place, values = PLACES[name]
    folders = (tmp_path / str(number) for number in itertools.count())

    @settings(max_examples=50 if LONG else 8, suppress_health_check=list(HealthCheck))
    @given(value=values)
    def check(value: Any) -> None:
        expected, folder = copy.deepcopy(value), next(folders)
        place = open_place(folder)
        try:
            got = place.keep(value)
            spoil(value)
            spoil(got)
            for _ in range(3):
                again = place.get()
                assert same(again, expected)
                spoil(again)
        finally:
            place.close()
        if name in _PASSING or not getattr(open_place, "lasts", True):
            return
        place = open_place(folder)
        try:
            for _ in range(2):
                again = place.get()
                assert same(again, expected)
                spoil(again)
        finally:
            place.close()

    check()
