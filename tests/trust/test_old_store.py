"""A store that an earlier castore made: it opens, and everything in it is as it was put."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from castore import Store
from castore.repair import doctor
from castore.watch import dangling_links

#: Made in November 2026, before modules moved into rooms: packs, loose objects of each codec, a dictionary, a
#: pin.
ARCHIVE = Path(__file__).with_name("store-2026-11.tar.xz")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "store", filter="data")
    (tmp_path / "store").chmod(0o700)
    return tmp_path / "store"


def record(number: int) -> bytes:
    return (
        b'{"word": "number %d", "value": %d, "text": "a line that is like others"}' % (number, number**2) * 6
    )


def holds_all(store: Store) -> None:
    for number in range(440):
        name = f"words/{number}.json" if number < 400 else f"words/late/{number}.json"
        assert store.get(name) == (None if number == 3 else record(number))
    large = store.entry("pinned/large.bin")
    assert large is not None
    assert large.pinned
    assert large.metadata == {"made": "before"}
    assert store.get("pinned/large.bin") == bytes(range(256)) * 4096
    assert store.get("raw.bin") == b"\x01\x02\x03" * 100_000
    assert store.get("lz4.bin") == b"lz4 " * 100_000
    assert store.get("gzip.bin") == b"gzip " * 100_000
    assert store.get("gone") is None
    assert store.load("array").tolist() == np.arange(10.0).tolist()
    assert store.load("object") == {"a": [1, 2.5, None, "text"]}


def test_an_old_store_has_all_that_was_put(path: Path) -> None:
    with Store(path, memory=0) as store:
        holds_all(store)
        assert store.verify().bad == []
        store.put("new", record(3))
        assert store.gc(grace=0).expired == ["gone"]
        holds_all(store)
    assert doctor.examine(path, [dangling_links.examine]) == []


def test_the_index_of_an_old_store_can_be_rebuilt(path: Path) -> None:
    shutil.rmtree(path / "locks")
    (path / "index.sqlite").unlink()
    doctor.rebuild_index(path)
    with Store(path, memory=0) as store:
        holds_all(store)
