"""Where in remotes the bytes of blobs are: the tables `places` and `origins`.

A blob that has a place may be away: its names stay, and its bytes are fetched when somebody reads them. The
bytes may go again whenever the budget wants their room. A row of `places` stays as long as its blob's row,
and a row of `origins` stands for an object of a remote. Nothing here fetches anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from castore.index.database import Index
from castore.index.many_rows import ManyRows
from castore.index.transaction import Write
from castore.names import below
from castore.records import AWAY, LOST, Blob

_PLACE = "p.digest, o.remote, o.object, p.offset, p.stored, p.codec, p.frames, b.size, p.fetched + 0.0"
_FROM = "FROM places p JOIN origins o ON o.id = p.origin JOIN blobs b ON b.digest = p.digest"
_AMONG = f"SELECT {_PLACE} {_FROM} WHERE p.digest IN (%s)"
_AWAY_AMONG = f"{_AMONG} AND b.pack = {AWAY}"
_AWAY_NAMES = (
    "SELECT e.name, e.digest FROM entries e JOIN blobs b ON b.digest = e.digest"
    f" WHERE e.name IN (SELECT value FROM json_each(?)) AND b.pack = {AWAY}"
)
_NEAR = (
    f"SELECT {_PLACE} {_FROM} WHERE p.origin = (SELECT id FROM origins WHERE object = ? AND remote = ?)"
    f" AND p.offset >= ? AND p.offset < ? AND b.pack = {AWAY} ORDER BY p.offset LIMIT ?"
)
# One pass over the objects, each of which has few places, or lies in a folder of no other.
_WITH_FOLDER = (
    "SELECT p.digest FROM origins o CROSS JOIN places p ON p.origin = o.id WHERE lower(hex(o.object)) IN"
    " (SELECT substr(name, ?1, 64) FROM entries WHERE name > ?2 AND name < ?3)"
)
_ADD_ORIGINS = ManyRows("INSERT INTO origins (remote, object) VALUES ", "(?, ?)", " ON CONFLICT DO NOTHING")
_SET_PLACES = ManyRows(
    "INSERT INTO places (digest, origin, offset, stored, codec, frames)"
    " SELECT column1, (SELECT id FROM origins WHERE object = column3 AND remote = column2), column4, column5,"
    " column6, column7 FROM (VALUES ",
    "(?, ?, ?, ?, ?, ?, ?)",
    ") WHERE true ON CONFLICT (digest) DO UPDATE SET origin = excluded.origin, offset = excluded.offset,"
    " stored = excluded.stored, codec = excluded.codec, frames = excluded.frames",
)
_NOTE_FETCHED = ManyRows(
    "UPDATE places SET fetched = column2 FROM (VALUES ", "(?, ?)", ") WHERE digest = column1"
)
_UNUSED_ORIGINS = "DELETE FROM origins WHERE NOT EXISTS (SELECT 1 FROM places WHERE origin = origins.id)"
# All places, in the order of their digests, which is that of the blobs. SQLite would read all blobs and look
# for the place of each, and with CROSS JOIN alone it would take the places object by object.
_ALL = "FROM places p CROSS JOIN blobs b ON b.digest = p.digest"
_ALL_AWAY = f"p.digest >= x'' AND b.pack = {AWAY}"
_COUNT_AWAY = (
    f"SELECT count(*), coalesce(sum(b.size), 0), coalesce(sum(p.stored), 0) {_ALL} WHERE {_ALL_AWAY}"
)
_OF_REMOTE = f"{_ALL} JOIN origins o ON o.id = p.origin WHERE {_ALL_AWAY} AND o.remote = ?"
_IN_REMOTE = f"SELECT 1 {_OF_REMOTE} AND b.refs > 0 LIMIT 1"
_NAMELESS = f"SELECT b.digest {_OF_REMOTE} AND b.refs = 0"
_NAMES = (
    "SELECT name, accessed FROM entries WHERE name IN (SELECT value FROM json_each(?)) AND digest = ?"
    " AND pinned = 0"
)
_REFS = "SELECT refs FROM blobs b JOIN places p ON p.digest = b.digest WHERE b.digest = ?"


class RemotePlace(NamedTuple):
    """Where a blob lies in a remote.

    Attributes:
        digest: of the blob, 32 raw bytes.
        remote: its name in this store.
        object: BLAKE3 of the remote's object, 32 raw bytes.
        offset: of the blob in a pack; 0 if the object is the blob's own.
        stored: length in bytes as stored there.
        codec: of the stored bytes.
        frames: length and digest of each stored frame, as trees of remotes have them (remote/pages.py).
        size: of the blob, uncompressed.
        fetched: when its bytes came last, in seconds since the epoch; 0 if they have not come yet.
    """

    digest: bytes
    remote: str
    object: bytes
    offset: int
    stored: int
    codec: str
    frames: bytes
    size: int
    fetched: float = 0.0


class AwayBlobs(NamedTuple):
    """Blobs whose bytes are only in remotes; parts of large ones may be here.

    Attributes:
        blobs: their number.
        size: their bytes, uncompressed.
        stored: the same, as stored there.
    """

    blobs: int
    size: int
    stored: int


def of_blobs(index: Index, digests: Sequence[bytes]) -> dict[bytes, RemotePlace]:
    """The places of up to a thousand blobs. Blobs without one are left out."""
    return _among(index, _AMONG, digests)


def of_away_blobs(index: Index, digests: Sequence[bytes]) -> dict[bytes, RemotePlace]:
    """`of_blobs`, for those whose bytes are away. The order is that of ``digests``."""
    found = _among(index, _AWAY_AMONG, digests)
    return {digest: found[digest] for digest in digests if digest in found}


def _among(index: Index, sql: str, digests: Sequence[bytes]) -> dict[bytes, RemotePlace]:
    rows = index.file.rows(sql % ",".join("?" * len(digests)), digests)
    return {row[0]: RemotePlace._make(row) for row in rows}


def away_digests(index: Index, names: Sequence[str]) -> list[bytes]:
    """The digests of names whose bytes are away, in the order of the names, each once."""
    found = dict(index.file.all(_AWAY_NAMES, (json.dumps(names),)))
    return list(dict.fromkeys(found[name] for name in names if name in found))


def with_folder(index: Index, folder: str) -> set[bytes]:
    """The digests of blobs whose objects have a folder of names in ``folder``, called as the object is."""
    low, high = below(folder)
    return {digest for (digest,) in index.file.rows(_WITH_FOLDER, (len(low) + 1, low, high))}


def near(index: Index, place: RemotePlace, start: int, end: int, limit: int) -> list[RemotePlace]:
    """The places of blobs that are away, and lie in the same object between two offsets, in their order."""
    rows = index.file.rows(_NEAR, (place.object, place.remote, start, end, limit))
    return list(map(RemotePlace._make, rows))


def record(txn: Write, places: Sequence[RemotePlace]) -> list[tuple[Blob, bool]]:
    """Record where blobs are; those whose bytes are not here are away from now on.

    Returns:
        For each place the blob, and whether its row is new. `Write.set_entry` of its name must follow then.
    """
    known = txn.blobs({place.digest for place in places})
    away = {
        place.digest: Blob(place.digest, place.size, 0, place.codec, AWAY, 0)
        for place in places
        if place.digest not in known or _is_worse(known[place.digest], place)
    }
    new = [blob for digest, blob in away.items() if digest not in known]
    txn.add_blobs(new)
    for digest in away.keys() & known.keys():
        txn.move_blob(away[digest])
    _set(txn, {place.digest: place for place in places})
    unnamed = {blob.digest for blob in new}
    found: list[tuple[Blob, bool]] = []
    for place in places:
        found.append((away.get(place.digest) or known[place.digest], place.digest in unnamed))
        unnamed.discard(place.digest)
    return found


def refresh(txn: Write, places: Sequence[RemotePlace]) -> None:
    """Record where blobs are whose rows the index has; others are passed over."""
    known = txn.blobs({place.digest for place in places})
    current = {place.digest: place for place in places if place.digest in known}
    for digest, place in current.items():
        if _is_worse(known[digest], place):
            txn.move_blob(Blob(digest, place.size, 0, place.codec, AWAY, 0))
    _set(txn, current)


def _is_worse(known: Blob, place: RemotePlace) -> bool:
    """Whether a blob's row is worth less than what a tree says: the blob is lost, or it is away, and an older
    tree gave it another size.
    """
    return known.pack == LOST or (known.pack == AWAY and known.size != place.size)


def _set(txn: Write, places: Mapping[bytes, RemotePlace]) -> None:
    _ADD_ORIGINS.run(txn.db, list({(place.remote, place.object) for place in places.values()}))
    # In the order of the B-tree, so that each of its pages is visited once.
    _SET_PLACES.run(txn.db, [places[digest][:7] for digest in sorted(places)])


def note_fetched(txn: Write, digests: Iterable[bytes]) -> None:
    """Note that bytes have just come: gc takes what came or was read longest ago."""
    now = time.time()
    _NOTE_FETCHED.run(txn.db, [(digest, now) for digest in digests])


def send_away(txn: Write, names: Mapping[bytes, Mapping[str, float]]) -> list[Blob]:
    """Record that blobs are away whose bytes the caller then removes, unless they were used or pinned since.

    Args:
        names: for each digest all names of the blob that gc saw, with their last accesses.

    Returns:
        The blobs as they were.
    """
    gone: list[Blob] = []
    for digest, seen in names.items():
        blob = txn.blob(digest)
        rows = txn.execute(_NAMES, (json.dumps(list(seen)), digest)).fetchall()
        counted = txn.execute(_REFS, (digest,)).fetchone()
        is_idle = dict(rows) == dict(seen) and counted is not None and counted[0] == len(seen)
        if blob is not None and blob.is_here and is_idle:
            txn.move_blob(Blob(digest, blob.size, 0, blob.codec, AWAY, 0))
            gone.append(blob)
    return gone


def drop_unused(txn: Write) -> None:
    """Forget objects of remotes in which no blob is."""
    txn.execute(_UNUSED_ORIGINS)


def count_away(index: Index) -> AwayBlobs:
    """How much is away. Reads the row of each place."""
    return AwayBlobs(*map(int, index.file.one(_COUNT_AWAY)))


def forget(txn: Write, remote: str) -> bool:
    """Forget what a remote has; False, and nothing is forgotten, if some blobs are only there."""
    if txn.execute(_IN_REMOTE, (remote,)).fetchone() is not None:
        return False
    for (digest,) in txn.execute(_NAMELESS, (remote,)).fetchall():
        blob = txn.blob(digest)
        if blob is not None:
            txn.drop_blob(blob)
    txn.execute("DELETE FROM places WHERE origin IN (SELECT id FROM origins WHERE remote = ?)", (remote,))
    drop_unused(txn)
    return True
