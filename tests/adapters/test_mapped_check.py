"""Objects are read and checked once before they are mapped, and again after a change."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import pytest

from castore import Store
from castore.adapters import mapped_check
from castore.errors import CorruptError, FullError, NotFoundError
from castore.records import Blob
from tests.helpers import flip, noise, payload


def put(store: Store, name: str = "a") -> Blob:
    store.put(name, noise(1_000_000, len(name)), codec="none")
    found = store.index.find(name)
    assert found is not None
    return found.blob


def test_an_object_is_read_once_for_as_long_as_nobody_touches_it(store: Store) -> None:
    blobs = [put(store), put(store, "bb")]
    assert mapped_check.find_unchecked(store, blobs) == blobs
    mapped_check.check_object(store, blobs[0])
    assert mapped_check.find_unchecked(store, blobs) == blobs[1:]
    path, _, _ = payload(store, "a")
    os.utime(path)
    assert mapped_check.find_unchecked(store, blobs[:1]) == blobs[:1]
    mapped_check.check_object(store, blobs[0])
    assert mapped_check.find_unchecked(store, blobs[:1]) == []


def test_an_object_is_noted_however_quickly_it_was_written(store: Store) -> None:
    """The kernel's time of a file lies up to a tick of its clock behind `time.time`."""
    data = noise(2_100_000, 5)
    for number in range(60):
        started = mapped_check.file_time()
        store.put("a", data[number * 1000 :][:2_000_000], codec="zstd")
        found = store.index.find("a")
        assert found is not None
        mapped_check.note_new(store, [found.blob], started)
        assert mapped_check.find_unchecked(store, [found.blob]) == []


def test_many_objects_have_one_note_once_each_has_its_own(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [chr(ord("a") + number) * (number + 1) for number in range(12)]
    blobs = [put(store, name) for name in names]
    mapped_check.note_new(store, blobs, mapped_check.file_time() - 60)
    assert mapped_check.find_unchecked(store, blobs) == []
    asked: list[str] = []
    get_many = store.get_many

    def noted(names: Iterable[str]) -> list[bytes | None]:
        asked.extend(names := list(names))
        return get_many(names)

    monkeypatch.setattr(store, "get_many", noted)
    assert mapped_check.find_unchecked(store, blobs) == []
    assert asked == []
    assert mapped_check.find_unchecked(store, blobs[1:]) == []
    assert len(asked) == 11, "other objects have another note"
    os.utime(payload(store, names[5])[0])
    assert mapped_check.find_unchecked(store, blobs) == [blobs[5]]
    mapped_check.check_now(store, blobs[5])
    assert mapped_check.find_unchecked(store, blobs) == []
    payload(store, names[7])[0].unlink()
    assert mapped_check.find_unchecked(store, blobs) == [blobs[7]]


def test_a_full_disk_costs_the_common_note_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [put(store, "x" * (number + 1)) for number in range(9)]
    mapped_check.note_new(store, blobs, mapped_check.file_time() - 60)

    def full(*_: object, **__: object) -> None:
        raise FullError("the disk is full")

    monkeypatch.setattr(store, "put", full)
    assert mapped_check.find_unchecked(store, blobs) == []


def test_damage_after_a_check_is_found_by_the_next(store: Store) -> None:
    blob = put(store)
    mapped_check.check_object(store, blob)
    flip(payload(store, "a")[0], 777_777)
    with pytest.raises(CorruptError):
        mapped_check.check_object(store, blob)
    assert store.get("a") is None
    with pytest.raises(NotFoundError):
        mapped_check.check_object(store, blob)


def test_only_what_was_written_since_is_taken_on_trust(store: Store) -> None:
    old = put(store)
    os.utime(payload(store, "a")[0], (1, 1))
    started = time.time() - 1
    new = put(store, "bb")
    mapped_check.note_new(store, [old, new], started)
    assert mapped_check.find_unchecked(store, [old, new]) == [old]


def test_a_forgotten_object_is_read_again(store: Store) -> None:
    blob = put(store)
    mapped_check.check_object(store, blob)
    mapped_check.forget_notes(store, [blob])
    assert mapped_check.find_unchecked(store, [blob]) == [blob]
