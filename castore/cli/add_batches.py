"""Puts the files that `castore add` found: small ones in batches and threads, large ones one after the other.

A file that cannot be put is reported, and the others are still put. An error of the store itself (a full
disk, a budget taken up by pins) ends everything.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from castore import Store
from castore.cli.output import Failures, describe, printable
from castore.cli.store_access import check_ttl
from castore.cli.walk import Source
from castore.errors import CastoreError, FullError, StoreError, add_filename
from castore.objects.codecs import check_codec
from castore.system.cpus import usable_cores
from castore.watch import entry_sources
from castore.write.putter import SupportsRead

#: Files up to this many bytes are read whole and put in batches.
SMALL = 1 << 20
_BATCH_BYTES = 8 << 20
_BATCH_FILES = 500
# Compression releases the GIL and the rest does not: more threads would only wait for one another.
_THREADS = 4


class AddOptions(NamedTuple):
    """The user's options for every entry; None is the store's default."""

    codec: str | None = None
    ttl: str | None = None
    metadata: dict[str, Any] | None = None
    pin: bool = False

    def check(self) -> None:
        """Refuse what no entry can have, before the first file is read.

        Raises:
            InvalidValueError: there is no such codec, or the ttl is no duration.
        """
        if self.codec is not None:
            check_codec(self.codec, None)
        if self.ttl is not None:
            check_ttl(self.ttl)


class _Outcome(NamedTuple):
    """The outcome of a batch: its entries, a sentence on each file not put, and an error that ends all."""

    files: int
    size: int
    problems: list[str]
    end: Exception | None = None


class _Item(NamedTuple):
    """A small file that was read; all but its path are an item of `Store.put_many`."""

    path: str
    name: str
    data: bytes
    metadata: dict[str, Any]


class FileAdder:
    """Puts files into a store.

    Args:
        store: where to.
        options: for all of them.
        failures: takes a sentence for each file that cannot be put.
        done: called with the bytes of files that are dealt with.

    Attributes:
        files, size: how many were put, and their bytes.
    """

    def __init__(
        self, store: Store, options: AddOptions, failures: Failures, done: Callable[[int], object]
    ) -> None:
        self._store = store
        self._options = options
        self._failures = failures
        self._done = done
        self.files = 0
        self.size = 0
        self._names: list[str] = []  # of what was put, where a budget may evict some of it

    def count_evicted(self) -> int:
        """How many of the files have had to go again, for others of them or of another process."""
        return sum(self._store.entry(name) is None for name in self._names)

    def put_all(self, sources: Iterable[Source]) -> None:
        """Put every file.

        Raises:
            CastoreError, OSError: the store itself cannot go on.
        """
        pool = ThreadPoolExecutor(min(usable_cores(), _THREADS), thread_name_prefix="castore-add")
        running: deque[tuple[list[Source], Future[_Outcome]]] = deque()
        try:
            for batch in _batches(sources):
                if batch[0].size > SMALL:
                    # Here and not in the pool: Ctrl-C must not wait for the end of a large file.
                    self._put_file(batch[0])
                    continue
                running.append((batch, pool.submit(self._put_batch, batch)))
                # Few batches wait, so that memory stays bounded however fast the disk is.
                if len(running) > 2 * usable_cores():
                    self._collect(*running.popleft())
            while running:
                self._collect(*running.popleft())
        finally:
            pool.shutdown(cancel_futures=True)
            for (
                batch,
                future,
            ) in running:  # after an error: batches under way have been put all the same
                if not future.cancelled() and future.exception() is None:
                    self._count(batch, future.result()._replace(end=None))

    def put_input(self, name: str, file: SupportsRead) -> None:
        """Put all bytes of a stream, or none.

        Raises:
            CastoreError, OSError: it cannot be read, or not be kept.
        """
        codec, ttl, metadata, pin = self._options
        entry = self._store.put_stream(
            name, file, codec=codec, ttl=ttl, metadata=metadata, pin=pin, progress=self._done
        )
        self.files, self.size = self.files + 1, self.size + entry.size

    def _collect(self, batch: list[Source], future: Future[_Outcome]) -> None:
        self._count(batch, future.result())

    def _count(self, batch: list[Source], outcome: _Outcome) -> None:
        self.files += outcome.files
        self.size += outcome.size
        if self._store.settings.max_size is not None and not outcome.problems:
            self._names += [source.name for source in batch]
        for problem in outcome.problems:
            self._failures.add(problem)
        self._done(sum(source.size for source in batch))
        if outcome.end is not None:
            raise outcome.end

    def _put_batch(self, batch: list[Source]) -> _Outcome:
        problems: list[str] = []
        items: list[_Item] = []
        for source in batch:
            try:
                with open(source.path, "rb") as file, add_filename(source.path):
                    status = os.fstat(file.fileno())
                    metadata = self._metadata(source.path, status)
                    items.append(_Item(source.path, source.name, file.read(), metadata))
            except OSError as error:
                problems.append(f"{describe(error)}; skipped")
        outcome = self._put_items(items)
        return outcome._replace(problems=problems + outcome.problems)

    def _metadata(self, path: str, status: os.stat_result) -> dict[str, Any]:
        """The user's metadata, with the file that the entry is made from."""
        source = entry_sources.source_of(os.path.abspath(path), status)
        return ({} if source is None else {"source": source}) | (self._options.metadata or {})

    def _put_items(self, items: list[_Item]) -> _Outcome:
        codec, ttl, _, pin = self._options
        try:
            self._store.put_many((item[1:] for item in items), codec=codec, ttl=ttl, pin=pin)
        except (FullError, StoreError):
            raise
        except CastoreError:
            pass  # one file made the whole batch fail: put each alone, to find it
        else:
            return _Outcome(len(items), sum(len(item.data) for item in items), [])
        files, size = 0, 0
        problems: list[str] = []
        for path, name, data, metadata in items:
            try:
                self._store.put(name, data, codec=codec, ttl=ttl, metadata=metadata, pin=pin)
            except (FullError, StoreError) as error:
                return _Outcome(files, size, problems, error)
            except CastoreError as error:
                problems.append(f"{printable(path)}: {error}")
            else:
                files, size = files + 1, size + len(data)
        return _Outcome(files, size, problems)

    def _put_file(self, source: Source) -> None:
        reported = 0

        def progress(size: int) -> None:
            nonlocal reported
            reported += size
            self._done(size)

        outcome = self._put_large(source, progress)
        self._count([source._replace(size=max(0, source.size - reported))], outcome)

    def _put_large(self, source: Source, progress: Callable[[int], object]) -> _Outcome:
        codec, ttl, _, pin = self._options
        try:
            metadata = self._metadata(source.path, os.stat(source.path))
            entry = self._store.put_file(
                source.name, source.path, codec=codec, ttl=ttl, metadata=metadata, pin=pin, progress=progress
            )
        except (FullError, StoreError):
            raise
        except OSError as error:
            if error.filename != source.path:
                raise  # the store cannot be written to
            return _Outcome(0, 0, [f"{describe(error)}; skipped"])
        except CastoreError as error:
            return _Outcome(0, 0, [f"{printable(source.path)}: {error}"])
        return _Outcome(1, entry.size, [])


def _batches(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """Batches: small files together, each large file alone."""
    batch: list[Source] = []
    size = 0
    for source in sources:
        if source.size > SMALL:
            yield [source]
            continue
        batch.append(source)
        size += source.size
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
