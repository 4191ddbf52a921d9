"""Facts and bytes that a store gives of blobs, past their names: for tools that keep digests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import castore
from castore import InvalidNameError, NotFoundError, Store
from castore.index.transaction import Write
from castore.objects.codecs import FRAME_SIZE
from castore.records import LOST
from tests.helpers import flip, noise, text
from tests.torture.kills import before, pause, paused

LARGE = 3 * FRAME_SIZE


def test_a_name_leads_to_its_blob_with_expiry_and_serializer(store: Store) -> None:
    entry = store.put("a", text(LARGE), ttl=100, serializer="text")
    found = store.find("a")
    assert found is not None
    assert (found.blob.digest.hex(), found.blob.size, found.blob.stored) == (
        entry.digest,
        LARGE,
        entry.stored,
    )
    assert (found.expires, found.serializer, found.blob.codec) == (entry.expires, "text", "zstd")
    assert store.find("b") is None
    assert store.find_many(["a", "b"]) == {"a": found}
    assert store.blob(entry.digest) == store.blob(bytes.fromhex(entry.digest)) == found.blob
    assert store.blob("00" * 32) is None
    for ask in (store.find, lambda name: store.find_many([name])):
        with pytest.raises(InvalidNameError):
            ask("a/../b")


def test_an_expired_entry_is_found_only_where_that_is_asked(store: Store) -> None:
    store.put("a", b"bytes", ttl=1e-9)
    assert store.entry("a") is None
    entry = store.entry("a", expired=True)
    assert entry is not None
    assert entry.size == 5
    assert store.find("a") is not None
    assert store.entry("b", expired=True) is None


@pytest.mark.parametrize("data", [b"", b"bytes", noise(LARGE, 1)], ids=["empty", "small", "large"])
def test_all_bytes_of_a_blob_are_given_or_none_once_they_are_damaged(store: Store, data: bytes) -> None:
    found = store.find(store.put("a", data).name)
    assert found is not None
    assert store.get_blob(found.blob) == data
    with Store(store.path, memory=0) as other:
        assert other.get_blob(found.blob) == data
        if len(data) == LARGE:
            flip(Path(store.objects.loose.path(found.blob.digest, found.blob.codec)), LARGE // 2)
            assert other.get_blob(found.blob) is None
            assert other.get("a") is None


def test_blobs_that_nobody_names_are_removed_at_once_and_others_stay(store: Store) -> None:
    digests = [bytes.fromhex(store.put(name, noise(LARGE, ord(name))).digest) for name in "ab"]
    store.put("small", b"small")
    store.delete("a")
    assert store.stat().blobs == 3
    store.remove_blobs(iter(digests))
    assert store.blob(digests[0]) is None
    assert store.get("b") == noise(LARGE, ord("b"))
    assert store.gc(grace=0).leftovers == []
    assert store.verify().bad == []


def test_a_use_that_is_reported_counts_for_gc_and_stat(store: Store) -> None:
    for name in ("older", "newer"):
        store.put(name, noise(LARGE, len(name) + ord(name[0])))
    before = store.stat().disk_hits
    store.count_use("older")
    store.flush()
    assert store.stat().disk_hits == before + 1
    assert store.gc(max_size=LARGE + 1000).evicted == ["newer"]


def test_uses_that_meet_a_busy_index_are_written_later(store: Store) -> None:
    store.put("a", b"x")
    begun = time.time()
    with paused(lambda: store.put("b", b"y"), before(Write, "commit", then=pause)):
        store._usage.due = 0.0
        assert (store.get("a"), store.get("nothing"), store.get("a")) == (b"x", None, b"x")
        with Store(store.path, memory=0) as other:
            assert (other.stat().disk_hits, other.stat().misses) == (0, 0)
    store.flush()
    with Store(store.path, memory=0) as other:
        assert (other.stat().disk_hits, other.stat().misses) == (2, 1)
        assert [entry.accessed >= begun for entry in other.entries("a")] == [True]


def test_totals_are_those_of_stat(store: Store) -> None:
    for name in ("a", "b", "c/d"):
        store.put(name, text(9000))
    stat, totals = store.stat(), store.totals()
    assert totals[:5] == (stat.entries, stat.logical, stat.blobs, stat.unique, stat.stored)
    assert totals.logical == 3 * totals.unique == 27_000


def test_what_signatures_of_the_store_name_is_exported() -> None:
    for name in ("Batch", "Blob", "Entry", "Found", "Mount", "OpenBlob", "Totals"):
        assert getattr(castore, name).__name__ == name
        assert name in castore.__all__


def test_the_file_of_a_blob_is_its_object_or_its_pack(store: Store) -> None:
    store.put("small", b"small")
    store.put("large", noise(LARGE, 1))
    found = store.find_many(["small", "large"])
    small, large = (Path(store.path_of(found[name].blob)) for name in ("small", "large"))
    assert b"small" in small.read_bytes()
    assert large.read_bytes().startswith(noise(LARGE, 1)[:1000])
    assert large.is_relative_to(store.path / "objects")
    with pytest.raises(NotFoundError):
        store.path_of(found["small"].blob._replace(pack=LOST))
