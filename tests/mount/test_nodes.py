"""A mount's record of the kernel's look-ups: it returns what was put in, and takes little memory."""

from __future__ import annotations

import tracemalloc

import pytest

from castore_fuse.lowlevel import ROOT
from castore_fuse.nodes import NodeTable
from castore_fuse.view import File, Folder

#: The first five in folders: shown with a prefix and without, by digest, generated, and of a damaged row.
FILES = [
    ("a/b", File("a/b/name.bin", bytes(range(32)), 12, 1.5, 2e9)),
    ("a/b", File("prefix/a/b/name.bin", bytes(range(32)), 12, 1, None)),
    ("", File("name.bin", bytes(32), 1 << 62, 0.0, None)),
    (".castore/objects/ab", File("", b"\xab" * 32, 5, 1.0)),
    (".castore", File("", b"\xab" * 32, 3, 1.0, 0.0, b"abc")),
    ("a", File("a/name.bin", b"short", 5, 1.0)),
    ("a", File("a/name.bin", bytes(32), "five", 1.0)),  # type: ignore[arg-type]
    ("a", File("a/name.bin", bytes(32), 1 << 64, 1.0)),
]


@pytest.mark.parametrize(("folder", "file"), FILES)
def test_a_node_stands_for_what_was_looked_up(folder: str, file: File) -> None:
    nodes, parent = NodeTable(), ROOT
    parts = folder.split("/") if folder else []
    for depth, part in enumerate(parts):
        parent = nodes.refer(parent, part, Folder("/".join(parts[: depth + 1]))).number
    node = nodes.refer(parent, "name.bin", file)
    assert node.item == file
    assert node.parent == parent
    assert nodes.refer(parent, "name.bin", file) is node
    assert nodes.refer(parent, "name.bin", file._replace(expires=3e9)) is node
    assert node.item == file._replace(expires=3e9)
    assert nodes.refer(parent, "name.bin", file._replace(digest=b"x" * 32)) is not node
    assert node.item == file._replace(expires=3e9)


def test_a_million_files_fit_into_half_a_gigabyte() -> None:
    nodes = NodeTable()
    folders = [nodes.refer(ROOT, f"shard-{number:05}", Folder(f"shard-{number:05}")) for number in range(20)]
    tracemalloc.start()
    try:
        for number in range(20_000):
            folder = folders[number // 1000]
            part = f"sample-{number:08}.json"
            digest = number.to_bytes(32, "little")
            nodes.refer(folder.number, part, File(f"data/{folder.part}/{part}", digest, number, number / 7))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / 20_000 < 420
    for number in range(20_000):
        nodes.forget(number + 2 + len(folders), 1)
    assert len(nodes) == 1 + len(folders)
    assert nodes.find(f"shard-00000/sample-{7:08}.json") == folders[:1]
