"""The possible contents of a disk after a power cut, computed from the log of powercut_fs.py.

The model is POSIX's promise, and no more than journalling file systems keep. A file's content at its last
fsync is there. Of data written since, each page may be there, missing, or zeros. A name that was made, moved
or removed is on the disk once its folder, or the file under it, was synced. Of other changes to names, those
up to some moment are there, and later ones are not.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

_PAGE = 4096


class File:
    """One file: its content on the disk for sure, and the changes since."""

    def __init__(self) -> None:
        self.synced = bytearray()
        self.pending: list[tuple[int, bytes] | int] = []

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.synced, change)
        self.pending = []

    def cut(self, chance: random.Random, kept: float) -> bytes:
        """Its content after a power cut; ``kept`` is the part of the unsynced changes that is kept."""
        content = bytearray(self.synced)
        for change in self.pending:
            if isinstance(change, int):
                if chance.random() < kept:
                    _apply(content, change)
                continue
            offset, data = change
            for start in range(0, len(data), _PAGE):
                fate = chance.random()
                piece = data[start : start + _PAGE]
                if fate < kept:
                    _apply(content, (offset + start, piece))
                elif fate < kept + (1 - kept) * 0.3 and offset + start >= len(content):
                    _apply(
                        content, (offset + start, bytes(len(piece)))
                    )  # the length is there, the data is not
        return bytes(content)


def _apply(content: bytearray, change: tuple[int, bytes] | int) -> None:
    if isinstance(change, int):
        content[:] = content[:change].ljust(change, b"\0")
        return
    offset, data = change
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


class Change(NamedTuple):
    """A change to names."""

    what: str
    path: str
    other: Any  # the number of a file that is made; the new name of a rename


class Disk:
    """The state of the disk after the events so far: sure and possible."""

    def __init__(self) -> None:
        self.files: dict[int, File] = {}
        self._names: dict[str, int | None] = {}  # None: a folder; as programs see it
        self._changes: list[Change] = []
        self._sure: set[int] = set()  # of _changes

    def see(self, event: list[Any]) -> None:
        """Apply one event of the log."""
        what, *rest = event
        if what == "write":
            self.files[rest[0]].pending.append((rest[1], rest[2]))
        elif what == "truncate":
            self.files[rest[0]].pending.append(rest[1])
        elif what == "fsync":
            self.files[rest[0]].sync()
            self._settle(lambda change: self._means(change, rest[0]))
        elif what == "fsyncdir":
            self._settle(lambda change: _touches(change, rest[0]))
        elif what == "create":
            self.files[rest[1]] = File()
            self._change(Change("create", rest[0], rest[1]))
        elif what in ("mkdir", "unlink", "rename"):
            self._change(Change(what, rest[0], rest[1] if what == "rename" else None))

    def _change(self, change: Change) -> None:
        self._changes.append(change)
        _do(self._names, change)

    def _means(self, change: Change, number: int) -> bool:
        return change.what == "create" and change.other == number

    def _settle(self, settled: Any) -> None:
        self._sure |= {at for at, change in enumerate(self._changes) if settled(change)}

    def after_cut(self, folder: Path, chance: random.Random, kept: float) -> None:
        """Make the disk's content after a power cut now, in ``folder``."""
        names: dict[str, int | None] = {}
        until = (
            int(len(self._changes) * kept) if kept in (0.0, 1.0) else chance.randrange(len(self._changes) + 1)
        )
        for at, change in enumerate(self._changes):
            if at < until or at in self._sure:
                _do(names, change)
        for path, number in sorted(names.items()):
            target = folder / path[1:]
            if not target.parent.is_dir():
                continue
            if number is None:
                target.mkdir(exist_ok=True)
            else:
                target.write_bytes(self.files[number].cut(chance, kept))


def _do(names: dict[str, int | None], change: Change) -> None:
    if change.what == "create":
        names[change.path] = change.other
    elif change.what == "mkdir":
        names[change.path] = None
    elif change.what == "unlink":
        names.pop(change.path, None)
    elif change.path in names:
        names[change.other] = names.pop(change.path)


def _touches(change: Change, folder: str) -> bool:
    ends = [change.path] + ([change.other] if change.what == "rename" else [])
    return any(os.path.dirname(path) == folder for path in ends)


def events(log: Path) -> Iterator[list[Any]]:
    """The events of a log, in order."""
    with log.open("rb") as file:
        yield from msgpack.Unpacker(file, max_buffer_size=1 << 30)
