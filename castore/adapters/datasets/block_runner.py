"""Runs a step block by block: blocks whose results are kept do not run again.

The result of a block follows from its rows, the operator, and the features of the step's result. The features
are decided by the first rows that come out, as in `datasets`: the first block runs as it is, and each later
block with the features of the first. So results are equal to those of one pass over all rows, whatever a
block alone would have looked like. The result of the first block has the key of a later block as well, for
inputs in which other blocks are in front of it. While another run or process makes the first block, a run
goes on with the features that a few rows have. Features are in the keys of results, so a wrong guess costs
work, and nothing else. Behind a guess of its own a run keeps no block before the first one is made, which may
show that the operator remembers rows.

A block's result is kept as soon as it is there. So a run that ends early leaves all its blocks but those in
flight, and the next run goes on after them.

Runs of one step at once, in any threads and processes, share its blocks. A run claims each block that it
makes, passes over blocks that others have claimed, and waits for those at its end. A claim is a lock: it ends
with its process, and then the block is free again. Over a store's ``remote`` the same holds for all nodes.

Must never keep a result that an operator's exception, or a dead worker, has cut short.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import NamedTuple, TypeAlias

import datasets
import pyarrow as pa

from castore.adapters.datasets.block_claims import BlockClaims, Claim
from castore.adapters.datasets.block_entries import (
    BlockResult,
    NotInBlocksError,
    RemembersError,
    find_result,
    name_again,
)
from castore.adapters.datasets.block_maker import (
    BeginsAnewError,
    BlockMaker,
    BlockProgress,
    FilesChangedError,
    Job,
)
from castore.adapters.datasets.block_parts import BlockParts
from castore.adapters.datasets.block_step import (
    GUESS_ROWS,
    UNCHANGED,
    BlockStep,
    Written,
    parse_features,
)
from castore.adapters.datasets.cutting import LARGEST_BYTES
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.dataset_fingerprint import features_text, format_digest
from castore.adapters.datasets.private_copies import result_like
from castore.adapters.datasets.row_block import MIXED_ANSWERS
from castore.adapters.datasets.source_blocks import ReadAhead, SourceBlock, source_blocks
from castore.adapters.datasets.tables import DatasetPart, KeptFile, describe_dataset
from castore.adapters.mapped_check import file_time, note_new
from castore.errors import CacheWarning, FullError, InvalidValueError, TooLargeError, warn
from castore.keys.encoder import key as key_of
from castore.store import Store
from castore.system.job_rank import job_rank

#: The folder of notes about operators that remember rows.
_MEMORY_FOLDER = ".datasets/memory"
_MEMORY_SECONDS = 30 * 86400.0
_VERSION = 2
# Blocks whose results are fetched ahead, if nodes share them.
_BLOCKS_AHEAD = 4
# Why an operator that remembers rows would have to see some twice.
_SHARED = "the ranks of a job share its blocks; a run without a shard sees them in order"
#: Seconds for another run to make the first block, before this one guesses its features; and of the first
#: pause between two looks at it.
_GUESS_SECONDS, _FIRST_PAUSE = 2.0, 0.02
# Worker processes that may be killed at one block: the third one is its fault, most likely.
_KILLS = 3
# In the place of a block's key: a worker process was killed between two blocks, or by rows for a guess.
_NO_BLOCK = ""
# Runs of the blocks whose files change meanwhile. A step that changes its own files runs as one piece.
_ATTEMPTS = 3


def bytes_at_once(num_proc: int) -> int:
    """The most bytes of a step that lie uncompressed at one time; more only if its rows grow."""
    # Rows and results of other processes pass through files.
    return (num_proc + 2) * LARGEST_BYTES * (1 if num_proc == 1 else 2)


class _WrongGuess(Exception):
    """The result has other features than a few rows of it."""


class _Elsewhere(NamedTuple):
    """A block that another run, or node, has claimed: its place, and the key of its result."""

    number: int
    key: str


_Item: TypeAlias = "BlockResult | Future[BlockResult] | _Elsewhere"


class FoundBlock(NamedTuple):
    """A block of a step's input, as far as it is known before a run.

    Attributes:
        block: the block; None if it is not known.
        result: its result; None if that is not kept.
        first: the number of its first row, where that counts.
        features: the features of the step's result, in JSON, as far as blocks before it tell.
    """

    block: SourceBlock | None
    result: BlockResult | None
    first: int
    features: str | None


class BlockRun:
    """A run of a step.

    Args:
        store: keeps the results.
        step: the step.
        options: the storage options of results.
        temp_dir: the folder of uncompressed files; by default below the store.
        fresh: run all blocks, also those whose results are kept.
        seconds_a_row: time that the function takes; None where it is not known.
    """

    def __init__(
        self,
        store: Store,
        step: BlockStep,
        options: StorageOptions,
        temp_dir: str | os.PathLike[str] | None = None,
        *,
        fresh: bool = False,
        seconds_a_row: float | None = None,
    ) -> None:
        self._seconds_a_row = seconds_a_row
        self._store = store
        self._step = step
        self.options = options
        self._temp_dir = temp_dir
        self._fresh = fresh
        self._claims = BlockClaims(store, fresh=fresh)
        #: The features that were guessed, in JSON, by the key of the first block; None where there are none.
        self._guesses: dict[str, str | None] = {}
        #: How often a worker process was killed while a block was being made, since a part of it was kept;
        #: by the block's key.
        self._killed = Counter[str]()
        self._lost: dict[str, range] = {}  # the numbers of the rows of such blocks
        #: Whether the operator has turned out to remember rows.
        self.remembers = False

    def take_kept(self) -> None:
        """Take results that are kept from now on, also in a fresh run: it has made them all."""
        self._fresh, self._claims = False, BlockClaims(self._store, fresh=False)

    def run(self) -> list[BlockResult]:
        """The results of all blocks, in order, all of them kept.

        Raises:
            NotInBlocksError: the step cannot run block by block, or the store has no room.
            RuntimeError: worker processes were killed again and again at one block.
            Exception: an exception of the operator; the blocks before that one are kept.

        Warns:
            CacheWarning: a worker process was killed.
        """
        while True:
            try:
                return self._run_once()
            except BrokenProcessPool as error:
                name, hit = self._step.state.name, [k for k, n in self._killed.items() if n == _KILLS]
                if hit:
                    raise RuntimeError(
                        f"worker processes of {name!r} were killed {_KILLS} times at one block"
                        f"{self._rows_of(hit)}: out of memory? Blocks that were done are kept; run the step"
                        " again with a smaller num_proc"
                    ) from error
                warn(
                    f"a worker process of {name!r} was killed (out of memory?): the blocks that were being"
                    " made run again",
                    CacheWarning,
                )

    def _rows_of(self, keys: Iterable[str]) -> str:
        """The rows of blocks that were lost, in words; empty if their numbers are not known."""
        lost = [self._lost[key] for key in keys if key in self._lost]
        if not lost or (job_rank()[1] > 1 and not self._step.is_numbered):
            return ""
        told = (f"{rows[0]:,} to {rows[-1]:,}" for rows in sorted(lost, key=lambda rows: rows[0]))
        return f" (rows {' or '.join(told)} of the step's input)"

    def _run_once(self) -> list[BlockResult]:
        """The results of all blocks, unless a worker process is killed: then those that are done are kept."""
        started, step = file_time(), self._step
        require_no_memory(step, "gc has taken blocks of it")
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(
                datasets.utils.tqdm(desc=step.title, total=len(step.dataset), unit=" examples")
            )
            stack.enter_context(_no_other_bars())
            progress = BlockProgress(step.on_rows, bar)
            maker = BlockMaker(
                self._store, step, self.options, self._temp_dir, self._parts(), progress, self._seconds_a_row
            )
            stack.enter_context(maker)
            try:
                results = self._make_all(maker)
            except BeginsAnewError as error:
                note_memory(self._store, step)
                why = str(error) or str(error.__context__ or "") or "blocks that it has begun are of no use"
                raise _begins_anew(step, why) from error
            except RemembersError:
                note_memory(self._store, step)
                raise
            except BrokenProcessPool:
                maker.await_all()
                self._claims.made |= maker.made
                for begun in maker.begun | ({_NO_BLOCK} if maker.made else set()):
                    del self._killed[begun]
                self._killed.update(maker.lost.keys() or [_NO_BLOCK])
                self._lost |= maker.lost
                raise
            finally:
                self.remembers = maker.remembers
                if maker.remembers:
                    maker.forget()
        if len({result.features == UNCHANGED for result in results}) > 1:
            raise NotInBlocksError(MIXED_ANSWERS)
        new = [self._store.blob(result.digest) for result in results if not result.reused]
        note_new(self._store, [blob for blob in new if blob is not None], started)
        return results

    def _make_all(self, maker: BlockMaker) -> list[BlockResult]:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FilesChangedError):
                results = self._make_share(maker)
                while results is None:
                    results = self._try_all(maker)
                    if results is None:  # another run has ended without a block that it had claimed
                        maker.require_no_memory()
                maker.look_at_end(results)
                return results
            maker.settle()
        raise NotInBlocksError("files that its rows name change while it runs")

    def _make_share(self, maker: BlockMaker) -> list[BlockResult] | None:
        """Make this rank's part of the blocks first, if the ranks of a job share results over a remote.

        So ranks do not ask for the same blocks all the time. Any rank makes those that are left.

        Returns:
            All results, if the first block has shown that the operator remembers rows: this rank has gone on
            with all other blocks then. None before that.
        """
        rank, ranks = job_rank()
        if ranks == 1 or not self._claims.are_shared:
            return None
        results = self._try_all(maker, rank, ranks)
        if results is None and maker.find_memory():
            raise BeginsAnewError(_SHARED)
        return results

    def _try_all(self, maker: BlockMaker, rank: int = 0, ranks: int = 1) -> list[BlockResult] | None:
        """Take the results that are there, and make those that nobody else makes.

        Args:
            maker: makes them.
            rank, ranks: as for `_take_blocks`.

        Returns:
            All results; None if another run has claimed a block, and not kept it, if the features of the
            result were guessed wrong, or if blocks were left to other ranks.
        """
        keys = _Keys(self._step)
        try:
            return self._take_all(keys, maker, rank, ranks)
        except Exception as error:
            if not self._follows_from_guess(error, keys, maker):
                raise
            return None

    def _follows_from_guess(self, error: Exception, keys: _Keys, maker: BlockMaker) -> bool:
        """Whether an error came of features that were guessed wrong. If so, none are guessed again."""
        is_wrong = isinstance(error, _WrongGuess)
        if keys.guessed_for is not None:
            if keys.making is not None:
                if keys.making.exception() is not None:
                    return False  # the first block itself has failed
                maker.settle()  # this run has the claim of that block
            begun = self._claims.wait_for(keys.guessed_for)
            is_wrong = keys.making is None if begun is None else not keys.is_confirmed_by(begun)
        if is_wrong:
            maker.settle()
            self._guesses = dict.fromkeys(self._guesses)
        return is_wrong

    def _take_all(self, keys: _Keys, maker: BlockMaker, rank: int, ranks: int) -> list[BlockResult] | None:
        done = self._take_blocks(keys, maker, rank, ranks)
        kept = [item.result() if isinstance(item, Future) else item for item in done]
        if ranks > 1 and not maker.remembers:
            return None
        results, made = [], self._claims.made | maker.made
        for item in kept:
            result = self._claims.wait_for(item.key) if isinstance(item, _Elsewhere) else item
            if result is None:
                return None
            if isinstance(item, _Elsewhere):
                maker.note(item.number, result)
            results.append(result._replace(reused=result.key not in made))
        begun = [result for result in results if result.key == keys.guessed_for]
        if begun and not keys.is_confirmed_by(begun[0]):
            raise _WrongGuess
        return results

    def _take_blocks(self, keys: _Keys, maker: BlockMaker, rank: int, ranks: int) -> list[_Item]:
        """The results of blocks that are there, and places for those that are made, here or elsewhere.

        Args:
            keys, maker: of this pass over the blocks.
            rank, ranks: one block of so many is taken, and the first ones until the keys of the others are
                known. All are taken once the first one has shown that the operator remembers rows.

        Raises:
            BeginsAnewError: the operator remembers rows, and blocks were left to other ranks before that
                showed.
        """
        first = 0
        done: list[_Item] = []
        numbers: deque[int] = deque()
        has_left = False

        def ours(blocks: Generator[SourceBlock, None, None]) -> Generator[SourceBlock, None, None]:
            nonlocal first, has_left
            with contextlib.closing(blocks):
                for number, block in enumerate(blocks, start=1):
                    if number % ranks == rank or not keys.are_final or maker.remembers:
                        numbers.append(number)
                        yield block
                    else:
                        has_left = True
                        first += len(block.read()) if self._step.is_numbered else 0

        ahead = ReadAhead(source_blocks(self._step.dataset, self._step.rule))
        all_blocks = iter(ahead)
        with contextlib.closing(all_blocks):
            for block in itertools.islice(all_blocks, 1):
                item, first = self._take(block, 0, 0, keys, maker)
                done.append(item)
                ahead.wants_rows = ranks == 1 and not isinstance(item, BlockResult)
            with contextlib.closing(self._fetch_ahead(ours(all_blocks), keys)) as blocks:
                for block in blocks:
                    item, rows = self._take(block, numbers.popleft(), first, keys, maker)
                    done.append(item)
                    first += rows
                    ahead.wants_rows = ranks == 1 and not isinstance(item, BlockResult)
                    if has_left and maker.remembers:
                        raise BeginsAnewError(_SHARED)
        return done

    def _fetch_ahead(
        self, blocks: Generator[SourceBlock, None, None], keys: _Keys
    ) -> Generator[SourceBlock, None, None]:
        """The blocks. Results that other nodes share are fetched some blocks ahead, side by side."""
        if not self._claims.are_shared or self._step.is_numbered:
            yield from blocks
            return
        waiting: deque[tuple[SourceBlock, Future[None] | None]] = deque()
        with contextlib.closing(blocks), ThreadPoolExecutor(_BLOCKS_AHEAD, "castore-shared") as pool:
            for block in blocks:
                # The keys of later blocks need the features of the first.
                fetching = pool.submit(self._claims.fetch, keys.of(block, 0)) if keys.are_final else None
                waiting.append((block, fetching))
                if fetching is None or len(waiting) > _BLOCKS_AHEAD:
                    yield _when_fetched(*waiting.popleft())
            while waiting:
                yield _when_fetched(*waiting.popleft())

    def _take(
        self, block: SourceBlock, number: int, first: int, keys: _Keys, maker: BlockMaker
    ) -> tuple[_Item, int]:
        """The result of a block if it is there, or a place for it; and the number of the block's rows."""
        begun = None if keys.guessed_for is None else self._claims.find_or_fetch(keys.guessed_for)
        if begun is not None and not keys.is_confirmed_by(begun):
            raise _WrongGuess
        key = keys.of(block, first)
        found: BlockResult | Claim | None = None
        if not maker.remembers:
            found = self._find_or_claim(key, keys, partial(self._guess, block, first, key, maker))
        if maker.remembers or (isinstance(found, BlockResult) and maker.find_memory()):
            # The block's result is another one after other rows.
            rows = block.read()
            job = Job(number, rows, block.files, first, keys.features, key, Claim(lambda: None), None)
            made, written = maker.make(maker.job_of_memory(job))
            if not keys.are_final:
                keys.learn(written.result())
            return made, len(rows)
        again = keys.later_key(block)
        if isinstance(found, BlockResult):
            if again is not None and found.rows and find_result(self._store, again(found.features)) is None:
                name_again(self._store, key, again(found.features))
            keys.learn(found)
            maker.note(number, found)
            return found, found.rows_in
        rows = _read(block, found)
        if found is None:
            return _Elsewhere(number, key), len(rows)
        job = Job(number, rows, block.files, first, keys.features, key, found, again, keys.making)
        made, written = maker.make(job)
        if not keys.are_final:
            told = None if key in self._guesses else maker.first_features(key, written)
            if told is not None:
                self._guesses[key] = told
                keys.guess(told, key, written)
            else:
                keys.learn(written.result())  # the next block runs while this one is being kept
        return made, len(rows)

    def _guess(self, block: SourceBlock, first: int, key: str, maker: BlockMaker) -> str | None:
        """The features that the first rows of the result have, in JSON; None if they do not show them, or
        are of no use.
        """
        multiple = self._step.rule.multiple
        if key not in self._guesses and (multiple is None or multiple <= GUESS_ROWS):
            rows = block.read()
            if len(rows) == len(self._step.dataset):  # there is no other block to go on with
                return None
            self._guesses[key] = maker.features_of(rows.slice(0, multiple or GUESS_ROWS), first, key)
        return self._guesses.get(key)

    def _find_or_claim(
        self, key: str, keys: _Keys, guess: Callable[[], str | None]
    ) -> BlockResult | Claim | None:
        """The result of a block; or a claim of it; None if another run has claimed it.

        The keys of all other blocks need the features of the first. While another run makes that block, and
        takes some time, ``guess`` gives them, unless it has been wrong. A guess shows the operator rows, and
        one that remembers them could not begin anew.
        """
        until, pause = time.monotonic() + _GUESS_SECONDS, _FIRST_PAUSE
        while (found := self._claims.find_or_claim(key)) is None and not keys.are_final:
            if time.monotonic() < until:
                time.sleep(pause)
                pause *= 2
                continue
            if (guessed := guess()) is not None:
                keys.guess(guessed, key)
                break
            self._claims.wait_for(key)
        return found

    def find(self, blocks: Iterable[SourceBlock | None], features: str | None = None) -> Iterator[FoundBlock]:
        """Blocks with their results, as far as those are kept. Runs nothing.

        Ends with the block behind which nothing more is known before a run: the features of the result are in
        the keys of all blocks but the first.

        Args:
            blocks: the blocks of the input, in order; None for one that is not known.
            features: a guess at the features of the result, for a first block whose result is not kept.
        """
        keys, first = _Keys(self._step), 0
        for block in blocks:
            known, begin = keys.features, first
            found = None if block is None else find_result(self._store, keys.of(block, first))
            if found is None and not keys.are_final:
                if features is None:
                    yield FoundBlock(block, None, begin, known)
                    return
                keys.features = features
            if found is not None:
                keys.learn(found)
            if self._step.is_numbered and block is not None:
                first += len(block.read()) if found is None else found.rows_in
            yield FoundBlock(block, found, begin, known)

    def rows_in_parts(self, found: FoundBlock, rows: pa.Table) -> int:
        """How many rows of a block, whose result is not kept, are in parts that are."""
        return self._parts().rows_kept(rows, found.first, found.features)

    def _parts(self) -> BlockParts:
        keys = _Keys(self._step)
        return BlockParts(self._store, self._step, self.options, keys.for_features, fresh=self._fresh)

    def part(self, results: Sequence[BlockResult], fingerprint: str) -> DatasetPart:
        """The step's result, for the store that has its blocks.

        Args:
            results: the results of all blocks, in order.
            fingerprint: the fingerprint of the result.
        """
        template = result_like(self._step.dataset, self.features_of(results), fingerprint)
        rows = sum(result.rows for result in results)
        names_files = any(result.names_files for result in results)
        return DatasetPart(
            lambda: [KeptFile(result.digest) for result in _with_rows(results)],
            lambda digests: describe_dataset(template, len(digests), rows, names_files=names_files),
        )

    def features_of(self, results: Sequence[BlockResult]) -> datasets.Features:
        """The features of the step's result, from the results of some of its blocks, at least one."""
        features = features_of(results)
        return self._step.dataset.features.copy() if features == UNCHANGED else parse_features(features)


def note_memory(store: Store, step: BlockStep) -> None:
    """Note that a step's operator remembers rows in a way that blocks cannot follow: see `has_memory`."""
    with contextlib.suppress(FullError, TooLargeError):  # the next run finds out again
        store.put(_memory_name(step), b"", ttl=_MEMORY_SECONDS)


def has_memory(store: Store, step: BlockStep) -> bool:
    """Whether an earlier run has found that a step's operator has to see all rows in one pass."""
    return store.entry(_memory_name(step)) is not None


def _memory_name(step: BlockStep) -> str:
    return f"{_MEMORY_FOLDER}/{key_of({'version': _VERSION, 'step': step.counted})}"


def require_no_memory(step: BlockStep, why: str) -> None:
    """Check, before a step begins anew, that its operator remembers no rows that this process has shown it.

    Raises:
        InvalidValueError: it does; the message has ``why`` it would begin anew.
    """
    if step.num_proc == 1 and step.state.has_changed(now=True):
        raise _begins_anew(step, why)


def _begins_anew(step: BlockStep, why: str) -> InvalidValueError:
    return InvalidValueError(
        f"the function {step.state.name!r} remembers rows that it has seen, and some would have to run twice"
        f" ({why}); make it anew and run the step again, or remember nothing between two calls"
    )


def _when_fetched(block: SourceBlock, fetching: Future[None] | None) -> SourceBlock:
    if fetching is not None:
        fetching.result()
    return block


class _Keys:
    """The keys of a step's blocks. Those behind the first have the features of the result in them."""

    def __init__(self, step: BlockStep) -> None:
        self._step = step
        self._format = format_digest(step.dataset)
        #: The features of the first result that has rows, in JSON; None if none is known, or needed.
        self.features: str | None = None
        #: The key of the first block, while the features are guessed, and its file, if this run makes it.
        self.guessed_for: str | None = None
        self.making: Future[Written] | None = None

    @property
    def are_final(self) -> bool:
        """Whether no result of another block can change them any more, unless they are guessed wrong."""
        return self.features is not None or self._step.has_features

    def guess(self, features: str, key: str, making: Future[Written] | None = None) -> None:
        """Take features for those of the result, until that of the first block is there.

        Args:
            features: the features, in JSON.
            key: the key of the first block.
            making: its file, if this run makes it.
        """
        self.features, self.guessed_for, self.making = features, key, making

    def is_confirmed_by(self, result: BlockResult) -> bool:
        """Whether the result for which features were guessed has them."""
        self.guessed_for = None
        return bool(result.rows) and result.features == self.features

    def learn(self, result: BlockResult | Written) -> None:
        """Take note of the features of the next result."""
        if result.rows and not self.are_final:
            self.features = result.features

    def later_key(self, block: SourceBlock) -> Callable[[str], str] | None:
        """The next block's key in an input that has other blocks in front of it, by the features of the
        result; None if there is no other key.
        """
        if self.are_final or self._step.is_numbered:
            return None
        return partial(self.for_features, block, 0)

    def of(self, block: SourceBlock, first: int) -> str:
        """The key of the next block, whose first row has that number."""
        return self.for_features(block, first, self.features)

    def for_features(self, block: SourceBlock, first: int, features: str | None) -> str:
        """The key of a block, given the features of the result."""
        return key_of(
            {
                "version": _VERSION,
                "rows": block.digest,
                "features": features_text(self._step.dataset.features),
                "format": self._format,
                "step": self._step.counted,
                "result": features,
                "first": first if self._step.is_numbered else None,
            }
        )


def _read(block: SourceBlock, claim: Claim | None) -> pa.Table:
    """The rows of a block; its claim ends if they cannot be read."""
    try:
        return block.read()
    except BaseException:
        if claim is not None:
            claim.end(is_kept=False)
        raise


def features_of(results: Sequence[BlockResult]) -> str:
    """The features of a step's result, as its blocks have them, from some of these, at least one."""
    return _with_rows(results)[0].features


def _with_rows(results: Sequence[BlockResult]) -> Sequence[BlockResult]:
    """The results that have rows; the first one if none has."""
    return [result for result in results if result.rows] or results[:1]


@contextlib.contextmanager
def _no_other_bars() -> Iterator[None]:
    """Keep `datasets` from showing a bar for each block."""
    if datasets.are_progress_bars_disabled():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
