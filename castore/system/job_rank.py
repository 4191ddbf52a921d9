"""The place of this process among the processes of its job, from the variables of torchrun and Slurm.

Serves as a hint alone: processes of a job that begin at different places get in each other's way less. So
nothing here is an error, and a process that knows of no job is the only one of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Variables for the rank and for the number of ranks, and the rank that is the first one; earlier ones win.
_JOBS = (
    ("RANK", "WORLD_SIZE", ""),
    ("SLURM_PROCID", "SLURM_NTASKS", ""),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
)


def job_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """The rank of this process, from 0 up, and the number of ranks.

    Args:
        environ: the variables; None for those of this process.

    >>> job_rank({})
    (0, 1)
    >>> job_rank({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    (5, 8)
    >>> job_rank({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "3",
    ...     "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "4"})
    (2, 4)
    """
    environ = os.environ if environ is None else environ
    for rank, size, first in _JOBS:
        try:
            own, all_ = int(environ[rank]) - int(environ.get(first, "0")), int(environ[size])
        except (KeyError, ValueError):
            continue
        if 0 <= own < all_ and all_ > 1:
            return own, all_
    return 0, 1
