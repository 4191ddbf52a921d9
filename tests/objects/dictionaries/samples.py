"""Samples to train on and to put, and helpers to read a store in the tests."""

from __future__ import annotations

from pathlib import Path

import zstandard

from castore import Store
from tests.helpers import payload, records

SEEN = records(600, 1)
NEW = records(300, 2)


def number_in(store: Store, name: str) -> int:
    """The number of the dictionary that an entry's frame needs; 0 for none."""
    path, offset, length = payload(store, name)
    with path.open("rb") as file:
        file.seek(offset)
        frame = file.read(length)
    return zstandard.get_frame_parameters(frame).dict_id if frame.startswith(b"\x28\xb5\x2f\xfd") else 0


def files(store: Store) -> list[Path]:
    return sorted((store.path / "objects" / "dicts").glob("*[0-9a-f].[sz]*"))


def all_read(store: Store) -> bool:
    return store.get_many([f"rec/{number}" for number in range(len(NEW))]) == list(NEW)
