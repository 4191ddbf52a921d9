"""Entries remember the files they were made from, and report when those have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from castore import Store
from castore.errors import InvalidValueError
from castore.watch import entry_sources
from castore.watch.entry_sources import Stale, changed, fresh, remember
from tests.watch.conftest import age, run


@pytest.fixture
def raw(folder: Path) -> Path:
    path = folder / "raw.txt"
    path.write_text("hello")
    age(path)
    return path


def derive(store: Store, *paths: Path, pin: bool = False) -> None:
    store.put("derived", b"HELLO", metadata={"sources": remember(paths)}, pin=pin)


def test_an_entry_is_fresh_while_its_sources_are_as_they_were(store: Store, raw: Path) -> None:
    derive(store, raw)
    assert fresh(store, "derived")
    assert not fresh(store, "another")


def test_another_size_is_noticed_without_reading(store: Store, raw: Path) -> None:
    derive(store, raw)
    raw.write_text("goodbye")
    entry = store.entry("derived")
    assert entry is not None
    assert changed(entry) == [f"{raw} has 7 bytes, and had 5"]


def test_another_mtime_with_the_same_content_is_no_change(store: Store, raw: Path) -> None:
    derive(store, raw)
    os.utime(raw)
    assert fresh(store, "derived")


def test_other_content_of_equal_size_is_a_change(store: Store, raw: Path) -> None:
    derive(store, raw)
    raw.write_text("HELLO")
    entry = store.entry("derived")
    assert entry is not None
    assert changed(entry) == [f"{raw} has other content"]


def test_content_written_within_the_same_tick_of_the_clock_is_a_change(store: Store, folder: Path) -> None:
    path = folder / "quick"
    path.write_bytes(b"one")
    derive(store, path)
    when = path.stat().st_mtime_ns
    path.write_bytes(b"two")
    os.utime(path, ns=(when, when))
    assert not fresh(store, "derived")


def test_content_is_not_read_while_size_and_mtime_are_as_they_were(store: Store, raw: Path) -> None:
    """A check of thousands of sources must cost no more than a stat each."""
    derive(store, raw)
    before = raw.stat()
    raw.write_text("HELLO")
    os.utime(raw, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fresh(store, "derived"), "it was read"


def test_each_source_that_is_gone_or_no_file_any_more_has_a_reason(store: Store, folder: Path) -> None:
    paths = [folder / "a", folder / "b", folder / "c"]
    for path in paths:
        path.write_text("x")
        age(path)
    derive(store, *paths)
    paths[0].unlink()
    paths[1].unlink()
    paths[1].mkdir()
    entry = store.entry("derived")
    assert entry is not None
    assert changed(entry) == [f"{paths[0]} is gone", f"{paths[1]} is not a file any more"]


def test_what_cannot_be_remembered_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidValueError, match="not a regular file"):
        remember([folder])
    with pytest.raises(FileNotFoundError):
        remember([folder / "nothing"])


def test_users_own_metadata_of_that_name_is_left_alone(store: Store) -> None:
    for value in ["train", ["a", "b"], {"path": 3, "size": 1, "mtime_ns": 2}, None]:
        store.put("x", b"x", metadata={"source": value, "sources": value})
        assert fresh(store, "x")
        assert list(entry_sources.drop_stale(store, lambda path: True)) == []


def test_stale_entries_are_dropped_and_pinned_ones_only_reported(store: Store, raw: Path) -> None:
    derive(store, raw)
    store.put("pinned", b"p", metadata={"sources": remember([raw])}, pin=True)
    store.put("other", b"o")
    assert list(entry_sources.drop_stale(store, lambda path: True)) == []
    raw.write_text("changed")
    assert list(entry_sources.drop_stale(store, lambda path: path == "elsewhere")) == []
    reasons = [f"{raw} has 7 bytes, and had 5"]
    assert list(entry_sources.drop_stale(store, lambda path: path == str(raw))) == [
        Stale("derived", reasons, True),
        Stale("pinned", reasons, False),
    ]
    assert [entry.name for entry in store.entries()] == ["other", "pinned"]


def test_an_entry_that_was_put_again_since_is_not_dropped(store: Store, raw: Path) -> None:
    derive(store, raw)
    seen = store.entry("derived")
    assert seen is not None
    raw.write_text("changed")
    derive(store, raw)
    assert not store.delete_unchanged(seen)
    assert fresh(store, "derived")


def test_castore_add_remembers_small_and_large_files(store: Store, raw: Path, folder: Path) -> None:
    large = folder / "large.bin"
    large.write_bytes(bytes(3_000_000))
    age(large)
    assert run(store.path, "add", folder, "--as", "in", "--meta", "split=train").returncode == 0
    for path in (raw, large):
        entry = store.entry(f"in/{path.name}")
        assert entry is not None
        status = path.stat()
        kept = {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
        assert entry.metadata == {"source": kept, "split": "train"}
        assert fresh(store, entry.name)
        path.write_bytes(b"something else")
        assert not fresh(store, entry.name)
