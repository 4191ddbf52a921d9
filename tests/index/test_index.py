"""The index: its derived figures stay right, it is made once, and the journal can restore it."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database, Migrations

from castore import NameConflictError, Store, StoreError, settings
from castore.index.database import Index
from castore.index.journal import JournalTail, pack_record
from castore.index.schema import SCHEMA_VERSION
from castore.records import HEAD_SIZE
from castore.repair import doctor
from tests.clocks import pass_time
from tests.helpers import (
    agrees_with_disk,
    flip,
    in_processes,
    mixed,
    noise,
    payload,
    recount,
    text,
    wait_for_call,
)


def operations(store: Store, chance: random.Random) -> list[Callable[[], object]]:
    """The operations that a user may do next, with random names and bytes."""
    name = chance.choice(["a", "b", "c/d", "c/e", "c/e/f", "a/b"])
    size = chance.choice([0, 10, 3_000, 40_000, 300_000])
    data = chance.choice([text, noise])(size, chance.randrange(3))
    return [
        lambda: store.put(name, data, codec=chance.choice(["auto", "lz4", "gzip", "none"])),
        lambda: store.put_many([(name, data), ("z", data), ("y", data[:5])]),
        lambda: store.put(name, data, ttl=0.001),
        lambda: store.put(name, data, pin=chance.random() < 0.2),
        lambda: store.delete(name),
        lambda: store.get(name),
        lambda: store.gc(grace=0),
        lambda: store.gc(max_size=200_000, grace=0),
        lambda: flip(*payload(store, name)[:2]) if store.entry(name) and len(data) > 0 else None,
        lambda: store.verify(repair=chance.random() < 0.5),
        lambda: store.unpin(name) if store.entry(name) else None,
    ]


@pytest.mark.parametrize("seed", range(4))
def test_totals_stay_equal_to_a_recount(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(120):
        act = chance.choice(operations(store, chance))
        # A name may conflict, and the object to be damaged may be gone or cut short already.
        with contextlib.suppress(NameConflictError, FileNotFoundError, IndexError):
            act()
        recount(store)


def test_rolled_back_writes_leave_no_trace(store: Store) -> None:
    store.put("a", text(100))
    before = (store.index.totals(), store.index.journal.size())
    with pytest.raises(NameConflictError):
        store.put_many([("b", text(200)), ("c", noise(50_000)), ("a/b", text(300))])
    with contextlib.suppress(RuntimeError), store.index.write() as txn:
        txn.delete_entry("a")
        raise RuntimeError("changed my mind")
    assert (store.index.totals(), store.index.journal.size()) == before
    recount(store)


def test_a_pack_of_a_rolled_back_put_is_not_shared_with_another_writer(tmp_path: Path) -> None:
    # Regression: the id of a pack begun in an uncommitted transaction was used again, and the first writer
    # went on appending to a file that was no longer there.
    first, second = Store(tmp_path / "store", memory=0), Store(tmp_path / "store", memory=0)
    second.put("file", noise(40_000))
    with pytest.raises(NameConflictError):
        first.put("file/below", b"conflict")
    second.put("b", b"of the second")
    first.put("a", b"of the first")
    assert first.get_many(["a", "b"]) == second.get_many(["a", "b"]) == [b"of the first", b"of the second"]
    assert first.verify().bad == []


def test_an_index_of_a_newer_castore_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    db = sqlite3.connect(tmp_path / "store/index.sqlite")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(StoreError, match=r"newer castore.*upgrade"):
        Store(tmp_path / "store")


@pytest.mark.parametrize(
    "first", [lambda path: Store(path).close(), doctor.examine], ids=["opened", "doctor"]
)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_an_index_of_an_older_castore_is_brought_up_to_date(
    tmp_path: Path, version: int, recorded: bool, first: Callable[[Path], object]
) -> None:
    with Store(tmp_path / "store") as store:
        store.put("a", b"kept")
    with closing(sqlite3.connect(tmp_path / "store/index.sqlite")) as db, db:
        undo = {
            4: ("DROP TABLE places", "DROP TABLE origins"),
            3: ("ALTER TABLE packs DROP COLUMN dead", "ALTER TABLE totals DROP COLUMN packed"),
            2: ("DROP TABLE released",),
        }
        for number in range(SCHEMA_VERSION, version, -1):
            for statement in undo[number]:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {version}")
        if recorded:
            had = Migrations("castore")
            for name in ("tables", "released", "dead", "places")[:version]:
                had(name=name)(lambda db: None)
            had.apply(Database(db))
    assert not first(tmp_path / "store")
    with Store(tmp_path / "store") as store:
        assert store.get("a") == b"kept"
        agrees_with_disk(store)
    assert doctor.examine(tmp_path / "store") == []


def test_a_file_that_is_no_index_is_refused_with_advice(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    (tmp_path / "store/index.sqlite").write_bytes(b"not a database" * 1_000)
    with pytest.raises(StoreError, match="castore doctor"):
        Store(tmp_path / "store")


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="not empty"):
        Store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_network_file_system_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = settings.filesystem_of(tmp_path)
    assert kind
    assert settings.filesystem_of(Path("/proc")) == "proc"
    # without an NFS server, this file system is declared a network file system
    monkeypatch.setattr(settings, "_NETWORK", {kind})
    with pytest.raises(StoreError, match=f"on a {kind} file system.*--store"):
        Store(tmp_path / "store")
    assert not (tmp_path / "store/castore.json").exists()


def test_threads_that_end_leave_no_descriptors_behind(store: Store) -> None:
    store.put("a", b"x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        thread = threading.Thread(target=store.get, args=("a",))
        thread.start()
        thread.join()
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_eight_processes_make_one_store(tmp_path: Path) -> None:
    for turn in range(2):
        path = tmp_path / f"store {turn}"

        def make(number: int, path: Path = path) -> None:
            with Store(path, memory=0) as store:
                store.put(f"n/{number}", b"%d" % number)

        in_processes(8, make)
        with Store(path, memory=0) as store:
            assert store.get_many([f"n/{i}" for i in range(8)]) == [b"%d" % i for i in range(8)]
            recount(store)


def test_eight_processes_put_without_waiting_in_vain(store: Store) -> None:
    def put(number: int) -> None:
        for i in range(60):
            store.put(f"{number}/{i}", b"%d of %d" % (i, number))
        store.put_many((f"{number}/many/{i}", noise(20_000, i)) for i in range(10))

    in_processes(8, put)
    assert store.stat().entries == 8 * 70
    assert all(store.get(f"{n}/{i}") == b"%d of %d" % (i, n) for n in range(8) for i in range(60))
    recount(store)


# The names journal


def described(store: Store) -> list[tuple[object, ...]]:
    """Every entry but for its last access, which the journal does not keep."""
    return [(*entry[:7], *entry[8:]) for entry in store.entries()]


def fill(store: Store) -> None:
    """Entries of all kinds, and some that are removed."""
    store.put_many((f"n/{i}", text(i * 37, i)) for i in range(200))
    for codec in ("zstd", "lz4", "gzip", "none"):
        store.put(f"large/{codec}", mixed(600_000, len(codec)), codec=codec)
    store.save("object", {"a": [1, 2]}, metadata={"k": "ä"}, ttl="1d")
    store.delete("n/7")
    store.put("n/8", b"another")
    store.pin("n/9")
    store.pin("n/10")
    store.unpin("n/10")


@pytest.mark.parametrize("loss", ["none", "missing", "garbage"])
def test_the_index_comes_back_from_the_object_directory(tmp_path: Path, loss: str) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        fill(store)
        before = described(store)
        values = {entry[0]: store.get(str(entry[0])) for entry in before}
    index = tmp_path / "store/index.sqlite"
    if loss == "missing":
        index.unlink()
    elif loss == "garbage":
        index.write_bytes(noise(50_000))
    _, rebuilt = doctor.rebuild_index(tmp_path / "store")
    assert (rebuilt.lost, rebuilt.damaged) == ([], [])
    with Store(tmp_path / "store", memory=0) as store:
        assert described(store) == before
        assert {str(entry[0]): store.get(str(entry[0])) for entry in before} == values
        assert store.load("object") == {"a": [1, 2]}
        recount(store)
        store.put("new", b"x")
        assert store.verify().bad == []
        recount(store)


def test_who_has_only_read_leaves_the_log_to_the_next_writer(tmp_path: Path) -> None:
    log = tmp_path / "store/index.sqlite-wal"
    with Store(tmp_path / "store") as store:
        store.put("a", b"1")
    assert not log.exists()
    for reads in (1, 2, 3):
        with Store(tmp_path / "store", memory=0) as store:
            assert store.get("a") == b"1"
        assert log.stat().st_size > 0
        with Store(tmp_path / "store") as store:
            assert store.stat().disk_hits == reads  # the reads are counted all the same
    with Store(tmp_path / "store") as store:
        store.put("b", b"2")
    assert not log.exists()
    with Store(tmp_path / "store") as store:
        assert store.stat().disk_hits == 3
        assert store.get_many(["a", "b"]) == [b"1", b"2"]


def test_a_log_that_is_no_longer_small_is_not_left(tmp_path: Path) -> None:
    log = tmp_path / "store/index.sqlite-wal"
    Store(tmp_path / "store").close()
    with Store(tmp_path / "store", memory=0) as reader:
        with Store(tmp_path / "store") as writer:
            for number in range(200):
                writer.put(f"n/{number}", b"%d" % number)
        assert log.stat().st_size > 256 * 1024
        assert reader.get("n/7") == b"7"
    assert not log.exists()


def test_the_journal_says_what_the_index_says(store: Store) -> None:
    fill(store)
    store.gc(max_size=500_000, grace=0)
    last: dict[str, bytes | None] = {}
    for record in store.index.journal.replay():
        assert record is not None
        last[record.name] = record.digest
    kept = {name: digest.hex() for name, digest in last.items() if digest is not None}
    assert kept == {entry.name: entry.digest for entry in store.entries()}


def test_damage_to_the_journal_costs_the_names_it_hit(store: Store) -> None:
    store.put("first", b"1")
    start = store.index.journal.size()
    store.put("second", b"2")
    end = store.index.journal.size()
    store.put("third", b"3")
    (segment,) = store.index.journal.segments()
    for place in range(start, end):
        flip(store.index.journal.path(segment), place)
        names = [record.name if record else None for record in store.index.journal.replay()]
        assert [name for name in names if name] == ["first", "third"]
        assert None in names
        flip(store.index.journal.path(segment), place)


def test_a_snapshot_that_fails_leaves_no_file_behind(store: Store) -> None:
    def records() -> Iterator[bytes]:
        yield pack_record(("name", None, "bytes", None, 0.0, None, 0))
        raise sqlite3.DatabaseError("database disk image is malformed")

    with pytest.raises(sqlite3.DatabaseError):
        store.index.journal.write_snapshot(9, records())
    assert [*(store.path / "tmp").iterdir()] == []


def test_a_tail_tells_of_an_append_that_stands_in_the_place_of_another(store: Store) -> None:
    journal, beacon = store.index.journal, store.index.beacon
    store.put("first", b"1")
    short, long = (pack_record((name, b"\1" * 32, "bytes", None, 1.0, None, 0)) for name in ("a", "a" * 9))
    for taken_back, put in ((short, short), (long, short), (short, long)):
        with closing(JournalTail(journal, beacon)) as tail:
            journal.append(taken_back)
            assert [record.name for record in tail.poll() or ()] == ["a" * (9 if taken_back == long else 1)]
            journal.retract(taken_back)
            journal.append(put)
            assert tail.poll() is None
            assert tail.poll() == []
            store.put("next", b"2")
            assert [record.name for record in tail.poll() or ()] == ["next"]
            store.delete("next")


def test_a_busy_index_makes_writers_wait_and_readers_not(store: Store) -> None:
    store.put("a", b"x")

    def put() -> float:
        store.put("b", b"y")
        return time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        with store.index.write():
            writer = pool.submit(put)
            # In a thread that does not hold the lock: with the lock held, the call would hang.
            assert pool.submit(store.get, "a").result(60) == b"x"
            wait_for_call(Index.transact)
            assert not writer.done()
            released = time.monotonic()
        assert writer.result(60) >= released
    assert store.get("b") == b"y"


def test_known_bytes_begin_no_pack_and_are_counted_once(store: Store) -> None:
    store.put("a", text(500))
    with Store(store.path) as other:
        for name in ("b", "c"):
            other.put(name, text(500))
        assert len(other.objects.packs.ids()) == 1
        other.put("d", text(600))  # begins a pack of its own
        end = other.objects.packs.path(3).stat().st_size
        other.put_many([("e", text(500)), ("f", text(700)), ("g", text(700)), ("b", text(600))])
        assert other.get_many(list("abcdefg")) == [text(size) for size in (500, 600, 500, 600, 500, 700, 700)]
        appended = other.objects.packs.path(3).stat().st_size - end
    _, _, length = payload(store, "f")
    assert appended == HEAD_SIZE + length
    recount(store)


def test_a_pack_cut_short_behind_its_writer_is_left(store: Store) -> None:
    store.put("a", text(500))
    path, _, _ = payload(store, "a")
    os.truncate(path, 20)
    store.put("b", text(600))
    assert store.get("b") == text(600)
    assert store.get("a") is None


def test_a_pack_removed_behind_its_writer_is_left_within_a_second(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", text(500))
    payload(store, "a")[0].unlink()
    pass_time(monkeypatch, 1.05)
    store.put("b", text(600))
    store.objects.packs.close()
    assert store.get("b") == text(600)
