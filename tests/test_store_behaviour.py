"""The behaviour of a store, the same with every codec, placement and tier."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import re
import subprocess
import sys
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from castore import (
    CacheWarning,
    Entry,
    InvalidNameError,
    InvalidValueError,
    NameConflictError,
    NotFoundError,
    SerializationError,
    Store,
)
from castore.objects.codecs import FRAME_SIZE
from castore.repair import doctor
from tests.clocks import pass_time
from tests.helpers import flip, mixed, noise, payload, recount, text

CODECS = ["auto", "zstd", "lz4", "gzip", "none"]
PLACEMENTS = {
    "pack": mixed(3_000),
    "one frame": mixed(200_000),
    "many frames": mixed(3 * FRAME_SIZE + 12_345),
}
TIERS = ["disk", "memory", "reopened"]


class Case:
    """A store to write to, one to read from, and bytes that end up in a known placement."""

    def __init__(self, path: Path, codec: str, placement: str, tier: str) -> None:
        self.codec = codec
        self.placement = placement
        self.data = PLACEMENTS[placement]
        self.store = Store(path, codec=codec, memory="64MB" if tier == "memory" else 0)
        self.reader = Store(path, memory=0) if tier == "reopened" else self.store

    def close(self) -> None:
        self.store.close()
        self.reader.close()


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _cases() -> Iterator[object]:
    """All combinations. `make test` runs a Latin square of them, in which each pair of two values is once."""
    for (row, codec), (column, placement), (number, tier) in itertools.product(
        enumerate(CODECS), enumerate(PLACEMENTS), enumerate(TIERS)
    ):
        left_out = (row + column + number) % len(TIERS) != 0
        yield pytest.param(
            (codec, placement, tier), marks=[pytest.mark.matrix] * left_out, id=f"{codec}-{placement}-{tier}"
        )


@pytest.fixture(params=_cases())
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path / "store", *request.param)
    yield made
    made.close()


@pytest.fixture
def pair(tier: str, tmp_path: Path) -> Iterator[Case]:
    """For what depends on names alone: any codec and placement will do."""
    made = Case(tmp_path / "store", "auto", "pack", tier)
    yield made
    made.close()


# Bytes


def test_get_gives_back_what_was_put(case: Case) -> None:
    entry = case.store.put("a/b", case.data)
    assert entry.size == len(case.data)
    assert entry.codec == ("zstd" if case.codec == "auto" else case.codec)
    for _ in range(2):
        assert case.reader.get("a/b") == case.data
    assert case.reader.get("a/c") is None


def test_blobs_lie_where_their_size_says(case: Case) -> None:
    case.store.put("a", case.data)
    path, _, _ = payload(case.store, "a")
    assert (path.suffix == ".pack") == (case.placement == "pack")


def test_put_returns_the_entry_that_the_store_then_shows(case: Case) -> None:
    entry = case.store.put("a", case.data, ttl="1h", metadata={"rows": 3, "ä": [None, True]}, pin=True)
    assert isinstance(entry, Entry)
    assert entry == case.reader.entry("a")
    again = case.store.put("a", case.data)
    assert again == case.reader.entry("a")
    assert again.pinned
    assert again.created == entry.created
    assert list(case.reader.entries()) == [again]


def test_open_reads_any_range(case: Case) -> None:
    case.store.put("a", case.data)
    chance = random.Random(0)
    size = len(case.data)
    edges = [0, 1, size - 1, size, size + 10, FRAME_SIZE - 1, FRAME_SIZE, FRAME_SIZE + 1]
    ranges = [(start, length) for start in edges for length in (0, 1, 100, FRAME_SIZE + 1)]
    ranges += [(chance.randrange(size), chance.randrange(size)) for _ in range(16)]
    with case.reader.open("a") as file:
        for start, length in ranges:
            assert file.seek(start) == start
            assert file.read(length) == case.data[start : start + length], (start, length)
            assert file.tell() == min(start + length, max(start, size))


def test_an_open_file_behaves_like_any_file(case: Case) -> None:
    case.store.put("folder/a", case.data)
    file = case.reader.open("folder/a")
    assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
    assert file.read() == case.data
    assert file.read() == b""
    assert file.seek(-5, 2) == len(case.data) - 5
    assert file.read() == case.data[-5:]
    file.seek(3)
    assert file.read() == case.data[3:]
    buffer = bytearray(len(case.data))
    file.seek(0)
    assert file.readinto(buffer) == len(case.data)
    assert buffer == case.data
    with pytest.raises(ValueError, match="before the start"):
        file.seek(-len(case.data) - 1, 2)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read()


def test_put_file_and_put_give_the_same_entry(case: Case, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(case.data)
    from_file = case.store.put_file("file", source)
    from_bytes = case.store.put("bytes", bytearray(case.data))
    assert from_file.digest == from_bytes.digest
    assert case.reader.get("file") == case.data
    assert case.store.stat().blobs == 1


def test_put_many_and_get_many_keep_order_and_duplicates(case: Case) -> None:
    other = case.data[::-1]
    entries = case.store.put_many(iter([("x", case.data), ("y", other), ("z", case.data)]))
    assert entries == [case.reader.entry(name) for name in "xyz"]
    expected = [case.data, None, other, case.data, case.data]
    assert case.reader.get_many(["z", "gone", "y", "x", "z"]) == expected
    assert case.store.stat().blobs == 2
    recount(case.store)


def test_the_same_bytes_are_kept_once(case: Case) -> None:
    first = case.store.put("a", case.data)
    before = case.store.stat()
    second = case.store.put("b", case.data)
    after = case.store.stat()
    assert first.digest == second.digest
    assert (after.blobs, after.stored, after.unique) == (before.blobs, before.stored, before.unique)
    assert after.logical == 2 * before.logical


def test_a_name_put_again_gives_the_new_bytes(case: Case) -> None:
    case.store.put("a", case.data)
    assert case.reader.get("a") == case.data
    other = noise(500) + case.data
    case.store.put("a", other)
    assert case.reader.get("a") == other
    case.store.put("a", case.data)
    assert case.reader.get("a") == case.data
    recount(case.store)


def test_a_deleted_name_is_a_miss(case: Case) -> None:
    case.store.put("a", case.data)
    assert case.reader.get("a") == case.data
    assert case.store.delete("a") is True
    assert case.store.delete("a") is False
    assert case.reader.get("a") is None
    assert case.reader.entry("a") is None
    with pytest.raises(NotFoundError):
        case.reader.open("a")


@pytest.mark.parametrize(
    ("size", "codec", "make"),
    [  # each size with each codec, and either bytes that compress or others; in `make torture` with both
        pytest.param(size, codec, make, marks=[pytest.mark.matrix] * ((row + column + number) % 2))
        for row, size in enumerate([0, 1, FRAME_SIZE - 1, FRAME_SIZE, FRAME_SIZE + 1, 2 * FRAME_SIZE])
        for column, codec in enumerate(CODECS)
        for number, make in enumerate([text, noise])
    ],
)
def test_sizes_around_a_frame(store: Store, tmp_path: Path, size: int, codec: str, make: object) -> None:
    data = make(size)  # type: ignore[operator]  # text or noise
    store.put("a", data, codec=codec)
    source = tmp_path / "source"
    source.write_bytes(data + b"!")
    store.put_file("b", source, codec=codec)
    assert store.get_many(["a", "b"]) == [data, data + b"!"]
    with store.open("a") as file:
        assert file.read(size + 1) == data
        file.seek(max(0, size - 1))
        assert file.read() == data[-1:]


def test_views_of_numbers_are_put_as_their_bytes(store: Store) -> None:
    numbers = array("d", range(100))
    every_other = memoryview(bytes(range(200)))[::2]
    empty = memoryview(array("d"))
    store.put_many([("many", memoryview(numbers)), ("many every other", every_other), ("many empty", empty)])
    store.put("one", memoryview(numbers))
    store.put("one every other", every_other)
    store.put("one empty", empty)
    for how in ("many", "one"):
        assert store.get(how) == numbers.tobytes()
        assert store.get(f"{how} every other") == bytes(range(0, 200, 2))
        assert store.get(f"{how} empty") == b""


@pytest.mark.parametrize("value", ["text", 5, None, [1]])
def test_what_is_not_bytes_is_refused(store: Store, value: object) -> None:
    with pytest.raises(SerializationError, match="bytes"):
        store.put("a", value)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(SerializationError, match="bytes"):
        store.put_many([("a", value)])  # type: ignore[list-item]  # what is tested
    assert store.stat().entries == 0


def test_what_is_no_regular_file_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="regular file"):
        store.put_file("a", "/dev/null")
    with pytest.raises((InvalidValueError, IsADirectoryError)):
        store.put_file("a", tmp_path)
    with pytest.raises(FileNotFoundError):
        store.put_file("a", tmp_path / "missing")


# Names


def test_an_expired_entry_is_a_miss(pair: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.store.put("soon", b"x", ttl=1000)
    pair.store.put("late", b"x", ttl="1d")
    pass_time(monkeypatch, 2000)
    assert pair.reader.get("soon") is None
    assert pair.reader.get_many(["soon", "late"]) == [None, b"x"]
    assert pair.reader.entry("soon") is None
    assert [entry.name for entry in pair.reader.entries()] == ["late"]
    with pytest.raises(NotFoundError):
        pair.reader.open("soon")
    pair.store.put("soon", b"y")
    assert pair.reader.get("soon") == b"y"


def test_an_expired_entry_is_pinned_no_more_and_can_be_unpinned(
    pair: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.store.put("pinned", b"x", ttl=1000, pin=True)
    pair.store.put("soon", b"x", ttl=1000)
    pass_time(monkeypatch, 2000)
    with pytest.raises(NotFoundError, match="soon"):
        pair.store.pin("soon")
    pair.store.unpin("pinned")
    assert not any(entry.pinned for entry in pair.store.entries(expired=True))


def test_expiry_is_seen_by_who_has_the_bytes_in_memory(pair: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.store.put("a", b"x", ttl=1000)
    assert pair.reader.get("a") == b"x"
    pass_time(monkeypatch, 2000)
    assert pair.reader.get("a") is None


def test_an_expired_name_is_in_nobodys_way(pair: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.store.put("file", b"x", ttl=1000)
    pair.store.put("folder/file", b"x", ttl=1000)
    pass_time(monkeypatch, 2000)
    pair.store.put("file/below", b"y")
    pair.store.put("folder", b"z")
    assert pair.reader.get_many(["file", "file/below", "folder", "folder/file"]) == [None, b"y", b"z", None]
    recount(pair.store)


def test_a_name_cannot_be_both_file_and_folder(pair: Case) -> None:
    pair.store.put("a/b", b"1")
    for name in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(NameConflictError, match="a/b"):
            pair.store.put(name, b"2")
        with pytest.raises(NameConflictError, match="a/b"):
            pair.store.put_many([("fine", b"3"), (name, b"2")])
    pair.store.put_many([("a/bc", b"3"), ("a.b", b"4"), ("ab", b"5"), ("a0", b"6")])
    assert [entry.name for entry in pair.reader.entries()] == ["a.b", "a/b", "a/bc", "a0", "ab"]
    for name in ("a/b", "a/bc"):
        pair.store.delete(name)
    pair.store.put("a", b"7")
    with pytest.raises(NameConflictError, match="'a'"):
        pair.store.put("a/b", b"8")
    recount(pair.store)


def test_a_batch_is_seen_whole_or_not_at_all(pair: Case) -> None:
    pair.store.put("file", b"x")
    with pytest.raises(NameConflictError):
        pair.store.put_many([("new", b"1"), ("file/below", b"2")])
    assert pair.reader.get("new") is None
    pair.store.put("next", b"3")
    assert pair.reader.get("next") == b"3"
    recount(pair.store)


def test_entries_lists_whole_parts_of_names(pair: Case) -> None:
    names = ["a/b/1", "a/b/2", "a/bc", "ab/1", "a-b", "a0", "\U0010ffff/last", "z"]
    pair.store.put_many((name, name.encode()) for name in names)

    def listed(prefix: str) -> list[str]:
        return [entry.name for entry in pair.reader.entries(prefix)]

    assert listed("") == sorted(names)
    assert listed("a") == ["a/b/1", "a/b/2", "a/bc"]
    assert listed("a/b/") == ["a/b/1", "a/b/2"]
    assert listed("a/b/1") == ["a/b/1"]
    assert listed("a/x") == []


def test_entries_pages_through_thousands(store: Store) -> None:
    store.put_many((f"n/{i:05d}", b"%d" % i) for i in range(4_321))
    assert [entry.name for entry in store.entries("n")] == [f"n/{i:05d}" for i in range(4_321)]
    assert store.delete_many(f"n/{i:05d}" for i in range(0, 5_000, 2)) == 2_161
    assert store.stat().entries == 2_160


def test_pin_and_metadata_stay_with_the_entry(pair: Case) -> None:
    pair.store.put("a", b"x", metadata={"k": 1})
    pair.store.pin("a")
    kept = pair.reader.entry("a")
    assert kept is not None
    assert (kept.pinned, kept.metadata) == (True, {"k": 1})
    pair.store.unpin("a")
    kept = pair.reader.entry("a")
    assert kept is not None
    assert not kept.pinned
    for act in (pair.store.pin, pair.store.unpin):
        with pytest.raises(NotFoundError, match="'nothing'"):
            act("nothing")


def test_an_entry_whose_metadata_is_damaged_is_listed_reported_and_removed(tmp_path: Path) -> None:
    for metadata in ("{not json", "[" * 100_000, '{"a":' + "9" * 5000 + "}"):
        with Store(tmp_path / "store", memory=0) as store:
            store.put("a", b"x")
            with store.index.write() as txn:
                txn.execute("UPDATE entries SET metadata = ?", (metadata,))
            [entry] = store.entries()
            assert entry.metadata == {"damaged": metadata}
            assert store.copy("a", "b").metadata == entry.metadata
            [finding] = doctor.examine(store.path)
            assert "its row of the name 'a' has impossible values" in finding.what
            assert store.delete_unchanged(entry)
            assert store.delete("b")


def nested(levels: int) -> list[Any]:
    """So many levels of lists."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": b"bytes"},
        {"a": float("nan")},
        {1: 2},
        {"a": {1, 2}},
        "note",
        "",
        5,
        0,
        [],
        [("a", 1)],
        False,
        {"a": nested(100)},
    ],
)
def test_metadata_that_is_not_json_is_refused(store: Store, metadata: Any) -> None:
    with pytest.raises(SerializationError, match="metadata"):
        store.put("a", b"x", metadata=metadata)


def test_metadata_may_have_a_hundred_levels_and_any_number_of_lists(pair: Case) -> None:
    metadata = {"a": nested(99), "b": [[]] * 1000, "c": "[" * 1000}
    pair.store.put("a", b"x", metadata=metadata)
    kept = pair.reader.entry("a")
    assert kept is not None
    assert kept.metadata == metadata


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", ".", "a/../b", "a\0b", "a\nb", "\ud800", "x" * 256, ".castore/a"]
)
def test_hostile_names_are_refused_everywhere(store: Store, name: str) -> None:
    for act in (store.get, store.open, store.entry, store.delete, store.pin, store.load):
        with pytest.raises(InvalidNameError):
            act(name)
    with pytest.raises(InvalidNameError):
        store.put(name, b"x")
    with pytest.raises(InvalidNameError):
        store.put_many([("good", b"x"), (name, b"x")])
    with pytest.raises(InvalidNameError):
        store.get_many(["good", name])
    assert store.stat().entries == 0


def test_reads_are_counted_over_stores(pair: Case) -> None:
    pair.store.put("a", b"x")
    pair.reader.get("a")
    pair.reader.get("nothing")
    pair.reader.flush()
    shown = Store(pair.store.path, memory=0).stat()
    assert (shown.memory_hits + shown.disk_hits, shown.misses, shown.corrupt) == (1, 1, 0)


def test_a_process_that_reads_and_writes_imports_only_what_that_needs(store: Store) -> None:
    script = (
        # Python's own logging imports some of these from 3.14 on.
        "import logging, sys; before = set(sys.modules)\nimport castore; store = castore.Store(sys.argv[1])\n"
        "store.put(castore.key({'a': [1, 2.0, None]}), b'x' * 9); assert store.get(castore.key({})) is None\n"
        "store.gc(dry_run=True); store.stat(); store.close()\nprint({'numpy', 'sqlite_utils', 'dataclasses', "
        "'inspect', 'decimal', 'uuid', 'pickle'} & {*sys.modules} - before)"
    )
    command = [sys.executable, "-c", script, str(store.path)]
    assert subprocess.check_output(command, text=True) == "set()\n"


def test_one_name_is_not_many(store: Store) -> None:
    store.put("a", b"x")
    with pytest.raises(InvalidValueError, match=r"get_many takes several names, not one: write \['al'\]"):
        store.get_many("al")


@pytest.mark.parametrize("names", ["runs", b"runs"])
def test_the_letters_of_one_name_are_not_many_names(store: Store, names: Any) -> None:
    store.put_many((letter, b"x") for letter in "runs")
    for use in (store.delete_many, store.find_many, lambda drop: store.put_if(("r", None), (), drop=drop)):
        with pytest.raises(InvalidValueError, match="takes several names, not one"):
            use(names)
    assert sorted(store) == sorted("runs")


@pytest.mark.parametrize("path", ["/proc/cpuinfo", "/proc/self/status", "/proc/version"])
def test_a_file_that_does_not_say_its_size_is_kept_whole(store: Store, path: str) -> None:
    """Regression: one byte was kept."""
    store.put_file("file", path)
    with store.batch() as batch:
        batch.put_file("again", path)
    for name in ("file", "again"):
        kept = store.get(name)
        assert kept is not None
        # Its values change, its words do not.
        assert re.findall(rb"[a-z_]{5,}", kept)[:3] == re.findall(rb"[a-z_]{5,}", Path(path).read_bytes())[:3]
        assert kept.endswith(b"\n")


def test_what_cannot_be_kept_is_refused_before_it_is_computed(store: Store) -> None:
    def compute() -> NoReturn:
        pytest.fail("it was computed")

    for options in ({"ttl": "junk"}, {"ttl": -1}, {"serializer": "junk"}, {"metadata": {"a": b"bytes"}}):
        with pytest.raises((InvalidValueError, SerializationError)):
            store.get_or_compute("key", compute, **options)


def test_a_computed_result_is_returned_also_when_there_is_no_room_for_it(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size=100_000) as store:
        store.put("pinned", noise(50_000))
        store.pin("pinned")

        @store.cached
        def random_bytes(size: int) -> bytes:
            return noise(size)

        for size, reason in ((200_000, "more than the whole store may hold"), (90_000, "pinned")):
            with pytest.warns(CacheWarning, match=f"'key' was computed and is not kept: .*{reason}"):
                assert store.get_or_compute("key", partial(noise, size)) == noise(size)
            with pytest.warns(CacheWarning, match=reason):
                assert random_bytes(size) == noise(size)
            assert list(store) == ["pinned"]
        assert store.get_or_compute("key", lambda: b"small") == store.get("key") == b"small"


def test_a_name_whose_bytes_were_found_damaged_says_so(store: Store) -> None:
    store.put("a", noise(30_000), codec="none")
    path, offset, length = payload(store, "a")
    flip(path, offset + length // 2)
    assert store.get("a") is None
    for use in (store.load, store.open):
        with pytest.raises(
            NotFoundError, match=r"bytes of 'a' .* were found damaged or missing; put them again"
        ):
            use("a")


def test_uses_are_counted_of_names_only(store: Store) -> None:
    with pytest.raises(InvalidNameError):
        store.count_use(Path("a"))  # type: ignore[arg-type]
    store.stat()


def test_a_batch_whose_block_has_ended_takes_nothing_more(store: Store) -> None:
    """Regression: it took puts and deletes, and dropped them."""
    with store.batch() as batch:
        batch.put("a", b"x")
    for use in (
        lambda: batch.put("late", b"x"),
        lambda: batch.delete("a"),
        lambda: batch.link("b", "0" * 64),
    ):
        with pytest.raises(InvalidValueError, match="the block of this batch has ended"):
            use()
    assert list(store) == ["a"]


def test_stores_that_nobody_closes_leave_no_file_open(tmp_path: Path) -> None:
    def open_files() -> list[str]:
        paths = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                paths.append(os.readlink(f"/proc/self/fd/{number}"))
        return [path for path in paths if path.startswith(str(tmp_path))]

    for number in range(5):
        store = Store(tmp_path / "store")
        store.put(f"small/{number}", b"small %d" % number)
        with store.batch() as batch:
            batch.put(f"large/{number}", noise(600_000, number))
        assert store.get(f"small/{number}") == b"small %d" % number
        assert open_files()
        del store, batch
        gc.collect()
        assert open_files() == []
