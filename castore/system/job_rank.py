"""The place of this process among those of its job: given, or from the variables of torchrun and Slurm.

Serves as a hint alone: processes of a job that begin at different places get in each other's way less. So no
variable is an error here, and a process that knows of no job is the only one of its own.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from castore.errors import InvalidValueError

# Variables for the rank and for the number of ranks, the rank that is the first one, and the step from one to
# the next; earlier ones win.
_JOBS = (
    ("RANK", "WORLD_SIZE", "", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", "", ""),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"),
)


_given_rank: ContextVar[tuple[int, int] | None] = ContextVar("castore-rank", default=None)


def check_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """A part ``(i, n)``, the i-th of n, counted from 0.

    Raises:
        InvalidValueError: there is no such part.

    >>> check_shard((3, 3))
    Traceback (most recent call last):
    castore.errors.InvalidValueError: there is no shard 3 of 3: count from 0 to 2
    """
    try:
        index, shards = map(operator.index, shard)
    except (TypeError, ValueError):
        raise InvalidValueError(f"a shard is two numbers, (i, n), not {shard!r}") from None
    if shards < 1:
        raise InvalidValueError(f"there is no shard {index} of {shards}: give at least one shard")
    if not 0 <= index < shards:
        raise InvalidValueError(f"there is no shard {index} of {shards}: count from 0 to {shards - 1}")
    return index, shards


@contextmanager
def as_rank(shard: tuple[int, int] | None) -> Iterator[None]:
    """Have `job_rank` give that in the block, in this thread; None leaves it as it is."""
    token = _given_rank.set(_given_rank.get() if shard is None else shard)
    try:
        yield
    finally:
        _given_rank.reset(token)


def job_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """The rank of this process, from 0 up, and the number of ranks.

    Args:
        environ: the variables; None for those of this process, unless `as_rank` has set another rank.

    >>> job_rank({})
    (0, 1)
    >>> job_rank({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    (5, 8)
    >>> job_rank({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "3",
    ...     "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "4"})
    (2, 4)
    >>> job_rank({"SLURM_ARRAY_TASK_ID": "14", "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "2",
    ...     "SLURM_ARRAY_TASK_COUNT": "4"})
    (2, 4)
    """
    given = _given_rank.get()
    if environ is None and given is not None:
        return given
    environ = os.environ if environ is None else environ
    for job in _JOBS:
        found = _read(job, environ)
        if found is not None and found[1] > 1:
            return found
    return 0, 1


def required_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """The rank of this process and the number of ranks, where a user has asked for this rank's part.

    Unlike `job_rank` it takes no silence for a job of one rank.

    Raises:
        InvalidValueError: no variables give the rank, or they make no sense.

    >>> required_rank({"RANK": "0", "WORLD_SIZE": "1"})
    (0, 1)
    >>> required_rank({"RANK": "3", "WORLD_SIZE": "3"})
    Traceback (most recent call last):
    castore.errors.InvalidValueError: RANK=3 and WORLD_SIZE=3 tell no rank of this process; ...
    """
    environ = os.environ if environ is None else environ
    present = [job for job in _JOBS if job[0] in environ]
    for job in present:
        if (found := _read(job, environ)) is not None and (found[1] > 1 or job == present[-1]):
            return found
    if present:
        rank, size, *_ = present[0]
        problem = f"{rank}={environ[rank]} and {size}={environ.get(size, '')} tell no rank of this process"
    else:
        problem = "neither RANK and WORLD_SIZE nor variables of Slurm tell the rank of this process"
    raise InvalidValueError(f"{problem}; say which part is its own, as in 0/8")


def _read(job: tuple[str, str, str, str], environ: Mapping[str, str]) -> tuple[int, int] | None:
    """The rank and the number of ranks by the variables of one kind of job; None if they give none."""
    rank, size, first, steps = job
    try:
        own, rest = divmod(int(environ[rank]) - int(environ.get(first, "0")), int(environ.get(steps, "1")))
        ranks = int(environ[size])
    except (KeyError, ValueError, ZeroDivisionError):
        return None
    return (own, ranks) if rest == 0 and 0 <= own < ranks else None
