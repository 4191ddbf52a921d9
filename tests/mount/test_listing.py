"""A folder's lines, packed or with attributes, from any offset, have the same names at the same offsets."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore_fuse.operations import Operations
from castore_fuse.view import File, Folder, View

DOTS = 2
FOLDERS = {f"{number:04}.d": number for number in range(0, 2_500, 7)}


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """A folder of 2,500 names, files and folders mixed."""
    store = Store(tmp_path_factory.mktemp("listing") / "store", memory=0)
    names = (f"a/{n:04}.d/x" if f"{n:04}.d" in FOLDERS else f"a/{n:04}.txt" for n in range(2_500))
    store.put_many((name, name.encode()) for name in names)
    return View(store)


def unpacked(line: bytes) -> tuple[int, str, int, int]:
    """Offset, name, inode and kind of a `struct fuse_dirent`, whose length is a multiple of eight."""
    inode, offset, length, kind = struct.unpack_from("=QQII", line)
    assert len(line) == 24 + (length + 7) // 8 * 8
    return offset, line[24 : 24 + length].decode(), inode, kind


def test_lines_are_the_same_packed_and_not_from_anywhere_on(view: View) -> None:
    expected = list(view.listing("a"))
    assert [name for name, _ in expected] == [
        f"{n:04}.d" if f"{n:04}.d" in FOLDERS else f"{n:04}.txt" for n in range(2_500)
    ]
    operations = Operations(view)
    folder = operations.lookup(1, b"a").node
    handle = operations.opendir(folder).fh
    chance = random.Random(3)
    # Backwards and forwards: pages that were read are kept, others are read on demand.
    for start in [0, 2_400, 1, 7, 999, 1_000, 1_001, *chance.sample(range(2_500), 20), 2_499, 2_500]:
        lines = [unpacked(line) for line in operations.readdir(folder, handle, start + DOTS)]
        assert lines == [
            (place + DOTS + 1, name, item.inode, 8 if isinstance(item, File) else 4)
            for place, (name, item) in enumerate(expected[start:], start)
        ]
        plus = list(operations.readdirplus(folder, handle, start + DOTS))
        assert [(line.offset, line.name.decode(), line.entry.attr.ino) for line in plus] == [
            line[:3] for line in lines
        ]
    assert [unpacked(line)[1] for line in operations.readdir(folder, handle, 0)][:3] == [".", "..", "0000.d"]
    operations.releasedir(folder, handle)


def test_a_listing_begins_with_few_attributes(view: View) -> None:
    """`find` needs none; a program that reads the first attributes is given more."""
    operations = Operations(view)
    folder = operations.lookup(1, b"a").node
    handle = operations.opendir(folder).fh
    first = list(operations.readdirplus(folder, handle, 0))
    assert [line.name for line in first[:3]] == [b".", b"..", b"0000.d"]
    assert 10 < len(first) < 50
    rest = list(operations.readdirplus(folder, handle, first[-1].offset))
    assert len(first) + len(rest) == 2_500 + DOTS
    assert all(line.entry.node for line in (*first[DOTS:], *rest))


def test_folders_of_the_root_are_all_listed(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.put_many((f"{number:03}/x", b"x") for number in range(300))
        store.put("a file", b"y")
        items = dict(View(store).listing(""))
        assert len(items) == 301
        assert items["007"] == Folder("007")


@pytest.mark.parametrize("name", [".castore", ".castore/x", ".castore/links/x"])
def test_a_name_in_the_place_of_the_mounts_own_folder_hides_nothing(store: Store, name: str) -> None:
    """Regression: an entry `PREFIX/.castore` was listed, and the kernel took it for the links' folder."""
    store.put(f"q/{name}", b"somebody's")
    store.put_many([("q/a", b"1"), ("q/z", b"2")])
    with castore_fuse.mounted(store, prefix="q") as root:
        assert sorted(os.listdir(root)) == ["a", "z"]
        assert [entry.name for entry in os.scandir(root) if entry.is_file()] == ["a", "z"]
        assert (root / ".castore" / "stat.json").read_bytes().startswith(b"{")
        assert sorted(os.listdir(root)) == ["a", "z"]
    with castore_fuse.mounted(store) as root:
        assert (root / "q" / name).read_bytes() == b"somebody's"
