"""Runs work on every node of a Ray cluster, each in a store of its own; the stores share results.

Each node does the whole work, and finds in the remote what others have done. So the end of one node is the
end of all work, nodes may come and go, and the driver, which does the work last, computes nothing. If no node
comes through, the driver does what is left.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from castore.adapters.datasets import Pipeline, PipelineResult, operator_fingerprint
from castore.errors import InvalidValueError, RemoteMissingError, RemoteWarning, UnhashableError, warn
from castore.remote.remotes import RemoteSettings
from castore.store import Store

log = logging.getLogger("castore")

# Seconds between two polls for nodes that have come.
_POLL_SECONDS = 1.0


class Place(NamedTuple):
    """The folder of a node's store, if the node has no ``$CASTORE_DIR``, and the remote that nodes share."""

    path: str
    remote: RemoteSettings

    @classmethod
    def of(cls, store: Store) -> Place:
        """The place for the nodes of this process's store.

        Raises:
            InvalidValueError: the store has no ``remote``.
        """
        remote = store.shared_remote
        if remote is None:
            raise InvalidValueError(
                "nodes share their work over a remote: open the store with remote=NAME, or set CASTORE_REMOTE"
            )
        return cls(str(store.path), remote.settings)

    def open(self) -> Store:
        """The store of the node of this process."""
        path, remote = Path(os.environ.get("CASTORE_DIR") or self.path), self.remote
        with Store(path, memory=0, remote="") as store:
            if remote.name not in store.remotes():
                try:
                    store.add_remote(
                        remote.name, remote.url, read_only=remote.read_only,
                        single_writer=remote.single_writer, create=False,
                    )  # fmt: skip
                except RemoteMissingError as error:
                    # The work goes on, as it does for a store that has known the remote for long.
                    warn(f"this node shares nothing with the others: {error}", RemoteWarning)
                    return Store(path, memory=0, remote="")
        return Store(path, memory=0, remote=remote.name)


def run_on_nodes(
    work: Callable[[Store], object], store: Store, *, cpus: int = 1, address: str | None = None
) -> int:
    """Have every node of a cluster do some work, until one of them has done all of it.

    Args:
        work: a function of the node's store, that Ray can send. It leaves in the store, and so in the
            remote, what it computes.
        store: of this process, opened with a ``remote``. A node's store is ``$CASTORE_DIR`` there, else the
            folder of the same path.
        cpus: CPUs to reserve on each node, at most those that it has.
        address: of the cluster; default the one that this process uses already, then ``$RAY_ADDRESS``, then
            one that is started on this machine alone.

    Returns:
        The number of nodes that began.

    Raises:
        InvalidValueError: the store has no ``remote``.
        Exception: what ``work`` raised on a node.
    """
    place = Place.of(store)
    with ExitStack() as stack:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False)
            stack.callback(ray.shutdown)
        return _Nodes(work, place, cpus).run()


class _Nodes:
    """The tasks of one piece of work, by node."""

    def __init__(self, work: Callable[[Store], object], place: Place, cpus: int) -> None:
        self._work = ray.put(work)
        self._place = place
        self._cpus = cpus
        self._begun: set[str] = set()
        self._tasks: dict[Any, str] = {}

    def run(self) -> int:
        """Start tasks on all nodes, those that come later too, and wait for the first to end."""
        try:
            self._start()
            while self._tasks:
                ended, _ = ray.wait(list(self._tasks), timeout=_POLL_SECONDS)
                if sum(map(self._is_done, ended)):  # all are checked: one may have failed
                    break
                self._start()
        finally:
            for task in self._tasks:
                ray.cancel(task)
        return len(self._begun)

    def _start(self) -> None:
        alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        for node in alive:
            if node["NodeID"] in self._begun:
                continue
            # A node that comes late takes a rank that another one has: ranks are hints alone.
            rank = {"RANK": f"{len(self._begun) % len(alive)}", "WORLD_SIZE": f"{len(alive)}"}
            task = _task.options(
                num_cpus=min(self._cpus, int(node["Resources"]["CPU"])),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                runtime_env={"env_vars": rank},
                max_retries=0,
            ).remote(self._work, self._place)
            self._begun.add(node["NodeID"])
            self._tasks[task] = node["NodeID"]

    def _is_done(self, task: Any) -> bool:
        """Whether a task that ended has done its work. Others go on with the work of a lost node."""
        node = self._tasks.pop(task)
        try:
            ray.get(task)
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            log.warning("node %s of the cluster was lost: %s", node[:8], str(error).partition("\n")[0])
            return False
        return True


def _do(work: Callable[[Store], object], place: Place) -> None:
    with place.open() as store:
        work(store)


_task = ray.remote(_do)


def run(pipeline: Pipeline, dataset: datasets.Dataset, *, address: str | None = None) -> PipelineResult:
    """Run a dataset through a pipeline on all nodes of a Ray cluster.

    The nodes divide the blocks of each step; the result is the one of `Pipeline.run`, from this process's
    store. A run that was killed, and is started again, goes on with what is left.

    Args:
        pipeline: its store is opened with a ``remote``, and keeps steps.
        dataset: the input. Files that it maps must be found by the same paths on all nodes; a dataset in
            memory is sent to each.
        address: of the cluster, as for `run_on_nodes`.

    Raises:
        InvalidValueError: the pipeline's store has no ``remote``, the pipeline keeps no steps, or a node has
            other code of an operator.
        Exception: what an operator raised.
    """
    if not pipeline.use_cache:
        raise InvalidValueError("nodes share the steps that a pipeline keeps: leave use_cache=True")
    options = {
        "name": pipeline.name, "codec": pipeline.codec, "num_proc": pipeline.num_proc,
        "temp_dir": pipeline.temp_dir,
    }  # fmt: skip
    fingerprints = [operator_fingerprint(operator) for operator in pipeline.operators]
    work = partial(_run_pipeline, pipeline.operators, fingerprints, options, dataset)
    run_on_nodes(work, pipeline.store, cpus=pipeline.num_proc or 1, address=address)
    return pipeline.run(dataset)


#: Whether operators, by their fingerprints, are the same in this process.
_same: dict[str, bool] = {}


def is_same_here(operator: Any, fingerprint: str) -> bool:
    """Whether an operator is the one of a fingerprint, as this process had it first: what a call loads into a
    global counts afterwards, and Ray's workers run one task after another.
    """
    if fingerprint not in _same:
        try:
            _same[fingerprint] = operator_fingerprint(operator) == fingerprint
        except UnhashableError:
            _same[fingerprint] = False
    return _same[fingerprint]


def _run_pipeline(
    operators: list[Any],
    fingerprints: list[str],
    options: dict[str, Any],
    dataset: datasets.Dataset,
    store: Store,
) -> None:
    for operator, expected in zip(operators, fingerprints, strict=True):
        # Ray sends functions of modules by name: results of another file would have keys that nobody asks
        # for.
        if not is_same_here(operator, expected):
            raise InvalidValueError(
                f"{operator!r} is another operator on the node {socket.gethostname()} than where the run was "
                "begun; bring the same files to all nodes, and start Ray's workers anew"
            )
    Pipeline(operators, store=store, **options).run(dataset)
