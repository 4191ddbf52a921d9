"""Links, pipes and folders in the place of every file and folder of a store: not followed, not waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import LONG
from tests.torture.victims import exercise, place_of


def link(path: Path) -> None:
    path.symlink_to(
        path.parents[len(path.parents) - 1]
        / Path(*path.parts[1 : path.parts.index("store")], "outside", "secret")
    )


def dangling(path: Path) -> None:
    path.symlink_to(
        Path(*path.parts[: path.parts.index("store")], "outside", "made by a write through a link")
    )


def folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"x")


PLANTS: dict[str, Callable[[Path], None]] = {
    "link": link,
    "dangling": dangling,
    "pipe": os.mkfifo,
    "folder": folder,
}
PLACES: dict[str, Callable[[Path], Path]] = {
    "object": lambda path: place_of(path, "large/zstd"),
    "raw object": lambda path: place_of(path, "large/one"),
    "pack": lambda path: place_of(path, "small/1"),
    "journal": lambda path: path / "objects" / "names" / "00000001.names",
    "next journal": lambda path: path / "objects" / "names" / "00000002.names",
    "snapshot": lambda path: path / "objects" / "names" / "00000009.snapshot",
    "temporary": lambda path: path / "tmp" / "1-2-3-4.part",
    "beacon": lambda path: path / "locks" / "beacon",
    "compute lock": lambda path: path / "locks" / "compute",
    "settings": lambda path: path / "castore.json",
    "index": lambda path: path / "index.sqlite",
    "log": lambda path: path / "index.sqlite-wal",
    "ballast": lambda path: path / "ballast",
    "stray object": lambda path: path / "objects" / "ab" / ("ab" * 32),
    "stray pack": lambda path: path / "objects" / "packs" / "000000ff.pack",
    "next pack": lambda path: path / "objects" / "packs" / "00000003.pack",
}


_CASES = [
    (where, what)
    for at, where in enumerate(PLACES)
    for turn, what in enumerate(PLANTS)
    if LONG or at % len(PLANTS) == turn or (what == "link" and at % 3 == 0)
]


@pytest.mark.parametrize(("where", "what"), _CASES)
def test_what_is_no_file_in_the_place_of_one_is_not_followed_and_not_waited_for(
    victim: Path, where: str, what: str
) -> None:
    place = PLACES[where](victim)
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        place.unlink()
    PLANTS[what](place)
    ended = exercise(victim)
    if where in (
        "object",
        "raw object",
        "stray object",
        "stray pack",
        "temporary",
        "next pack",
        "pack",
        "snapshot",
    ):
        # One bad file never breaks the rest.
        assert isinstance(ended["read again"], int), ended
        assert ended["read again"] >= 4, ended
        assert ended["verify again"] == 0, ended


@pytest.mark.parametrize("name", ["objects", "objects/packs", "objects/names", "tmp", "locks", "quarantine"])
def test_a_linked_folder_of_the_store_is_refused_before_anything_is_written(victim: Path, name: str) -> None:
    (victim / name).rename(victim / "aside")
    (victim / name).symlink_to(victim.parent / "outside")
    ended = exercise(victim)
    assert all(
        "is a link or a file where a folder of the store belongs" in str(end) for end in ended.values()
    ), ended


def test_a_linked_folder_of_objects_is_not_written_to(victim: Path) -> None:
    for number in range(256):
        place = victim / "objects" / f"{number:02x}"
        if not place.exists():
            place.symlink_to(victim.parent / "outside" / "ab")
    ended = exercise(victim)
    assert ended["read again"] >= 24
