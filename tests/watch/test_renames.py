"""Links that tools rename, swap, rotate, back up and park: each goes on to show its own file's bytes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from castore import Store
from castore.names import LINKS
from castore.system.exchange import exchange
from castore.watch.folder import is_temporary
from tests.mount.conftest import until
from tests.watch.conftest import Watch, make_file, names, replace_files, run

SOON = "from castore.watch import link_census; link_census._LOOK_SECONDS = 0.3"


class Files:
    """Files of one folder, and the bytes that each must show.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: dict[str, bytes] = {}

    def new(self, name: str, data: bytes) -> None:
        """Write a file as tools do: under a temporary name first."""
        temporary = self.folder / f"{name}.tmp"
        temporary.write_bytes(data)
        temporary.rename(self.folder / name)
        self.contents[name] = data

    def move(self, old: str, new: str) -> None:
        """Rename a file."""
        (self.folder / old).rename(self.folder / new)
        self.contents[new] = self.contents.pop(old)

    def remove(self, name: str) -> None:
        """Remove a file."""
        (self.folder / name).unlink()
        del self.contents[name]

    def check(self) -> None:
        """Read all."""
        for name, data in self.contents.items():
            assert (self.folder / name).read_bytes() == data, f"{self.folder.name}: {name}"


def rotate(files: Files) -> None:
    """Checkpoints: the newest has the lowest number."""
    files.move("b", "c")
    files.move("a", "b")
    files.new("a", b"newest")


def swap(files: Files) -> None:
    files.move("a", "t")
    files.move("b", "a")
    files.move("t", "b")


def cycle(files: Files) -> None:
    files.move("a", "t")
    files.move("b", "a")
    files.move("c", "b")
    files.move("t", "c")


def overwrite(files: Files) -> None:
    files.move("a", "b")
    files.new("a", b"new")


def back_up(files: Files) -> None:
    """As editors, patch and mv -b do."""
    files.move("a", "a~")
    files.new("a", b"new")


def park(files: Files) -> None:
    """Under a name that counts as unfinished, in a folder of such a name."""
    (files.folder / "old.tmp").mkdir()
    files.move("a", "old.tmp/a")
    files.move("b", "b.part")
    files.new("a", b"new")


def copy(files: Files) -> None:
    """Links that are copied as links, one as a hard link."""
    (files.folder / "copy").symlink_to(os.readlink(files.folder / "a"))
    files.contents["copy"] = files.contents["a"]
    os.link(files.folder / "b", files.folder / "hard", follow_symlinks=False)
    files.contents["hard"] = files.contents["b"]
    files.remove("a")
    files.new("b", b"new")


def move_folder(files: Files) -> None:
    """A folder makes way for another of its name."""
    (files.folder / "deep").rename(files.folder / "deeper")
    files.contents["deeper/a"] = files.contents.pop("deep/a")
    (files.folder / "deep").mkdir()
    files.new("deep/a", b"new")


WAYS = [rotate, swap, cycle, overwrite, back_up, park, copy, move_folder]


def make(folder: Path, name: str) -> Files:
    files = Files(folder / name)
    files.folder.mkdir()
    (files.folder / "deep").mkdir()
    for one in ("a", "b", "c", "deep/a"):
        files.new(one, f"{name} {one} ".encode() * 50)
    return files


def is_shown(name: str) -> bool:
    """Whether a name is none that unfinished files have."""
    return not any(map(is_temporary, name.split("/")))


def all_links(all_files: list[Files]) -> bool:
    return all(
        (files.folder / name).is_symlink() for files in all_files for name in files.contents if is_shown(name)
    )


def held(store: Store) -> set[str]:
    """The paths of links whose bytes are held."""
    return {one.metadata["path"] for one in store.index.own_entries(LINKS)}


def targets(folder: Path) -> set[str]:
    return {os.readlink(path) for path in folder.rglob("*") if path.is_symlink()}


def settles(store: Store, folder: Path, all_files: list[Files]) -> None:
    """Wait until all files are links that have entries, and nothing else is held."""

    def is_settled() -> bool:
        names = {
            str((files.folder / name).relative_to(folder)): data
            for files in all_files
            for name, data in files.contents.items()
        }
        shown = {f"in/{name}": data for name, data in names.items() if is_shown(name)}
        return (
            all_links(all_files)
            and {entry.name: store.get(entry.name) for entry in store.entries("in")} == shown
            and len(list(store.index.own_entries(LINKS))) == len(targets(folder))
            and held(store) <= {str(folder / name) for name in names}
        )

    until(is_settled)


@pytest.mark.parametrize("is_watched", [True, False])
def test_links_that_move_keep_their_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, is_watched: bool
) -> None:
    """Regression: in a chain of renames a link led to the name of another, and showed its bytes."""
    all_files = [make(folder, way.__name__) for way in WAYS]
    watching = watch("--replace", "--mirror", period=SOON)
    until(lambda: all_links(all_files))
    settles(store, folder, all_files)
    if not is_watched:
        watching.end()
    for way, files in zip(WAYS, all_files, strict=True):
        way(files)
        files.check()
    if not is_watched:
        watching = watch("--replace", "--mirror", period=SOON)
    settles(store, folder, all_files)
    assert watching.end() == 0
    store.gc(max_size=0, grace=0)
    for files in all_files:
        files.check()
    assert run(store.path, "watch", folder, "--as", "in", "--restore").returncode == 0
    assert targets(folder) == set()
    for files in all_files:
        files.check()
    assert held(store) == set()


STEPS: list[Callable[[Files, random.Random], None]] = [
    lambda files, chance: files.move(chance.choice(sorted(files.contents)), chance.choice("abcd")),
    lambda files, chance: files.move(chance.choice(sorted(files.contents)), chance.choice("abcd") + "~"),
    lambda files, chance: files.new(chance.choice("abcd"), chance.randbytes(40)),
    lambda files, chance: files.remove(chance.choice(sorted(files.contents))),
]


@pytest.mark.parametrize("seed", range(2))
def test_random_steps_beside_a_watcher_that_is_ended_lose_nothing(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, seed: int
) -> None:
    chance = random.Random(seed)
    all_files = [make(folder, f"{number:02}") for number in range(25)]
    watching = watch("--replace", "--mirror", settle="50ms", period=SOON)
    for round_ in range(5):
        until(lambda: all_links(all_files))
        if round_ % 2:
            watching.process.kill()
        for _ in range(3):
            for files in all_files:
                if len(files.contents) > 1:
                    chance.choice(STEPS)(files, chance)
                files.check()
        if round_ % 2:
            watching = watch("--replace", "--mirror", settle="50ms", period=SOON)
    settles(store, folder, all_files)
    assert watching.end() == 0
    store.gc(max_size=0, grace=0)
    for files in all_files:
        files.check()


def test_bytes_of_links_that_are_gone_are_let_go(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    for name in "abcd":
        make_file(folder, name, name.encode() * 100)
    watching = watch("--replace", period=SOON)
    for name in "abcd":
        watching.until("replaced", f"in/{name}")
    (folder / "a").unlink()
    (folder / "b").unlink()
    (folder / "b").write_bytes(b"a tool has computed it anew")
    until(lambda: held(store) == {str(folder / name) for name in "bcd"})
    assert watching.end() == 0
    shutil.copy(folder / "d", folder / "e")  # its bytes
    (folder / "c").unlink()
    (folder / "e").rename(folder / "d")
    watching = watch("--mirror", period=SOON)
    until(lambda: held(store) == {str(folder / "b")})
    assert watching.end() == 0
    assert (folder / "b").read_bytes() == b"a tool has computed it anew"


def test_a_link_whose_bytes_nothing_holds_any_more_takes_them_again(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """It was outside the folder for a while, say."""
    path = make_file(folder, "a", b"bytes" * 100)
    watching = watch("--replace", "--mirror", period=SOON)
    watching.until("replaced", "in/a")
    path.rename(folder.with_name("outside"))
    until(lambda: held(store) == set())
    assert store.get("in/a") is None
    folder.with_name("outside").rename(folder / "b")
    watching.until("relinked", "in/b")
    assert (folder / "b").read_bytes() == b"bytes" * 100
    store.gc(max_size=0, grace=0)
    assert (folder / "b").read_bytes() == b"bytes" * 100


def test_rm_of_an_entry_touches_no_links_of_equal_files_and_copies(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Regression: equal files of one name, or links that were copied, shared what `rm` let go of."""
    for place in ("one", "two"):
        os.utime(make_file(folder, f"{place}/a", b"equal" * 100), (1.5e9, 1.5e9))
    watching = watch("--replace")
    for place in ("one", "two"):
        watching.until("replaced", f"in/{place}/a")
    (folder / "three").symlink_to(os.readlink(folder / "one/a"))
    watching.until("relinked", "in/three")
    assert watching.end() == 0
    assert len(targets(folder)) == 3
    assert run(store.path, "rm", "in/one/a").returncode == 0
    store.gc(grace=0)
    until(lambda: not (folder / "one/a").exists())
    assert (folder / "two/a").read_bytes() == (folder / "three").read_bytes() == b"equal" * 100


def test_a_link_whose_new_name_is_no_utf8_keeps_its_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Regression: it ended the watcher, and each one that was started after it."""
    path = make_file(folder, "a", b"bytes" * 100)
    watching = watch("--replace", "--mirror", period=SOON)
    watching.until("replaced")
    odd = path.rename(folder / os.fsdecode(b"\xff\xfe"))
    until(lambda: held(store) == {str(odd)})
    watching.until("dropped")
    assert "which is not valid Unicode" in watching.until("failed")["reason"]
    assert watching.end() == 0
    assert watch("--replace").end() == 0
    store.gc(max_size=0, grace=0)
    assert odd.read_bytes() == b"bytes" * 100
    odd.unlink()
    assert r"/\udcff\udcfe' first)" in run(store.path, "doctor").stdout


def test_rm_of_an_entry_keeps_the_link_that_stands_for_another_one_too(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Regression: of a folder that was watched under two prefixes."""
    path = make_file(folder, "a", b"bytes" * 100)
    watch("--replace").end_after("replaced", "in/a")
    watch("--replace", prefix="out").end_after("relinked", "out/a")
    removed = run(store.path, "rm", "-r", "out")
    assert (removed.returncode, removed.stderr) == (0, "")
    assert path.read_bytes() == b"bytes" * 100
    removed = run(store.path, "rm", "-r", "in")
    assert "leads to nothing now" in removed.stderr
    until(lambda: not path.exists())


def test_a_link_that_moves_to_another_watched_folder_is_looked_after_there(
    store: Store, folder: Path, mountpoint: Path, watch: Watch, tmp_path: Path
) -> None:
    """Also under a temporary name."""
    for name in "ab":
        make_file(folder, name, name.encode() * 100)
    watching = watch("--replace", "--mirror", period=SOON)
    for name in "ab":
        watching.until("replaced", f"in/{name}")
    other = tmp_path / "other"
    other.mkdir()
    second = watch("--replace", "--mirror", period=SOON, root=other, prefix="other")
    (folder / "a").rename(other / "a")
    (folder / "b").rename(other / "b.part")
    second.until("relinked", "other/a")
    until(lambda: held(store) == {str(other / "a"), str(other / "b.part")})
    until(lambda: names(store) == ["other/a"])
    assert (watching.end(), second.end()) == (0, 0)
    store.gc(max_size=0, grace=0)
    assert (other / "a").read_bytes() == b"a" * 100
    assert (other / "b.part").read_bytes() == b"b" * 100


def test_rm_of_an_entry_lets_go_of_its_links_bytes(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    for name in "ab":
        make_file(folder, name, name.encode() * 100)
    replace_files(watch, "in/a", "in/b")
    assert run(store.path, "rm", "-r", "in").returncode == 0
    assert held(store) == set()
    assert store.gc(grace=0).blobs == 2


def test_folders_that_change_places_in_one_step_are_watched_on(folder: Path, watch: Watch) -> None:
    """Regression: watchdog had both under the wrong names, so changes in them were missed for an hour, and
    SIGTERM ended with a KeyError.
    """
    for name in ("a/x", "b/y", "b/deep/z"):
        make_file(folder, name, name.encode())
    watching = watch("--mirror")
    for name in ("a/x", "b/y", "b/deep/z"):
        watching.until("added", f"in/{name}")
    exchange(folder / "a", folder / "b")
    watching.until("rescan")
    for event, name in (("added", "in/b/x"), ("added", "in/a/deep/z"), ("dropped", "in/b/y")):
        watching.until(event, name)
    (folder / "b" / "x").write_bytes(b"other bytes")
    watching.until("changed", "in/b/x")
    make_file(folder, "a/deep/new", b"new")
    watching.until("added", "in/a/deep/new")
    (folder / "a" / "y").unlink()
    watching.until("dropped", "in/a/y")
    exchange(folder / "a", folder / "b")
    assert watching.end() == 0
