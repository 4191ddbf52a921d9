"""Puts datasets into a store in a thread of its own, while the caller continues.

A process has one such thread, which serves in order of arrival: compression uses all cores by itself. A
caller can wait for pending datasets, and the interpreter waits for them at its end. After a failure the
dataset is not in the cache, and no half of it is. The next call that uses this module, or the end of the
process, reports the failure as a `CacheWarning`.

A forked child begins with nothing pending: it lacks the parent's thread, and the parent's work stays the
parent's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from castore.adapters.datasets.dataset_entries import DatasetSize
from castore.errors import CacheWarning, warn
from castore.system.forks import reset_after_fork
from castore.system.thread_pools import lasting_pool


class PendingPut(NamedTuple):
    """A dataset that is being stored: a snapshot that no caller has, its record, and the future of its size.

    The size is None if the dataset could not be stored. The file has the uncompressed rows.
    """

    dataset: datasets.Dataset
    record: dict[str, Any]
    size: Future[DatasetSize | None]
    file: Path


class PendingPuts:
    """The thread, and the datasets that are pending in it."""

    def __init__(self) -> None:
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._guard = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[tuple[Path, str], PendingPut] = {}
        self._failures: list[str] = []

    def find(self, store: Path, name: str) -> PendingPut | None:
        """The pending result of that name."""
        with self._guard:
            return self._pending.get((store, name))

    def submit(
        self,
        store: Path,
        name: str,
        dataset: datasets.Dataset,
        record: dict[str, Any],
        put: Callable[[], DatasetSize],
        file: Path,
    ) -> PendingPut:
        """Call ``put`` in the thread."""
        with self._guard:
            if self._pool is None:
                self._pool = lasting_pool(1, "castore-datasets")
            pool = self._pool
        # Registered before the work can be done: otherwise the entry would stay registered.
        future: Future[DatasetSize | None] = Future()
        found = PendingPut(dataset, record, future, file)
        with self._guard:
            self._pending[store, name] = found
        pool.submit(self._run_put, store, name, put, future)
        return found

    def _run_put(
        self, store: Path, name: str, put: Callable[[], DatasetSize], future: Future[DatasetSize | None]
    ) -> None:
        size = None
        try:
            size = put()
        except Exception as error:  # noqa: BLE001 - reported in the caller's thread, whatever it is
            with self._guard:
                self._failures.append(f"{name!r} was not stored in {store}: {error}")
        finally:
            with self._guard:
                del self._pending[store, name]
            future.set_result(size)

    def warn(self) -> None:
        """Warn of failures since the last call."""
        with self._guard:
            failures, self._failures = self._failures, []
        for failure in failures:
            warn(failure, CacheWarning)

    def wait(self) -> None:
        """Wait until nothing is pending, and warn of failures."""
        with self._guard:
            waiting = [found.size for found in self._pending.values()]
        for size in waiting:
            size.result()
        self.warn()


pending_puts = PendingPuts()


def wait() -> None:
    """Wait until every dataset that this process is storing is in its store.

    Warns:
        CacheWarning: one of them could not be stored.
    """
    pending_puts.wait()


# Not `atexit`: by then `concurrent.futures` takes no more work, and compressing is work for its threads.
# Hooks run in reverse order, so this one comes before that of `concurrent.futures`, which is imported above.
threading._register_atexit(wait)  # type: ignore[attr-defined]
