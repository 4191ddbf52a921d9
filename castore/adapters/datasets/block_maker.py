"""Makes results of blocks, here or in the step's processes, and keeps each as soon as it is there.

The result of a slow block is put together from parts (`block_parts`). Nothing is known of a block beforehand:
one that turns out to be slow is ended, and begun anew in parts. The speed of the function is that of the
latest rows.

Which blocks are made, and under which keys, is `block_runner`'s. Must never keep a result that an operator's
exception, or a dead worker, has cut short.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from castore.adapters.datasets import scratch
from castore.adapters.datasets.block_claims import Claim
from castore.adapters.datasets.block_entries import (
    BlockResult,
    NotInBlocksError,
    RemembersError,
    check_room,
    name_again,
    name_of_result,
    put_result,
    remove_result,
)
from castore.adapters.datasets.block_parts import (
    AS_BLOCKS,
    TELLING_PARTS,
    BlockParts,
    Joined,
    MadePart,
    Part,
    PartsDifferError,
    seconds_of_row,
)
from castore.adapters.datasets.block_step import (
    BlockStep,
    Written,
    run_block,
    tells_features,
)
from castore.adapters.datasets.block_workers import block_workers, was_begun
from castore.adapters.datasets.call_watch import TooSlowError
from castore.adapters.datasets.cutting import LARGEST_BYTES
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.named_files import file_states
from castore.adapters.datasets.operator_state import differ
from castore.errors import CacheWarning, warn
from castore.store import Store

#: Why an operator's step cannot run in processes block by block.
REMEMBERS = (
    "the function remembers rows that it has seen, so its results depend on the rows before; let it remember"
    " nothing between two calls, or, if it only loads a model at its first call, load it in a function under"
    " functools.cache"
)
#: For so many seconds after a kill no block runs before the last one is kept, unless that takes more seconds
#: than the second number. A process that was killed early is often killed early again: on a machine that is
#: taken away, or for memory.
_CAREFUL_SECONDS, _KEEPING_SECONDS = 2.0, 0.1


class BeginsAnewError(Exception):
    """An operator that remembers rows would have to see some of them twice."""


class FilesChangedError(Exception):
    """Files that rows of a block name have changed since its key was made."""


class Job(NamedTuple):
    """A block to make.

    Attributes:
        number: the block's place.
        rows, files, first: the block, what its rows name, and the number of its first row.
        features: the features of the result, in JSON; None to find them.
        key: of the result.
        claim: of the block.
        again: gives another key for the result, by its features; None for no other.
        after: the first block, if nothing of this one may be kept before that one is made: the features of
            the result are guessed, and the first block may show that the operator remembers rows.
    """

    number: int
    rows: pa.Table
    files: Sequence[Any]
    first: int
    features: str | None
    key: str
    claim: Claim
    again: Callable[[str], str] | None
    after: Future[Written] | None = None

    def wait_for_first(self) -> None:
        """Wait until something of this block may be kept.

        Raises:
            Exception: the first block has failed.
        """
        if self.after is not None:
            self.after.result()


class _Made(NamedTuple):
    """A block's result in a file, and the parts that it was put together from."""

    written: Written
    parts: Sequence[MadePart] = ()


class BlockProgress:
    """The rows that are done, for a bar and a callback. Each block, or part, counts once, however often seen.

    Args:
        on_rows: a callback that receives the number of rows done; None for none.
        bar: a bar of tqdm.
    """

    def __init__(self, on_rows: Callable[[int], object] | None, bar: Any) -> None:
        self._on_rows, self._bar = on_rows, bar
        self._counted: dict[int, int] = {}  # rows of each block
        self._reused = 0
        self._guard = threading.Lock()

    def count(self, block: int, upto: int, *, reused: bool) -> None:
        """Count the rows of a block, up to so many, whose results are there."""
        with self._guard:
            rows = upto - self._counted.get(block, 0)
            if rows <= 0:
                return
            self._counted[block] = upto
            if reused and not self._bar.disable:
                self._bar.initial += rows  # the rate is that of rows that run
                self._reused += rows
                self._bar.set_postfix_str(f"{self._reused:,} reused", refresh=False)
            self._bar.update(rows)
            if self._on_rows is not None:
                self._on_rows(rows)


class BlockMaker:
    """Makes the results of blocks; a context.

    Args:
        store, step, options, temp_dir: of the run.
        parts: the parts of its blocks.
        progress: counts rows.
        seconds_a_row: time that the function takes; None where it is not known.
    """

    def __init__(
        self,
        store: Store,
        step: BlockStep,
        options: StorageOptions,
        temp_dir: str | os.PathLike[str] | None,
        parts: BlockParts,
        progress: BlockProgress,
        seconds_a_row: float | None,
    ) -> None:
        self._store = store
        self._step = step
        self._options = options
        self._temp_dir = temp_dir
        self._parts = parts
        self._progress = progress
        #: Time that the function takes; None while no row has run.
        self._seconds_a_row = seconds_a_row
        self._may_be_parts = True
        #: Blocks that are being made, or kept: the file of each, and its bytes.
        self._waiting: dict[Future[BlockResult], tuple[Future[Written], int]] = {}
        self._rows_kept, self._bytes_kept = 0, 0
        #: The keys of all results that were made.
        self.made: set[str] = set()
        self._others: set[str] = set()  # under which results were named again
        #: Whether the operator remembers rows. No result is kept for other runs then.
        self.remembers = False
        #: Blocks that were being made when a worker process was killed: the numbers of their rows, by key.
        self.lost: dict[str, range] = {}
        #: The keys of blocks of which a part was kept that another run takes.
        self.begun: set[str] = set()

    def __enter__(self) -> BlockMaker:
        with contextlib.ExitStack() as stack:
            file = scratch.new_file(self._store, self._temp_dir)
            stack.callback(scratch.remove, file)
            since_kill = scratch.seconds_after_kill(file)
            self._follows_kill = since_kill is not None
            careful = 0.0 if since_kill is None else _CAREFUL_SECONDS - since_kill
            self._careful_until = time.monotonic() + careful
            self._files = (file.with_name(f"{number:09}.arrow") for number in itertools.count())
            self._guard = threading.Lock()
            # One thread: compression uses all cores by itself.
            self._keeper = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="castore-blocks"))
            # A thread waits for each block, and for the parts of it, that the processes make.
            count = self._step.num_proc + 2
            self._waiters = stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="castore-parts"))
            self._workers = stack.enter_context(block_workers(self._step))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def note(self, number: int, found: BlockResult) -> None:
        """Count a block whose result was there."""
        if self._seconds_a_row is None and found.seconds:
            self._seconds_a_row = found.seconds / max(1, found.rows_in)
        self._progress.count(number, found.rows_in, reused=found.key not in self.made)

    def make(self, job: Job) -> tuple[Future[BlockResult], Future[Written]]:
        """Make a block's result; waits while many others are being made.

        Returns:
            The result, once it is kept, and its file before that.
        """
        file, written = self._new_file(), Future[Written]()
        if self._workers is None:
            try:
                made = self._make_or_clean(job, file)
            finally:
                self._step.early.forget()
            if made.written.remembers and self.find_memory():
                job = self.job_of_memory(job)
            written.set_result(made.written)
            kept = self._keeper.submit(self._keep, job, made, file)
            if time.monotonic() < self._careful_until:
                wait([kept], timeout=_KEEPING_SECONDS)
        else:
            kept = Future[BlockResult]()
            self._waiters.submit(self._make_and_keep, job, file, written, kept)
        self._waiting[kept] = written, min(job.rows.nbytes, LARGEST_BYTES)
        self._wait_for_room()
        return kept, written

    def _wait_for_room(self) -> None:
        """Wait until at most one block is claimed that nobody runs yet, and until others take little room.

        Raises:
            Exception: one of the blocks has failed.
        """
        # In one process a block is kept while the next one runs: a kill costs both.
        most = -1 if self._workers is None else (self._step.num_proc + 1) * LARGEST_BYTES
        while True:
            unmade = [written for written, _ in self._waiting.values() if not written.done()]
            is_full = len(self._waiting) > 1 and sum(size for _, size in self._waiting.values()) > most
            if not is_full and len(unmade) <= self._step.num_proc + 1:
                return
            running: list[Future[Any]] = [*self._waiting] if is_full else [*unmade]
            wait(running, return_when=FIRST_COMPLETED)
            for kept in [kept for kept in self._waiting if kept.done()]:
                del self._waiting[kept]
                kept.result()

    def await_all(self) -> None:
        """Wait for the blocks that are being made, whatever comes of them."""
        wait(self._waiting)
        self._waiting.clear()

    def features_of(self, rows: pa.Table, first: int, key: str) -> str | None:
        """The features of a part of the result, in JSON; None if it does not show the types of all columns.

        Args:
            rows, first: the first rows of a block, and the number of the first.
            key: the block's key.
        """
        file = self._new_file()
        try:
            made = self._run(rows, first, None, file, key).result()
        finally:
            remove_result(file)
        return made.features if tells_features(made.rows, made.features) else None

    def first_features(self, key: str, block: Future[Written]) -> str | None:
        """The features that the first rows of a block have, in JSON, while other processes make the rest.

        Args:
            key: the block's key.
            block: the block's file.

        Returns:
            None if the first rows do not show them, or the block is done first.
        """
        return None if self._workers is None else self._workers.first_features(key, block)

    def settle(self) -> None:
        """Wait for the results that are being made. A block whose result failed will be made again.

        Raises:
            BeginsAnewError, RemembersError: the operator remembers rows.
        """
        self.await_all()
        self.require_no_memory()

    def job_of_memory(self, job: Job) -> Job:
        """A job for an operator that remembers rows: its result has a key that no other run finds."""
        job.claim.end(is_kept=False)
        return job._replace(key=uuid.uuid4().hex, claim=Claim(lambda: None), again=None)

    def forget(self) -> None:
        """Take back the keys of all results that were made, if the operator has turned out to remember rows.

        It may have begun to do so some blocks before that was seen.
        """
        self.await_all()
        for key in self.made | self._others:
            self._store.delete(name_of_result(key))
        self._parts.forget()

    def find_memory(self) -> bool:
        """Whether the operator remembers rows that this process has shown it: then it warns, once."""
        if self._workers is None and not self.remembers and self._step.state.has_changed(now=True):
            self.remembers = True
            warn(
                f"results of the step {self._step.state.name!r} are not kept block by block: {REMEMBERS}",
                CacheWarning,
            )
        return self.remembers

    def look_at_end(self, results: Sequence[BlockResult]) -> None:
        """Find out whether the operator has begun to remember rows in its last blocks, or has loaded objects
        that it made from rows.

        Raises:
            BeginsAnewError: it has loaded such objects.
            RemembersError: it remembers rows, in other processes.
        """
        if self._workers is None:
            self.find_memory()
        elif self.made and self._workers.find_memory():
            self._refuse_memory()
        if not self.remembers and differ(result.loaded for result in results):
            if self._workers is not None or not self.made:
                self._refuse_memory()
            self.remembers = True
            raise BeginsAnewError(
                "an object that it makes at its first call depends on the rows of that call"
            )

    def require_no_memory(self) -> None:
        """Check that rows may run once more.

        Raises:
            BeginsAnewError: the operator remembers them, and has seen them in this process.
            RemembersError: the operator has seen them in other processes.
        """
        if self.find_memory():
            raise BeginsAnewError if self._workers is None else RemembersError(REMEMBERS)

    def _new_file(self) -> Path:
        with self._guard:
            return next(self._files)

    # Running

    def _make_and_keep(
        self, job: Job, file: Path, written: Future[Written], kept: Future[BlockResult]
    ) -> None:
        """Make a block, and have it kept; the futures become done with its file, and with its result."""
        try:
            made = self._make_or_clean(job, file)
        except BaseException as error:  # noqa: BLE001 (the caller's, where it asks for the block)
            if isinstance(error, BrokenProcessPool) and was_begun(file):
                self.lost[job.key] = range(job.first, job.first + len(job.rows))
            written.set_exception(error)
            kept.set_exception(error)
            return
        written.set_result(made.written)
        _pass_on(self._keeper.submit(self._keep, job, made, file), kept)

    def _make_or_clean(self, job: Job, file: Path) -> _Made:
        """Make a block. Its files are removed, and its claim ends, if that fails."""
        try:
            return self._make(job, file)
        except BaseException:
            remove_result(file)
            job.claim.end(is_kept=False)
            raise

    def _make(self, job: Job, file: Path) -> _Made:
        """Run the step on a block, as a whole or in parts."""
        finer = self._choose(job)
        if finer is None and self._may_be_parts:
            try:
                return _Made(self._run_whole(job, file, may_end=True))
            except TooSlowError as slow:
                self._seconds_a_row = slow.seconds_a_row
            finer = self._choose(job)
        if finer is not None:
            try:
                if (made := self._make_in_parts(job, finer, file)) is not None:
                    return made
            except TooSlowError as slow:
                self._seconds_a_row = slow.seconds_a_row
                return self._make(job, file)
            except PartsDifferError as error:
                self.require_no_memory()
                self._may_be_parts = False  # nor would those of other blocks do
                if len(job.rows) == len(self._step.dataset):
                    raise NotInBlocksError(
                        "its rows take long, and give results of several types, or with several keys, so that"
                        " parts of them cannot be kept"
                    ) from error
            self.require_no_memory()
        return _Made(self._run_whole(job, file, may_end=False))

    def _choose(self, job: Job) -> int | None:
        if not self._may_be_parts:
            return None
        return self._parts.choose(
            job.rows, job.first, job.features, self._seconds_a_row, follows_kill=self._follows_kill
        )

    def _run_whole(self, job: Job, file: Path, *, may_end: bool) -> Written:
        tells = may_end and self._step.decides_features(len(job.rows), job.features)
        written = self._run(
            job.rows, job.first, job.features, file, job.key, may_end=may_end, tells=tells, in_memory=True
        ).result()
        self._seconds_a_row = seconds_of_row(written, len(job.rows))
        self._check_memory(written)
        return written

    def _check_memory(self, written: Written) -> None:
        """Check that an operator in other processes, each with its own rows, remembers none."""
        if written.remembers and self._workers is not None:
            self._refuse_memory()

    def _refuse_memory(self) -> NoReturn:
        self.remembers = True
        raise RemembersError(REMEMBERS)

    def _make_in_parts(self, job: Job, finer: int, file: Path) -> _Made | None:
        """Make a block in parts: first the rows that decide the features of the result, if any do.

        Returns:
            None if the parts do not fit into one file.

        Raises:
            PartsDifferError: the parts do not show what the result is.
        """
        joined, made = Joined(self._step), list[MadePart]()
        head = self._parts.head_rows(len(job.rows), job.features)
        done = 0
        with contextlib.ExitStack() as stack:
            for rows in (job.rows[:head], job.rows[head:]):
                if not len(rows):
                    continue
                features = joined.decide() if done else job.features
                section = job._replace(rows=rows, first=job.first + done, features=features)
                for part in self._run_parts(section, finer, stack):
                    self._check_memory(part.written)
                    joined.add(part.written)
                    made.append(part)
                    done += part.rows
                    self._progress.count(job.number, done, reused=part.is_reused)
            written = joined.write(file)
        if written is None:
            return None
        remembers = any(part.written.remembers for part in made)
        return _Made(written._replace(remembers=remembers), () if remembers else made)

    def _run_parts(self, job: Job, finer: int, stack: contextlib.ExitStack) -> Iterator[MadePart]:
        """The results of parts, in order, each kept once it is there.

        The first parts tell how long the others take: the rows before that may have loaded a model. So the
        rest is cut anew. Where it takes little time, it runs at once, up to the next part that is kept. The
        others begin when the first parts have told, in however many processes: so another run cuts at the
        same places.
        """
        running: deque[tuple[Part, Future[Written]] | MadePart] = deque()
        most = 1 if self._workers is None else 2 * self._step.num_proc
        waiting = deque(self._parts.cut(job.rows, job.first, job.features, finer))
        speeds, may_be_quick = list[float](), finer != AS_BLOCKS
        while waiting or running:
            untold = TELLING_PARTS - len(speeds)
            while waiting and len(running) < (min(most, untold) if untold > 0 else most):
                part = waiting.popleft()
                file = self._new_file()
                stack.callback(remove_result, file)
                found = self._parts.bring(part, file)
                if found is not None and not self.find_memory():
                    running.append(found)
                    continue
                if may_be_quick and self._are_quick(speeds, job):
                    along = list(itertools.takewhile(lambda other: not self._parts.is_kept(other), waiting))
                    count = part.rows + sum(other.rows for other in along)
                    rows = job.rows[part.first - job.first :][:count]
                    try:
                        written = self._run_part(job, part, rows, file, may_end=True).result()
                    except TooSlowError:
                        may_be_quick = False
                    else:
                        for _ in along:
                            waiting.popleft()
                        running.append(MadePart(None, count, written, False, None))
                        continue
                may_end = finer == AS_BLOCKS and self._seconds_a_row is None
                running.append((part, self._run_part(job, part, part.block.read(), file, may_end=may_end)))
            next_made = running.popleft()
            made = next_made if isinstance(next_made, MadePart) else self._keep_part(job, *next_made)
            if made.part is not None:
                speeds.append(seconds_of_row(made.written, made.part.rows))
                self._seconds_a_row = statistics.median(speeds)
            if waiting:
                anew = self._parts.cut_anew(job.rows, job.first, job.features, finer, waiting[0], speeds)
                waiting = waiting if anew is None else deque(anew)
            yield made

    def _are_quick(self, speeds: Sequence[float], job: Job) -> bool:
        """Whether a block takes little time at the speed of its latest parts."""
        if len(speeds) < TELLING_PARTS:
            return False
        latest = statistics.median(speeds[-TELLING_PARTS:])
        return latest * len(job.rows) <= self._step.slow_seconds(len(job.rows))

    def _run_part(
        self, job: Job, part: Part, rows: pa.Table, file: Path, *, may_end: bool = False
    ) -> Future[Written]:
        """Run the step on rows that begin with those of a part."""
        with _not_in_parts():
            return self._run(rows, part.first, job.features, file, part.key, may_end=may_end)

    def _keep_part(self, job: Job, part: Part, coming: Future[Written]) -> MadePart:
        """Keep a part once it is there."""
        with _not_in_parts():
            written = coming.result()
        self._check_files(part.block.read(), part.block.files)
        if written.remembers:
            return MadePart(part, part.rows, written, False, None)
        job.wait_for_first()
        made = self._parts.keep(part, written)
        if not self._parts.fresh:
            self.begun.add(job.key)
        return made

    def _run(
        self,
        rows: pa.Table,
        first: int,
        features: str | None,
        file: Path,
        key: str,
        *,
        may_end: bool = False,
        tells: bool = False,
        in_memory: bool = False,
    ) -> Future[Written]:
        if self._workers is not None:  # the first block too: an operator's crash must not end this process
            return self._workers.run(rows, first, features, file, key, may_end, tells=tells)
        done: Future[Written] = Future()
        written = run_block(self._step, rows, first, features, file, key, may_end, in_memory=in_memory)
        done.set_result(written)
        return done

    # Keeping

    def _keep(self, job: Job, made: _Made, file: Path) -> BlockResult:
        (written, parts), is_kept = made, False
        try:
            job.wait_for_first()
            self._check_files(job.rows, job.files)
            result = put_result(
                self._store,
                job.key,
                written.path if written.data is None else written.data,
                len(job.rows),
                written.rows,
                written.features,
                self._options,
                written.seconds,
                names_files=written.names_files,
                loaded=written.loaded,
            )
            if job.again is not None and written.rows:
                other = job.again(written.features)
                name_again(self._store, job.key, other)
                self._others.add(other)
            if parts:
                self._parts.link(parts, result)
            self.made.add(job.key)
            is_kept = True
        finally:
            remove_result(file)
            job.claim.end(is_kept=is_kept)
        self._check_room(result)
        self._progress.count(job.number, len(job.rows), reused=False)
        reused = [part for part in parts if part.part is not None and part.is_reused]
        return result._replace(
            rows_reused=sum(part.part.rows for part in reused if part.part is not None),
            seconds_saved=sum(part.written.seconds for part in reused),
        )

    def _check_files(self, rows: pa.Table, files: Sequence[Any]) -> None:
        """Check that files that rows name are still as they were when the key of the rows was made."""
        if files and file_states(rows, self._step.dataset.features) != files:
            raise FilesChangedError

    def _check_room(self, result: BlockResult) -> None:
        """Check that all results will fit."""
        self._rows_kept += result.rows_in
        self._bytes_kept += result.stored
        check_room(self._store, self._rows_kept, len(self._step.dataset), self._bytes_kept)


@contextlib.contextmanager
def _not_in_parts() -> Iterator[None]:
    """Give up on parts where a part alone cannot be made."""
    try:
        yield
    except NotInBlocksError as error:
        raise PartsDifferError from error


def _pass_on(coming: Future[BlockResult], future: Future[BlockResult]) -> None:
    """Have a future become done with another one."""

    def pass_on(coming: Future[BlockResult]) -> None:
        try:
            future.set_result(coming.result())
        except BaseException as error:  # noqa: BLE001 (the caller's, where it asks for the result)
            future.set_exception(error)

    coming.add_done_callback(pass_on)
