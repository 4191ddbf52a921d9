"""A bucket that counts what it is asked, and keeps to limits of requests at once and bytes a second.

The limits hold for the process: the one that fetches for all readers of a store, and each push or pull.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castore.errors import RemoteError, RemoteMissingError
from castore.remote.bucket import Bucket, Listed, Patience, Versioned
from castore.remote.retries import ENDED
from castore.remote.urls import open_bucket

if TYPE_CHECKING:
    from castore.read.usage import Usage
    from castore.records import Buffer

#: Seconds of silence that a limited link may catch up on.
BURST_SECONDS = 0.25


class Link:
    """A bound on bytes a second. Threads share it.

    Args:
        rate: bytes a second; None for no bound.
    """

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def take(self, size: int) -> None:
        """Wait until ``size`` more bytes may have passed."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - BURST_SECONDS) + size / self._rate
            wait = self._free - now
        if wait > 0 and ENDED.wait(wait):
            raise RemoteError("the transfer was interrupted")


def open_metered(
    url: str,
    *,
    requests: int | None = None,
    rate: int | None = None,
    patience: Patience | None = None,
) -> MeteredBucket:
    """The bucket that a URL leads to, metered; requests that are tried again are counted, too.

    Args:
        url, patience: see `castore.remote.urls.open_bucket`, also for its errors.
        requests, rate: see `MeteredBucket`.
    """
    bucket = open_bucket(url, patience, lambda: metered.count(retries=1))
    metered = MeteredBucket(bucket, requests, rate)
    return metered


class _Answer:
    """The answer to a request, asked for by a thread of its own that ends with the process.

    A pool of `concurrent.futures` imports `logging`, and a pull waits for each module (transfer.py).
    """

    def __init__(self, request: Callable[[], Any]) -> None:
        self._request = request
        self._found: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._found = self._request()
        except Exception as error:  # noqa: BLE001 (raised to whoever wants the answer)
            self._error = error

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            Exception: as the request did.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def within(self, seconds: float) -> Any:
        """The answer; None where it was an error of the remote's, or does not come in time."""
        self._thread.join(seconds)
        if self._thread.is_alive() or isinstance(self._error, RemoteError):
            return None
        return self.result()


class MeteredBucket:
    """See `castore.remote.bucket.Bucket`.

    Args:
        bucket: does the work.
        requests: requests at once; None for no bound of its own.
        rate: bytes a second; None for no bound.
    """

    def __init__(self, bucket: Bucket, requests: int | None = None, rate: int | None = None) -> None:
        self._bucket = bucket
        self._usage: Usage | None = None
        self._early = Counter[str]()
        self._ahead: dict[str, _Answer] = {}
        self._turns = threading.Semaphore(requests) if requests is not None else None
        self._link = Link(rate)
        self._lock = threading.Lock()
        self.url = bucket.url

    def report_to(self, usage: Usage) -> None:
        """Have all counts added to those of a store, also those from before this call."""
        with self._lock:
            self._usage = usage
            early, self._early = self._early, Counter()
        self.count(**early)

    def count(self, **counts: int) -> None:
        """Add to counters of requests."""
        with self._lock:
            for name, count in counts.items():
                if self._usage is None:
                    self._early[name] += count
                else:
                    self._usage.counts[f"remote_{name}"] += count

    def ask_ahead(self, keys: Iterable[str]) -> None:
        """Ask for small objects now. The next `get` of each has the answer, or raises what came of it."""
        self._ahead |= {key: _Answer(partial(self._get, key)) for key in keys}

    def connect(self, connections: int, key: str) -> None:
        """Have connections opened, which later requests use, by asking for the size of an object.

        Does nothing for a folder, or where the requests at once are bounded.
        """
        if self._turns is None and not self.url.startswith("file:"):
            for _ in range(connections):
                _Answer(partial(self.size, key))

    @contextmanager
    def _request(self, kind: str) -> Iterator[None]:
        if self._turns is not None:
            self._turns.acquire()
        began = time.monotonic()
        try:
            yield
        except RemoteMissingError:
            raise
        except RemoteError:
            self.count(errors=1)
            raise
        finally:
            if self._turns is not None:
                self._turns.release()
            self.count(**{kind: 1, "microseconds": round((time.monotonic() - began) * 1e6)})

    def get(self, key: str) -> Versioned:
        """See `Bucket`."""
        ahead = self._ahead.pop(key, None)
        return self._get(key) if ahead is None else ahead.result()

    def get_within(self, key: str, seconds: float) -> bytes | None:
        """The bytes of a small object that nobody needs; None where they cannot be had, or take longer."""
        answer = self._ahead.pop(key, None) or _Answer(partial(self._get, key))
        found: Versioned | None = answer.within(seconds)
        return None if found is None else found.data

    def _get(self, key: str) -> Versioned:
        with self._request("reads"):
            found = self._bucket.get(key)
        self._receive(len(found.data))
        return found

    def _receive(self, size: int) -> None:
        self.count(received=size)
        self._link.take(size)

    def size(self, key: str) -> int | None:
        """See `Bucket`."""
        with self._request("reads"):
            return self._bucket.size(key)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Bucket`."""
        with self._request("reads"):
            found = self._bucket.get_range(key, start, end)
        self._receive(len(found))
        return found

    def stream(self, key: str) -> Iterator[bytes]:
        """See `Bucket`."""
        with self._request("reads"):
            for piece in self._bucket.stream(key):
                self._receive(len(piece))
                yield piece

    def put(self, key: str, data: Buffer) -> None:
        """See `Bucket`."""
        self._send(len(data))
        with self._request("writes"):
            self._bucket.put(key, data)

    def _send(self, size: int) -> None:
        self._link.take(size)
        self.count(sent=size)

    def upload(self, key: str, path: Path, progress: Callable[[int], object]) -> None:
        """See `Bucket`."""

        def pass_on(size: int) -> None:
            self._send(size)
            progress(size)

        with self._request("writes"):
            self._bucket.upload(key, path, pass_on)

    def create(self, key: str, data: bytes) -> bool:
        """See `Bucket`."""
        self._send(len(data))
        with self._request("writes"):
            return self._bucket.create(key, data)

    def replace(self, key: str, data: bytes, version: Any) -> bool:
        """See `Bucket`."""
        self._send(len(data))
        with self._request("writes"):
            return self._bucket.replace(key, data, version)

    def renew(self, key: str, seen: Versioned) -> None:
        """See `Bucket`."""
        self._send(len(seen.data))
        with self._request("writes"):
            self._bucket.renew(key, seen)

    def listing(self, prefix: str) -> Iterator[Listed]:
        """See `Bucket`. Counted as one request for each thousand objects."""
        with self._request("lists"):
            for found, listed in enumerate(self._bucket.listing(prefix), start=1):
                if found % 1000 == 0:
                    self.count(lists=1)
                yield listed

    def delete(self, keys: Iterable[str]) -> None:
        """See `Bucket`."""
        with self._request("deletes"):
            self._bucket.delete(keys)

    def remove_unfinished(self, before: float) -> None:
        """See `Bucket`."""
        self._bucket.remove_unfinished(before)
