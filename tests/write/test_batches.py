"""`Store.put_many` leaves what as many `put` would, in any mixture of new and known content."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard

from castore import NameConflictError, Store
from castore.objects.codecs import FRAME_SIZE
from castore.objects.dictionaries import Dictionary, with_number
from castore.objects.encode import encode_small, encode_small_many
from castore.objects.packs import PackRecord, scan
from castore.records import LOST, Buffer, Entry
from tests.helpers import agrees_with_disk, files_up_to, flip, mixed, noise, payload, records, recount, text

Items = Sequence[tuple[str, bytes]]
SIZES = [0, 1, 700, 4_096, 4_097, 60_000, FRAME_SIZE, FRAME_SIZE + 1]


def timeless(entry: Entry) -> Entry:
    return entry._replace(created=0.0, accessed=0.0)


def random_batch(chance: random.Random) -> Items:
    """A few names and blobs, so that a batch meets existing names, existing blobs and itself."""
    names = [f"{folder}/{number}" for folder in "ab" for number in range(6)] + ["top"]
    return [
        (chance.choice(names), chance.choice([text, noise, mixed])(chance.choice(SIZES), chance.randrange(2)))
        for _ in range(chance.randrange(2, 9))
    ]


@pytest.mark.parametrize("codec", ["auto", "zstd", "lz4", "none"])
def test_a_batch_is_as_many_puts(store: Store, tmp_path: Path, codec: str) -> None:
    chance = random.Random(codec)
    with Store(tmp_path / "singly", memory=0) as singly:
        for _ in range(25):
            batch = random_batch(chance)
            entries = store.put_many(batch, codec=codec)
            assert [timeless(entry) for entry in entries] == [
                timeless(singly.put(name, data, codec=codec)) for name, data in batch
            ]
            assert list(map(timeless, store.entries())) == list(map(timeless, singly.entries()))
            recount(store)
        for entry in store.entries():
            assert store.get(entry.name) == singly.get(entry.name)
    agrees_with_disk(store)


def _dictionary(seed: int) -> Dictionary:
    seen: list[Buffer] = [*records(200, seed)]
    return Dictionary(with_number(zstandard.train_dictionary(2000, seen).as_bytes()))


@pytest.mark.parametrize("codec", ["auto", "zstd", "lz4", "gzip", "none"])
@pytest.mark.parametrize("level", [None, 1])
def test_blobs_compressed_together_are_as_if_singly(codec: str, level: int | None) -> None:
    level = None if codec == "none" else level
    blobs: list[Buffer] = [make(size, size) for make in (text, noise, mixed) for size in SIZES[1:7]]
    blobs += records(900, 7)
    dictionaries = [None, *map(_dictionary, (1, 2))]
    values = [(data, dictionaries[place % 3]) for place, data in enumerate(blobs)]
    mixture = [*values, (bytearray(blobs[0]), None), (memoryview(blobs[2]), None)]
    together = encode_small_many(mixture, codec, level)
    assert [(used, bytes(frame)) for used, frame in together] == [
        encode_small(data, codec, level, dictionary) for data, dictionary in mixture
    ]


def test_what_a_batch_finds_known_is_not_stored_again(store: Store) -> None:
    values = [noise(2_000, number) for number in range(50)]
    store.put_many((f"first/{number}", data) for number, data in enumerate(values))
    [pack] = store.objects.packs.ids()
    before = store.objects.packs.path(pack).stat().st_size
    store.put_many((f"again/{number}", data) for number, data in enumerate(values * 2))
    assert store.objects.packs.path(pack).stat().st_size == before
    store.put_many([("new", b"twice"), ("new too", b"twice")])
    found = [found for found in scan(store.objects.packs.path(pack), pack) if isinstance(found, PackRecord)]
    assert len(found) == len(values) + 1
    recount(store)


def test_a_batch_heals_what_was_lost(store: Store) -> None:
    values = {f"n/{number}": text(3_000, number) for number in range(5)}
    store.put_many(values.items())
    flip(*payload(store, "n/3")[:2])
    assert store.get("n/3") is None
    store.put_many(values.items())
    assert store.get_many(values) == list(values.values())
    assert all(blob.pack != LOST for blob in store.index.blobs())
    recount(store)


def test_a_batch_starts_another_pack_if_its_own_was_retired(store: Store) -> None:
    store.put("first", noise(500))
    [pack] = store.objects.packs.ids()
    with store.index.write() as txn:
        txn.delete_entry("first")
        blob = next(store.index.blobs())
        txn.drop_blob(blob)
        txn.retire_pack(pack)
    values = {f"n/{number}": noise(500, number) for number in range(10)}
    store.put_many(values.items())
    assert store.get_many(values) == list(values.values())
    assert {blob.pack for blob in store.index.blobs()} == {pack + 2}  # packs of puts have odd ids
    recount(store)


@pytest.mark.parametrize(
    ("there", "batch"),
    [
        ([], ["a", "a/b"]),
        ([], ["a/b", "a"]),
        ([], ["a/b/c", "a"]),
        (["a/x"], ["a", "b"]),
        (["a/x"], ["a", "a-b"]),  # "a/x" sorts after everything that begins with "a-b"
        (["a"], ["a/x", "a/y"]),
        (["a/x/y"], ["a/w", "a/x"]),
        (["z/a"], ["y", "z"]),
    ],
)
def test_a_batch_makes_no_name_both_file_and_folder(store: Store, there: list[str], batch: list[str]) -> None:
    store.put_many((name, b"there") for name in [*there, "other"])
    with pytest.raises(NameConflictError):
        store.put_many((name, b"batch") for name in batch)
    assert [entry.name for entry in store.entries()] == sorted([*there, "other"])
    recount(store)


@pytest.mark.parametrize(("there", "batch"), [("a/x", ["a", "b"]), ("a", ["a/x", "a/y"])])
def test_what_has_expired_is_in_no_batchs_way(store: Store, there: str, batch: list[str]) -> None:
    store.put_many([(there, b"old")], ttl=0.0)
    store.put_many((name, b"new") for name in batch)
    assert [entry.name for entry in store.entries()] == batch
    recount(store)


def test_a_folder_dropped_in_a_put_is_none_any_more_for_the_same_put(store: Store) -> None:
    store.put("a/x", b"1")
    store.put("a/y", b"2")
    with pytest.raises(NameConflictError):
        store.put_if(("s", None), [("a", b"3", None), ("a/z", b"4", None)], drop=["a/x", "a/y"])
    recount(store)


def test_a_batch_can_be_put_while_the_interpreter_ends(tmp_path: Path) -> None:
    script = (
        "import atexit, castore, sys\n"
        "store = castore.Store(sys.argv[1])\n"
        "batch = [(f'n/{number}', b'%d ' % number * 500) for number in range(100)]\n"
        "atexit.register(store.put_many, batch)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "store"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    with Store(tmp_path / "store") as store:
        assert len(list(store.entries())) == 100


def test_a_batch_that_fails_leaves_no_temporary_files(store: Store) -> None:
    with files_up_to(4 << 20), pytest.raises(OSError, match="the limit on the size of files"):
        store.put_many([("fits", noise(1 << 20)), ("does not", noise(6 << 20))])
    assert list((store.path / "tmp").iterdir()) == []
    assert list(store.entries()) == []
