"""The open pack: this process appends the records of small blobs to it, under the write lock.

The write lock also excludes this process's other threads, so this module takes no lock.
"""

from __future__ import annotations

import time

from castore.errors import StoreError
from castore.index.beacon import PREFIXES
from castore.index.database import Index
from castore.index.transaction import Write
from castore.objects.dictionaries import Dictionary
from castore.objects.directory import ObjectDirectory
from castore.objects.packs import PACK_SIZE, PackWriter, build_record
from castore.records import HEAD_SIZE, Blob
from castore.system.forks import reset_after_fork

# Seconds between two checks whether a dictionary in use still exists.
_DICTIONARY_SECONDS = 1.0


class Vanished(Exception):
    """A known blob or a dictionary was removed since it was looked up: stage the bytes again."""


class OpenPack:
    """One pack of this process at a time. All methods but `close` are called under the write lock.

    Args:
        index: rows.
        objects: bytes.
        received: the pack is for bytes of a remote that were compared with its tree alone.
    """

    def __init__(self, index: Index, objects: ObjectDirectory, *, received: bool = False) -> None:
        self.received = received
        self._index = index
        self._objects = objects
        self._pack: PackWriter | None = None
        self._begun_by: Write | None = None
        self._appending: Write | None = None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._seen: tuple[Dictionary, int] | None = None
        self._next_check = 0.0
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._pack = self._appending = None  # the pack stays the parent's, which goes on appending

    @property
    def is_begun(self) -> bool:
        """Whether there is a pack to append to."""
        return self._pack is not None

    def close(self) -> None:
        """Close the pack."""
        pack, self._pack = self._pack, None  # first, for a Ctrl-C may come right behind the close
        if pack is not None:
            pack.close()

    def append(self, txn: Write, data: bytes) -> tuple[int, int]:
        """Append records to this process's pack; returns the pack's id and the records' offset.

        They are written, all at once, before the transaction commits: nobody can read them earlier.
        """
        if self._appending is not txn:
            self._begin_transaction(txn)
        elif self._pack is not None and self._pack.size + self._pending_size > PACK_SIZE:
            self._flush()
            self.close()
        if self._pack is None:
            self._pack, self._begun_by = self._objects.start_pack(txn.new_pack(received=self.received)), txn
        position = self._pack.size + self._pending_size
        self._pending.append(data)
        self._pending_size += len(data)
        return self._pack.pack, position

    def undo_append(self) -> None:
        """Undo the last `append` of this transaction: the store has its bytes already."""
        self._pending_size -= len(self._pending.pop())

    def _begin_transaction(self, txn: Write) -> None:
        # Pending records of an earlier transaction were never committed.
        self._appending, self._pending, self._pending_size = txn, [], 0
        txn.before_commit(self._flush)
        # A transaction that rolled back has returned the id of the pack that it began, and another process
        # may have created its own file under that id. Rows of records appended to our file would refer to the
        # other one.
        is_rolled_back = self._begun_by is not None and not self._begun_by.committed
        pack = self._pack
        if pack is not None and (pack.size > PACK_SIZE or is_rolled_back or not pack.is_whole()):
            self.close()

    def _flush(self) -> None:
        if self._pending:
            if self._pack is None:
                # Rows of this transaction refer to bytes that were never written: it must not commit.
                raise StoreError("another thread closed the store while this put was under way; put again")
            self._pack.add(b"".join(self._pending))
            if self._objects.durable:
                self._pack.sync()
        self._pending, self._pending_size = [], 0

    def require_dictionary(self, dictionary: Dictionary) -> None:
        """Check, under the write lock, that a dictionary used for compression still exists.

        castore removes dictionaries under the lock, and changes the beacon then. A removal by hand is noticed
        within a second.

        Raises:
            Vanished: the dictionary has been removed since.
        """
        seen, now = (dictionary, self._index.beacon.words[PREFIXES]), time.monotonic()
        if seen == self._seen and now < self._next_check:
            return
        if not self._objects.dictionaries.has(dictionary.number):
            raise Vanished
        self._seen, self._next_check = seen, now + _DICTIONARY_SECONDS

    def rewrite(self, txn: Write, blob: Blob, payload: bytes) -> None:
        """Write the record of a packed blob again, into this process's pack, and update its row."""
        data = build_record(blob.digest, blob.size, blob.codec, payload)
        while True:
            target, position = self.append(txn, data)
            if txn.move_blob(blob._replace(pack=target, offset=position + HEAD_SIZE)):
                return
            self.abandon()

    def abandon_if_open(self, pack: int) -> None:
        """Have the next append start another pack, if ``pack`` is the open one."""
        if self._pack is not None and self._pack.pack == pack:
            self.abandon()

    def abandon(self) -> None:
        """Have the next append start another pack: the open one was retired. Drops its pending records."""
        self._pending, self._pending_size = [], 0
        self.close()
