"""The processes that share the blocks of a step.

They are forked with the step, for an operator may hold what pickle cannot take. Rows and results pass through
files: a pipe takes four times as long for a block. The process that makes a step's first block tells the
features of the first rows' result before the rest runs, so that the others need not wait for it.

Must never let a worker's death, or its exit, pass for a result.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from castore.adapters.datasets.block_step import BlockStep, Written, run_block
from castore.system import worker_processes

# Seconds between two looks whether a block has ended without telling its features.
_PAUSE = 0.02
# Seconds between two looks whether a process has ended.
_LOOK_SECONDS = 1.0
# Longer features, of very many columns, are not told: a message goes into the pipe as a whole, at once, so
# neither a killed process nor a caller that does not listen leaves the other waiting.
_MOST_TOLD = 12 * 1024


class BlockWorkers:
    """The processes.

    Args:
        pool: runs `_run_own`, and `_look`.
        count: the number of its processes.
        told: receives what `_run_own` sends.
    """

    def __init__(self, pool: ProcessPoolExecutor, count: int, told: Connection) -> None:
        self._pool = pool
        self._count = count
        self._told = told

    def run(
        self,
        rows: pa.Table,
        first: int,
        features: str | None,
        file: Path,
        key: str,
        may_end: bool,
        *,
        tells: bool = False,
    ) -> Future[Written]:
        """`block_step.run_block` in one of them; the arguments are the same.

        With ``tells``, its process tells the features of the first rows' result, for `first_features`.
        """
        path = _rows_file(file)
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        return self._pool.submit(_run_own, path, tells, first, features, file, key, may_end)

    def first_features(self, key: str, block: Future[Any]) -> str | None:
        """The features of a block's first rows, in JSON, as soon as its process tells them.

        Args:
            key: the key of the block's result.
            block: becomes done with the block.

        Returns:
            None if the rows do not show them, or the block is done.
        """
        while not block.done():
            if self._told.poll(_PAUSE):
                told, features = self._told.recv()
                if told == key:
                    return features  # type: ignore[no-any-return]
        return None

    def find_memory(self) -> bool:
        """Whether the operator remembers rows that one of the processes, all of them idle, has shown it."""
        looks = [self._pool.submit(_look) for _ in range(self._count)]
        return any(look.result() for look in looks)


def was_begun(file: Path) -> bool:
    """Whether a process has begun with a block, whose result was to be in that file, before one was killed.

    A block that is made in parts has been begun.
    """
    return not os.path.exists(_rows_file(file))


def _rows_file(file: Path) -> str:
    return f"{file}.rows"


@contextlib.contextmanager
def block_workers(step: BlockStep) -> Iterator[BlockWorkers | None]:
    """The processes of a step; None if this one runs the blocks."""
    if step.num_proc == 1:
        yield None
        return
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        told, telling = (stack.enter_context(end) for end in context.Pipe(duplex=False))
        stack.enter_context(worker_processes.bound_to_thread())
        own = _Own(step, telling, context.Barrier(step.num_proc))
        pool, is_over = ProcessPoolExecutor(step.num_proc, context, _begin_worker, (own,)), threading.Event()
        try:
            # The processes are forked now: a thread that reads ahead may hold locks later on.
            pool.submit(int).result()
            threading.Thread(target=_watch, args=(pool, is_over), daemon=True, name="castore-watch").start()
            yield BlockWorkers(pool, step.num_proc, told)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _kill_all(pool)
            raise
        finally:
            is_over.set()
            pool.shutdown()


def _watch(pool: ProcessPoolExecutor, is_over: threading.Event) -> None:
    """End all processes of a pool once one has ended.

    The pool itself waits for the end of a pipe, which a process that the function has forked holds open.
    """
    while not is_over.wait(_LOOK_SECONDS):
        if any(process.exitcode is not None for process in list((pool._processes or {}).values())):
            _kill_all(pool)


def _kill_all(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()


# --- in a worker ------------------------------------------------------------------------------------------


class _Own(NamedTuple):
    """A worker's step, the end of the pipe that it tells features through, and where all workers meet."""

    step: BlockStep
    telling: Connection
    together: Barrier


_own: _Own | None = None


def _begin_worker(own: _Own) -> None:
    global _own
    _own = own


def _run_own(
    path: str, tells: bool, first: int, features: str | None, file: Path, key: str, may_end: bool
) -> Written:
    assert _own is not None
    step, telling, _ = _own

    def tell(features: str | None) -> None:
        telling.send((key, features if features is not None and len(features) <= _MOST_TOLD else None))

    try:
        rows = _take_rows(path)
        return run_block(step, rows, first, features, file, key, may_end, tell if tells else None)
    except SystemExit as error:  # here it would end the program, in whose process the function does not run
        raise RuntimeError(f"the function has ended its process, with {error!r}") from error
    except Exception as error:
        if _can_travel(error):
            raise
        told = RuntimeError(f"the function has raised {type(error).__qualname__}: {error}")
        if hasattr(told, "add_note"):
            for note in getattr(error, "__notes__", ()):
                told.add_note(note)
        raise told from error
    finally:
        step.early.forget()  # any process may run those rows anew


def _look() -> bool:
    """Whether the operator remembers rows that this process has shown it."""
    assert _own is not None
    try:
        return _own.step.state.has_changed(now=True)
    finally:
        _own.together.wait()  # each process takes one look


def _take_rows(path: str) -> pa.Table:
    """The rows of a file, mapped, whose name is free again."""
    try:
        return pa.ipc.open_stream(pa.memory_map(path)).read_all()
    finally:
        Path(path).unlink()


def _can_travel(error: Exception) -> bool:
    """Whether an error comes out of its worker. One that cannot be made anew there, because its class takes
    more than a message, would pass for a worker that was killed.
    """
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # noqa: BLE001 (whatever the methods of a user's class raise)
        return False
    return True
