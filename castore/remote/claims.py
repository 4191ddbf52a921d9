"""Claims: short-lived marks in a bucket that say that a node computes something, so that others wait for it.

A claim saves work, and nothing depends on it: if two nodes hold one, both compute, and the first result is
kept. The holder writes a claim again every few seconds. A node that waits for a claim, and sees no change
in it for a while by a clock of its own, takes it over, so clocks of nodes may differ by hours. The holder
removes a claim once the result is in the bucket, or once the process that computes is gone.
"""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress

from castore.errors import RemoteError, RemoteMissingError
from castore.remote.bucket import Bucket, Versioned
from castore.remote.keys import claim_key

#: Seconds between two signs of life of a holder, and without one until another node takes over.
BEAT_SECONDS, LOST_SECONDS = 5.0, 20.0


class Claims:
    """The claims of one bucket that this process watches. Threads may share it.

    Args:
        bucket: of the remote.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[bytes, float]] = {}

    def take(self, name: str) -> Claim | None:
        """Claim a computation; None if another node has a claim that is alive.

        Raises:
            RemoteError: the bucket cannot be used.
        """
        claim = Claim(self._bucket, claim_key(name))
        while not self._bucket.create(claim.key, claim.data):
            try:
                there = self._bucket.get(claim.key)
            except RemoteMissingError:  # released meanwhile
                continue
            if there.data == claim.data:  # written by a request whose answer was lost
                break
            if self._is_alive(claim.key, there.data):
                return None
            if self._bucket.replace(claim.key, claim.data, there.version):
                break
        with self._lock:
            self._seen.pop(claim.key, None)
        return claim

    def _is_alive(self, key: str, data: bytes) -> bool:
        now = time.monotonic()
        with self._lock:
            before, since = self._seen.get(key, (b"", now))
            if before != data:
                self._seen[key] = data, now
                return True
            return now - since < LOST_SECONDS


class Claim:
    """A claim of this process.

    Args:
        bucket: of the remote.
        key: of the claim.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._id = uuid.uuid4().hex
        self._beats = 0
        self._is_over = threading.Event()
        self.key = key

    @property
    def data(self) -> bytes:
        """The bytes of the claim: other ones after each sign of life."""
        return f"{self._id} {self._beats}\n".encode()

    def keep(self) -> None:
        """Give signs of life until the claim is released, or another node has taken it over."""
        while not self._is_over.wait(BEAT_SECONDS):
            with suppress(RemoteError):  # the next one may come through
                there = self._own()
                if there is None:
                    return
                self._beats += 1
                self._bucket.replace(self.key, self.data, there.version)

    def release(self) -> None:
        """Remove the claim if it is this process's still. Without an answer of the bucket, others take it
        over later.
        """
        self._is_over.set()
        with suppress(RemoteError):
            if self._own() is not None:
                self._bucket.delete([self.key])

    def _own(self) -> Versioned | None:
        """The claim in the bucket, if it is this process's still."""
        try:
            there = self._bucket.get(self.key)
        except RemoteMissingError:
            return None
        return there if there.data.startswith(self._id.encode()) else None
