"""A link in the place of a file is treated as the file: renamed, deleted, written anew, pinned, put back."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.watch import link_registry
from castore.watch.folder import Root
from tests.clocks import pass_time
from tests.helpers import text
from tests.watch.conftest import Watch, make_file, run


def test_a_renamed_link_takes_its_bytes_along(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = {name: text(100_000, seed=ord(name)) for name in "abc"}
    for name, content in data.items():
        make_file(folder, f"old/{name}", content)
    watching = watch("--replace", "--mirror")
    for name in data:
        watching.until("replaced", f"in/old/{name}")
    (folder / "old").rename(folder / "new")
    for name in data:
        watching.until("dropped", f"in/old/{name}")
    watching.end()
    (folder / "new").rename(folder / "newer")  # while no watcher runs
    watching = watch("--replace", "--mirror")
    for name in data:
        watching.until("dropped", f"in/new/{name}")
    store.gc(max_size=0, grace=0)
    assert [entry.name for entry in store.entries()] == [f"in/newer/{name}" for name in data]
    for name, content in data.items():
        assert os.readlink(folder / "newer" / name).startswith(f"{mountpoint}/.castore/links/")
        assert (folder / "newer" / name).read_bytes() == content


@pytest.mark.parametrize("mirror", [True, False])
def test_a_link_that_a_tool_deletes_lets_go_of_its_entry(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, mirror: bool
) -> None:
    path = make_file(folder, "a", b"a")
    watching = watch("--replace", *(["--mirror"] if mirror else []))
    watching.until("replaced")
    path.unlink()
    watching.until("dropped" if mirror else "unpinned", "in/a")
    entry = store.entry("in/a")
    assert entry is None if mirror else entry is not None and not entry.pinned


def test_a_new_file_in_the_place_of_a_link_is_replaced_in_turn(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = make_file(folder, "a", b"one")
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
    path = make_file(folder, "a", b"a")
    watch().end_after("added")
    store.pin("in/a")
    watching = watch("--replace")
    watching.until("replaced")
    path.unlink()
    watching.until("unpinned")
    entry = store.entry("in/a")
    assert entry is not None
    assert entry.pinned


def test_what_a_link_leads_to_never_expires(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store.path, "init", "--ttl", "1h")
    make_file(folder, "a", b"a")
    watch().end_after("added")
    entry = store.entry("in/a")
    assert entry is not None
    assert entry.expires is not None
    store.put("expires", b"x", ttl="1h")
    watch("--replace").end_after("replaced")
    pass_time(monkeypatch, 7200, "time")
    assert store.gc(grace=0).expired == ["expires"]
    assert store.get("in/a") == b"a"  # by this process's clock: the mount's is not set ahead
    assert (folder / "a").read_bytes() == b"a"


def test_links_inside_the_folder_lead_on_through_what_was_replaced(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Like a hub's cache: snapshots of links to blobs."""
    make_file(folder, "blobs/abc", b"bytes")
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "model").symlink_to("../blobs/abc")
    watching = watch("--replace")
    watching.until("replaced", "in/blobs/abc")
    (folder / "snapshots" / "second").symlink_to("../blobs/abc")
    watching.until("added", "in/snapshots/second")
    assert (folder / "snapshots" / "model").read_bytes() == b"bytes"
    assert os.readlink(folder / "snapshots" / "second") == "../blobs/abc"
    assert store.get("in/snapshots/second") == b"bytes"


def test_restore_puts_the_files_back_without_a_mount(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    data = text(3_000_000)
    path = make_file(folder, "a.bin", data)
    path.chmod(0o640)
    before = path.stat()
    watch("--replace").end_after("replaced")
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


def test_a_sparse_file_takes_no_more_of_the_disk_when_it_comes_back(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = folder / "sparse"
    with path.open("wb") as file:
        file.write(b"head")
        file.seek(10_000_000)
        file.write(b"middle")
        file.truncate(30_000_000)
    data = path.read_bytes()
    watch("--replace").end_after("replaced")
    ran = run(store.path, "watch", folder, "--as", "in", "--restore")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert path.read_bytes() == data
    assert path.stat().st_blocks * 512 < 2_000_000


def test_restore_lets_go_of_links_that_went_when_nobody_watched(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Regression: `castore doctor` raised an alarm for ever, and their bytes stayed pinned."""
    for name in ("stays", "removed", "replaced"):
        make_file(folder, name, name.encode() * 1000)
    watching = watch("--replace")
    for name in ("stays", "removed", "replaced"):
        watching.until("replaced", f"in/{name}")
    watching.end()
    (folder / "removed").unlink()
    (folder / "new").write_bytes(b"new")
    (folder / "new").rename(folder / "replaced")
    assert len([*link_registry.all_held(store, str(folder))]) == 3
    ran = run(store.path, "watch", folder, "--as", "in", "--restore")
    assert (ran.returncode, ran.stdout.splitlines()[0]) == (0, "restored in/stays (5 KB)")
    assert [*link_registry.all_held(store, str(folder))] == []
    assert run(store.path, "doctor").returncode == 0
    assert (folder / "stays").read_bytes() == b"stays" * 1000
    assert (folder / "replaced").read_bytes() == b"new"


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
            held = link_registry.held_name(entry.digest, 1, str(link))
            owner = link_registry.Owner(0, 0, 0o600)
            binding = link_registry.Binding(
                entry, source, 1, owner, held, f"{root}/{held}", "", Root.at(str(small))
            )
            assert link_registry.bind_links(store, [binding]) != [None]
            link.symlink_to(root / held)
            ran = run(store.path, "watch", small, "--as", "in", "--restore")
            assert "No space left" in ran.stderr
            assert ran.returncode == 1
            assert [path.name for path in small.iterdir()] == ["a"]
            assert link.read_bytes() == data
    finally:
        subprocess.run(["umount", small], check=True)
        shutil.rmtree(small)
