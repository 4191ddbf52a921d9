"""`castore watch --replace` makes a folder small in place, and never loses a byte of it."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.temporary import pid_namespace, process_started
from castore.watching import links, replacing
from castore.watching.folder import PART, SWAP, Folder
from castore.watching.live import NoMountError, find_mount
from castore.watching.quiet import BusyError, Snapshot
from tests.helpers import flip, payload, text
from tests.watching.conftest import Watch, run


def real_bytes(folder: Path) -> int:
    """What the regular files of a folder take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink())


def settled(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def test_files_become_links_with_the_same_bytes_and_times(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = {f"{kind}/{number}": text(300_000, seed=number) for number in range(3) for kind in "ab"}
    for name, content in data.items():
        settled(folder, name, content).chmod(0o640)
    before = {name: (folder / name).stat() for name in data}
    taken = real_bytes(folder)
    watching = watch("--replace")
    for name in data:
        watching.until("replaced", f"in/{name}")
    assert watching.end() == 0
    for name, content in data.items():
        path = folder / name
        assert os.readlink(path) == f"{mountpoint}/in/{name}"
        assert path.read_bytes() == content
        assert path.lstat().st_mtime_ns == before[name].st_mtime_ns
        assert abs(path.stat().st_mtime - before[name].st_mtime) < 1e-6
        assert path.stat().st_size == before[name].st_size
    assert real_bytes(folder) < taken / 10
    store.gc(max_size=0, grace=0)
    assert all((folder / name).read_bytes() == content for name, content in data.items()), (
        "gc took a link's bytes"
    )


def test_restore_puts_the_files_back_without_a_mount(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = text(3_000_000)
    path = settled(folder, "a.bin", data)
    path.chmod(0o640)
    before = path.stat()
    watching = watch("--replace")
    watching.until("replaced")
    watching.end()
    castore_fuse.umount(mountpoint)
    assert not path.exists()
    ran = run(store.path, "watch", folder, "--as", "in", "--restore")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "restored in/a.bin (3 MB)\nrestored 1 file (3 MB)\n"
    after = path.lstat()
    assert stat.S_ISREG(after.st_mode)
    assert (after.st_mtime_ns, after.st_mode) == (before.st_mtime_ns, before.st_mode)
    assert path.read_bytes() == data
    entry = store.entry("in/a.bin")
    assert entry is not None
    assert not entry.pinned
    assert watch().end() == 0
    assert [one.name for one in folder.iterdir()] == ["a.bin"]


def test_without_a_live_mount_it_refuses_with_the_command_to_run(store: Store, folder: Path) -> None:
    path = settled(folder, "a", b"a")
    ran = run(store.path, "watch", folder, "--as", "in", "--replace")
    assert ran.returncode == 1
    assert ran.stderr == (
        f"castore: no live mount of {store.path} shows 'in', so there is nothing that links could lead into;"
        f" make one first: castore --store {store.path} mount MOUNTPOINT\n"
    )
    assert not path.is_symlink()


def test_mounts_of_a_prefix_serve_if_they_show_the_names(store: Store, tmp_path: Path) -> None:
    store.put("in/deep/x", b"x")
    with castore_fuse.mounted(store, tmp_path / "other", prefix="other"), pytest.raises(NoMountError):
        find_mount(store, "in/deep")
    with castore_fuse.mounted(store, tmp_path / "deeper", prefix="in/deep"), pytest.raises(NoMountError):
        find_mount(store, "in")
    with castore_fuse.mounted(store, tmp_path / "m", prefix="in") as root:
        mount = find_mount(store, "in/deep")
        assert mount.path("in/deep/x") == f"{root}/deep/x"
        assert Path(mount.path("in/deep/x")).read_bytes() == b"x"
    with pytest.raises(NoMountError):
        find_mount(store, "in")


def test_a_standing_mount_is_chosen_before_one_that_ends_with_a_block(
    store: Store, tmp_path: Path, mountpoint: Path
) -> None:
    castore_fuse.umount(mountpoint)
    with castore_fuse.mounted(store, tmp_path / "block") as root:
        assert find_mount(store, "in").mountpoint == str(root)
        castore_fuse.mount(store, mountpoint)
        assert find_mount(store, "in").mountpoint == str(mountpoint)


def test_a_mount_of_a_prefix_can_be_linked_into(
    store: Store, folder: Path, tmp_path: Path, watch: Watch
) -> None:
    settled(folder, "a/b", b"bytes")
    with castore_fuse.mounted(store, tmp_path / "m", prefix="in") as root:
        watching = watch("--replace")
        watching.until("replaced")
        assert os.readlink(folder / "a/b") == f"{root}/a/b"
        (folder / "a").rename(folder / "c")
        watching.until("relinked", "in/c/b")
        assert (folder / "c/b").read_bytes() == b"bytes"


def test_a_pinned_mount_serves_as_well(store: Store, folder: Path, tmp_path: Path, watch: Watch) -> None:
    with castore_fuse.mounted(store, tmp_path / "m", pin=True):
        path = settled(folder, "a", b"one")
        watching = watch("--replace")
        watching.until("replaced")
        assert path.read_bytes() == b"one"
        (folder / "a.tmp").write_bytes(b"three")
        (folder / "a.tmp").rename(path)
        watching.until("changed", "in/a")
        watching.until("replaced", "in/a")
        assert path.read_bytes() == b"three"


def test_open_and_mapped_files_keep_their_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = text(2_000_000)
    path = settled(folder, "a", data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        watch("--replace").until("replaced")
        assert path.is_symlink()
        assert mapped[:] == data
        assert file.read() == data


def test_a_file_open_for_writing_is_left_alone(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = settled(folder, "a", b"one")
    first = watch()
    first.until("added")
    first.end()
    with path.open("r+b") as file:
        watching = watch("--replace")
        settled(folder, "b", b"b")
        watching.until("replaced", "in/b")
        time.sleep(0.6)
        assert not path.is_symlink()
        file.write(b"two")
    watching.until("replaced", "in/a")
    assert path.read_bytes() == b"two"


def test_a_swap_is_taken_back_when_the_file_was_written_meanwhile(
    store: Store, folder: Path, mountpoint: Path
) -> None:
    """Between the look and the swap, in place, by rename, or by opening it: the file stays what its writer made it."""
    mount = find_mount(store, "in")

    def write_in_place(path: Path) -> None:
        path.write_bytes(b"other")

    def write_anew(path: Path) -> None:
        path.with_name("new").write_bytes(b"other")
        path.with_name("new").rename(path)

    def remove(path: Path) -> None:
        path.unlink()

    told: list[Exception | None] = []
    for touch in (write_in_place, write_anew, remove):
        path = settled(folder, touch.__name__, b"bytes")
        entry = store.put_file(f"in/{path.name}", path)
        with Snapshot(str(path)) as file:
            touch(path)
            replacing.replace(
                store, mount, [(file, entry)], lambda size: None, lambda *done: told.append(done[2])
            )
        assert not path.is_symlink()
        assert path.read_bytes() == b"other" if touch is not remove else not path.exists()
        after = store.entry(entry.name)
        assert after is not None
        assert not after.pinned
    assert [type(error) for error in told] == [BusyError] * 3
    assert sorted(one.name for one in folder.iterdir()) == ["write_anew", "write_in_place"]


def test_writers_racing_with_swaps_lose_nothing(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Tools that write a new file and rename it over the old one, again and again, while everything is replaced."""
    watching = watch("--replace", settle="0")
    latest: dict[str, bytes] = {}
    chance = random.Random(4)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        name = f"{chance.randrange(8)}"
        latest[name] = chance.randbytes(chance.randrange(1, 20_000))
        temporary = folder / f"{name}.tmp"
        temporary.write_bytes(latest[name])
        temporary.rename(folder / name)
        time.sleep(chance.random() * 0.01)
    deadline = time.monotonic() + 20
    while not all((folder / name).is_symlink() for name in latest):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert {name: (folder / name).read_bytes() for name in latest} == latest
    assert watching.end() == 0


def test_what_cannot_be_read_back_is_not_replaced(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = text(300_000)
    path = settled(folder, "a", data)
    first = watch()
    first.until("added")
    first.end()
    file, offset, _ = payload(store, "in/a")
    flip(file, offset + 100)
    watching = watch("--replace", ready=False)
    kept = watching.until("kept", "in/a")
    assert "could not be read back through the mount" in kept["reason"]
    assert not path.is_symlink()
    assert path.read_bytes() == data


def test_files_with_other_hard_links_stay(store: Store, folder: Path, mountpoint: Path, watch: Watch) -> None:
    path = settled(folder, "a", b"a")
    os.link(path, folder.with_name("another"))
    assert "hard links" in watch("--replace", ready=False).until("kept", "in/a")["reason"]
    assert not path.is_symlink()


def test_a_renamed_link_takes_its_bytes_along(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = {name: text(100_000, seed=ord(name)) for name in "abc"}
    for name, content in data.items():
        settled(folder, f"old/{name}", content)
    watching = watch("--replace", "--mirror")
    for name in data:
        watching.until("replaced", f"in/old/{name}")
    (folder / "old").rename(folder / "new")
    for name in data:
        watching.until("dropped", f"in/old/{name}")
    watching.end()
    (folder / "new").rename(folder / "newer")  # while nobody watches
    watching = watch("--replace", "--mirror")
    for name in data:
        watching.until("dropped", f"in/new/{name}")
    store.gc(max_size=0, grace=0)
    assert [entry.name for entry in store.entries()] == [f"in/newer/{name}" for name in data]
    for name, content in data.items():
        assert os.readlink(folder / "newer" / name) == f"{mountpoint}/in/newer/{name}"
        assert (folder / "newer" / name).read_bytes() == content


def test_files_wait_while_the_mount_is_gone_and_are_replaced_when_it_is_back(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    watching = watch("--replace")
    castore_fuse.umount(mountpoint)
    for name in "abc":
        settled(folder, name, b"bytes")
    watching.until("added", "in/c")
    assert "no live mount" in watching.until("failed")["reason"]
    assert not (folder / "a").is_symlink()
    castore_fuse.mount(store, mountpoint)
    for name in "abc":
        watching.until("replaced", f"in/{name}")
    assert len([event for event in watching.events if event["event"] == "failed"]) == 1


def test_a_large_file_does_not_keep_the_watcher_from_ending(store: Store, folder: Path, watch: Watch) -> None:
    with (folder / "large").open("wb") as file:
        for seed in range(40):
            file.write(random.Random(seed).randbytes(10_000_000))
    time.sleep(0.3)
    watching = watch(ready=False)
    deadline = time.monotonic() + 20
    while not list((store.path / "tmp").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    started = time.monotonic()
    assert watching.end() == 0
    assert time.monotonic() - started < 3
    assert store.entry("in/large") is None
    assert list((store.path / "tmp").iterdir()) == []


@pytest.mark.parametrize("mirror", [True, False])
def test_a_link_that_a_tool_deletes_lets_go_of_its_entry(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, mirror: bool
) -> None:
    path = settled(folder, "a", b"a")
    watching = watch("--replace", *(["--mirror"] if mirror else []))
    watching.until("replaced")
    path.unlink()
    watching.until("dropped" if mirror else "unpinned", "in/a")
    entry = store.entry("in/a")
    assert entry is None if mirror else entry is not None and not entry.pinned


def test_mirror_keeps_entries_whose_link_is_there_though_the_mount_is_not(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = settled(folder, "a", b"a")
    watching = watch("--replace", "--mirror")
    watching.until("replaced")
    watching.end()
    castore_fuse.umount(mountpoint)
    assert watch("--mirror").end() == 0
    entry = store.entry("in/a")
    assert entry is not None
    assert entry.pinned
    castore_fuse.mount(store, mountpoint)
    assert path.read_bytes() == b"a"


def test_links_follow_the_mount_to_another_place(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, tmp_path: Path
) -> None:
    path = settled(folder, "a", b"a")
    watching = watch("--replace")
    watching.until("replaced")
    watching.end()
    castore_fuse.umount(mountpoint)
    with castore_fuse.mounted(store, tmp_path / "elsewhere") as root:
        watch("--replace").until("relinked", "in/a")
        assert os.readlink(path) == f"{root}/in/a"
        assert path.read_bytes() == b"a"


def test_a_new_file_in_the_place_of_a_link_is_replaced_in_turn(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = settled(folder, "a", b"one")
    watching = watch("--replace")
    watching.until("replaced")
    (folder / "a.tmp").write_bytes(b"three")
    (folder / "a.tmp").rename(path)
    watching.until("changed", "in/a")
    watching.until("replaced", "in/a")
    assert path.read_bytes() == b"three"
    path.unlink()
    watching.until("unpinned", "in/a")


def test_a_pin_of_the_users_outlives_the_link(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = settled(folder, "a", b"a")
    first = watch()
    first.until("added")
    first.end()
    store.pin("in/a")
    watching = watch("--replace")
    watching.until("replaced")
    path.unlink()
    watching.until("unpinned")
    entry = store.entry("in/a")
    assert entry is not None
    assert entry.pinned


def test_what_a_link_leads_to_never_expires(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    run(store.path, "init", "--ttl", "1s")
    settled(folder, "a", b"a")
    first = watch()
    first.until("added")
    first.end()
    entry = store.entry("in/a")
    assert entry is None or entry.expires is not None
    watching = watch("--replace")
    watching.until("replaced")
    time.sleep(1.2)
    assert (folder / "a").read_bytes() == b"a"


def test_a_link_that_is_renamed_while_there_is_no_mount_leads_to_its_new_name(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    settled(folder, "a", b"a")
    first = watch("--replace")
    first.until("replaced")
    first.end()
    castore_fuse.umount(mountpoint)
    (folder / "a").rename(folder / "b")
    second = watch("--mirror")
    second.until("relinked", "in/b")
    second.end()
    assert [entry.name for entry in store.entries()] == ["in/b"]
    castore_fuse.mount(store, mountpoint)
    assert (folder / "b").read_bytes() == b"a"


def test_links_inside_the_folder_lead_on_through_what_was_replaced(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """As a hub's cache has it: snapshots of links to blobs."""
    settled(folder, "blobs/abc", b"bytes")
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "model").symlink_to("../blobs/abc")
    watching = watch("--replace")
    watching.until("replaced", "in/blobs/abc")
    (folder / "snapshots" / "second").symlink_to("../blobs/abc")
    watching.until("added", "in/snapshots/second")
    assert (folder / "snapshots" / "model").read_bytes() == b"bytes"
    assert os.readlink(folder / "snapshots" / "second") == "../blobs/abc"
    assert store.get("in/snapshots/second") == b"bytes"


def test_at_any_kill_each_name_holds_its_file_or_its_link(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = {f"{number:03}": text(20_000 + number, seed=number) for number in range(150)}
    for name, content in data.items():
        settled(folder, name, content)
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
    """The mark of a process that was killed, as temporary names carry it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = process_started(process.pid)
        mark = f"{pid_namespace()}-{process.pid}-{started}"
        process.communicate(b"\n")
    return mark


def test_what_a_kill_behind_the_exchange_leaves_is_cleaned_or_put_back(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    paths = [settled(folder, name, name.encode() * 100) for name in ("kept", "written")]
    first = watch("--replace")
    first.until("replaced", "in/kept")
    first.until("replaced", "in/written")
    first.end()
    leftovers = [Path(replacing.temporary_beside(str(path), SWAP)) for path in paths]
    own = "-".join(leftovers[0].name.removeprefix(SWAP).split("-")[:3])
    dead = dead_process()
    leftovers = [path.with_name(path.name.replace(own, dead)) for path in leftovers]
    leftovers[0].write_bytes(b"kept" * 100)
    leftovers[1].write_bytes(b"somebody wrote to it at that moment")
    (folder / f"{PART}{dead}-0123456789abcdef").write_bytes(b"half a file")
    (folder / f"{SWAP}{own}-0123456789abcdef").symlink_to("of a process that lives")
    shown = Folder(str(folder), "in", str(store.path))
    for path in folder.iterdir():
        if path.name.startswith((SWAP, PART)):
            replacing.clean(store, shown, str(path))
    assert paths[0].read_bytes() == b"kept" * 100
    assert paths[0].is_symlink()
    assert paths[1].read_bytes() == b"somebody wrote to it at that moment"
    assert len(list(folder.iterdir())) == 3, "what a living process makes was touched"


def test_two_watchers_that_replace_do_no_harm(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = {f"{number:02}": text(50_000, seed=number) for number in range(30)}
    one, two = watch("--replace", "--mirror"), watch("--replace", "--mirror")
    for name, content in data.items():
        settled(folder, name, content)
    deadline = time.monotonic() + 30
    while not all((folder / name).is_symlink() for name in data):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (one.end(), two.end()) == (0, 0)
    store.gc(max_size=0, grace=0)
    assert {name: (folder / name).read_bytes() for name in data} == data
    assert sorted(path.name for path in folder.iterdir()) == sorted(data)


def test_restore_leaves_the_link_when_the_disk_is_too_full(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        data = random.Random(1).randbytes(400_000)
        (tmp_path / "big").write_bytes(data)
        with castore_fuse.mounted(store, tmp_path / "m") as root:
            link = small / "a"
            entry = store.put_file("in/a", tmp_path / "big")
            source = {"path": str(link), "size": len(data), "mtime_ns": 1}
            assert links.bind(store, [links.Binding(entry, source, f"{root}/in/a", 0o600)]) != [None]
            link.symlink_to(root / "in/a")
            ran = run(store.path, "watch", small, "--as", "in", "--restore")
            assert "No space left" in ran.stderr
            assert ran.returncode == 1
            assert [path.name for path in small.iterdir()] == ["a"]
            assert link.read_bytes() == data
    finally:
        subprocess.run(["umount", small], check=True)
        shutil.rmtree(small)
