"""The keys that are being encoded, so that processes that fill one table share the work.

Each filler writes its claimed keys into a file of its own in the store's ``tmp``, and holds a lock on it
through the open file description. The lock ends with the process, however that ends, and the claims end with
the lock. Any filler removes such a file without a lock, and so does gc. Locks only save work: on a file
system that grants them to every process, a key is encoded twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from blake3 import blake3

from castore.adapters.embeddings.key_table import Digests
from castore.store import Store
from castore.system.file_locks import is_locked, lock_byte
from castore.system.forks import reset_after_fork
from castore.system.single_flight import ComputeLocks
from castore.system.temporary import create_temporary, open_regular

# Most bytes of claims that are read: more than any filler has.
_MAX_BYTES = 1 << 28


@cache
def _process_locks(path: Path, mode: int) -> ComputeLocks:
    """One object for the whole process, which is how it keeps the process's threads apart."""
    return ComputeLocks(path, mode)


def embedding_locks(store: Store) -> ComputeLocks:
    """The locks of this adapter in a store."""
    return _process_locks(store.path / "locks" / "embeddings", store.settings.file_mode)


class Claims:
    """The keys that one filler has claimed.

    Args:
        store, prefix: the table.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._folder = store.path / "tmp"
        self._suffix = blake3(prefix.encode()).hexdigest()[:32] + ".claims"
        self._lock = f"claims of {prefix}"
        self._locks = embedding_locks(store)
        self._mode = store.settings.file_mode
        self._mine: Digests = np.empty((0, 2), np.uint64)
        with self._locks.hold(self._lock):
            self._fd, self._path = create_temporary(self._folder, self._suffix)
            reset_after_fork(self)
            os.fchmod(self._fd, self._mode)
            lock_byte(self._fd, 0)

    def _after_fork(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:  # the claims are the parent's, and must not outlive it in a child
            os.close(fd)

    def claim(self, keys: Digests) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Claim the keys that no other filler has; returns which.

        Other fillers may put their keys a moment later.
        """
        with self._locks.hold(self._lock):
            free = np.ones(len(keys), bool)
            for others in self._read_others():
                free &= ~_is_among(keys, others)
            self._write(np.concatenate([self._mine, keys[free]]))
        return free

    def release(self, keep: list[bytes]) -> None:
        """Release all keys but some: they have been put."""
        with self._locks.hold(self._lock):
            self._write(np.frombuffer(b"".join(keep), np.uint64).reshape(-1, 2))

    def close(self) -> None:
        """Release all keys, for good."""
        fd, self._fd = self._fd, -1  # first, for a Ctrl-C may come right behind the close
        if fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(fd)

    def _write(self, keys: Digests) -> None:
        self._mine = keys
        os.pwrite(self._fd, keys.tobytes(), 0)
        os.ftruncate(self._fd, keys.nbytes)

    def _read_others(self) -> Iterator[Digests]:
        for path in list(self._folder.glob(f"*.{self._suffix}")):
            if path == self._path:
                continue
            try:
                fd = open_regular(path)
            except FileNotFoundError:
                continue  # its filler has just finished
            try:
                if not is_locked(fd, 0):
                    path.unlink(missing_ok=True)
                    continue
                data = os.pread(fd, _MAX_BYTES, 0)
            finally:
                os.close(fd)
            yield np.frombuffer(data[: len(data) // 16 * 16], np.uint64).reshape(-1, 2)


def _is_among(keys: Digests, others: Digests) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which keys are among others. Equal halves are rare, so those keys are compared one by one."""
    found = np.isin(keys[:, 0], others[:, 0])
    if found.any():
        whole = {other.tobytes() for other in others}
        found[found] = [key.tobytes() in whole for key in keys[found]]
    return found
