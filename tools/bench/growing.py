"""Stores of any number of entries, made in minutes: writes the rows and records that puts would have written.

The result is a store like any other: objects in packs, rows of both tables, totals, and the names journal
agree, and `doctor` and `verify` find nothing (a test holds this). Only the way is shorter: sorted bulk
inserts without a rollback journal, instead of one transaction a batch. No other process may have the store
open meanwhile.

Most entries are tiny records, each with its own number. 10,000 of them, spread evenly, hold 2 KB. Readers
read those, so at any size a read costs the same except for finding the entry.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

from blake3 import blake3

from castore import Store
from castore.gc import leftovers
from castore.index.journal import pack_record
from castore.index.statements import NEW_PACK
from castore.objects.encode import encode_small
from castore.objects.packs import FILE_HEAD, build_record
from castore.records import HEAD_SIZE, Blob, entry_check
from castore.system.temporary import open_with_mode
from tools.bench import corpus

#: How many entries of a store hold 2 KB (all of them, in a smaller one).
PROBES = 10_000
#: Files in a folder, and folders in a set.
FILES, FOLDERS = 1000, 200
_PROBE_SIZE = 2048
# Up to this size no value shrinks by the twentieth that `codec="auto"` requires.
_TINY = 40
# The tiny records take about an eighth of the room of 2 KB records. With packs of an eighth of their size
# there are as many packs.
_PACK_SIZE = 8 * 1024 * 1024
_CHUNK = 1_000_000

_ADD_BLOB = "INSERT INTO blobs (digest, size, stored, codec, pack, offset, refs) VALUES (?, ?, ?, ?, ?, ?, 1)"
_ADD_ENTRY = (
    "INSERT INTO entries (name, digest, size, serializer, created, expires, accessed, checked)"
    " VALUES (?1, ?2, ?3, 'bytes', ?4, ?5, ?4, ?6)"
)
_ADD_TOTALS = (
    "UPDATE totals SET entries = entries + ?1, logical = logical + ?2, blobs = blobs + ?1, uniq = uniq + ?2,"
    " stored = stored + ?3, packed = packed + ?4"
)


class Growing:
    """A store that is filled to a number of entries, and later to more.

    Args:
        path: the store's folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = 0
        self._vanishing = 0

    def grow(self, entries: int) -> None:
        """Fill it up to ``entries`` entries: any number at first, later ten times as many as there were."""
        spacing = max(1, entries // PROBES)
        probes = iter(corpus.records(entries // spacing + 1, _PROBE_SIZE, f"{self.path.name}-{entries}"))
        _fill(
            self.path,
            (
                (name_of(number), next(probes) if number % spacing == 0 else _tiny(number))
                for number in range(self.entries, entries)
            ),
            None,
        )
        self.entries = entries

    def add_expired(self, count: int) -> None:
        """Add that many expired entries, in folders of their own."""
        start, self._vanishing = self._vanishing, self._vanishing + count
        numbers = range(start, start + count)
        _fill(
            self.path,
            ((f"expired/{name_of(number)}", _tiny(-number - 1)) for number in numbers),
            time.time() - 1,
        )


def probes(entries: int) -> list[str]:
    """Names of the entries that hold 2 KB in a store of that many, evenly spread."""
    return [name_of(number) for number in range(0, entries, max(1, entries // PROBES))]


def name_of(number: int) -> str:
    """The name of an entry, in a set of folders of files."""
    folder = number // FILES
    return f"set-{folder // FOLDERS:03}/shard-{folder:05}/sample-{number:08}.json"


def _tiny(number: int) -> bytes:
    return b'{"id": "%09d", "label": %03d}' % (number, number % 1000)


def _fill(path: Path, items: Iterator[tuple[str, bytes]], expires: float | None) -> None:
    with Store(path, memory=0):
        pass  # creates the store if there is none
    while chunk := list(islice(items, _CHUNK)):
        now = time.time()
        names = [name for name, _ in chunk]
        with closing(sqlite3.connect(path / "index.sqlite", isolation_level=None)) as db:
            rows = _insert(path, db, chunk, now, expires)
        with Store(path, memory=0) as store, store.index.write():
            written = zip(names, rows, strict=True)
            journal_records = ((name, row.digest, "bytes", None, now, expires, 0) for name, row in written)
            while records := b"".join(map(pack_record, islice(journal_records, 10_000))):
                store.index.journal.append(records)
    with Store(path, memory=0) as store:
        leftovers.rotate_journal(store.index)


def _insert(
    path: Path, db: sqlite3.Connection, chunk: list[tuple[str, bytes]], now: float, expires: float | None
) -> list[Blob]:
    """Write objects and rows; returns the blobs in the order of the chunk."""
    # A rollback journal would double the writing. A crash may cost this store.
    for pragma in (
        "journal_mode = DELETE",
        "journal_mode = OFF",
        "synchronous = OFF",
        "cache_size = -1500000",
    ):
        db.execute(f"PRAGMA {pragma}")
    db.execute("BEGIN EXCLUSIVE")
    rows = list(_packed(path / "objects" / "packs", db, (value for _, value in chunk), now))
    # Names come in order, as in a data set. Digests are spread over the table: sorted, each page is touched
    # once.
    named = zip(chunk, rows, strict=True)
    db.executemany(
        _ADD_ENTRY,
        (
            (name, row.digest, row.size, now, expires, entry_check(name, row.digest))
            for (name, _), row in named
        ),
    )
    db.executemany(_ADD_BLOB, sorted(rows))
    stored = sum(row.stored for row in rows)
    packed = stored + HEAD_SIZE * len(rows)
    db.execute(_ADD_TOTALS, (len(rows), sum(row.size for row in rows), stored, packed))
    db.execute("COMMIT")
    return rows


def _packed(folder: Path, db: sqlite3.Connection, values: Iterator[bytes], now: float) -> Iterator[Blob]:
    """Write the values into new packs; yields each value's blob with its place."""
    first = next(values, None)
    while first is not None:
        pack = db.execute(NEW_PACK, (now, True)).lastrowid or 0  # of puts
        fd = open_with_mode(folder / f"{pack:08x}.pack", os.O_WRONLY | os.O_EXCL, 0o600)
        with open(fd, "wb", buffering=1 << 20) as file:
            file.write(FILE_HEAD)
            position = len(FILE_HEAD)
            for value in chain((first,), values):
                digest, size = blake3(value).digest(), len(value)
                codec, payload = encode_small(value, "auto", None) if size > _TINY else ("none", value)
                file.write(build_record(digest, size, codec, payload))
                yield Blob(digest, size, len(payload), codec, pack, position + HEAD_SIZE)
                position += HEAD_SIZE + len(payload)
                if position > _PACK_SIZE:
                    break
        first = next(values, None)
