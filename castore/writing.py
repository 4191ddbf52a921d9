"""How bytes become a blob and a name: hash, look, compress, place, point.

The order is what makes a put whole or absent. Everything slow (hashing, compressing, writing a temporary file)
happens before the write lock is taken; under the lock the bytes get their final place, the rows are written, and the
commit makes both visible together. If the process dies anywhere before the commit, what it leaves is a temporary
file, dead bytes at the end of a pack, or an object no row means: gc removes all three.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Protocol

import blake3

from castore.beacon import PREFIXES
from castore.errors import FullError, InvalidValueError, StoreError, TooLargeError
from castore.forks import reset_after_fork
from castore.index import Index
from castore.objects.codecs import FRAME_SIZE, Buffer
from castore.objects.dictionaries import Dictionary
from castore.objects.directory import ObjectDirectory
from castore.objects.encode import (
    Encoded,
    HashingFrames,
    begin_encoding,
    choose_codec,
    encode,
    encode_one,
    encode_small,
    hash_file,
    slices,
)
from castore.objects.packs import PACK_LIMIT, PACK_SIZE, PackWriter
from castore.records import LOOSE, LOST, Blob, Entry, Pointing
from castore.sizes import format_size
from castore.staged import Known, Large, Small, Staged, Vanished, place_all
from castore.transaction import Write

#: Blobs larger than this are looked up before they are compressed.
_LOOK_FIRST = 4096
# Seconds between two looks whether a dictionary that is used is still there.
_DICTIONARY_SECONDS = 1.0

_Encoding = Callable[[Callable[[bytes], object]], Encoded]


class MakeRoom(Protocol):
    """Evicts until ``need`` more stored bytes fit under ``max_size``."""

    def __call__(self, need: int) -> None:
        """Raises FullError if that cannot be done."""
        ...


class BlobWriter:
    """Puts blobs and names into a store.

    Args:
        index: rows.
        objects: bytes.
        max_size: budget in stored bytes, or None.
        make_room: called when a put would pass the budget.
    """

    def __init__(
        self, index: Index, objects: ObjectDirectory, max_size: int | None, make_room: MakeRoom
    ) -> None:
        self._index = index
        self._objects = objects
        self._max_size = max_size
        self._make_room = make_room
        #: The open pack.
        self.pack: PackWriter | None = None
        self._begun_by: Write | None = None
        self._appending: Write | None = None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._seen: tuple[Dictionary, int] | None = None
        self._look_again = 0.0
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self.pack = self._appending = None  # the pack stays the parent's, which goes on appending

    def close(self) -> None:
        """Close the open pack."""
        if self.pack is not None:
            self.pack.close()
            self.pack = None

    # The open pack; all under the write lock, which also keeps this process's threads apart

    def append(self, txn: Write, data: bytes) -> tuple[int, int]:
        """Append records to this process's pack: ``(pack id, where they begin)``.

        They are written, all at once, before the transaction commits: nobody can know of them earlier.
        """
        if self._appending is not txn:
            self._begin(txn)
        elif self.pack is not None and self.pack.size + self._pending_size > PACK_SIZE:
            self._flush()
            self.close()
        if self.pack is None:
            self.pack, self._begun_by = self._objects.start_pack(txn.new_pack()), txn
        position = self.pack.size + self._pending_size
        self._pending.append(data)
        self._pending_size += len(data)
        return self.pack.pack, position

    def take_back(self) -> None:
        """Undo the last `append` of this transaction: its bytes were known."""
        self._pending_size -= len(self._pending.pop())

    def _begin(self, txn: Write) -> None:
        # What an earlier transaction left pending was never committed.
        self._appending, self._pending, self._pending_size = txn, [], 0
        txn.before_commit(self._flush)
        # A transaction that did not commit has given the id of the pack it began back, and another process may have
        # begun a file of its own under it: what is appended to ours would be named by rows and lie nowhere.
        taken_back = self._begun_by is not None and not self._begun_by.committed
        pack = self.pack
        if pack is not None and (pack.size > PACK_SIZE or taken_back or not pack.is_whole()):
            self.close()

    def _flush(self) -> None:
        if self._pending:
            if self.pack is None:
                # Rows of this transaction name bytes that were never written: it must not commit.
                raise StoreError("the store was closed by another thread while this put was under way")
            self.pack.add(b"".join(self._pending))
            if self._objects.durable:
                self.pack.sync()
        self._pending, self._pending_size = [], 0

    def see_dictionary(self, dictionary: Dictionary) -> None:
        """Check, under the write lock, that what was compressed with a dictionary will find it.

        Who removes one does so under the lock, and says so in the beacon. A user's own hand is noticed within a second.

        Raises:
            Vanished: it has been removed since.
        """
        seen, now = (dictionary, self._index.beacon.words[PREFIXES]), time.monotonic()
        if seen == self._seen and now < self._look_again:
            return
        if not self._objects.dictionaries.has(dictionary.number):
            raise Vanished
        self._seen, self._look_again = seen, now + _DICTIONARY_SECONDS

    def leave_pack(self, pack: int) -> None:
        """Have the next append start another pack, if it is this one that is open."""
        if self.pack is not None and self.pack.pack == pack:
            self.forget_pack()

    def forget_pack(self) -> None:
        """Have the next append start another pack: this one has been retired, so nothing of it was kept."""
        self._pending, self._pending_size = [], 0
        self.close()

    # Staging

    def stage(
        self,
        data: Buffer,
        codec: str,
        level: int | None,
        *,
        known: bool = True,
        dictionary: Dictionary | None = None,
    ) -> Staged:
        """Hash, look the blob up, and compress it if it is new.

        Args:
            known: False compresses without looking, for a blob that was seen to vanish.
            dictionary: for blobs that are small enough.
        """
        digest = blake3.blake3(data).digest()
        size = len(data)
        # Compressing so little costs no more than the look-up, which is then left to the write transaction.
        if size > _LOOK_FIRST and known and (found := self._known(digest)) is not None:
            return found
        if size <= FRAME_SIZE:
            return self._one_frame(digest, size, *encode_small(data, codec, level, dictionary), dictionary)
        view = memoryview(data)
        used = choose_codec(codec, size, lambda at, length: view[at : at + length])
        return self._large(digest, size, used, partial(encode, slices(data), size, used, level))

    def _one_frame(
        self, digest: bytes, size: int, used: str, payload: Buffer, dictionary: Dictionary | None = None
    ) -> Staged:
        if len(payload) <= PACK_LIMIT:
            return Small(self, digest, size, used, payload, dictionary)
        return self._large(digest, size, used, partial(encode_one, bytes(payload), size, used))

    def _large(self, digest: bytes, size: int, used: str, encoding: _Encoding) -> Large:
        encoded, temporary = self._write_temporary(encoding)
        blob = Blob(digest, size, encoded.stored, used, LOOSE, 0)
        return Large(self._objects, blob, temporary, encoded.checksums)

    def stage_many(
        self,
        values: Sequence[tuple[Buffer, Dictionary | None]],
        codec: str,
        level: int | None,
        *,
        known: bool = True,
    ) -> list[Staged]:
        """`stage` for each of many, with the dictionary that it may be compressed with, on all cores."""
        is_quick = [0 < len(data) <= _LOOK_FIRST for data, _ in values]
        quick = list(compress(values, is_quick))
        staged: list[Staged] = []
        for count, encoded in begin_encoding(quick, codec, level):
            piece = quick[len(staged) : len(staged) + count]
            # Other threads compress while this one hashes, and makes records of what is compressed.
            digests = [blake3.blake3(data).digest() for data, _ in piece]
            staged += [
                self._one_frame(digest, len(data), *frame, dictionary)
                for (data, dictionary), digest, frame in zip(piece, digests, encoded(), strict=True)
            ]
        if len(quick) == len(values):
            return staged
        small = iter(staged)
        others = [value for value, quickly in zip(values, is_quick, strict=True) if not quickly]
        other = iter(self._stage_others(others, codec, level, known))
        return [next(small if quickly else other) for quickly in is_quick]

    def _stage_others(
        self, values: Sequence[tuple[Buffer, Dictionary | None]], codec: str, level: int | None, known: bool
    ) -> list[Staged]:
        """The same for those that are looked up before they are compressed, or are empty."""
        staged: dict[int, Staged] = {}
        frames: dict[int, bytes] = {}
        for at, (data, _) in enumerate(values):
            if 0 < len(data) <= FRAME_SIZE:
                digest = blake3.blake3(data).digest()
                if known and (found := self._known(digest)) is not None:
                    staged[at] = found
                else:
                    frames[at] = digest
        begun = begin_encoding([values[at] for at in frames], codec, level)
        encoded = chain.from_iterable(wait() for _, wait in begun)
        try:
            for at, (data, dictionary) in enumerate(values):
                if at in frames:
                    staged[at] = self._one_frame(frames[at], len(data), *next(encoded), dictionary)
                elif at not in staged:
                    staged[at] = self.stage(data, codec, level, known=known, dictionary=dictionary)
        except BaseException:
            for item in staged.values():
                item.discard()
            raise
        return [staged[at] for at in range(len(values))]

    def _known(self, digest: bytes) -> Known | None:
        blob = self._index.blob(digest)
        return None if blob is None or blob.pack == LOST else Known(blob)

    def stage_file(
        self,
        fd: int,
        codec: str,
        level: int | None,
        *,
        known: bool = True,
        progress: Callable[[int], object] | None = None,
        dictionary: Dictionary | None = None,
    ) -> Staged:
        """The same for an open file of any size, in constant memory."""
        size = os.fstat(fd).st_size
        if size <= 4 * FRAME_SIZE:
            return self.stage(os.pread(fd, size + 1, 0), codec, level, known=known, dictionary=dictionary)
        if known and self._index.has_loose_of_size(size):
            # Some blob of this size is here: reading twice costs less than compressing what may be known.
            digest, size = hash_file(fd)
            if (found := self._known(digest)) is not None:
                return found
        used = choose_codec(codec, size, lambda at, length: os.pread(fd, length, at))
        frames = HashingFrames(fd, progress)
        encoded, temporary = self._write_temporary(partial(encode, frames, size, used, level))
        if frames.size != size:
            temporary.unlink()
            raise InvalidValueError(
                f"the file changed while it was read ({size} bytes became {frames.size});"
                " put it again when nobody writes to it"
            )
        blob = Blob(frames.digest, size, encoded.stored, used, LOOSE, 0)
        return Large(self._objects, blob, temporary, encoded.checksums)

    def _write_temporary(self, encoding: _Encoding) -> tuple[Encoded, Path]:
        fd, temporary = self._objects.loose.create()
        try:
            try:
                encoded = encoding(lambda piece: _write_all(fd, piece))
                self._objects.loose.seal(fd, durable=self._objects.durable)
            finally:
                os.close(fd)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return encoded, temporary

    # Committing

    def commit(
        self, staged: Sequence[tuple[Pointing, Staged]], first: Callable[[Write], object] | None = None
    ) -> list[Entry]:
        """Place and name everything in one transaction.

        Args:
            first: done in the transaction before anything else; what it raises takes all back.

        Raises:
            TooLargeError: one blob alone passes the budget.
            FullError: what is pinned leaves no room, or the disk is full.
            Vanished: a known blob is not there any more; stage again with ``known=False``.
        """
        try:
            if self._max_size is not None:
                self._check_budget(staged, self._max_size)
            return self._index.transact(partial(_place, staged, time.time(), first))
        finally:
            for _, item in staged:
                item.discard()

    def _check_budget(self, staged: Sequence[tuple[Pointing, Staged]], most: int) -> None:
        for pointing, item in staged:
            if item.stored > most:
                raise TooLargeError(
                    f"{pointing.name!r} takes {format_size(item.stored)}, more than the whole store may hold"
                    f" ({format_size(most)}); raise it with `castore init --max-size`"
                )
        need = sum(item.stored for _, item in staged)
        if need and self._index.totals().stored + need > most:
            self._make_room(need)


def _place(
    staged: Sequence[tuple[Pointing, Staged]],
    now: float,
    first: Callable[[Write], object] | None,
    txn: Write,
) -> list[Entry]:
    if first is not None:
        first(txn)
    if len(staged) == 1:
        [(pointing, item)] = staged
        blob, added = item.place(txn)
        return [_entry(pointing, blob, now, *txn.set_entry(pointing, blob, now, added=added))]
    pointings = [pointing for pointing, _ in staged]
    placed = place_all([item for _, item in staged], txn)
    said = txn.set_entries(pointings, placed, now)
    return [
        _entry(pointing, blob, now, created, pinned)
        for pointing, (blob, _), (created, pinned) in zip(pointings, placed, said, strict=True)
    ]


def _entry(pointing: Pointing, blob: Blob, now: float, created: float, pinned: bool) -> Entry:
    name, serializer, metadata, expires, _ = pointing
    decoded = json.loads(metadata) if metadata else {}
    digest = blob.digest.hex()
    return Entry(
        name, digest, blob.size, blob.stored, blob.codec, created, expires, now, serializer, decoded, pinned
    )


def _write_all(fd: int, data: Buffer) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def open_source(path: str | os.PathLike[str]) -> int:
    """Open a file to be put.

    Raises:
        InvalidValueError: it is a folder, a pipe or a device, whose bytes have no end or no order.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidValueError(f"{os.fspath(path)} is not a regular file; `castore add` takes folders")
    return fd


def full(need: int, max_size: int) -> FullError:
    """The error for a budget that what is pinned leaves too small."""
    return FullError(
        f"no room for {format_size(need)} within {format_size(max_size)}: the rest is pinned;"
        " unpin something or raise the budget with `castore init --max-size`"
    )
