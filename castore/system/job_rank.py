"""The place of this process among those of its job: told, or from the variables of torchrun and Slurm.

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

# Variables for the rank and for the number of ranks, and the rank that is the first one; earlier ones win.
_JOBS = (
    ("RANK", "WORLD_SIZE", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", ""),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
)


_told: ContextVar[tuple[int, int] | None] = ContextVar("castore-rank", default=None)


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
    if not 0 <= index < shards:
        raise InvalidValueError(f"there is no shard {index} of {shards}: count from 0 to {shards - 1}")
    return index, shards


@contextmanager
def as_rank(shard: tuple[int, int] | None) -> Iterator[None]:
    """Have `job_rank` give that in the block, in this thread; None leaves it as it is."""
    token = _told.set(_told.get() if shard is None else shard)
    try:
        yield
    finally:
        _told.reset(token)


def job_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """The rank of this process, from 0 up, and the number of ranks.

    Args:
        environ: the variables; None for those of this process, unless `as_rank` tells otherwise.

    >>> job_rank({})
    (0, 1)
    >>> job_rank({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    (5, 8)
    >>> job_rank({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "3",
    ...     "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "4"})
    (2, 4)
    """
    told = _told.get()
    if environ is None and told is not None:
        return told
    environ = os.environ if environ is None else environ
    for rank, size, first in _JOBS:
        try:
            own, all_ = int(environ[rank]) - int(environ.get(first, "0")), int(environ[size])
        except (KeyError, ValueError):
            continue
        if 0 <= own < all_ and all_ > 1:
            return own, all_
    return 0, 1
