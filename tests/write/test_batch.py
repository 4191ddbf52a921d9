"""A batch: puts and deletes that are seen together at the end of its block, or not at all."""

from __future__ import annotations

import gc
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from castore import (
    Batch,
    FullError,
    InvalidNameError,
    InvalidValueError,
    NameConflictError,
    SerializationError,
    Store,
    TooLargeError,
)
from castore.objects.codecs import FRAME_SIZE
from tests.helpers import agrees_with_disk, noise, object_files, text

LARGE = 3 * FRAME_SIZE


def temporaries(store: Store) -> list[str]:
    return os.listdir(store.path / "tmp")


def test_what_is_put_and_deleted_is_seen_at_the_end_and_not_before(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(noise(LARGE, 1))
    store.put("old", b"old")
    with store.batch() as batch:
        assert batch.put("small", b"small") == store.put("elsewhere", b"small").digest
        batch.put("large", text(LARGE))
        batch.put_file("file", tmp_path / "file")
        batch.delete("old")
        batch.delete("no/such/name")
        with Store(store.path) as other:
            assert [entry.name for entry in other.entries()] == ["elsewhere", "old"]
    with Store(store.path) as other:
        assert [entry.name for entry in other.entries()] == ["elsewhere", "file", "large", "small"]
        assert other.get("large") == text(LARGE)
        assert other.get("file") == noise(LARGE, 1)
    assert [entry.name for entry in batch.entries] == ["small", "large", "file"]
    assert [entry.digest for entry in batch.entries] == [
        entry.digest for entry in map(store.entry, ("small", "large", "file")) if entry is not None
    ]
    assert temporaries(store) == []
    agrees_with_disk(store)


def test_an_exception_keeps_nothing_and_leaves_nothing_behind(store: Store) -> None:
    store.put("old", b"old")
    batch = store.batch()

    def fail() -> None:
        with batch:
            batch.put("a", text(LARGE))
            batch.delete("old")
            assert temporaries(store) != []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [entry.name for entry in store.entries()] == ["old"]
    assert temporaries(store) == []
    assert object_files(store) == []
    assert batch.entries == []


def test_one_name_that_cannot_be_put_takes_back_all(store: Store) -> None:
    store.put("a/b", b"1")
    batch = store.batch()
    batch.put("first", text(LARGE))
    batch.put("a", b"2")
    batch.delete("a/b/c")
    with pytest.raises(NameConflictError):
        batch.commit()
    assert [entry.name for entry in store.entries()] == ["a/b"]
    assert temporaries(store) == []
    agrees_with_disk(store)


def test_a_name_can_take_the_place_of_a_folder_whose_names_are_deleted_with_it(store: Store) -> None:
    store.put("a/b", b"1")
    with store.batch() as batch:
        batch.put("a", b"2")
        batch.delete("a/b")
    assert {entry.name: store.get(entry.name) for entry in store.entries()} == {"a": b"2"}
    agrees_with_disk(store)


def test_the_last_word_on_a_name_counts(store: Store) -> None:
    store.put("put last", b"0")
    store.put("deleted last", b"0")
    with store.batch() as batch:
        batch.delete("put last")
        batch.put("put last", b"1")
        batch.put("put last", b"2")
        batch.put("deleted last", text(LARGE))
        batch.delete("deleted last")
        assert temporaries(store) == []
    assert {entry.name: store.get(entry.name) for entry in store.entries()} == {"put last": b"2"}
    agrees_with_disk(store)


def test_arguments_are_those_of_put_and_defaults_those_of_the_batch(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text(9000))
    with Store(tmp_path / "store", ttl="1h") as store:
        with store.batch(codec="lz4", ttl=50) as batch:
            batch.put("defaults", text(9000, 1))
            batch.put("own", text(9000, 2), codec="none", ttl=500, metadata={"a": 1}, pin=True)
            batch.put("never", text(9000, 3), ttl=math.inf, serializer="text")
            batch.put_file("file", tmp_path / "file", metadata={"b": 2}, pin=True)
        with store.batch() as plain:
            plain.put("store's", b"x")
        found = {entry.name: entry for entry in [*batch.entries, *plain.entries]}
        lives = {
            name: None if entry.expires is None else round(entry.expires - entry.created)
            for name, entry in found.items()
        }
        with store.batch(ttl=50) as together:
            for number in range(3):
                together.put(f"{number}", b"x" * number)
        # Entries that belong together expire together, however long staging takes.
        assert len({entry.expires for entry in together.entries}) == 1
        assert lives == {"defaults": 50, "own": 500, "never": None, "file": 50, "store's": 3600}
        assert [found[name].codec for name in ("defaults", "own", "file")] == ["lz4", "none", "lz4"]
        assert (found["own"].metadata, found["own"].pinned) == ({"a": 1}, True)
        assert (found["file"].metadata, found["file"].pinned) == ({"b": 2}, True)
        assert found["never"].serializer == "text"


def test_what_cannot_be_put_is_refused_where_it_is_put(store: Store, tmp_path: Path) -> None:
    with store.batch() as batch:
        with pytest.raises(InvalidNameError):
            batch.put("a/../b", b"")
        with pytest.raises(InvalidNameError):
            batch.delete("/a")
        with pytest.raises(SerializationError):
            batch.put("a", "text")  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError):
            batch.put_file("a", tmp_path / "none")
        with pytest.raises(InvalidValueError):
            batch.put_file("a", tmp_path)
        batch.put("b", b"1")
    assert [entry.name for entry in store.entries()] == ["b"]


def test_a_buffer_may_be_used_again_as_soon_as_it_is_put(store: Store) -> None:
    buffer = bytearray(LARGE)
    with store.batch() as batch:
        for number in range(4):
            buffer[:] = bytes([number]) * LARGE
            batch.put(str(number), memoryview(buffer))
    assert [store.get(str(number)) for number in range(4)] == [bytes([number]) * LARGE for number in range(4)]


def test_an_empty_batch_changes_nothing(store: Store) -> None:
    size = store.index.journal.size()
    with store.batch() as batch:
        assert batch.commit() == []
    assert store.index.journal.size() == size


def test_a_batch_can_go_on_after_a_commit(store: Store) -> None:
    batch = store.batch()
    for number in range(3):
        batch.put(f"{number}", noise(5000, number))
        assert batch.stored > 0
        assert [entry.name for entry in batch.commit()] == [f"{number}"]
        assert batch.stored == 0
    assert [entry.name for entry in batch.entries] == ["0", "1", "2"]
    batch.put("forgotten", text(LARGE))
    batch.discard()
    assert temporaries(store) == []
    assert len(list(store.entries())) == 3


@pytest.mark.parametrize("size", [9000, LARGE])
def test_bytes_that_were_known_and_that_gc_takes_meanwhile_are_put_again(
    store: Store, tmp_path: Path, size: int
) -> None:
    first, second = text(size, 1), text(size, 2)
    (tmp_path / "file").write_bytes(second)
    store.put("first", first)
    store.put("second", second)
    with store.batch() as batch:
        batch.put("a", bytearray(first))
        batch.put_file("b", tmp_path / "file")
        batch.put("c", noise(LARGE, 1))
        assert temporaries(store) != []
        store.delete_many(["first", "second"])
        store.gc(grace=0)
        assert store.stat().blobs == 0
    assert [store.get(name) for name in "abc"] == [first, second, noise(LARGE, 1)]
    assert temporaries(store) == []
    agrees_with_disk(store)


def test_a_file_that_changed_before_it_had_to_be_read_again_is_refused(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(text(LARGE))
    store.put_file("known", path)
    batch = store.batch()
    batch.put("other", noise(LARGE, 1))
    batch.put_file("a", path)
    store.delete("known")
    store.gc(grace=0)
    path.write_bytes(noise(LARGE, 2))
    with pytest.raises(InvalidValueError, match="changed between two reads of it"):
        batch.commit()
    assert list(store.entries()) == []
    assert temporaries(store) == []


def test_names_that_change_places_take_their_lifetimes_along(store: Store) -> None:
    with store.batch() as batch:
        for number in range(3):
            batch.put(f"part-{number}", b"%d" % number, ttl=[3600, 7200, None][number])
        batch.rename({"part-0": "part-1", "part-1": "part-2", "part-2": "part-0"})
    lifetimes = {entry.name: entry.expires and entry.expires - time.time() for entry in store.entries()}
    assert lifetimes == {
        "part-0": None, "part-1": pytest.approx(3600, abs=60), "part-2": pytest.approx(7200, abs=60),
    }  # fmt: skip
    assert store.get("part-1") == b"0"


def test_work_that_makes_its_bytes_is_called_again_if_they_vanished_and_none_are_kept_for_that(
    store: Store,
) -> None:
    store.put("known", text(LARGE))
    store.put("old", b"old")
    calls: list[int] = []
    batch = store.batch()

    def work() -> None:
        calls.append(len(calls))
        batch.put("part-0", text(LARGE))
        batch.put("part-1", noise(LARGE, 1))
        batch.rename({f"part-{number}": f"part-{number}-of-2" for number in range(2)})
        batch.delete("old")
        if len(calls) == 1:
            store.delete("known")
            store.gc(grace=0)

    entries = batch.run(work)
    assert calls == [0, 1]
    assert [entry.name for entry in entries] == ["part-0-of-2", "part-1-of-2"]
    assert [entry.name for entry in store.entries()] == ["part-0-of-2", "part-1-of-2"]
    assert store.get("part-0-of-2") == text(LARGE)
    assert temporaries(store) == []
    agrees_with_disk(store)


def test_work_that_fails_keeps_nothing(store: Store) -> None:
    batch = store.batch()

    def work() -> None:
        batch.put("a", text(LARGE))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        batch.run(work)
    assert list(store.entries()) == []
    assert temporaries(store) == []


def test_a_batch_that_does_not_fit_into_the_budget_is_refused_whole(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size=LARGE) as store:
        store.put("pinned", noise(LARGE // 2, 0), pin=True)
        batch = store.batch()
        batch.put("a", noise(LARGE // 3, 1))
        batch.put("b", noise(LARGE // 3, 2))
        with pytest.raises(FullError):
            batch.commit()
        batch.put("a", noise(2 * LARGE, 1))
        with pytest.raises(TooLargeError):
            batch.commit()
        assert [entry.name for entry in store.entries()] == ["pinned"]
        assert temporaries(store) == []
        agrees_with_disk(store)


def test_a_batch_that_no_empty_store_could_hold_is_told_so(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size=LARGE) as store:
        with pytest.raises(
            TooLargeError, match=r"2 blobs that are committed at once take .* several batches"
        ):
            store.put_if(("a", None), [("a", noise(LARGE // 3 * 2, 1)), ("b", noise(LARGE // 3 * 2, 2))])
        assert list(store) == []
        assert temporaries(store) == []


@pytest.mark.parametrize(
    ("stage", "count"),
    [
        (lambda batch: batch.put("a", noise(LARGE)), "1 staged change,"),
        (lambda batch: (batch.put("a", b"1"), batch.put("b", b"2"), batch.delete("c")), "3 staged changes,"),
    ],
)
def test_a_batch_that_is_dropped_with_changes_says_so(
    store: Store, stage: Callable[[Batch], object], count: str
) -> None:
    batches = [store.batch()]
    stage(batches[0])
    with pytest.warns(ResourceWarning, match=rf"dropped with {count} .* commit\(\) or discard\(\)"):
        batches.clear()  # Python collects the batch at once
    assert list(store) == []
    assert temporaries(store) == []


@pytest.mark.parametrize("end", [Batch.commit, Batch.discard])
def test_a_batch_that_has_ended_or_has_no_changes_is_dropped_in_silence(
    store: Store, end: Callable[[Batch], object]
) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        unused, batch = store.batch(), store.batch()
        batch.put("a", b"1")
        end(batch)
        with store.batch() as in_block:
            in_block.put("b", b"2")
        with pytest.raises(InvalidValueError):
            store.batch(codec="no codec")
        del unused, batch, in_block
        gc.collect()
    assert seen == []


def test_after_its_block_a_batch_takes_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    with store.batch() as batch:
        digest = batch.put("a", b"1")
    uses: list[Callable[[], object]] = [
        lambda: batch.put("b", b"2"),
        lambda: batch.put_file("b", tmp_path / "file"),
        lambda: batch.link("b", digest),
        lambda: batch.delete("a"),
        lambda: batch.rename({"a": "b"}),
        lambda: batch.run(lambda: None),
        batch.commit,
    ]
    for use in uses:
        with pytest.raises(InvalidValueError, match="the block of this batch has ended"):
            use()
    batch.discard()
    assert list(store) == ["a"]
