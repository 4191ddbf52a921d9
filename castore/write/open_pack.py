"""The open pack: where this process appends the records of small blobs, under the write lock.

The write lock also keeps this process's threads apart, so nothing here locks.
"""

from __future__ import annotations

import time

from castore.errors import StoreError
from castore.index.beacon import PREFIXES
from castore.index.database import Index
from castore.index.transaction import Write
from castore.objects.dictionaries import Dictionary
from castore.objects.directory import ObjectDirectory
from castore.objects.packs import PACK_SIZE, PackWriter, record
from castore.records import HEAD_SIZE, Blob
from castore.system.forks import reset_after_fork

# Seconds between two looks whether a dictionary that is used is still there.
_DICTIONARY_SECONDS = 1.0


class Vanished(Exception):
    """A blob that was known when it was looked up, or a dictionary, is not there any more: stage the bytes again."""


class OpenPack:
    """One pack of this process at a time. All methods but `close` are called under the write lock.

    Args:
        index: rows.
        objects: bytes.
    """

    def __init__(self, index: Index, objects: ObjectDirectory) -> None:
        self._index = index
        self._objects = objects
        self._pack: PackWriter | None = None
        self._begun_by: Write | None = None
        self._appending: Write | None = None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._seen: tuple[Dictionary, int] | None = None
        self._look_again = 0.0
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._pack = self._appending = None  # the pack stays the parent's, which goes on appending

    @property
    def is_begun(self) -> bool:
        """Whether there is a pack to append to."""
        return self._pack is not None

    def close(self) -> None:
        """Close the pack."""
        if self._pack is not None:
            self._pack.close()
            self._pack = None

    def append(self, txn: Write, data: bytes) -> tuple[int, int]:
        """Append records to this process's pack: ``(pack id, where they begin)``.

        They are written, all at once, before the transaction commits: nobody can know of them earlier.
        """
        if self._appending is not txn:
            self._begin(txn)
        elif self._pack is not None and self._pack.size + self._pending_size > PACK_SIZE:
            self._flush()
            self.close()
        if self._pack is None:
            self._pack, self._begun_by = self._objects.start_pack(txn.new_pack()), txn
        position = self._pack.size + self._pending_size
        self._pending.append(data)
        self._pending_size += len(data)
        return self._pack.pack, position

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
        pack = self._pack
        if pack is not None and (pack.size > PACK_SIZE or taken_back or not pack.is_whole()):
            self.close()

    def _flush(self) -> None:
        if self._pending:
            if self._pack is None:
                # Rows of this transaction name bytes that were never written: it must not commit.
                raise StoreError("the store was closed by another thread while this put was under way")
            self._pack.add(b"".join(self._pending))
            if self._objects.durable:
                self._pack.sync()
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

    def write_anew(self, txn: Write, blob: Blob, payload: bytes) -> None:
        """Write the record of a packed blob once more, into this process's pack, and have its row mean that."""
        data = record(blob.digest, blob.size, blob.codec, payload)
        while True:
            target, position = self.append(txn, data)
            if txn.move_blob(blob._replace(pack=target, offset=position + HEAD_SIZE)):
                return
            self.forget()

    def leave(self, pack: int) -> None:
        """Have the next append start another pack, if it is this one that is open."""
        if self._pack is not None and self._pack.pack == pack:
            self.forget()

    def forget(self) -> None:
        """Have the next append start another pack: this one has been retired, so nothing of it was kept."""
        self._pending, self._pending_size = [], 0
        self.close()
