"""`castore watch --replace` makes a folder small in place, and never loses a byte of it."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from castore import Store
from castore.index.figures import PrefixSize
from castore.names import LINKS
from castore.records import Entry, EntrySpec
from castore.system.temporary import pid_namespace, process_started
from castore.watch import entry_sources, link_registry, replace
from castore.watch.adder import Adder
from castore.watch.file_lease import FileBusyError, Snapshot
from castore.watch.find_mount import find_mount
from castore.watch.folder import PART_PREFIX, SWAP_PREFIX, WatchedFolder
from castore.watch.reports import Event
from castore.watch.restore import restore, restore_all
from castore.watch.scanner import Scanner, Stop
from castore.watch.task import Task, WatchOptions
from tests.helpers import flip, noise, payload, text
from tests.watch.conftest import Watch, make_file, real_bytes, run


def test_files_become_links_with_the_same_bytes_and_times(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = {f"{kind}/{number}": text(300_000, seed=number) for number in range(3) for kind in "ab"}
    for name, content in data.items():
        make_file(folder, name, content).chmod(0o640)
    before = {name: (folder / name).stat() for name in data}
    taken = real_bytes(folder)
    watching = watch("--replace")
    for name in data:
        watching.until("replaced", f"in/{name}")
    assert watching.end() == 0
    for name, content in data.items():
        path = folder / name
        entry = store.entry(f"in/{name}")
        assert entry is not None
        held = link_registry.held_name(entry.digest, before[name].st_mtime_ns, str(path))
        assert os.readlink(path) == f"{mountpoint}/{held}"
        assert path.read_bytes() == content
        assert path.lstat().st_mtime_ns == before[name].st_mtime_ns
        assert abs(path.stat().st_mtime - before[name].st_mtime) < 1e-6
        assert path.stat().st_size == before[name].st_size
    assert real_bytes(folder) < taken / 10
    figures = store.stat()
    assert (figures.entries, len(store)) == (len(data), len(data))
    size = sum(map(len, data.values()))
    assert (figures.logical, figures.prefixes) == (size, [PrefixSize("in", len(data), size)])
    store.gc(max_size=0, grace=0)
    assert all((folder / name).read_bytes() == content for name, content in data.items()), (
        "gc took a link's bytes"
    )


def test_open_and_mapped_files_keep_their_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = text(2_000_000)
    path = make_file(folder, "a", data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        watch("--replace").until("replaced")
        assert path.is_symlink()
        assert mapped[:] == data
        assert file.read() == data


def test_writing_in_place_to_what_was_replaced_is_refused_and_changes_nothing(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Logs do not belong into such a folder: a tool that pauses longer than files take to settle fails."""
    path = make_file(folder, "log", b"one\n")
    watching = watch("--replace")
    watching.until("replaced")
    for write in (lambda: path.open("ab"), lambda: path.open("r+b"), lambda: path.chmod(0o600)):
        with pytest.raises(OSError, match="Read-only file system"):
            write()
    assert path.read_bytes() == b"one\n"
    assert watching.end() == 0
    assert store.get("in/log") == b"one\n"


def test_a_file_open_for_writing_is_left_alone(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = make_file(folder, "a", b"one")
    watch().end_after("added")
    with path.open("r+b") as file:
        watching = watch("--replace")
        for name in "bc":  # the second settles when `a`, scanned as the watcher started, was scanned again
            make_file(folder, name, name.encode())
            watching.until("replaced", f"in/{name}")
        assert not path.is_symlink()
        file.write(b"two")
    watching.until("replaced", "in/a")
    assert path.read_bytes() == b"two"


def test_a_swap_is_taken_back_when_the_file_was_written_meanwhile(
    store: Store, folder: Path, mountpoint: Path
) -> None:
    """Written between scan and swap (in place, by rename, or by opening), the file stays as written."""
    mount = find_mount(store, "in")

    def write_in_place(path: Path) -> None:
        path.write_bytes(b"other")

    def write_anew(path: Path) -> None:
        path.with_name("new").write_bytes(b"other")
        path.with_name("new").rename(path)

    def remove(path: Path) -> None:
        path.unlink()

    def set_permissions(path: Path) -> None:
        path.chmod(0o600)  # as tools do right after a rename; a restored file must have these bits

    left = {"write_in_place": b"other", "write_anew": b"other", "set_permissions": b"bytes"}
    told: list[Exception | None] = []
    for touch in (write_in_place, write_anew, remove, set_permissions):
        path = make_file(folder, touch.__name__, b"bytes")
        entry = store.put_file(f"in/{path.name}", path)
        with Snapshot(str(path)) as file:
            touch(path)
            replace.replace(
                store,
                WatchedFolder(str(folder), "in", str(store.path)),
                mount,
                [(file, entry)],
                lambda size: None,
                lambda *done: told.append(done[2]),
            )
        assert not path.is_symlink()
        after = store.entry(entry.name)
        assert after is not None
        assert not after.pinned
    assert [type(error) for error in told] == [FileBusyError] * 4
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == left


def test_writers_racing_with_swaps_lose_nothing(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Tools write a new file and rename it over the old one repeatedly, while everything is replaced."""
    watching = watch("--replace", settle="0")
    latest: dict[str, bytes] = {}
    chance = random.Random(4)
    for _ in range(300):
        name = f"{chance.randrange(8)}"
        latest[name] = chance.randbytes(chance.randrange(1, 20_000))
        temporary = folder / f"{name}.tmp"
        temporary.write_bytes(latest[name])
        temporary.rename(folder / name)
        time.sleep(chance.random() * 0.01)
    deadline = time.monotonic() + 240
    while not all((folder / name).is_symlink() for name in latest):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert {name: (folder / name).read_bytes() for name in latest} == latest
    assert watching.end() == 0


def test_what_cannot_be_read_back_is_not_replaced(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = text(300_000)
    path = make_file(folder, "a", data)
    watch().end_after("added")
    file, offset, _ = payload(store, "in/a")
    flip(file, offset + 100)
    shorter = "from castore.watch import replace; replace._MOUNT_SECONDS = 0.5"
    watching = watch("--replace", ready=False, period=shorter)
    kept = watching.until("kept", "in/a")
    assert "could not be read back through the mount" in kept["reason"]
    assert not path.is_symlink()
    assert path.read_bytes() == data


def test_files_with_other_hard_links_stay(store: Store, folder: Path, mountpoint: Path, watch: Watch) -> None:
    path = make_file(folder, "a", b"a")
    os.link(path, folder.with_name("another"))
    assert "hard links" in watch("--replace", ready=False).until("kept", "in/a")["reason"]
    assert not path.is_symlink()


def test_files_that_a_link_cannot_stand_for_stay(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Regression: a set-user-ID file of another user came back as root's."""
    make_file(folder, "privileged", b"a").chmod(0o4755)
    make_file(folder, "attributes", b"a")
    try:
        os.setxattr(folder / "attributes", "user.origin", b"a browser")
        reason = "it has an extended attribute (user.origin), which would be lost"
    except OSError:  # a file system without them
        (folder / "attributes").chmod(0o2755)
        reason = "it has a set-user-ID"
    watching = watch("--replace", ready=False)
    told = {event["name"]: event["reason"] for event in (watching.until("kept"), watching.until("kept"))}
    assert "it has a set-user-ID" in told["in/privileged"]
    assert reason in told["in/attributes"]
    assert watching.end() == 0


def test_the_owner_comes_back_and_no_record_makes_a_set_user_id_file(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    if os.geteuid():
        pytest.skip("files of others take root")
    path = make_file(folder, "a", b"a" * 100)
    os.chown(path, 1234, 2345)
    path.chmod(0o640)
    watching = watch("--replace")
    watching.until("replaced", "in/a")
    assert watching.end() == 0
    (held,) = store.index.own_entries(LINKS)
    with store.index.write() as txn:
        blob = txn.blob(bytes.fromhex(held.digest))
        assert blob is not None
        text = json.dumps(held.metadata | {"mode": 0o4640})
        txn.delete_entry(held.name)
        txn.set_entry(EntrySpec(held.name, "bytes", text, None, True), blob, held.created, added=False)
    assert run(store.path, "watch", folder, "--as", "in", "--restore").returncode == 0
    found = path.lstat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 2345, 0o640)


@pytest.mark.parametrize("before", ["added", "replaced", "replaced, and no watcher"])
def test_other_bytes_of_the_same_size_and_time_are_put_and_not_lost(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, before: str
) -> None:
    """Regression: archives set one mtime for all; the link in the new file's place led to the old bytes."""

    def unpack(data: bytes) -> None:
        temporary = folder / "a.tmp"
        temporary.write_bytes(data)
        os.utime(temporary, (1.5e9, 1.5e9))
        temporary.rename(folder / "a")

    unpack(b"one" * 100)
    watching = watch(*([] if before == "added" else ["--replace"]))
    watching.until(before.partition(",")[0], "in/a")
    if before != "replaced":
        assert watching.end() == 0
    unpack(b"two" * 100)
    if before != "replaced":
        watching = watch("--replace", ready=False)
    watching.until("changed", "in/a")
    watching.until("replaced", "in/a")
    assert (folder / "a").read_bytes() == b"two" * 100 == store.get("in/a")
    assert watching.end() == 0


def test_a_file_with_an_mtime_ahead_is_replaced(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = make_file(folder, "a", b"a" * 100)
    os.utime(path, (4e9, 4e9))
    watch("--replace", ready=False).until("replaced", "in/a")
    assert (path.read_bytes(), path.lstat().st_mtime) == (b"a" * 100, 4e9)


def test_at_any_kill_each_name_holds_its_file_or_its_link(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = {f"{number:03}": text(20_000 + number, seed=number) for number in range(150)}
    for name, content in data.items():
        make_file(folder, name, content)
    chance = random.Random(7)
    for _ in range(12):
        watching = watch("--replace", settle="0", ready=False)
        watching.until("replaced")
        time.sleep(chance.random() * 0.15)
        watching.end(signal.SIGKILL)
        for name, content in data.items():
            assert (folder / name).read_bytes() == content
        if all((folder / name).is_symlink() for name in data):
            break
    watch("--replace", settle="0").end()
    assert sorted(path.name for path in folder.iterdir()) == sorted(data), "temporary files were left"
    store.gc(max_size=0, grace=0)
    for name, content in data.items():
        assert (folder / name).is_symlink()
        assert (folder / name).read_bytes() == content


def dead_process() -> str:
    """The mark of a killed process in a temporary name."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = process_started(process.pid)
        mark = f"{pid_namespace()}-{process.pid}-{started}"
        process.communicate(b"\n")
    return mark


def test_what_a_kill_behind_the_exchange_leaves_is_cleaned_or_put_back(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    paths = [make_file(folder, name, name.encode() * 100) for name in ("kept", "written")]
    first = watch("--replace")
    first.until("replaced", "in/kept")
    first.until("replaced", "in/written")
    first.end()
    leftovers = [Path(replace.temporary_beside(str(path), SWAP_PREFIX)) for path in paths]
    own = "-".join(leftovers[0].name.removeprefix(SWAP_PREFIX).split("-")[:3])
    dead = dead_process()
    leftovers = [path.with_name(path.name.replace(own, dead)) for path in leftovers]
    leftovers[0].write_bytes(b"kept" * 100)
    leftovers[1].write_bytes(b"somebody wrote to it at that moment")
    for path in leftovers:  # as if they were the files that the links took the places of
        note_inode(store, path.lstat().st_ino, "kept" if path == leftovers[0] else "written")
    (folder / f"{PART_PREFIX}{dead}-0123456789abcdef").write_bytes(b"half a file")
    (folder / f"{SWAP_PREFIX}{own}-0123456789abcdef").symlink_to("of a process that lives")
    for path in folder.iterdir():
        if path.name.startswith((SWAP_PREFIX, PART_PREFIX)):
            replace.clean(store, str(path))
    assert paths[0].read_bytes() == b"kept" * 100
    assert paths[0].is_symlink()
    assert paths[1].read_bytes() == b"somebody wrote to it at that moment"
    assert len(list(folder.iterdir())) == 3, "what a living process makes was touched"


def note_inode(store: Store, inode: int, name: str) -> None:
    """Have the held entry of a link tell of that file."""
    [held] = [one for one in store.index.own_entries(LINKS) if one.name.endswith(f"/{name}")]
    with store.index.write() as txn:
        blob = txn.blob(bytes.fromhex(held.digest))
        assert blob is not None
        text = json.dumps(held.metadata | {"inode": inode})
        txn.delete_entry(held.name)
        txn.set_entry(EntrySpec(held.name, "bytes", text, None, True), blob, held.created, added=False)


def test_files_of_others_under_castores_own_names_are_left_alone(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Regression: a pipe made the watcher wait for ever, a folder ended it, a file took the link's place."""
    paths = [make_file(folder, name, name.encode() * 100) for name in ("file", "pipe", "deep")]
    watching = watch("--replace")
    for path in paths:
        watching.until("replaced", f"in/{path.name}")
    assert watching.end() == 0
    own = "-".join(Path(replace.temporary_beside("/a", SWAP_PREFIX)).name.split("-")[2:5])
    dead = dead_process()
    strange = [Path(replace.temporary_beside(str(path), SWAP_PREFIX).replace(own, dead)) for path in paths]
    assert all(dead in path.name for path in strange)
    if os.geteuid():
        pytest.skip("files of others take root")
    strange[0].write_bytes(b"of somebody else")
    os.chown(strange[0], 1234, 1234)
    os.mkfifo(strange[1])
    strange[2].mkdir()
    watching = watch("--replace")
    make_file(folder, "another", b"another" * 100)
    watching.until("replaced", "in/another")
    assert watching.end() == 0
    assert run(store.path, "watch", folder, "--as", "in", "--restore").returncode == 0
    assert [path.read_bytes() for path in paths] == [path.name.encode() * 100 for path in paths]
    assert strange[0].read_bytes() == b"of somebody else"
    assert all(path.exists() for path in strange)


def test_a_file_that_takes_the_place_of_a_restored_one_changes_nothing_else(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, tmp_path: Path
) -> None:
    """Regression: a link in the place of the half-written file had its target given away."""
    path = make_file(folder, "a", noise(3_000_000))
    path.chmod(0o666)
    watch("--replace").end_after("replaced", "in/a")
    victim = make_file(tmp_path, "victim", b"secret")
    victim.chmod(0o600)
    before = victim.stat()
    (held,) = store.index.own_entries(LINKS)

    def swap(size: int) -> None:
        for part in folder.glob(f"{PART_PREFIX}*"):
            if not part.is_symlink():
                part.unlink()
                part.symlink_to(victim)

    with pytest.raises(FileBusyError):
        restore(store, str(path), held, swap)
    after = victim.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (
        before.st_mode, before.st_uid, before.st_mtime_ns,
    )  # fmt: skip
    assert path.is_symlink()
    assert path.read_bytes() == noise(3_000_000)


@pytest.mark.parametrize("mirror", [False, True])
def test_a_folder_that_becomes_a_link_is_not_followed(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, tmp_path: Path, mirror: bool
) -> None:
    """Regression: a path that was due was looked at through the link, and the file there was replaced."""
    outside = make_file(tmp_path / "outside", "model", b"not in the folder" * 100)
    watching = watch("--replace", *(["--mirror"] if mirror else []), settle="1s")
    inside = make_file(folder, "deep/model", b"in the folder" * 100)
    inside.parent.rename(tmp_path / "elsewhere")
    inside.parent.symlink_to(outside.parent)
    os.utime(outside)
    make_file(folder, "later", b"later")
    watching.until("replaced", "in/later")
    make_file(folder, "still later", b"later")
    watching.until("replaced", "in/still later")
    assert watching.end() == 0
    assert not outside.is_symlink()
    assert outside.read_bytes() == b"not in the folder" * 100
    assert "in/deep/model" not in store


@pytest.mark.usefixtures("mountpoint")
def test_a_link_keeps_its_pin_when_another_watcher_gives_up_meanwhile(store: Store, folder: Path) -> None:
    """The other has bound the entry as well, found the file busy, and takes its record back."""
    mount, path = find_mount(store, "in"), make_file(folder, "a", b"bytes" * 100)

    def give_up(size: int) -> None:
        entry = store.entry("in/a")
        if entry is not None and link_registry.target_of(entry) is not None:
            link_registry.unbind_links(store, [entry])

    with Snapshot(str(path)) as file:
        replace.replace(
            store,
            WatchedFolder(str(folder), "in", str(store.path)),
            mount,
            [(file, put_as_watched(store, path))],
            give_up,
            lambda file, entry, error: None,
        )
    assert path.is_symlink()
    link_registry.unbind_links(store, [bound(store)])  # and once more, when the link is there
    assert bound(store).pinned
    store.gc(max_size=0, grace=0)
    assert path.read_bytes() == b"bytes" * 100


@pytest.mark.usefixtures("mountpoint")
def test_a_copy_that_took_castores_own_attributes_along_is_replaced(
    store: Store, folder: Path, watch: Watch
) -> None:
    """As `cp -aL` and `rsync -aXL` do, of a file in a mount."""
    path = make_file(folder, "a", b"bytes" * 100)
    os.setxattr(path, "user.castore.size", b"500")
    watch("--replace").end_after("replaced")
    assert path.is_symlink()


@pytest.mark.usefixtures("mountpoint")
def test_folders_of_version_control_are_left_alone(store: Store, folder: Path, watch: Watch) -> None:
    make_file(folder, ".git/HEAD", b"ref: refs/heads/main\n")
    make_file(folder, "a", b"bytes")
    watch("--replace").end_after("replaced")
    assert not (folder / ".git/HEAD").is_symlink()
    assert [entry.name for entry in store.entries()] == ["in/a"]


@pytest.mark.usefixtures("mountpoint")
def test_a_file_that_became_a_link_while_it_was_put_keeps_the_links_record(
    store: Store, folder: Path
) -> None:
    mount, path = find_mount(store, "in"), make_file(folder, "a", b"bytes" * 100)
    failed: list[str] = []
    adder = Adder(store, None, print, lambda path, error: failed.append(path), lambda size: None)
    adder.add("in/a", str(path), None)
    with Snapshot(str(path)) as file:
        entry = put_as_watched(store, path)
        replace.replace(
            store,
            WatchedFolder(str(folder), "in", str(store.path)),
            mount,
            [(file, entry)],
            lambda size: None,
            print,
        )
    assert path.is_symlink()
    adder.flush()
    assert failed == [str(path)]
    link_registry.unpin_file(store, entry, str(path))
    assert bound(store).pinned


@pytest.mark.parametrize("mirror", [False, True])
def test_a_renamed_link_whose_old_name_is_scanned_first_keeps_its_bytes(
    store: Store, folder: Path, mountpoint: Path, mirror: bool
) -> None:
    """Regression: the names of a rename could be due a moment apart, and the old one let the bytes go."""
    mount, path = find_mount(store, "in"), make_file(folder, "a", b"bytes" * 100)
    path.chmod(0o640)
    with Snapshot(str(path)) as file:
        replace.replace(
            store,
            WatchedFolder(str(folder), "in", str(store.path)),
            mount,
            [(file, put_as_watched(store, path))],
            lambda size: None,
            print,
        )
    path.rename(folder / "b")
    events: list[Event] = []
    shown = WatchedFolder(str(folder), "in", str(store.path))
    task = Task(store, shown, WatchOptions(mirror=mirror, replace=True, settle=0.0), events.append)
    scanner = Scanner(task, lambda path, seconds: None, Stop())
    scanner.scan_missing(list(store.entries("in/a")))
    store.gc(max_size=0, grace=0)
    assert (folder / "b").read_bytes() == b"bytes" * 100
    scanner.scan(str(folder / "b"))
    scanner.flush()
    entry = store.entry("in/b")
    assert entry is not None
    assert entry.pinned
    assert [event.event for event in events] == ["dropped" if mirror else "unpinned", "relinked"]
    store.gc(max_size=0, grace=0)
    assert (folder / "b").read_bytes() == b"bytes" * 100
    restore_all(store, shown, events.append, lambda size: None)
    assert (folder / "b").stat().st_mode & 0o777 == 0o640
    assert held_paths(store) == []


def held_paths(store: Store) -> list[str]:
    """The paths of links whose bytes are held."""
    return [one.metadata["path"] for one in store.index.own_entries(LINKS)]


def put_as_watched(store: Store, path: Path) -> Entry:
    source = entry_sources.source_of(str(path), path.stat())
    return store.put_file(f"in/{path.name}", path, metadata={"source": source})


def bound(store: Store) -> Entry:
    """The entry of the file ``a``, with the record of a link."""
    entry = store.entry("in/a")
    assert entry is not None
    assert link_registry.target_of(entry) is not None, "the link has no record"
    return entry


def test_two_watchers_that_replace_do_no_harm(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = {f"{number:02}": text(50_000, seed=number) for number in range(30)}
    one, two = watch("--replace", "--mirror"), watch("--replace", "--mirror")
    for name, content in data.items():
        make_file(folder, name, content)
    deadline = time.monotonic() + 240
    while not all((folder / name).is_symlink() for name in data):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (one.end(), two.end()) == (0, 0)
    store.gc(max_size=0, grace=0)
    assert {name: (folder / name).read_bytes() for name in data} == data
    assert sorted(path.name for path in folder.iterdir()) == sorted(data)


def test_a_file_that_cannot_be_put_back_is_not_unlinked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody puts a file in the link's place at that moment, and the second exchange fails."""
    path = folder / "link"
    path.symlink_to("old")
    exchange, calls = replace.exchange, []

    def fail_the_second(one: str, other: str) -> None:
        calls.append(one)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), other)
        path.unlink()
        path.write_bytes(b"new bytes of the user's")
        exchange(one, other)

    monkeypatch.setattr(replace, "exchange", fail_the_second)
    with pytest.raises(OSError, match="Input/output"):
        replace.relink(str(path), "old", "new")
    assert Path(calls[0]).read_bytes() == b"new bytes of the user's"


@pytest.mark.parametrize("name", [f"{PART_PREFIX}notes", f"{SWAP_PREFIX}1-2", f"{SWAP_PREFIX}a-b-c-d"])
def test_a_file_that_only_looks_like_a_leftover_stays(store: Store, folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"the user's")
    replace.clean(store, str(folder / name))
    assert (folder / name).read_bytes() == b"the user's"
    replace.clean(store, str(folder / f"{PART_PREFIX}1-2-3-0123456789abcdef"))  # another watcher was faster
