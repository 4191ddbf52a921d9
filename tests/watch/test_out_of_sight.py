"""Links that cannot be seen for a while, since their disk is not mounted, say, keep their bytes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.names import LINKS
from castore.watch.link_registry import path_of
from tests.mount.conftest import until
from tests.watch.conftest import ENVIRONMENT, Watch, make_file, replace_files, run

SOON = "from castore.watch import link_census; link_census._LOOK_SECONDS = 0.3"
DATA = b"bytes" * 1000


def held(store: Store) -> set[str]:
    return {path_of(entry) for entry in store.index.own_entries(LINKS)}


@contextmanager
def covered(folder: Path) -> Iterator[None]:
    """Mount another file system over a folder, as if the folder's own disk were not mounted."""
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def replaced(folder: Path) -> Iterator[None]:
    """Put another folder in the place of one."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder)
        away.rename(folder)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("hide", [covered, replaced])
def test_links_of_a_folder_whose_disk_is_not_mounted_keep_their_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, hide: Callable[[Path], object], mirror: bool
) -> None:
    path = make_file(folder, "a", DATA)
    watch("--replace").end_after("replaced")
    with hide(folder):  # type: ignore[attr-defined]
        make_file(folder, "other", b"a tool has found no file, and made one")
        watching = watch("--replace", *(["--mirror"] if mirror else []), period=SOON)
        told = watching.until("hidden")
        assert told["path"] == str(folder)
        assert told["reason"].startswith(f"links out of sight: 1. Either {folder} is another folder than")
        until(lambda: str(folder / "other") in held(store))
        (folder / "other").unlink()
        until(lambda: str(folder / "other") not in held(store))  # two looks have passed
        watching.process.kill()
        watching.process.wait()
        store.gc(max_size=0, grace=0)
    assert path.read_bytes() == DATA
    assert watch("--replace").end() == 0
    (entry,) = store.entries()
    assert (entry.name, entry.pinned) == ("in/a", True)


def test_a_link_that_was_renamed_into_such_a_part_while_nobody_watched_keeps_its_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = make_file(folder, "a", DATA)
    replace_files(watch, "in/a")
    (folder / "part").mkdir()
    moved = path.rename(folder / "part" / "a")
    with covered(folder / "part"):
        make_file(folder, "other", b"other")
        watching = watch("--replace", period=SOON)
        watching.until("hidden")
        until(lambda: str(folder / "other") in held(store))
        (folder / "other").unlink()
        until(lambda: str(folder / "other") not in held(store))  # two looks have passed
        assert watching.end() == 0
        store.gc(max_size=0, grace=0)
    assert moved.read_bytes() == DATA


def test_a_copy_of_the_disk_that_was_made_before_is_another_folder(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, tmp_path: Path
) -> None:
    """The disks have one identifier, and their folders one number and one birth time."""
    images = [tmp_path / "disk", tmp_path / "copy"]
    with images[0].open("wb") as image:
        image.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", images[0]], check=True)
    shutil.copy(*images)
    mounted = ["mount", "-o", "loop"]
    if subprocess.run([*mounted, images[0], folder]).returncode:
        pytest.skip("no image can be mounted here")
    try:
        make_file(folder, "a", DATA)
        replace_files(watch, "in/a")
        subprocess.run(["umount", folder], check=True)
        subprocess.run([*mounted, images[1], folder], check=True)
        make_file(folder, "other", b"other")
        watching = watch("--replace", period=SOON)
        watching.until("hidden")
        assert watching.end() == 0
        store.gc(max_size=0, grace=0)
        subprocess.run(["umount", folder], check=True)
        subprocess.run([*mounted, images[0], folder], check=True)
        assert (folder / "a").read_bytes() == DATA
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_links_that_moved_out_of_a_nested_watched_folder_keep_their_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """The inner folder's watcher sees them go, and the outer one's has not seen them come."""
    path = make_file(folder, "inner/a", DATA)
    replace_files(watch, "in/inner/a")
    inner = watch("--replace", period=SOON, root=path.parent, prefix="nested")
    until(lambda: store.entry("nested/a") is not None)
    moved = path.rename(folder / "b")
    inner.until("unpinned", "nested/a")
    make_file(folder, "inner/other", b"other")
    inner.until("replaced", "nested/other")
    (folder / "inner" / "other").unlink()
    until(lambda: held(store) == {str(path)})  # two looks have passed
    assert inner.end() == 0
    assert moved.read_bytes() == DATA
    watch("--replace").end_after("relinked", "in/b")
    assert held(store) == {str(moved)}


@pytest.mark.parametrize("bind", [False, True])
def test_links_in_a_part_over_which_something_is_mounted_keep_their_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, tmp_path: Path, bind: bool
) -> None:
    path, seen = make_file(folder, "part/a", DATA), make_file(folder, "seen", DATA * 2)
    replace_files(watch, "in/part/a", "in/seen")
    (tmp_path / "empty").mkdir()
    how = ["--bind", str(tmp_path / "empty")] if bind else ["-t", "tmpfs", "tmpfs"]
    if subprocess.run(["mount", *how, path.parent]).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        watching = watch("--replace", period=SOON)
        watching.until("hidden")
        seen.unlink()
        until(lambda: held(store) == {str(path)})
        assert watching.end() == 0
        store.gc(max_size=0, grace=0)
    finally:
        subprocess.run(["umount", path.parent], check=True)
    assert path.read_bytes() == DATA


def test_links_that_went_with_their_folder_to_another_disk_are_looked_after_there(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    for name in "ab":
        make_file(folder, name, name.encode() * 100)
    replace_files(watch, "in/a", "in/b")
    folder.rename(folder.with_name("old"))
    shutil.copytree(folder.with_name("old"), folder, symlinks=True)
    watching = watch("--replace", period=SOON)
    (folder / "a").unlink()
    until(lambda: held(store) == {str(folder / "b")})
    assert watching.end() == 0
    assert watching.told("hidden") == []
    assert (folder / "b").read_bytes() == b"b" * 100


def test_links_on_another_file_system_in_the_folder_keep_their_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    inner = folder / "inner"
    inner.mkdir()
    with covered(inner):
        path = make_file(folder, "a", DATA)
        make_file(folder, "inner/other", b"what is on another file system is not added")
        watching = watch("--replace", period=SOON)
        watching.until("replaced", "in/a")
        shutil.move(path, inner / "a")
        until(lambda: held(store) == {str(inner / "a")})
        (inner / "a").rename(inner / "b")
        until(lambda: held(store) == {str(inner / "b")})
        assert watching.end() == 0
        assert watch("--replace").end() == 0
        assert [entry.name for entry in store.entries()] == ["in/a"]
        store.gc(max_size=0, grace=0)
        assert (inner / "b").read_bytes() == DATA
        watching = watch("--replace", period=SOON)
        (inner / "b").unlink()
        until(lambda: held(store) == set())
        assert watching.end() == 0


def test_a_watcher_that_starts_holds_again_what_was_let_go_of(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = make_file(folder, "a", DATA)
    watch("--replace").end_after("replaced")
    (name,) = [entry.name for entry in store.index.own_entries(LINKS)]
    with store.index.write() as txn:
        txn.delete_entry(name)
    until(lambda: not path.exists())
    assert watch("--replace").end() == 0
    until(path.exists)
    assert path.read_bytes() == DATA


def test_restore_tells_of_links_whose_bytes_are_gone(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    for name in "ab":
        make_file(folder, name, name.encode() * 100)
    replace_files(watch, "in/a", "in/b")
    assert run(store.path, "rm", "in/a").returncode == 0
    store.gc(grace=0)
    told = watch("--replace").end_after("failed")
    assert told == 0
    restored = run(store.path, "watch", folder, "--as", "in", "--restore")
    assert restored.returncode == 1
    assert restored.stderr == (
        f"castore: {folder}/a: the link leads to nothing, and {store.path} does not have its bytes\n"
    )
    assert (folder / "a").is_symlink()
    assert (folder / "b").read_bytes() == b"b" * 100


def test_verify_tells_of_links_whose_bytes_were_damaged(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    make_file(folder, "a", bytes(range(256)) * 4000)
    replace_files(watch, "in/a")
    entry = store.entry("in/a")
    assert entry is not None
    blob = store.blob(entry.digest)
    assert blob is not None
    path = Path(store.path_of(blob))
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(blob.offset + blob.stored // 2)
        file.write(b"damage")
    found = run(store.path, "verify", "--repair")
    assert found.returncode == 1
    assert "1 entry dropped; add or compute them again\n1 file behind a link of" in found.stdout


def test_links_into_the_live_mount_of_another_store_are_that_stores(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, tmp_path: Path
) -> None:
    path = make_file(folder, "a", DATA)
    watch("--replace").end_after("replaced")
    before = path.readlink()
    with Store(tmp_path / "second") as second:
        second.put("in/a", DATA)
        with castore_fuse.mounted(second, tmp_path / "second-mount"):
            watching = watch("--replace", store=second)
            make_file(folder, "b", DATA)
            watching.until("replaced", "in/b")
            assert watching.end() == 0
            assert (path.readlink(), held(second)) == (before, {str(folder / "b")})
            refused = run(second.path, "watch", tmp_path / "second-mount" / "in", "--as", "x")
            assert (refused.returncode, refused.stdout) == (2, "")
            assert "is a mount of the store itself; watch another folder" in refused.stderr


LOOK = """
import sys
from castore import Store
from castore.watch import link_census
from castore.watch.folder import WatchedFolder

link_census._LOOK_SECONDS = 0.0
store = Store(sys.argv[1])
census = link_census.LinkCensus(store, WatchedFolder(sys.argv[2], "in", sys.argv[1]))
for _ in range(3):
    census.suspect_all()
    census.look_if_due()
store.close()
"""


def test_a_link_in_a_folder_that_cannot_be_listed_keeps_its_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = make_file(folder, "a", DATA)
    watch("--replace").end_after("replaced")
    closed = folder / "closed"
    closed.mkdir()
    moved = path.rename(closed / "a")
    closed.chmod(0)
    bounded = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    if subprocess.run([*bounded, "ls", closed], capture_output=True).returncode == 0:
        pytest.skip("no folder can be closed to this user")
    look = [sys.executable, "-c", LOOK, str(store.path), str(folder)]
    subprocess.run([*bounded, *look], env=ENVIRONMENT, check=True)
    closed.chmod(0o700)
    store.gc(max_size=0, grace=0)
    assert moved.read_bytes() == DATA
    watching = watch("--replace", period=SOON)
    moved.unlink()
    until(lambda: held(store) == set())
    assert watching.end() == 0
