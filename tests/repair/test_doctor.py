"""The index, the journal or a process goes missing: nothing that can be recovered is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from castore import Store, StoreError
from castore.errors import InvalidValueError
from castore.gc import leftovers
from castore.index.database import Index
from castore.objects.directory import ObjectDirectory
from castore.repair import doctor
from tests.helpers import LONG, in_processes

NAMES = [f"folder/{i:02d}" for i in range(20)]


def filled(path: Path) -> Store:
    store = Store(path, memory=0)
    store.put_many((name, name.encode() * 50) for name in NAMES)
    store.put("large", os.urandom(600_000), metadata={"kind": "noise"}, pin=True)
    return store


def remove_index(path: Path) -> None:
    for file in path.glob("index.sqlite*"):
        file.unlink()


def test_a_missing_index_is_refused_rather_than_taken_for_an_empty_store(tmp_path: Path) -> None:
    filled(tmp_path / "store").close()
    remove_index(tmp_path / "store")
    with pytest.raises(StoreError, match="rebuild-index"):
        Store(tmp_path / "store")
    assert not (tmp_path / "store" / "index.sqlite").exists(), "an empty one would pass for a damaged one"
    (finding,) = doctor.examine(tmp_path / "store")
    assert not finding.mended
    assert "missing" in finding.what
    assert "rebuild-index" in finding.advice


def test_a_rebuilt_index_knows_every_entry_again(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    store.delete(NAMES[0])
    before = [entry._replace(accessed=0) for entry in store.entries()]
    store.close()
    remove_index(tmp_path / "store")
    findings, rebuilt = doctor.rebuild_index(tmp_path / "store")
    assert findings
    assert rebuilt.entries == len(NAMES)
    with Store(tmp_path / "store", memory=0) as again:
        assert [entry._replace(accessed=0) for entry in again.entries()] == before
        assert again.get(NAMES[0]) is None
        assert all(again.get(name) == name.encode() * 50 for name in NAMES[1:])
        assert again.verify().bad == []
    assert doctor.examine(tmp_path / "store") == []


def test_what_a_rebuild_reads_for_long_it_reads_before_writers_have_to_wait(tmp_path: Path) -> None:
    """Writers give up after two minutes, and reading a terabyte of raw objects takes longer."""
    path, size = tmp_path / "store", 700_000
    with filled(path) as store:
        store.put_many((f"raw/{number}", random.Random(number).randbytes(size)) for number in range(3))
    refused: list[int] = []
    read: list[int] = []

    def progress(done: int) -> None:
        read.append(done)
        with closing(sqlite3.connect(path / "index.sqlite", timeout=0, isolation_level=None)) as db:
            try:
                db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                refused.append(done)

    _, rebuilt = doctor.rebuild_index(path, progress)
    assert rebuilt.entries == len(NAMES) + 4
    assert read.count(size) == 3
    assert refused, "what is quick to read is read under the lock"
    assert size not in refused
    with Store(path, memory=0) as again:
        assert again.verify().bad == []


def test_an_open_store_goes_on_after_its_index_was_replaced(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    (tmp_path / "store" / "index.sqlite").write_bytes(b"not a database" * 1000)
    for file in tmp_path.glob("store/index.sqlite-*"):
        file.unlink()
    doctor.rebuild_index(tmp_path / "store")
    assert store.get(NAMES[3]) == NAMES[3].encode() * 50
    store.put("afterwards", b"new")
    with Store(tmp_path / "store") as other:
        assert other.get("afterwards") == b"new"
    store.close()


def test_a_second_look_finds_nothing_that_the_first_could_mend(tmp_path: Path) -> None:
    with filled(tmp_path / "store") as store:
        store.index.connection().execute("UPDATE totals SET entries = 7, stored = 1")
        stray = store.path / "objects" / "ab"
        stray.mkdir(exist_ok=True)
        (stray / ("ab" + "0" * 62)).write_bytes(b"nobody's")
    first = doctor.examine(tmp_path / "store")
    assert len(first) == 2
    assert all(finding.mended for finding in first)
    assert doctor.examine(tmp_path / "store") == []


def test_a_late_snapshot_does_not_bring_deleted_names_back(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    journal = store.index.journal
    with store.index.write():
        number = journal.switch()
    records = list(store.index._name_records())  # the slow process reads the index ...
    store.delete(NAMES[5])
    store.index.snapshot_journal()  # ... while a quick one does all of it ...
    journal.write_snapshot(number, records)  # ... and is overtaken
    store.close()
    remove_index(tmp_path / "store")
    doctor.rebuild_index(tmp_path / "store")
    with Store(tmp_path / "store") as again:
        assert again.get(NAMES[5]) is None
        assert again.get(NAMES[6]) is not None


def test_a_beacon_from_before_a_power_cut_does_not_turn_time_back(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    store.index.snapshot_journal()
    store.close()
    (tmp_path / "store" / "locks" / "beacon").write_bytes(bytes(24))
    with Store(tmp_path / "store") as store:
        store.put(NAMES[1], b"newer")
    remove_index(tmp_path / "store")
    doctor.rebuild_index(tmp_path / "store")
    with Store(tmp_path / "store") as again:
        assert again.get(NAMES[1]) == b"newer"


def test_computing_a_key_from_inside_its_own_computation_is_an_error(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        with pytest.raises(InvalidValueError, match="asks for its own result"):
            store.get_or_compute("key", lambda: store.get_or_compute("key", lambda: b"1"))
        with (
            Store(tmp_path / "store") as other,
            pytest.raises(InvalidValueError, match="asks for its own result"),
        ):
            store.get_or_compute("key", lambda: other.get_or_compute("key", lambda: b"1"))
        assert store.get_or_compute("key", lambda: b"2") == b"2"


@pytest.mark.torture
def test_a_child_forked_in_the_middle_of_writes_can_write(tmp_path: Path) -> None:
    children = 25 if LONG else 10
    with Store(tmp_path / "store", memory=0) as store:
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                store.put(f"parent/{number % 100}", b"%d" % number)
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for child in range(children):
                pid = os.fork()
                if pid == 0:
                    store.put(f"child/{child}", b"written")
                    os._exit(0)
                deadline = time.monotonic() + 120
                while os.waitpid(pid, os.WNOHANG) == (0, 0):
                    assert time.monotonic() < deadline, "the child hangs"
                    time.sleep(0.002)
        finally:
            stop.set()
            writer.join()
        assert all(store.get(f"child/{child}") == b"written" for child in range(children))


def test_a_forked_child_keeps_its_writes_when_everybody_else_closes(tmp_path: Path) -> None:
    """SQLite's last connection deletes the WAL: a child that inherited a connection must count as one."""
    store = Store(tmp_path / "store", memory=0)
    store.put("first", b"1")
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        store.put("child/0", b"0")
        os.read(go_read, 1)  # until the parent has closed, and others have opened and closed
        for number in range(1, 5):
            store.put(f"child/{number}", b"%d" % number)
        os._exit(0)
    os.close(go_read)
    while store.get("child/0") is None:
        time.sleep(0.01)
    store.close()
    visit = f"import castore; s = castore.Store({str(store.path)!r}); s.put('visitor', b'v'); s.close()"
    subprocess.run([sys.executable, "-c", visit], check=True)
    os.close(go_write)
    assert os.waitpid(pid, 0)[1] == 0
    with Store(tmp_path / "store", memory=0) as again:
        assert [again.get(f"child/{number}") for number in range(5)] == [b"%d" % n for n in range(5)]
        assert again.get("visitor") == b"v"


def test_a_shared_store_ignores_the_umask(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        assert (store.path / "locks" / "beacon").stat().st_mode & 0o777 == 0o600
    import grp

    from castore import settings

    old = os.umask(0o077)
    try:
        group = grp.getgrgid(os.getgid()).gr_name
        settings.create(tmp_path / "shared", settings.Settings(shared=group))
        with Store(tmp_path / "shared") as store:
            store.put("small", b"1")
            store.put("large", os.urandom(100_000))
            store.index.snapshot_journal()
            store.put("more", b"2")
    finally:
        os.umask(old)
    for path in (tmp_path / "shared").rglob("*"):
        if path.is_file() and path.name not in (".gitignore", "CACHEDIR.TAG"):
            assert path.stat().st_mode & 0o040, f"{path} cannot be read by the group"
        elif path.is_dir():
            assert path.stat().st_mode & 0o2070 == 0o2070, f"{path} is closed to the group"


def test_a_second_store_in_the_process_leaves_the_locks_of_the_first(tmp_path: Path) -> None:
    """Closing any descriptor of the index drops SQLite's locks; the next connection would delete the WAL."""
    first = Store(tmp_path / "store", memory=0)
    first.put("a", b"1")
    with Store(tmp_path / "store", memory=0) as second:
        second.put("b", b"2")
        visit = f"import castore; castore.Store({str(first.path)!r}).close()"
        subprocess.run([sys.executable, "-c", visit], check=True)
        first.put("c", b"3")
        look = f"import castore; print(castore.Store({str(first.path)!r}).get('c'))"
        seen = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True)
    assert seen.stdout.strip() == "b'3'"
    first.close()


def test_a_put_while_the_index_is_replaced_is_refused_and_holds_nobody_up(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    remove_index(tmp_path / "store")
    store.index.beacon.words[2] += 1  # as `doctor` does when it sets a damaged index aside
    with pytest.raises(StoreError, match="rebuilt"):
        store.put("x", b"1")
    doctor.rebuild_index(tmp_path / "store")
    done = threading.Thread(target=store.put, args=("x", b"2"))
    done.start()
    done.join(120)
    assert store.get("x") == b"2"
    store.close()


def test_doctor_finds_nothing_wrong_with_a_sound_store_that_is_in_use(tmp_path: Path) -> None:
    """The journal is a step ahead of the index, and neither stands still while it is read."""
    path, done = tmp_path / "store", tmp_path / "done"
    filled(path).close()
    turns: Any = multiprocessing.get_context("fork").Value("i")

    def examine() -> list[str]:
        found, looks, begun = [], 0, time.monotonic()
        try:
            while looks < 25 or turns.value <= 100:
                assert time.monotonic() < begun + 60, f"the others had {turns.value} turns"
                found += [finding.what for finding in doctor.examine(path)]
                looks += 1
        finally:
            done.touch()
        print(f"{turns.value} turns of three processes while doctor looked {looks} times")
        # gc forgets an object a moment before it unlinks it: a process that comes in between may unlink it.
        return [what for what in found if "leftover files" not in what]

    def use(number: int) -> None:
        chance = random.Random(number)
        with Store(path, memory=0) as store:
            while not done.exists():
                name = f"n/{chance.randrange(200)}"
                with turns.get_lock():
                    turns.value += 1
                match chance.randrange(40):
                    case 0:
                        store.gc(max_size=1_000_000, grace=0)
                    case 1:
                        store.index.snapshot_journal()
                    case less if less < 10:
                        store.delete(name)
                    case _:
                        store.put(name, chance.randbytes(chance.choice((100, 2000, 30_000))))

    found, *_ = in_processes(4, lambda number: use(number) if number else examine())
    assert found == []
    assert doctor.examine(path) == []


def test_doctor_reports_only_what_it_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "store").close()
    (tmp_path / "store/objects/packs/00000063.pack").write_bytes(b"nobody registered it")
    find = leftovers.find

    def find_and_register(index: Index, objects: ObjectDirectory) -> Iterator[leftovers.Leftover]:
        yield from find(index, objects)
        with index.write() as txn:  # a rebuild has found it in the meantime
            txn.execute("INSERT INTO packs (id, created) VALUES (?, ?)", (0x63, time.time()))

    with monkeypatch.context() as patch:
        patch.setattr(leftovers, "find", find_and_register)
        assert doctor.examine(tmp_path / "store") == []
    with Store(tmp_path / "store", memory=0) as store, store.index.write() as txn:
        txn.retire_pack(0x63)
    (finding,) = doctor.examine(tmp_path / "store")
    assert "leftover files of dead processes: 1" in finding.what


def test_a_journal_that_is_rotated_while_it_is_listed_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that a new snapshot replaces are unlinked at once, wherever a reader is."""
    with filled(tmp_path / "store") as store:
        journal = store.index.journal
        store.index.snapshot_journal()
        store.put("after", b"the snapshot")
        store.delete(NAMES[0])
        names = {entry.name for entry in store.entries()}
        for method in ("snapshots", "segments"):
            listing = getattr(journal, method)
            rotated: list[int] = []

            def list_and_rotate(
                listing: Callable[[], list[int]] = listing, rotated: list[int] = rotated
            ) -> list[int]:
                found = listing()
                if not rotated:
                    rotated.append(1)
                    store.index.snapshot_journal()
                return found

            with monkeypatch.context() as patch:
                patch.setattr(journal, method, list_and_rotate)
                said = list(journal.replay())
            assert rotated
            assert {record.name for record in said if record is not None} == names
            assert None not in said
