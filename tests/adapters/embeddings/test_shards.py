"""The embedding cache on disk: its files, their merges, and reads after damage or loss of files."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import castore_fuse
from castore import Store
from castore.adapters.embeddings import shard_commit, table
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.errors import CacheWarning, CastoreError, CorruptError, OutOfRangeError, StoreError
from castore_fuse.lifecycle import check_fuse
from tests.adapters.embeddings.test_table import Encoder, vectors
from tests.adapters.torch.conftest import same_batch
from tests.helpers import flip, overwrite, payload, recount


def shards(store: Store, column: str = "output") -> list[str]:
    return [entry.name for entry in store.entries(f"embeddings/demo/{column}")]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 64 KiB, which are not merged."""
    monkeypatch.setattr(shard_commit, "SHARD_BYTES", 1 << 16)
    monkeypatch.setattr("castore.adapters.embeddings.table_fill.SHARD_BYTES", 1 << 16)


def fill(store: Store, start: int, end: int) -> EmbeddingCache:
    cache = EmbeddingCache("demo", store)
    cache.fill(range(start, end), range(start, end), vectors)
    return cache


def test_shards_are_arrays_that_numpy_maps_through_the_mount(store: Store, tmp_path: Path) -> None:
    try:
        check_fuse()
    except CastoreError as error:
        pytest.skip(str(error))
    cache = EmbeddingCache("demo", store, dtype=torch.bfloat16)
    cache.fill(range(100), range(100), vectors)
    (tmp_path / "mnt").mkdir()
    with castore_fuse.mounted(store, tmp_path / "mnt") as root:
        array = np.load(Path(root) / shards(store)[0], mmap_mode="r")
        keys = np.load(Path(root) / shards(store, "keys")[0], mmap_mode="r")
        assert (array.shape, array.dtype, array.offset) == ((100, 384), np.uint16, 4096)
        assert (keys.shape, keys.dtype) == ((100, 2), np.uint64)
        assert keys[:, 0].tolist() == list(range(100))
        got = torch.from_numpy(np.array(array)).view(torch.bfloat16)
        del array, keys
        gc.collect()
    assert torch.equal(got, vectors(list(range(100))).to(torch.bfloat16))


def test_many_small_fills_become_few_shards_and_rows_keep_their_numbers(store: Store) -> None:
    cache, given = EmbeddingCache("demo", store), []
    for number in range(60):
        cache.fill([number], [number], vectors)
        given.append(cache.rows([number]))
    assert len(shards(store)) == 1
    rows = torch.cat(given)
    for reader in (cache, EmbeddingCache("demo", store)):
        assert torch.equal(reader.rows(range(60)), rows)
        assert torch.equal(reader.take(rows), vectors(list(range(60))))
    recount(store)


def test_a_reader_that_mapped_small_shards_sees_them_merge(store: Store) -> None:
    writer = fill(store, 0, 10)
    reader = EmbeddingCache("demo", store)
    rows = reader.rows(range(10))
    for number in range(10, 200, 10):
        writer.fill(range(number, number + 10), range(number, number + 10), vectors)
        assert reader.refresh() == number + 10
        assert torch.equal(reader.take(rows), vectors(list(range(10))))
    assert torch.equal(reader.get(range(200)), vectors(list(range(200))))


@pytest.mark.usefixtures("small_shards")
def test_a_large_fill_is_put_shard_by_shard(store: Store) -> None:
    cache = fill(store, 0, 1000)
    assert len(shards(store)) > 15
    assert torch.equal(EmbeddingCache("demo", store).get(range(1000)), vectors(list(range(1000))))
    assert len(cache) == 1000


@pytest.mark.usefixtures("small_shards")
def test_a_table_that_outgrows_its_addresses_moves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that gc has unlinked move too, and so do rows that are copies of packed blobs."""
    monkeypatch.setattr(table, "_MIN_BYTES", 4096)
    monkeypatch.setattr(table, "_SPARE", 1)
    reader = fill(store, 0, 8)  # packed
    old = reader.take(reader.rows(range(8)))
    fill(store, 8, 300)
    reader.refresh()
    before = reader._table
    for name in shards(store)[:2]:
        store.delete(name)
    store.gc(grace=0)
    fill(store, 300, 3000)
    reader.refresh()
    assert reader._table is before
    assert torch.equal(reader.get(range(300)), vectors(list(range(300))))
    assert torch.equal(reader.get(range(8)), old)


def test_sorted_keys_are_mapped_and_are_not_needed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_commit, "_UNSORTED", 16)
    fill(store, 0, 500)
    fill(store, 500, 520)
    name = "embeddings/demo/sorted-keys.npy"
    kept = store.entry(name)
    assert kept is not None
    reader = EmbeddingCache("demo", store)
    assert reader._table is not None
    assert reader._table.unsorted == 20
    assert torch.equal(reader.get(range(520)), vectors(list(range(520))))
    store.delete(name)
    assert torch.equal(EmbeddingCache("demo", store).get(range(520)), vectors(list(range(520))))
    fill(store, 520, 600)
    assert store.entry(name) is not None
    assert EmbeddingCache("demo", store).find([519, 599, 600])[2] == -1


@pytest.mark.usefixtures("small_shards")
def test_rows_that_gc_evicted_are_encoded_again_and_nothing_else(store: Store) -> None:
    fill(store, 0, 300)
    victim = shards(store)[1]
    start, end = (int(part) for part in Path(victim).stem.split("-"))
    holder = EmbeddingCache("demo", store)
    kept_rows = holder.rows(range(300))
    assert store.delete(victim)
    store.gc(grace=0)
    cache, encode = EmbeddingCache("demo", store), Encoder()
    lost = [key for key in range(300) if key not in cache]
    assert len(lost) == end - start
    with pytest.raises(OutOfRangeError, match="its shard is gone"):
        cache.take(kept_rows)
    assert cache.fill(range(300), range(300), encode) == len(lost)
    assert encode.seen == lost
    assert torch.equal(cache.get(range(300)), vectors(list(range(300))))
    # A process that had mapped the table continues with its rows.
    assert torch.equal(holder.take(kept_rows), vectors(list(range(300))))
    assert all((end <= a or b <= start) for a, b in _extents(store))
    recount(store)


def _extents(store: Store) -> list[tuple[int, int]]:
    pairs = [Path(name).stem.split("-") for name in shards(store)]
    return [(int(start), int(end)) for start, end in pairs]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("column", ["output", "keys"])
@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_shard_is_told_set_aside_and_encoded_again(store: Store, column: str, damage: str) -> None:
    fill(store, 0, 300)
    name = shards(store, column)[1]
    path, offset, length = payload(store, name)
    if damage == "flip" or path.suffix == ".pack":
        flip(path, offset + length - 5)
    else:
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.truncate(length - 100)
    with pytest.warns(CacheWarning, match="computed again"):
        cache = EmbeddingCache("demo", store)
    lost = [key for key in range(300) if key not in cache]
    assert 0 < len(lost) < 100
    encode = Encoder()
    assert cache.fill(range(300), range(300), encode) == len(lost)
    assert encode.seen == lost
    assert torch.equal(EmbeddingCache("demo", store).get(range(300)), vectors(list(range(300))))
    recount(store)


@pytest.mark.usefixtures("small_shards")
def test_no_flipped_bit_gives_other_vectors(store: Store) -> None:
    fill(store, 0, 100)
    expected = vectors(list(range(100)))
    for part in range(7):
        path, offset, length = payload(store, shards(store)[0])
        flip(path, offset + length * part // 7)
        with pytest.warns(CacheWarning, match="computed again"):
            cache = EmbeddingCache("demo", store)
        known = [key for key in range(100) if key in cache]
        assert len(known) < 100
        assert torch.equal(cache.get(known), expected[known])
        cache.fill(range(100), range(100), vectors)


def test_a_damaged_file_of_sorted_keys_is_told_and_not_needed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_commit, "_UNSORTED", 16)
    fill(store, 0, 3000)
    path, _, length = payload(store, "embeddings/demo/sorted-keys.npy")
    overwrite(path, length - 64, b"\x01" * 64)
    with pytest.warns(CacheWarning, match="does not have its digest|damaged"):
        cache = EmbeddingCache("demo", store)
    assert torch.equal(cache.get(range(3000)), vectors(list(range(3000))))


def test_a_table_without_its_manifest_is_a_miss_of_everything(store: Store) -> None:
    fill(store, 0, 30)
    store.delete("embeddings/demo/table.json")
    cache = EmbeddingCache("demo", store)
    assert len(cache) == 0
    assert cache.fill(range(5), range(5), vectors) == 5
    assert len(shards(store)) == 1


def test_a_damaged_manifest_is_a_miss_of_everything(store: Store) -> None:
    fill(store, 0, 30)
    path, offset, _ = payload(store, "embeddings/demo/table.json")
    flip(path, offset + 20)
    cache = EmbeddingCache("demo", store)
    assert len(cache) == 0
    assert cache.fill(range(5), range(5), vectors) == 5
    assert torch.equal(EmbeddingCache("demo", store).get(range(5)), vectors(list(range(5))))


def test_rows_never_mean_others_in_a_table_that_was_made_anew(store: Store) -> None:
    old = fill(store, 0, 30)
    store.delete_many([entry.name for entry in store.entries("embeddings/demo")])
    other = EmbeddingCache("demo", store)
    other.fill(range(100, 130), range(100, 130), vectors)
    assert torch.equal(old.get(range(30)), vectors(list(range(30))))
    with pytest.raises(StoreError, match="created again"):
        old.refresh()


def test_a_writer_goes_on_when_its_manifest_was_evicted(store: Store) -> None:
    cache = fill(store, 0, 30)
    rows = cache.rows(range(30))
    store.delete("embeddings/demo/table.json")
    assert cache.fill(range(20, 40), range(20, 40), vectors) == 10
    assert torch.equal(cache.take(rows), vectors(list(range(30))))
    reader = EmbeddingCache("demo", store)
    known = [key for key in range(40) if key in reader]
    assert set(range(30, 40)) <= set(known)
    assert torch.equal(reader.get(known), vectors(known))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"format": 2}', b"\xff" * 50])
def test_a_manifest_of_something_else_is_a_clear_error(store: Store, data: bytes) -> None:
    store.put("embeddings/demo/table.json", data)
    with pytest.raises(CorruptError, match="is no manifest of embeddings"):
        EmbeddingCache("demo", store)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"extents":[[0,30]]', '"extents":[[0,40]]'),
        ('"extents":[[0,30]]', '"extents":[[-8,30]]'),
        ('"extents":[[0,30]]', '"extents":[[4,30]]'),
        ('"extents":[[0,30]]', '"extents":[[0,30],[0,30]]'),
        ('"ends":[30]', '"ends":[30,30]'),
        ('"ends":[30]', '"ends":[]'),
        ('"shape":[384]', '"shape":[384,0]'),
        ('"dtype":"float32"', '"dtype":"Tensor"'),
        ('"stored":"float32"', '"stored":"manual_seed"'),
        ('"kind":"tensor"', '"kind":"object"'),
        ('"structure":0', '"structure":7'),
        ('"digests":[', '"digests":["",'),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused_before_anything_is_mapped(
    store: Store, old: str, new: str
) -> None:
    fill(store, 0, 30)
    manifest = (store.get("embeddings/demo/table.json") or b"").decode()
    assert old in manifest
    store.put("embeddings/demo/table.json", manifest.replace(old, new).encode())
    with pytest.raises(CorruptError, match="is no manifest of embeddings"):
        EmbeddingCache("demo", store)


def test_a_table_of_more_rows_than_addresses_is_a_clear_error(store: Store) -> None:
    fill(store, 0, 30)
    manifest = (store.get("embeddings/demo/table.json") or b"").decode()
    store.put("embeddings/demo/table.json", manifest.replace('"ends":[30]', f'"ends":[{2**60}]').encode())
    with pytest.raises(StoreError, match="cannot map the shards"):
        EmbeddingCache("demo", store)


def test_a_resident_cache_brings_its_rows_into_memory(store: Store) -> None:
    fill(store, 0, 5000)
    size = 5000 * 384 * 4
    file = payload(store, shards(store)[0])[0]

    def mapped() -> int:
        """The most bytes of the file that one mapping has in this process's page table: the process that
        filled the file may have a mapping, too.
        """
        maps = psutil.Process().memory_maps(grouped=False)
        return max((place.rss for place in maps if place.path == str(file)), default=0)

    def is_brought() -> bool:
        cache = EmbeddingCache("demo", store, resident=True)
        for thread in threading.enumerate():
            if thread.name == "castore-populate":
                thread.join(60)
        assert torch.equal(cache.get([4999]), vectors([4999]))
        return mapped() >= size / 2

    assert mapped() < size / 2
    # A kernel that is short of memory, or that reclaims what looks cold (DAMON), may be faster than
    # a look, and takes a part.
    assert any(is_brought() for _ in range(20))


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_every_known_key_has_its_own_outputs(
    store: Store, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fills of all sizes by two writers, files removed one by one, merges, readers of any age, compared with
    a function.
    """
    monkeypatch.setattr(shard_commit, "_SMALL_SHARD_BYTES", 1 << 12)
    monkeypatch.setattr(shard_commit, "_UNSORTED", 64)
    monkeypatch.setattr(table, "_MIN_BYTES", 4096)
    monkeypatch.setattr(table, "_SPARE", 2)
    chance = random.Random(seed)

    def encode(items: list[int]) -> tuple[torch.Tensor, list[torch.Tensor], list[str]]:
        return (
            vectors(items, 33),
            [torch.full((item % 4, 3), item) for item in items],
            [f"é{item}" for item in items],
        )

    caches = [EmbeddingCache("demo", store), EmbeddingCache("demo", store)]
    given: list[tuple[EmbeddingCache, list[int], torch.Tensor]] = []
    for _ in range(40):
        cache = chance.choice(caches)
        what = chance.random()
        if what < 0.55:
            start = chance.randrange(2000)
            keys = range(start, start + chance.choice([1, 2, 5, 40, 150]))
            cache.fill(keys, keys, encode, batch_size=16)
        elif what < 0.7 and (names := [name for name in shards(store, "") if not name.endswith(".json")]):
            store.delete(chance.choice(names))
            store.gc(grace=0)
        elif what < 0.85:
            caches[chance.randrange(2)] = EmbeddingCache("demo", store)
        else:
            cache.refresh()
        for reader in caches:
            asked = torch.tensor(chance.sample(range(2200), 300))
            known = asked[reader.find(asked) >= 0].tolist()
            if known:
                rows = reader.rows(known)
                given.append((reader, known, rows))
                same_batch(reader.take(rows), encode(known))
    for reader, known, rows in given:
        same_batch(reader.take(rows), encode(known))
    recount(store)


@pytest.mark.usefixtures("small_shards")
def test_shards_whose_ragged_outputs_are_all_empty_keep_their_files(store: Store) -> None:
    """The files share one name; the first merge once removed it from all of them."""

    def encode(items: list[int]) -> tuple[torch.Tensor, list[str]]:
        return vectors(items), ["" if item < 490 else "full" for item in items]

    cache = EmbeddingCache("demo", store)
    cache.fill(range(200), range(200), encode)
    for start in range(200, 600, 20):
        cache.fill(range(start, start + 20), range(start, start + 20), encode)
    same_batch(EmbeddingCache("demo", store).get(range(600)), encode(list(range(600))))


def test_what_merged_takes_no_room_any_more(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    for number in range(0, 640, 8):
        keys = range(number, number + 8)
        cache.fill(keys, keys, vectors)
    stored = store.stat()
    assert stored.stored < 1.3 * 640 * 384 * 4
    assert sum(path.stat().st_size for path in (store.path / "objects").glob("??/*")) < 1.3 * 640 * 384 * 4
    assert len(list(store.entries(".checked"))) < 10
