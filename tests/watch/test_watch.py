"""`castore watch` adds files once they are whole, and forgets only files that it was asked to forget."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from castore import Store
from castore.watch.entry_sources import remember
from castore.watch.folder import WatchedFolder, is_temporary
from tests.watch.conftest import (
    ENVIRONMENT,
    Watch,
    Watching,
    castore,
    names,
    run,
)


def test_files_are_added_as_they_are_closed_and_when_they_change(
    store: Store, folder: Path, watch: Watch
) -> None:
    watching = watch()
    (folder / "a.txt").write_text("one")
    assert watching.until("added") == {
        "event": "added", "path": str(folder / "a.txt"), "name": "in/a.txt", "size": 3, "reason": "",
    }  # fmt: skip
    assert store.get("in/a.txt") == b"one"
    (folder / "a.txt").write_text("two")
    watching.until("changed", "in/a.txt")
    assert store.get("in/a.txt") == b"two"
    assert watching.end() == 0


def test_files_of_a_new_folder_are_told_of_once(store: Store, folder: Path, watch: Watch) -> None:
    (folder / "a").write_text("a file")
    watching = watch("--mirror")
    for round_ in range(3):
        (folder / "a").unlink() if round_ == 0 else shutil.rmtree(folder / "a")
        (folder / "a").mkdir()
        for name in "bcd":
            (folder / "a" / f"{name}{round_}").write_text(f"{name}{round_}")
        for name in "bcd":
            watching.until("added", f"in/a/{name}{round_}")
    assert watching.end() == 0
    told = Counter(watching.told("added"))
    assert set(told.values()) == {1}, told


def test_a_file_with_two_names_changes_under_both(store: Store, folder: Path, watch: Watch) -> None:
    (folder / "a.txt").write_text("one")
    os.link(folder / "a.txt", folder / "b.txt")
    watching = watch()
    for name in ("in/a.txt", "in/b.txt"):
        watching.until("added", name)
    for text, changed in (("one, two", "a.txt"), ("one, two, three", "b.txt")):
        (folder / changed).write_text(text)
        for name in ("in/a.txt", "in/b.txt"):
            watching.until("changed", name)
            assert store.get(name) == text.encode()
    assert watching.end() == 0


def test_the_catch_up_adds_only_what_changed_while_nobody_watched(
    store: Store, folder: Path, watch: Watch
) -> None:
    for name in ("same", "changes", "touched"):
        (folder / name).write_text(name)
    first = watch()
    for name in ("same", "changes", "touched"):
        first.until("added", f"in/{name}")
    assert first.end(signal.SIGINT) == 0
    (folder / "changes").write_text("changed")
    (folder / "new").write_text("new")
    os.utime(folder / "touched")
    second = watch(settle="0")
    assert second.end() == 0
    assert (second.told("added"), second.told("changed")) == (["in/new"], ["in/changes"])
    third = watch(settle="0")
    assert third.end() == 0
    assert [event["event"] for event in third.events] == ["ready"]


def test_a_file_is_never_added_half(store: Store, folder: Path, watch: Watch) -> None:
    watching = watch()
    with (folder / "slow.bin").open("wb") as file:
        for part in range(4):
            file.write(bytes(100_000))
            file.flush()
            os.fsync(file.fileno())
            # Files settle in the order of their last changes: once the marker is added, the other has settled
            # too, and is kept out only because it is open for writing.
            (folder / f"marker{part}").write_text("x")
            watching.until("added", f"in/marker{part}")
            assert store.entry("in/slow.bin") is None
    assert watching.until("added", "in/slow.bin")["size"] == 400_000
    assert store.get("in/slow.bin") == bytes(400_000)


def test_a_file_that_is_written_while_it_is_read_is_not_added_until_it_is_quiet(
    store: Store, folder: Path, watch: Watch
) -> None:
    """Each rewrite fills the file with one byte: an entry with two different bytes would be half a file."""
    path = folder / "rewritten"
    path.write_bytes(bytes(6_000_000))
    watching = watch(settle="0")
    script = (
        "import sys\nfor number in range(1, 400):\n    "
        "with open(sys.argv[1], 'r+b' if number % 256 else 'wb') "
        "as file: file.write(bytes([number % 256]) * 6_000_000)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, path])
    while writer.poll() is None:
        data = store.get("in/rewritten")
        assert data is None or (len(data), len(set(data))) == (6_000_000, 1), "half of one writing"
        time.sleep(0.02)
    deadline = time.monotonic() + 240
    while store.get("in/rewritten") != path.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert watching.end() == 0


def test_new_folders_moved_folders_and_their_files_are_seen(
    store: Store, folder: Path, watch: Watch, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "b").write_text("b")
    watching = watch("--mirror")
    (folder / "x" / "y" / "z").mkdir(parents=True)
    (folder / "x" / "y" / "z" / "a").write_text("a")
    watching.until("added", "in/x/y/z/a")
    outside.rename(folder / "moved")
    watching.until("added", "in/moved/deep/b")
    (folder / "x").rename(folder / "w")
    watching.until("added", "in/w/y/z/a")
    watching.until("dropped", "in/x/y/z/a")
    (folder / "w" / "y" / "late").write_text("late")
    watching.until("added", "in/w/y/late")
    shutil.rmtree(folder / "moved")
    watching.until("dropped", "in/moved/deep/b")
    assert names(store) == ["in/w/y/late", "in/w/y/z/a"]


def test_without_mirror_nothing_is_ever_dropped(store: Store, folder: Path, watch: Watch) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    watching = watch()
    watching.until("added", "in/b")
    (folder / "a").unlink()
    (folder / "b").rename(folder / "c")
    watching.until("added", "in/c")
    assert watching.end() == 0
    assert watch().end() == 0
    assert names(store) == ["in/a", "in/b", "in/c"]


def test_mirror_drops_what_went_while_nobody_watched_and_nothing_else(
    store: Store, folder: Path, watch: Watch
) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    watch().end_after("added", "in/b")
    store.put("in/by-hand", b"x")
    store.put("other", b"y")
    (folder / "a").unlink()
    second = watch("--mirror")
    assert second.end() == 0
    assert second.told("dropped") == ["in/a"]
    assert names(store) == ["in/b", "in/by-hand", "other"]


def test_mirror_lets_a_file_become_a_folder_and_a_folder_a_file(
    store: Store, folder: Path, watch: Watch
) -> None:
    (folder / "a").write_text("a")
    (folder / "b").mkdir()
    (folder / "b" / "x").write_text("x")
    watching = watch("--mirror")
    watching.until("added", "in/b/x")
    (folder / "a").unlink()
    (folder / "a").mkdir()
    (folder / "a" / "y").write_text("y")
    shutil.rmtree(folder / "b")
    (folder / "b").write_text("b")
    watching.until("added", "in/a/y")
    watching.until("added", "in/b")
    assert names(store) == ["in/a/y", "in/b"]
    watching.end()
    shutil.rmtree(folder / "a")
    (folder / "a").write_text("a again")
    assert watch("--mirror", settle="0").told("added") == ["in/a"]
    assert names(store) == ["in/a", "in/b"]
    assert watching.told("failed") == []


#: Has a watcher tell of each path that it scans.
TELL_SCANS = (
    "import json; from castore.watch.scanner import Scanner; scan = Scanner.scan; Scanner.scan = lambda self,"
    " path: (print(json.dumps({'event': 'scan', 'name': path}), flush=True), scan(self, path))[1]"
)


def test_links_to_nothing_cost_one_look(store: Store, folder: Path, watch: Watch) -> None:
    (folder / "nothing").symlink_to("missing")
    (folder / "circle").symlink_to("circle")
    watching = watch(settle="0", period=TELL_SCANS)
    (folder / "later").symlink_to("missing")
    for number in range(8):  # each is found by a look of its own at what is due
        (folder / f"file{number}").write_text("x")
        watching.until("added", f"in/file{number}")
    assert watching.end() == 0
    looks = Counter(Path(name).name for name in watching.told("scan"))
    assert all(1 <= looks[name] <= 2 for name in ("nothing", "circle", "later")), looks
    assert watching.told("failed") == []


def test_temporary_names_wait_until_they_are_renamed(store: Store, folder: Path, watch: Watch) -> None:
    watching = watch()
    for name in ("a.incomplete", "b.tmp", "c.lock", "tmpab12_xyz", ".~lock.d#"):
        (folder / name).write_text("x")
    (folder / "set.incomplete").mkdir()
    (folder / "set.incomplete" / "data.arrow").write_text("y")
    (folder / "a.incomplete").rename(folder / "a")
    watching.until("added", "in/a")
    (folder / "set.incomplete").rename(folder / "set")
    watching.until("added", "in/set/data.arrow")
    assert names(store) == ["in/a", "in/set/data.arrow"]


@pytest.mark.parametrize("name", ["train.arrow", "tmp.arrow", "template.json", "clock", "x.part2"])
def test_ordinary_names_are_not_temporary(name: str) -> None:
    assert not is_temporary(name)


def test_links_are_not_followed_out_of_the_folder(
    store: Store, folder: Path, watch: Watch, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("key")
    (folder / "real").write_text("real")
    (folder / "inside").symlink_to("real")
    (folder / "outside").symlink_to(secret / "key")
    (folder / "folder").symlink_to(secret)
    (folder / "circle").symlink_to(folder)
    (folder / "nothing").symlink_to("missing")
    watching = watch("--mirror")
    watching.until("added", "in/inside")
    (folder / "real").write_text("changed")
    watching.until("changed", "in/real")
    watching.until("changed", "in/inside")
    assert store.get("in/inside") == b"changed"
    (folder / "inside").unlink()
    watching.until("dropped", "in/inside")
    assert names(store) == ["in/real"]


def test_dependants_are_dropped_at_once_when_their_source_changes(
    store: Store, folder: Path, watch: Watch
) -> None:
    for name in ("raw", "other"):
        (folder / name).write_text(name)
    watching = watch()
    watching.until("added", "in/raw")
    watching.until("added", "in/other")
    store.put("of-raw", b"RAW", metadata={"sources": remember([folder / "raw"])})
    store.put("of-other", b"OTHER", metadata={"sources": remember([folder / "other"])})
    (folder / "raw").write_text("raw, changed")
    stale = watching.until("stale", "of-raw")
    assert stale["reason"] == f"{folder}/raw has 12 bytes, and had 3"
    (folder / "other").unlink()
    watching.until("stale", "of-other")
    assert names(store) == ["in/other", "in/raw"]


def test_dependants_whose_source_changed_while_nobody_watched_are_dropped_by_the_catch_up(
    store: Store, folder: Path, watch: Watch
) -> None:
    (folder / "raw").write_text("raw")
    store.put("derived", b"RAW", metadata={"sources": remember([folder / "raw"])})
    (folder / "raw").write_text("changed")
    assert watch().told("stale") == ["derived"]


def test_a_mount_below_the_folder_and_the_store_in_it_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = root / "store"
    store.mkdir(parents=True)
    (store / "castore.json").write_text("{}")
    (root / "a").write_text("a")
    folder = WatchedFolder(str(root), "in", str(store))
    assert list(folder.files(str(root), print, print)) == [str(root / "a")]
    assert not folder.is_relevant(str(store / "castore.json"))


def test_events_are_printed_in_plain_lines(store: Store, folder: Path) -> None:
    (folder / "a.txt").write_text("one")
    command = castore(store.path, "watch", folder, "--as", "in", "--settle", "0")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "added    in/a.txt (3 B)\n"
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read() == "added 1 file (3 B)\n"
    assert process.wait(300) == 0
    process.stdout.close()


def test_a_store_is_made_and_a_folder_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    command = castore(tmp_path / "new" / "store", "watch", tmp_path / "later", "--as", "in", "--json")
    process = subprocess.Popen(
        [*command, "--settle", "0"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watching = Watching(process)
    try:
        assert watching.until("waiting")["path"] == str(tmp_path / "later")
        (tmp_path / "later").mkdir()
        watching.until("ready")
        (tmp_path / "later" / "a").write_text("a")
        watching.until("added", "in/a")
        assert watching.end() == 0
    finally:
        _end(watching)
    with Store(tmp_path / "new" / "store") as store:
        assert store.get("in/a") == b"a"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_waiting_for_a_folder_ends_at_a_signal(tmp_path: Path, number: int) -> None:
    command = castore(tmp_path / "store", "watch", tmp_path / "later", "--as", "in", "--json")
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watching = Watching(process)
    try:
        watching.until("waiting")
        assert watching.end(number) == 0
        assert watching.error() == ""
    finally:
        _end(watching)


def _end(watching: Watching) -> None:
    watching.process.kill()
    watching.process.wait()
    assert watching.process.stderr is not None
    watching.process.stderr.close()
    watching.reader.join()


def test_restoring_makes_no_store(tmp_path: Path, folder: Path) -> None:
    ran = run(tmp_path / "nothing", "watch", folder, "--as", "in", "--restore")
    assert ran.returncode == 1
    assert "there is no store at" in ran.stderr
    assert not (tmp_path / "nothing").exists()
