"""The place of this process among the processes of a training job, from torchrun's environment variables.

Other launchers set fewer: Lightning tells the rank on the node alone, and `torch.multiprocessing.spawn`
nothing. The process group, if there is one, tells the rest. Without all of these there is one rank, on one
node. Reads the environment at each call, because launchers set it late. Must never need `torch`
or a process group: datasets are made before, or without, `init_process_group`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from castore.errors import InvalidValueError
from castore.units import as_whole

# Counts the unnamed things that this process made: all ranks of a job make theirs in the same order.
_made = itertools.count()
_JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# With one of these as MASTER_ADDR, all ranks run on this machine.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of one process in its job: its rank in the job and on its node, and its node."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1


def read_ranks(
    environ: Mapping[str, str] | None = None, *, rank: int | None = None, num_replicas: int | None = None
) -> Ranks:
    """The ranks of this process.

    `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and `LOCAL_WORLD_SIZE` default to 0, 0, 1, 1. The node is `GROUP_RANK`
    of `GROUP_WORLD_SIZE`; without these two variables every node is taken to run `LOCAL_WORLD_SIZE` ranks.

    Where `RANK` is missing, the process group counts, if it is initialised, and else `LOCAL_RANK` on the node
    `NODE_RANK`. Where `LOCAL_WORLD_SIZE` is missing, and `MASTER_ADDR` is this machine's loopback, all ranks
    are of one node.

    Args:
        environ: the variables; None for those of this process.
        rank, num_replicas: the rank and the world size, in place of the variables, as in
        `DistributedSampler`.

    Raises:
        InvalidValueError: a variable is no whole number, or two of them contradict each other.

    >>> read_ranks({})
    Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, nodes=1)
    >>> read_ranks({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}).node
    1
    >>> lightning = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    >>> read_ranks(lightning)
    Ranks(rank=1, local_rank=1, world_size=2, local_world_size=2, node=0, nodes=1)
    >>> read_ranks({"RANK": "2", "WORLD_SIZE": "2"})
    Traceback (most recent call last):
    castore.errors.InvalidValueError: RANK is 2, but WORLD_SIZE is 2: ranks run from 0 to 1; start with
    torchrun, or set both
    """
    environ = _completed(os.environ if environ is None else environ)
    local_rank, local_size = _pair(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if rank is None and num_replicas is None:
        own, size = _pair(environ, "RANK", "WORLD_SIZE")
        if local_size > size:
            raise InvalidValueError(
                f"LOCAL_WORLD_SIZE is {local_size}, but WORLD_SIZE is {size}: a node cannot run more ranks "
                "than the whole job; start with torchrun, or set both"
            )
    else:
        own = _whole(environ, "RANK", 0) if rank is None else _given(rank, "rank")
        size = (
            _whole(environ, "WORLD_SIZE", 1) if num_replicas is None else _given(num_replicas, "num_replicas")
        )
        _check_below(own, size, "rank", "num_replicas", "give both")
    node, nodes = _node(environ, own, size, local_size)
    return Ranks(own, local_rank, size, local_size, node, nodes)


def _completed(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables, and those that this launcher has left out."""
    found = dict(environ)
    if not _has(found, "RANK") and (group := _group()) is not None:
        found |= {"RANK": str(group[0]), "WORLD_SIZE": str(group[1])}
    if not _has(found, "LOCAL_RANK"):
        return found
    if not _has(found, "LOCAL_WORLD_SIZE") and found.get("MASTER_ADDR") in _LOOPBACK:
        found["LOCAL_WORLD_SIZE"] = found.get("WORLD_SIZE", "")
    if not _has(found, "RANK"):
        before = _whole(found, "NODE_RANK", 0) * _whole(found, "LOCAL_WORLD_SIZE", 1)
        found["RANK"] = str(before + _whole(found, "LOCAL_RANK", 0))
    return found


def _has(environ: Mapping[str, str], name: str) -> bool:
    return bool(environ.get(name, "").strip())


def _group() -> tuple[int, int] | None:
    """Rank and size of the process group; None if no code of this process has initialised one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def _node(environ: Mapping[str, str], rank: int, size: int, local_size: int) -> tuple[int, int]:
    has_group = "GROUP_RANK" in environ and "GROUP_WORLD_SIZE" in environ
    # GROUP_RANK belongs to the environment's RANK, not to a rank that the caller gave instead.
    if has_group and (rank, size) == (_whole(environ, "RANK", 0), _whole(environ, "WORLD_SIZE", 1)):
        return _pair(environ, "GROUP_RANK", "GROUP_WORLD_SIZE")
    return rank // local_size, -(-size // local_size)


def job_id(environ: Mapping[str, str] | None = None) -> str | None:
    """16 hex digits, the same in all ranks that a job runs on this node, and different in every other job.

    The digits are derived from `MASTER_ADDR`, `MASTER_PORT` and `TORCHELASTIC_RUN_ID`, and from `GROUP_RANK`,
    because one machine may run two groups of ranks that a launcher calls nodes.

    Args:
        environ: the variables; None for those of this process.

    Returns:
        None for the only rank of its node, which has nobody to share with.

    Raises:
        InvalidValueError: several ranks run on this node, and no variable distinguishes their job from
        others.

    >>> job_id({}) is None
    True
    >>> job = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    >>> job_id(job | {"RANK": "0"}) == job_id(job | {"RANK": "1", "LOCAL_RANK": "1"})
    True
    >>> job_id(job) == job_id(job | {"MASTER_PORT": "29501"})
    False
    """
    environ = os.environ if environ is None else environ
    ranks = read_ranks(environ)
    if ranks.local_world_size == 1:
        return None
    # A host name alone does not distinguish two jobs; torchrun without --rdzv-id sets "none".
    if not environ.get("MASTER_PORT") and environ.get("TORCHELASTIC_RUN_ID", "none") == "none":
        raise InvalidValueError(
            f"LOCAL_WORLD_SIZE is {ranks.local_world_size}, but neither MASTER_PORT nor TORCHELASTIC_RUN_ID "
            "tells this job from others on this node; start with torchrun, set MASTER_ADDR and MASTER_PORT, "
            "or give a name"
        )
    parts = [environ.get(name, "") for name in _JOB_VARIABLES] + [str(ranks.node)]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def common_name(kind: str, layout: Mapping[str, object]) -> str | None:
    """The name that all ranks of this node give the next thing they make with that layout; None without a
    job.

    Raises:
        InvalidValueError: as `job_id`.
    """
    job, order = job_id(), next(_made)
    if job is None:
        return None
    shape = hashlib.blake2b(json.dumps(layout).encode(), digest_size=6).hexdigest()
    return f"{kind}-{job}-{order}-{shape}"


def _pair(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    own, all_ = _whole(environ, rank, 0), _whole(environ, size, 1)
    _check_below(own, all_, rank, size, "start with torchrun, or set both")
    return own, all_


def _check_below(own: int, size: int, rank_name: str, size_name: str, advice: str) -> None:
    if size < 1:
        raise InvalidValueError(f"{size_name} is {size}, but there is at least one rank; {advice}")
    if not 0 <= own < size:
        raise InvalidValueError(
            f"{rank_name} is {own}, but {size_name} is {size}: ranks run from 0 to {size - 1}; {advice}"
        )


def _whole(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None or not text.strip():
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidValueError(
            f"the environment variable {name} is {text!r}, which is no whole number; "
            "start with torchrun, or set it to one"
        ) from None


def _given(value: object, name: str) -> int:
    number = as_whole(value)
    if number is None:
        raise InvalidValueError(
            f"{name} is {value!r}; give a whole number, or leave it out to ask torchrun's variables"
        )
    return number
