"""Damage under a mount: EIO there, right bytes elsewhere, never wrong ones; a mended file reads again."""

from __future__ import annotations

import errno
import faulthandler
import mmap
import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.objects.codecs import FRAME_SIZE
from castore.objects.frames import read_table
from castore.repair.doctor import rebuild_index
from tests.helpers import flip, mixed, noise, payload, text
from tests.mount.conftest import each_with_a_mount, forget_pages, until

pytestmark = pytest.mark.usefixtures("forked_processes")

DATA = mixed(4 * FRAME_SIZE + 77, 9)
OTHER = mixed(2 * FRAME_SIZE, 10)


def flip_in_frame(store: Store, name: str, number: int) -> None:
    """Flip a bit in the middle of a frame of a loose object."""
    found = store.index.find(name)
    assert found is not None
    path, _, length = payload(store, name)
    stored = path.read_bytes()
    table = read_table(found.blob.codec, found.blob.size, length, lambda at, size: stored[at : at + size])
    flip(path, (table.offsets[number] + table.offsets[number + 1]) // 2)


def fails(read: object) -> int | None:
    """The errno that a call ends with, or None if it does not fail."""
    try:
        read()  # type: ignore[operator]
    except OSError as error:
        return error.errno
    return None


def quarantined(store: Store) -> list[str]:
    return sorted(path.name[:64] for path in (store.path / "quarantine").iterdir())


@pytest.mark.parametrize(
    ("live", "codec"),
    each_with_a_mount({codec: codec for codec in ("zstd", "lz4", "gzip", "none")}),
    indirect=["live"],
)
def test_flipped_bit_in_an_object_is_an_error_where_it_is(live: Path, store: Store, codec: str) -> None:
    digest = store.put("bad", DATA, codec=codec).digest
    store.put("good", OTHER, codec=codec)
    flip_in_frame(store, "bad", 2)
    received: list[bytes] = []
    with (live / "bad").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert file.read(FRAME_SIZE) == DATA[:FRAME_SIZE]
        file.seek(2 * FRAME_SIZE + 100)
        with pytest.raises(OSError, match="Input/output error") as caught:
            file.read(1000)
        assert caught.value.errno == errno.EIO
        # An open handle still serves the intact frames. A pinned mount has no handles, so the whole file is
        # an error there.
        file.seek(3 * FRAME_SIZE)
        error = fails(lambda: received.append(file.read(5000)))
        assert (error, received) in [(None, [DATA[3 * FRAME_SIZE :][:5000]]), (errno.EIO, [])]
    assert quarantined(store) == [digest]
    assert (live / "good").read_bytes() == OTHER
    assert store.get("bad") is None
    forget_pages(live / "good")
    assert (live / "good").read_bytes() == OTHER


def test_flipped_bit_in_a_pack_costs_one_file(live: Path, store: Store) -> None:
    files = {f"small/{number}": text(3000 + number, number) for number in range(20)}
    store.put_many(files.items())
    path, offset, length = payload(store, "small/7")
    flip(path, offset + length // 2)
    for name, data in files.items():
        if name == "small/7":
            assert fails((live / name).read_bytes) == errno.EIO
            assert fails((live / name).read_bytes) == errno.EIO
        else:
            assert (live / name).read_bytes() == data
    assert len(quarantined(store)) == 1


def test_damage_found_through_a_mount_is_counted_once(store: Store) -> None:
    store.put("name", text(3000))
    path, offset, length = payload(store, "name")
    flip(path, offset + length // 2)
    with castore_fuse.mounted(store) as root:
        for _ in range(3):
            assert fails((root / "name").read_bytes) == errno.EIO
    assert store.stat().corrupt == 1


@pytest.mark.parametrize("size", [3000, len(DATA)], ids=["packed", "loose"])
def test_file_reads_again_once_its_bytes_are_put_again(live: Path, store: Store, size: int) -> None:
    data = DATA[:size]
    store.put("name", data, codec="zstd")
    path, offset, length = payload(store, "name")
    flip(path, offset + length // 3)
    assert fails((live / "name").read_bytes) == errno.EIO
    assert store.put("name", data).size == size
    until(lambda: fails((live / "name").read_bytes) is None)
    assert (live / "name").read_bytes() == data


def test_damaged_page_of_a_map_is_a_bus_error_and_no_byte(store: Store) -> None:
    store.put("name", DATA, codec="zstd")
    flip_in_frame(store, "name", 1)
    with castore_fuse.mounted(store) as root:
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            with (root / "name").open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                mapped.madvise(mmap.MADV_RANDOM)
                os._exit(mapped[FRAME_SIZE + 5])
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == 7  # SIGBUS


DAMAGES = (
    "digest = 'text'",
    "digest = x'01'",
    "size = 'big'",
    "size = -5",
    "created = 'now'",
    "created = 1e300",
)


@pytest.mark.parametrize(
    ("live", "damage"), each_with_a_mount({damage: damage for damage in DAMAGES}), indirect=["live"]
)
def test_row_that_cannot_be_costs_its_own_name_alone(live: Path, store: Store, damage: str) -> None:
    store.put_many((f"a/{number:02}", b"%d" % number) for number in range(40))
    names = [f"{number:02}" for number in range(40)]
    with closing(sqlite3.connect(store.path / "index.sqlite", isolation_level=None)) as db:
        # One name among those listed with attributes, one among those listed without.
        db.execute(f"UPDATE entries SET {damage} WHERE name IN ('a/03', 'a/33')")
    assert sorted(os.listdir(live / "a")) == names
    for name in names:
        read = partial((live / "a" / name).read_bytes)
        assert fails(read) == (errno.EIO if name in ("03", "33") else None), name
    assert sorted(entry.name for entry in os.scandir(live / "a") if entry.is_file()) == names


def test_missing_and_truncated_objects_are_errors(live: Path, store: Store) -> None:
    for name, seed in ("missing", 1), ("cut", 2), ("empty", 3), ("whole", 4):
        store.put(name, noise(FRAME_SIZE + seed, seed))
    payload(store, "missing")[0].unlink()
    for name, size in ("cut", FRAME_SIZE // 2), ("empty", 0):
        path = payload(store, name)[0]
        path.chmod(0o600)
        os.truncate(path, size)
    for name in ("missing", "cut", "empty"):
        assert fails((live / name).read_bytes) == errno.EIO
    assert (live / "whole").read_bytes() == noise(FRAME_SIZE + 4, 4)


@pytest.mark.parametrize("live", ["default", pytest.param("pinned", marks=pytest.mark.matrix)], indirect=True)
def test_broken_index_is_an_error_and_a_rebuilt_one_serves_again(live: Path, store: Store) -> None:
    files = {f"folder-{number % 50}/{number:05d}": text(100, number) for number in range(3000)}
    store.put_many(files.items())
    store.close()
    assert (live / "folder-1" / "00001").read_bytes() == files["folder-1/00001"]
    with (live / "folder-2" / "00002").open("rb", buffering=0) as held:
        held.read(1)
        index = store.path / "index.sqlite"
        for path in (index, index.with_name("index.sqlite-wal")):
            if path.exists():
                with path.open("r+b") as file:
                    file.write(b"\xa5" * path.stat().st_size)
        errors = {fails((live / name).read_bytes) for name in list(files)[100:160]}
        assert errors & {errno.EIO}
        assert errors <= {errno.EIO, None}
        rebuild_index(store.path)
        forget_pages(held.fileno())
        assert held.read() == files["folder-2/00002"][1:]
        for name, data in files.items():
            assert (live / name).read_bytes() == data
    with Store(store.path, memory=0) as again:
        again.put("folder-3/new", b"seen")
    until((live / "folder-3" / "new").exists)
    assert len(os.listdir(live / "folder-3")) == 61
