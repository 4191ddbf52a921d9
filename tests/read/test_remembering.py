"""A process's caches of the index: read once, they answer alone, and never with outdated facts."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from castore import Store
from castore.read import source
from tests.helpers import flip, in_processes, mixed, noise, payload, statements_of, text

#: Packed and compressed, packed and raw, loose and compressed, loose and raw; one of several frames.
VALUES = {
    "packed": text(3_000),
    "packed raw": noise(900),
    "loose": mixed(60_000),
    "loose raw": noise(40_000),
    "frames": mixed(600_000),
}
SMALL = [name for name in VALUES if name != "frames"]


@pytest.fixture(params=[0, "64MB"], ids=["disk", "memory"])
def known(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store that has read each of VALUES a few times."""
    with Store(tmp_path / "store", memory=request.param) as opened:
        opened.put_many(VALUES.items())
        for _ in range(3):
            assert {name: opened.get(name) for name in VALUES} == VALUES
        yield opened


def questions(store: Store, act: Callable[[], object]) -> int:
    """The number of statements that ``act`` has SQLite run for this thread."""
    return len(statements_of(store, act))


def elsewhere(store: Store, act: Callable[[Store], object]) -> None:
    """Run ``act`` on the store in another process."""

    def task(_: int) -> None:
        with Store(store.path, memory=0) as opened:
            act(opened)

    in_processes(1, task)


def test_what_is_known_is_read_without_a_question(known: Store) -> None:
    assert questions(known, lambda: [known.get(name) for name in SMALL]) == 0
    assert questions(known, lambda: known.get_many(SMALL * 3)) == 0
    assert questions(known, lambda: [known.load(name) for name in SMALL]) == 0
    elsewhere(known, lambda store: store.put("new", b"x"))
    assert questions(known, lambda: [known.get(name) for name in SMALL]) == 0, "nothing known has changed"
    known.put("new", b"y")
    assert questions(known, lambda: [known.get(name) for name in SMALL]) == len(SMALL)
    assert questions(known, lambda: [known.get(name) for name in SMALL]) == 0


def test_get_many_asks_once_for_all_that_is_not_known(known: Store) -> None:
    known.put_many((f"n/{number}", b"%d" % number) for number in range(300))
    names = [*SMALL, *(f"n/{number}" for number in range(300)), "nothing", "n/7"]
    answers: list[bytes | None] = []
    assert questions(known, lambda: answers.extend(known.get_many(names))) == 1
    expected = [VALUES.get(name) or name.removeprefix("n/").encode() for name in names]
    expected[-2] = None  # type: ignore[call-overload]
    assert answers == expected


def test_get_many_goes_through_the_ram_tier(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory="64MB") as store:
        store.put_many(VALUES.items())
        for _ in range(3):
            assert store.get_many(VALUES) == list(VALUES.values())
        stat = store.stat()
        assert (stat.disk_hits, stat.memory_hits, stat.misses) == (len(VALUES), 2 * len(VALUES), 0)


@pytest.mark.parametrize("change", ["replaced", "deleted", "evicted", "shortened"])
def test_what_another_process_changes_is_known_no_more(known: Store, change: str) -> None:
    def act(store: Store) -> None:
        for name, data in VALUES.items():
            if change == "deleted":
                store.delete(name)
            elif change == "shortened":
                store.put(name, data, ttl=0.001)
            elif change == "replaced":
                store.put(name, data[::-1])
        if change == "evicted":
            store.gc(max_size=0, grace=0)

    elsewhere(known, act)
    for _ in range(3):
        for name, data in VALUES.items():
            assert known.get(name) == (data[::-1] if change == "replaced" else None)


def test_what_compaction_moves_is_found_and_its_new_place_remembered(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        values = {f"n/{number}": noise(900, number) for number in range(60)}
        elsewhere(store, lambda other: other.put_many(values.items()))
        store.put("own", b"x")
        kept = {f"n/{number}": values[f"n/{number}"] for number in range(50, 60)}
        for _ in range(3):
            assert store.get_many(kept) == list(kept.values())
        store.delete_many(name for name in values if name not in kept)
        for _ in range(3):
            assert store.get_many(kept) == list(kept.values())
        (old,) = {blob.pack for blob in store.index.blobs()} - {payload_pack(store, "own")}
        elsewhere(store, lambda other: other.gc(grace=0))
        assert old not in store.objects.packs.ids()
        store.objects.packs.close()  # as happens within seconds
        assert questions(store, lambda: store.get("n/50")) > 0
        for _ in range(2):
            assert store.get_many(kept) == list(kept.values())
        assert questions(store, lambda: store.get_many(kept)) == 0


def payload_pack(store: Store, name: str) -> int:
    found = store.index.find(name)
    assert found is not None
    return found.blob.pack


@pytest.mark.parametrize("name", SMALL)
def test_what_is_known_is_checked_each_time_it_is_read(tmp_path: Path, name: str) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        store.put(name, VALUES[name])
        for _ in range(4):  # of which the third compares the digest, and the fourth the stored bytes alone
            assert store.get(name) == VALUES[name]
        path, offset, length = payload(store, name)
        flip(path, offset + length // 2)
        for _ in range(3):
            assert store.get(name) is None
        assert store.stat().corrupt == 1
        store.put(name, VALUES[name])
        for _ in range(3):
            assert store.get(name) == VALUES[name]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_is_known_is_not_taken_from_a_record_that_another_has_overwritten(
    tmp_path: Path, codec: str
) -> None:
    values = {"a": b"A" * 1000, "b": b"B" * 1000}
    with Store(tmp_path / "store", memory=0) as store:
        for name, value in values.items():
            store.put(name, value, codec=codec)
        for _ in range(4):
            assert store.get_many(["a", "b"]) == list(values.values())
        path, offset, length = payload(store, "a")
        _, other, other_length = payload(store, "b")
        assert length == other_length
        with path.open("r+b") as file:
            file.seek(other)
            record = file.read(length)
            file.seek(offset)
            file.write(record)
        assert store.get_many(["a", "b"]) == [None, values["b"]]


def test_a_loose_object_that_comes_back_in_another_way_is_found(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        for codec in ("zstd", "lz4", "gzip", "none", "zstd"):
            store.put("a", VALUES["loose"], codec=codec)
            for _ in range(3):
                assert store.get("a") == VALUES["loose"]
            payload(store, "a")[0].unlink()
            assert store.get("a") is None


def test_what_is_read_once_is_not_remembered_and_what_is_remembered_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3_000
    monkeypatch.setattr(source, "MAX_REMEMBERED", count // 2)
    with Store(tmp_path / "store", memory=0) as store:
        names = [f"some/longer/name/{number:06}" for number in range(count)]
        store.put_many((name, name.encode()) for name in names)
        store.get_many(names)
        store.flush()
        last = names[-100:]
        assert questions(store, lambda: [store.get(name) for name in last]) >= len(last)
        store.flush()
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(3):
                for name in names:
                    assert store.get(name) == name.encode()
            store.flush()
            gc.collect()
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert held < count // 2 * 800


def test_the_names_of_get_many_are_those_of_one_moment(tmp_path: Path) -> None:
    """A batch that is written between the look at one name and the look at another is seen whole."""
    with Store(tmp_path / "store") as store, Store(tmp_path / "store") as writer:
        writer.put_many([("a", b"old"), ("b", b"old")])
        for _ in range(2):  # `a` is remembered from its second read on, `b` is not
            assert store.get("a") == b"old"
        find_many = store.parts.index.find_many

        def find_after_a_batch(names: list[str]) -> object:
            if names == ["b"]:
                with writer.batch() as batch:
                    batch.put("a", b"new")
                    batch.put("b", b"new")
            return find_many(names)

        store.parts.index.find_many = find_after_a_batch  # type: ignore[method-assign, assignment]
        assert store.get_many(["a", "b", "a"]) == [b"new"] * 3
