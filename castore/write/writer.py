"""Turns bytes into a blob and a name: hash, look up, compress, place, name.

The order of the steps makes a put whole or absent. Everything slow (hashing, compressing, writing a temporary
file) happens before the write lock is taken. Under the lock the bytes get their final place and the rows are
written, and the commit makes both visible together. A process that dies before the commit leaves a temporary
file, dead bytes at the end of a pack, or an object without a row: gc removes all three.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Protocol

import blake3

from castore.errors import FullError, InvalidValueError, TooLargeError
from castore.index import places
from castore.index.database import Index
from castore.index.transaction import Write
from castore.objects.codecs import FRAME_SIZE
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
from castore.objects.packs import PACK_LIMIT
from castore.records import AWAY, LOOSE, Blob, Buffer, Entry, EntrySpec, parse_metadata
from castore.units import format_size
from castore.write.incoming import IncomingBlob, write_all
from castore.write.open_pack import OpenPack
from castore.write.staging import (
    KnownBlob,
    LargeBlob,
    SmallBlob,
    Staged,
    bring_all,
    place_all,
)

#: Blobs larger than this are looked up before they are compressed.
_LOOKUP_BYTES = 4096
# Seconds between two checks whether a dictionary in use still exists.
_DICTIONARY_SECONDS = 1.0

_Encoding = Callable[[Callable[[bytes], object]], Encoded]


# A name and its attributes, its blob, when it was first pointed at that blob, whether it is pinned.
_Named = tuple[EntrySpec, Blob, float, bool]


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
        #: This process's open pack, and the one for bytes that were compared with a remote's tree alone.
        self.pack, self.received = OpenPack(index, objects), OpenPack(index, objects, received=True)

    def close(self) -> None:
        """Close the open packs."""
        self.pack.close()
        self.received.close()

    def abandon_if_open(self, pack: int) -> None:
        """Have the next append start another pack, if ``pack`` is an open one."""
        self.pack.abandon_if_open(pack)
        self.received.abandon_if_open(pack)

    # Staging

    def stage(
        self,
        data: Buffer,
        codec: str,
        level: int | None,
        *,
        reuse: bool = True,
        dictionary: Dictionary | None = None,
    ) -> Staged:
        """Hash, look the blob up, and compress it if it is new.

        Args:
            reuse: False compresses without looking the blob up, for a blob that has vanished.
            dictionary: for blobs that are small enough.
        """
        digest = blake3.blake3(data).digest()
        size = len(data)
        # Compressing so few bytes costs no more than the look-up. The write transaction does that instead.
        if size > _LOOKUP_BYTES and reuse and (found := self.stage_known(digest)) is not None:
            return found
        if size <= FRAME_SIZE:
            return self._stage_frame(digest, size, *encode_small(data, codec, level, dictionary), dictionary)
        view = memoryview(data)
        used = choose_codec(codec, size, lambda at, length: view[at : at + length])
        return self._stage_large(digest, size, used, partial(encode, slices(data), size, used, level))

    def _stage_frame(
        self, digest: bytes, size: int, used: str, payload: Buffer, dictionary: Dictionary | None = None
    ) -> Staged:
        if len(payload) <= PACK_LIMIT:
            return SmallBlob(self.pack, digest, size, used, payload, dictionary)
        return self._stage_large(digest, size, used, partial(encode_one, bytes(payload), size, used))

    def _stage_large(self, digest: bytes, size: int, used: str, encoding: _Encoding) -> LargeBlob:
        encoded, temporary = self._write_temporary(encoding)
        blob = Blob(digest, size, encoded.stored, used, LOOSE, 0)
        return LargeBlob(self._objects, blob, temporary, encoded.checksums)

    def stage_many(
        self,
        values: Sequence[tuple[Buffer, Dictionary | None]],
        codec: str,
        level: int | None,
        *,
        reuse: bool = True,
    ) -> list[Staged]:
        """`stage` for many values, each with the dictionary to try or None, on all cores."""
        is_quick = [0 < len(data) <= _LOOKUP_BYTES for data, _ in values]
        quick = list(compress(values, is_quick))
        staged: list[Staged] = []
        for count, encoded in begin_encoding(quick, codec, level):
            piece = quick[len(staged) : len(staged) + count]
            # Other threads compress while this one hashes, and makes records of compressed values.
            digests = [blake3.blake3(data).digest() for data, _ in piece]
            staged += [
                self._stage_frame(digest, len(data), *frame, dictionary)
                for (data, dictionary), digest, frame in zip(piece, digests, encoded(), strict=True)
            ]
        if len(quick) == len(values):
            return staged
        small = iter(staged)
        others = [value for value, quickly in zip(values, is_quick, strict=True) if not quickly]
        other = iter(self._stage_others(others, codec, level, reuse))
        return [next(small if quickly else other) for quickly in is_quick]

    def _stage_others(
        self, values: Sequence[tuple[Buffer, Dictionary | None]], codec: str, level: int | None, reuse: bool
    ) -> list[Staged]:
        """`stage_many` for values that are looked up before they are compressed, or are empty."""
        staged: dict[int, Staged] = {}
        frames: dict[int, bytes] = {}
        for at, (data, _) in enumerate(values):
            if 0 < len(data) <= FRAME_SIZE:
                digest = blake3.blake3(data).digest()
                if reuse and (found := self.stage_known(digest)) is not None:
                    staged[at] = found
                else:
                    frames[at] = digest
        begun = begin_encoding([values[at] for at in frames], codec, level)
        encoded = chain.from_iterable(wait() for _, wait in begun)
        try:
            for at, (data, dictionary) in enumerate(values):
                if at in frames:
                    staged[at] = self._stage_frame(frames[at], len(data), *next(encoded), dictionary)
                elif at not in staged:
                    staged[at] = self.stage(data, codec, level, reuse=reuse, dictionary=dictionary)
        except BaseException:
            for item in staged.values():
                item.discard()
            raise
        return [staged[at] for at in range(len(values))]

    def stage_known(self, digest: bytes, *, may_be_away: bool = False) -> KnownBlob | None:
        """A blob that the store has already; None if it is missing or damaged.

        Args:
            may_be_away: bytes will do that are received or only in a remote. By default the blob needs bytes
                of the store's own (`Blob.is_own`): the caller has the content, and can write it.
        """
        blob = self._index.blob(digest)
        if blob is None or not (blob.is_own or (may_be_away and (blob.is_here or blob.pack == AWAY))):
            return None
        return KnownBlob(blob, may_be_received=may_be_away, may_be_away=may_be_away)

    def stage_file(
        self,
        fd: int,
        codec: str,
        level: int | None,
        *,
        reuse: bool = True,
        progress: Callable[[int], object] | None = None,
        dictionary: Dictionary | None = None,
    ) -> Staged:
        """`stage` for an open file of any size, in constant memory."""
        size = os.fstat(fd).st_size
        if size <= 4 * FRAME_SIZE:
            data = os.pread(fd, size + 1, 0)
            if data and not size:  # files below /proc have no size
                return self._stage_to_end(fd, self.incoming(codec, level, dictionary), reuse)
            if len(data) != size:
                raise _changed(size, f"{len(data)}" if len(data) < size else f"{len(data)} or more")
            return self.stage(data, codec, level, reuse=reuse, dictionary=dictionary)
        if reuse and self._index.has_loose_of_size(size):
            # The store has a blob of this size. Hash first: reading twice costs less than compressing a known
            # blob.
            digest, size = hash_file(fd)
            if (found := self.stage_known(digest)) is not None:
                return found
        used = choose_codec(codec, size, lambda at, length: os.pread(fd, length, at))
        frames = HashingFrames(fd, progress)
        encoded, temporary = self._write_temporary(partial(encode, frames, size, used, level))
        if frames.size != size:
            temporary.unlink()
            raise _changed(size, str(frames.size))
        blob = Blob(frames.digest, size, encoded.stored, used, LOOSE, 0)
        return LargeBlob(self._objects, blob, temporary, encoded.checksums)

    def _stage_to_end(self, fd: int, blob: IncomingBlob, reuse: bool) -> Staged:
        try:
            at = 0
            while piece := os.pread(fd, FRAME_SIZE, at):
                blob.add(piece)
                at += len(piece)
            return blob.stage(reuse)
        except BaseException:
            blob.abandon()
            raise

    def incoming(self, codec: str, level: int | None, dictionary: Dictionary | None) -> IncomingBlob:
        """A blob whose bytes arrive in pieces, and whose size is known only at its end."""
        self._index.require_writable()
        return IncomingBlob(partial(self.stage, dictionary=dictionary), self._objects, codec, level)

    def _write_temporary(self, encoding: _Encoding) -> tuple[Encoded, Path]:
        self._index.require_writable()
        fd, temporary = self._objects.loose.create()
        try:
            try:
                encoded = encoding(lambda piece: write_all(fd, piece, temporary))
                self._objects.loose.seal(fd, durable=self._objects.durable)
            finally:
                os.close(fd)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return encoded, temporary

    # Committing

    def commit(
        self, staged: Sequence[tuple[EntrySpec, Staged]], on_begin: Callable[[Write], object] | None = None
    ) -> list[Entry]:
        """Place and name everything in one transaction; returns the entries.

        Args:
            on_begin: called in the transaction before anything else; its exceptions roll everything back.

        Raises:
            TooLargeError: one blob alone, or all of them together, pass the budget.
            FullError: pinned entries leave no room, or the disk is full.
            Vanished: a known blob was removed; stage again with ``reuse=False``.
        """
        now = time.time()
        return [_make_entry(*named, now) for named in self._name(staged, on_begin, now)]

    def name(
        self, staged: Sequence[tuple[EntrySpec, Staged]], on_begin: Callable[[Write], object] | None = None
    ) -> None:
        """`commit`, for a caller that needs no entries."""
        self._name(staged, on_begin, time.time())

    def _name(
        self,
        staged: Sequence[tuple[EntrySpec, Staged]],
        on_begin: Callable[[Write], object] | None,
        now: float,
    ) -> list[_Named]:
        try:
            self._check_budget([(spec.name, item) for spec, item in staged])
            return self._index.transact(partial(_place, staged, now, on_begin))
        finally:
            for _, item in staged:
                item.discard()

    def restore(self, staged: Sequence[Staged]) -> None:
        """Place the bytes of blobs that are away. Blobs that no name points to by now are passed over.

        Raises:
            TooLargeError, FullError: as for `commit`.
        """
        if not staged:
            return
        try:
            self._check_budget([(f"blob {item.digest.hex()}", item) for item in staged])
            self._index.transact(partial(_place_known, staged))
        finally:
            for item in staged:
                item.discard()

    def _check_budget(self, staged: Sequence[tuple[str, Staged]]) -> None:
        max_size = self._max_size
        if max_size is None:
            return
        for name, item in staged:
            if item.stored > max_size:
                raise TooLargeError(
                    f"{name!r} takes {format_size(item.stored)}, more than the whole store may hold"
                    f" ({format_size(max_size)}); raise the budget with `castore init --max-size`"
                )
        need = sum(item.stored for _, item in staged)
        if need > max_size:
            raise TooLargeError(
                f"{len(staged)} blobs that are committed at once take {format_size(need)}, more than the"
                f" whole store may hold ({format_size(max_size)}); put them in several batches, or raise the"
                " budget with `castore init --max-size`"
            )
        if need and self._index.totals().stored + need > max_size:
            self._make_room(need)


def _place(
    staged: Sequence[tuple[EntrySpec, Staged]],
    now: float,
    on_begin: Callable[[Write], object] | None,
    txn: Write,
) -> list[_Named]:
    if on_begin is not None:
        on_begin(txn)
    if not staged:
        return []
    if len(staged) == 1:
        [(spec, item)] = staged
        blob, added = item.place(txn)
        return [(spec, blob, *txn.set_entry(spec, blob, now, added=added))]
    specs = [spec for spec, _ in staged]
    placed = place_all([item for _, item in staged], txn)
    kept = txn.set_entries(specs, placed, now)
    return [
        (spec, blob, created, pinned)
        for spec, (blob, _), (created, pinned) in zip(specs, placed, kept, strict=True)
    ]


def _place_known(staged: Sequence[Staged], txn: Write) -> None:
    places.note_fetched(txn, bring_all(staged, txn))


def _make_entry(spec: EntrySpec, blob: Blob, created: float, pinned: bool, now: float) -> Entry:
    name, serializer, metadata, expires, _ = spec
    digest = blob.digest.hex()
    return Entry(
        name, digest, blob.size, blob.stored, blob.codec, created, expires, now, serializer,
        parse_metadata(metadata), pinned, blob.pack == AWAY,
    )  # fmt: skip


def open_source(path: str | os.PathLike[str]) -> int:
    """Open a file to be put.

    Raises:
        InvalidValueError: it is no path, or one of a folder, a pipe or a device, whose bytes have no end or
            no order.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (TypeError, ValueError) as error:  # a NUL
        raise InvalidValueError(f"{path!r:.100} is no path of a file: {error}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidValueError(f"{os.fspath(path)} is not a regular file; `castore add` takes folders")
    return fd


def budget_error(need: int, max_size: int) -> FullError:
    """The error for a budget in which pinned entries leave too little room."""
    return FullError(
        f"no room for {format_size(need)} within {format_size(max_size)}: the rest is pinned;"
        " unpin something or raise the budget with `castore init --max-size`"
    )


def _changed(size: int, now: str) -> InvalidValueError:
    return InvalidValueError(
        f"the file changed while it was read ({size} bytes became {now});"
        " put it again when nobody writes to it"
    )
