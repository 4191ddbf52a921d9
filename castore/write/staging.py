"""Bytes that are ready to be placed: known already, meant for a pack, or waiting in a file of their own.

The rest happens under the write lock, in `place`. Nothing here deals with names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from castore.index.transaction import Write
from castore.objects.dictionaries import Dictionary
from castore.objects.directory import ObjectDirectory
from castore.objects.packs import build_record
from castore.records import AWAY, HEAD_SIZE, Blob, Buffer
from castore.write.open_pack import OpenPack, Vanished


class Staged(Protocol):
    """Bytes that are ready to be placed: the rest happens under the write lock."""

    @property
    def digest(self) -> bytes:
        """Of the blob."""
        ...

    def place(self, txn: Write) -> tuple[Blob, bool]:
        """Move the bytes into place and add their row, unless the index has them as good already.

        Returns:
            The blob, and whether its row is new.
        """
        ...

    def discard(self) -> None:
        """Remove temporary files if `place` was not called, or did not need the bytes."""
        ...

    @property
    def stored(self) -> int:
        """Bytes this will add to the store."""
        ...


class KnownBlob(NamedTuple):
    """A blob whose bytes the store has already.

    Attributes:
        blob: its row, when it was looked up.
        may_be_received: bytes will do that were compared with a remote's tree alone.
        may_be_away: bytes will do that are only in a remote.
    """

    blob: Blob
    may_be_received: bool = False
    may_be_away: bool = False
    stored: int = 0

    @property
    def digest(self) -> bytes:
        """Of the blob."""
        return self.blob.digest

    def place(self, txn: Write) -> tuple[Blob, bool]:
        """See `Staged`."""
        known = txn.blob(self.blob.digest)
        if known is None or not (
            known.is_own
            or (self.may_be_received and known.is_here)
            or (self.may_be_away and known.pack == AWAY)
        ):
            raise Vanished
        return known, False

    def discard(self) -> None:
        """Nothing is left over."""


class SmallBlob:
    """A blob for this process's pack, with the dictionary for which it was encoded, if any."""

    __slots__ = ("_codec", "_dictionary", "_pack", "_record", "_size", "digest", "stored")

    def __init__(
        self,
        pack: OpenPack,
        digest: bytes,
        size: int,
        codec: str,
        payload: Buffer,
        dictionary: Dictionary | None,
    ) -> None:
        self._pack = pack
        self._dictionary = dictionary
        self._size = size
        self._codec = codec
        self._record = build_record(digest, size, codec, payload)
        self.digest = digest
        self.stored = len(payload)

    def place(self, txn: Write) -> tuple[Blob, bool]:
        """See `Staged`."""
        digest = self.digest
        # INSERT before SELECT, as most blobs are new. But if no pack is open, look up first: known bytes need
        # no pack.
        known = None if self._pack.is_begun else txn.blob(digest)
        if known is not None and self.is_met_by(known):
            return known, False
        while True:
            placed = self.append(txn)
            if txn.add_blob(placed):
                return placed, True
            known = txn.blob(digest)
            if known is not None and self.is_met_by(known):
                self._pack.undo_append()
                return known, False
            if known is not None and txn.move_blob(placed):
                return placed, False
            self.abandon_pack()

    def is_met_by(self, known: Blob) -> bool:
        """Whether a row of this digest has bytes that are as good as these. Own ones take the place of
        received ones, whose content nobody may have compared with the digest.
        """
        return known.is_own or (self._pack.received and known.is_here)

    def append(self, txn: Write) -> Blob:
        """Have the bytes written to the pack before ``txn`` commits; returns the values of their row.

        Raises:
            Vanished: the dictionary that they need has been removed since.
        """
        if self._dictionary is not None:
            self._pack.require_dictionary(self._dictionary)
        pack, position = self._pack.append(txn, self._record)
        return Blob(self.digest, self._size, self.stored, self._codec, pack, position + HEAD_SIZE)

    def abandon_pack(self) -> None:
        """Have the next append start another pack: gc retired this one, and will unlink its file."""
        self._pack.abandon()

    def discard(self) -> None:
        """Nothing is left over."""


class LargeBlob:
    """A blob that is a file of its own, written to ``tmp/``, to be renamed into place."""

    def __init__(
        self, objects: ObjectDirectory, blob: Blob, temporary: Path, checksums: bytes | None
    ) -> None:
        self._objects = objects
        self._blob = blob
        self._temporary: Path | None = temporary
        self._checksums = checksums
        self.digest = blob.digest
        self.stored = blob.stored

    def place(self, txn: Write) -> tuple[Blob, bool]:
        """See `Staged`."""
        known = txn.blob(self.digest)
        if known is None:
            txn.add_blob(self._blob, self._checksums)
        elif not known.is_own:
            txn.move_blob(self._blob, self._checksums)
        else:
            return known, False
        assert self._temporary is not None
        self._objects.loose.publish(
            self._temporary, self._blob.digest, self._blob.codec, durable=self._objects.durable
        )
        self._temporary = None
        return self._blob, known is None

    def discard(self) -> None:
        """Remove the temporary file, unless it was renamed into place."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None


def place_all(items: Sequence[Staged], txn: Write) -> list[tuple[Blob, bool]]:
    """`place` for each of many. Blobs for packs are looked up and recorded all at once."""
    small: dict[bytes, SmallBlob] = {}
    for item in items:
        if isinstance(item, SmallBlob):
            small.setdefault(item.digest, item)  # the first adds the row: no name can point at it yet
    known = txn.blobs(small)
    added = _add_new([item for digest, item in small.items() if digest not in known], txn)
    placed = []
    for item in items:
        digest = item.digest
        blob = added.get(digest)
        if blob is not None:
            placed.append((blob, small[digest] is item))
        elif (blob := known.get(digest)) is not None and small[digest].is_met_by(blob):
            placed.append((blob, False))
        else:
            placed.append(item.place(txn))
    return placed


def bring_all(items: Sequence[Staged], txn: Write) -> dict[bytes, Blob]:
    """Place the bytes of blobs that are away, and pass over those without a row; returns the rows."""
    known = txn.blobs([item.digest for item in items])
    small: dict[bytes, SmallBlob] = {}
    for item in items:
        if item.digest not in known:
            continue
        if isinstance(item, SmallBlob) and known[item.digest].pack == AWAY:
            small[item.digest] = item
        else:
            item.place(txn)
    txn.bring_blobs(_append_all(list(small.values()), txn), known)
    return known


def _add_new(items: Sequence[SmallBlob], txn: Write) -> dict[bytes, Blob]:
    """Append and record blobs that the store does not have yet."""
    blobs = _append_all(items, txn)
    txn.add_blobs(blobs)
    return {blob.digest: blob for blob in blobs}


def _append_all(items: Sequence[SmallBlob], txn: Write) -> list[Blob]:
    """Append to packs that the index knows; returns the values of the rows."""
    while items:
        blobs = [item.append(txn) for item in items]
        if all(txn.has_pack(pack) for pack in {blob.pack for blob in blobs}):
            return blobs
        items[0].abandon_pack()
    return []
