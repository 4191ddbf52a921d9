"""Links lead into a live mount: the choice of the mount, and the behaviour while there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.watch.find_mount import NoMountError, find_mount
from tests.mount.conftest import until
from tests.watch.conftest import Watch, make_file, run


def test_without_a_live_mount_it_refuses_with_the_command_to_run(store: Store, folder: Path) -> None:
    path = make_file(folder, "a", b"a")
    ran = run(store.path, "watch", folder, "--as", "in", "--replace")
    assert ran.returncode == 1
    assert ran.stderr == (
        f"castore: no live mount of {store.path} shows 'in', so links have nothing to lead into;"
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
    make_file(folder, "a/b", b"bytes")
    with castore_fuse.mounted(store, tmp_path / "m", prefix="in") as root:
        watching = watch("--replace")
        watching.until("replaced")
        assert os.readlink(folder / "a/b").startswith(f"{root}/.castore/links/")
        (folder / "a").rename(folder / "c")
        watching.until("relinked", "in/c/b")
        assert (folder / "c/b").read_bytes() == b"bytes"


def test_a_pinned_mount_serves_as_well(store: Store, folder: Path, tmp_path: Path, watch: Watch) -> None:
    with castore_fuse.mounted(store, tmp_path / "m", pin=True):
        path = make_file(folder, "a", b"one")
        watching = watch("--replace")
        watching.until("replaced")
        assert path.read_bytes() == b"one"
        (folder / "a.tmp").write_bytes(b"three")
        (folder / "a.tmp").rename(path)
        watching.until("changed", "in/a")
        watching.until("replaced", "in/a")
        assert path.read_bytes() == b"three"


def test_files_wait_while_the_mount_is_gone_and_are_replaced_when_it_is_back(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    watching = watch("--replace")
    castore_fuse.umount(mountpoint)
    for name in "abc":
        make_file(folder, name, b"bytes")
    watching.until("added", "in/c")
    assert "no live mount" in watching.until("failed")["reason"]
    assert not (folder / "a").is_symlink()
    castore_fuse.mount(store, mountpoint)
    for name in "abc":
        watching.until("replaced", f"in/{name}")
    assert len([event for event in watching.events if event["event"] == "failed"]) == 1


def test_mirror_keeps_entries_whose_link_is_there_though_the_mount_is_not(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = make_file(folder, "a", b"a")
    watch("--replace", "--mirror").end_after("replaced")
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
    path = make_file(folder, "a", b"a")
    watch("--replace").end_after("replaced")
    castore_fuse.umount(mountpoint)
    with castore_fuse.mounted(store, tmp_path / "elsewhere") as root:
        watch("--replace").until("relinked", "in/a")
        assert os.readlink(path).startswith(f"{root}/.castore/links/")
        assert path.read_bytes() == b"a"


def test_a_running_watcher_turns_links_to_a_mount_elsewhere_parked_ones_too(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, tmp_path: Path
) -> None:
    for name in "ab":
        make_file(folder, name, name.encode() * 100)
    sooner = "from castore.watch import watcher; watcher._MOUNT_SECONDS = 0.2"
    watching = watch("--replace", period=sooner)
    for name in "ab":
        watching.until("replaced", f"in/{name}")
    (folder / "b").rename(folder / "b~")
    castore_fuse.umount(mountpoint)
    with castore_fuse.mounted(store, tmp_path / "elsewhere"):
        watching.until("relinked", "in/a")
        assert (folder / "a").read_bytes() == b"a" * 100
        until((folder / "b~").exists)
        assert (folder / "b~").read_bytes() == b"b" * 100
        assert watching.end() == 0


def test_a_link_that_is_renamed_while_there_is_no_mount_leads_to_its_new_name(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    make_file(folder, "a", b"a")
    watch("--replace").end_after("replaced")
    castore_fuse.umount(mountpoint)
    (folder / "a").rename(folder / "b")
    watch("--mirror").end_after("relinked", "in/b")
    assert [entry.name for entry in store.entries()] == ["in/b"]
    castore_fuse.mount(store, mountpoint)
    assert (folder / "b").read_bytes() == b"a"
