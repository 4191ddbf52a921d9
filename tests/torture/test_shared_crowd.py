"""Nodes that share results are killed, lose their remote, and have wrong clocks: no result is wrong, no node
waits for a dead one, and little is computed twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from castore import Store
from castore.adapters.datasets.block_step import GUESS_ROWS
from tests.adapters.datasets import small_blocks
from tests.helpers import agrees_with_disk
from tests.mount.conftest import until
from tests.remote.conftest import folder, seaweedfs  # noqa: F401 (fixtures)
from tests.remote.nodes import end_fetcher, fetchers, know
from tests.remote.proxy import LOST_REQUEST, Proxy, proxy
from tests.remote.servers import Place as Server
from tests.remote.servers import environment, s3_place
from tests.torture.shared_job import ITEMS, KEYS, ROWS, SAMPLES, SLOW_KEYS
from tests.warm import Started, WarmPython

Outage = Callable[[], AbstractContextManager[None]]
#: Seconds by which the clock of each node is wrong, while it works.
CLOCKS = (0, 3600, -3600, 1800)
_WRONG_CLOCK = Path(__file__).with_name("wrong_clock")
#: Results of a round, by kind.
_EACH = {"slow": SLOW_KEYS, "key": KEYS, "row": ROWS, "item": ITEMS, "sample": SAMPLES}
_PER_ROUND = sum(_EACH.values())
# Items of the smallest block of embeddings.
_BATCH = 64


class Crowd:
    """Nodes that ask for the same results, and are started again when they were killed."""

    def __init__(self, warm: WarmPython, place: Path, url: str) -> None:
        self.folder = place
        self._warm, self._url = warm, url
        self._running: dict[int, Started] = {}
        self.killed: Counter[str] = Counter()
        for node in range(len(CLOCKS)):
            self.make(node)

    def make(self, node: int) -> Store:
        """A node's store."""
        store = Store(self.folder / f"node{node}", memory=0)
        know(store, "team", self._url)
        return store

    def ended(self, node: int) -> list[float]:
        """The seconds of each round that a node has ended."""
        with suppress(FileNotFoundError):
            return [
                float(line.split()[1]) for line in (self.folder / f"ended{node}").read_text().splitlines()
            ]
        return []

    def computed(self) -> list[str]:
        """A line for each computation, with its node."""
        with suppress(FileNotFoundError):
            return (self.folder / "computed").read_text().splitlines()
        return []

    def start(self, node: int, clock: float = 0) -> None:
        request = {"folder": str(self.folder), "node": node, "round": len(self.ended(node))}
        with (self.folder / f"errors{node}").open("a") as errors:
            self._running[node] = self._warm.start(
                ["-m", "tests.torture.shared_job", json.dumps(request)],
                env={**os.environ, "CASTORE_TEST_CLOCK": str(clock), "PYTHONPATH": str(_WRONG_CLOCK)},
                stdout=errors,
                stderr=errors,
            )

    def kill_node(self, node: int) -> None:
        self._running[node].kill()
        assert self._running[node].wait(60) == -signal.SIGKILL, self.errors(node)
        self.killed["nodes"] += 1
        self.start(node, CLOCKS[node])

    def kill_fetcher(self, node: int) -> None:
        with Store(self.folder / f"node{node}", memory=0) as store:
            for pid in fetchers(store):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.killed["fetchers"] += 1

    def errors(self, node: int) -> str:
        return (self.folder / f"errors{node}").read_text()

    def is_well(self) -> bool:
        """Check that no program has failed."""
        for node, process in self._running.items():
            assert process.poll() in (None, 0), self.errors(node)
        return True

    def wait_for_work(self, count: int) -> None:
        """Wait until so many more results were computed."""
        wanted = len(self.computed()) + count
        until(lambda: self.is_well() and len(self.computed()) > wanted, 300)

    def end(self, last: int) -> None:
        """Have all of them end with this round, and wait for them."""
        (self.folder / "over.new").write_text(str(last))
        (self.folder / "over.new").rename(self.folder / "over")
        until(lambda: self.is_well() and all(one.poll() == 0 for one in self._running.values()), 500)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait(60)


@contextmanager
def _losing_all(between: Proxy) -> Iterator[None]:
    """No request reaches the storage."""
    between.inject(LOST_REQUEST, 1_000_000)
    try:
        yield
    finally:
        between.heal()


@contextmanager
def _moved_away(bucket: Path) -> Iterator[None]:
    """The folder of the remote is not there."""
    bucket.rename(bucket.with_name("elsewhere"))
    try:
        yield
    finally:
        bucket.with_name("elsewhere").rename(bucket)


@pytest.mark.matrix
@pytest.mark.parametrize("outages", [0, 2])
@pytest.mark.parametrize("server", ["folder", "seaweedfs"])
def test_nodes_that_are_killed_and_lose_their_remote_compute_once_and_never_wrong(
    server: str,
    outages: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    warm_datasets: WarmPython,
    scale: Callable[[float, float], float],
    figure: Callable[[str], None],
) -> None:
    there: Server = request.getfixturevalue(server)
    url, variables = (tmp_path / "bucket").as_uri(), there.environment
    with proxy(there.port) as between:
        outage: Outage = partial(_moved_away, tmp_path / "bucket")
        if server == "seaweedfs":
            url, variables = f"{there.url}/{uuid.uuid4().hex}", s3_place(between.port).environment
            outage = partial(_losing_all, between)
        with environment(variables):
            if server == "seaweedfs":
                with Store(tmp_path / "maker") as maker:
                    maker.add_remote("team", url)
            crowd = Crowd(warm_datasets, tmp_path, url)
            try:
                _torment(crowd, outage, scale(20.0, 300.0), outages)
                told = _check(crowd, outages)
            finally:
                crowd.close()
                for path in tmp_path.glob("node*"):
                    with Store(path, memory=0) as store:
                        end_fetcher(store)
    figure(f"{len(CLOCKS)} nodes, {server}: {told}")


def _torment(crowd: Crowd, outage: Outage, seconds: float, outages: int) -> None:
    """Kill nodes and fetchers, and take the remote away a few times."""
    chance = random.Random(7)
    for node, clock in enumerate(CLOCKS):
        crowd.start(node, clock)
    began, away = time.monotonic(), 0
    while time.monotonic() < began + seconds or min(crowd.killed["nodes"], crowd.killed["fetchers"]) < 3:
        crowd.wait_for_work(chance.randrange(100, 900))
        if away < outages and time.monotonic() > began + seconds * (away + 1) / (outages + 1):
            away += 1
            with outage():
                crowd.wait_for_work(2000)
        crowd.kill_node(chance.randrange(len(CLOCKS)))
        if chance.random() < 0.5:
            crowd.kill_fetcher(chance.randrange(len(CLOCKS)))
    crowd.end(max(len(crowd.ended(node)) for node in range(len(CLOCKS))))


def _check(crowd: Crowd, outages: int) -> str:
    """Check nodes and remote in the end; returns the figures."""
    rounds = {len(crowd.ended(node)) for node in range(len(CLOCKS))}
    assert len(rounds) == 1
    wanted = rounds.pop() * _PER_ROUND
    before = len(crowd.computed())
    assert len({line.rpartition(" ")[0] for line in crowd.computed()}) == wanted
    twice = Counter(line.split()[0] for line in crowd.computed())
    twice.subtract({kind: count * wanted // _PER_ROUND for kind, count in _EACH.items()})
    cold = len(CLOCKS)
    crowd.make(cold).close()
    crowd.start(cold)
    until(lambda: crowd.is_well() and len(crowd.ended(cold)) * _PER_ROUND == wanted, 500)
    again = len(crowd.computed()) - before
    if not outages:
        # Of results that are claimed, a kill costs those that its node had in hand. A node that comes to a
        # step while another one makes its first block runs some rows as a guess besides.
        kills, guesses = sum(crowd.killed.values()), len(CLOCKS) * (wanted // _PER_ROUND)
        assert twice["slow"] <= kills, twice
        assert twice["item"] <= kills * _BATCH, twice
        assert twice["row"] <= kills * 2 * small_blocks.ROWS + guesses * GUESS_ROWS, twice
        # A node that was killed may have been the only one to offer a result.
        assert again < wanted / 20, f"a cold node computed {again} of {wanted} again"
    for node in range(cold + 1):
        with Store(crowd.folder / f"node{node}", memory=0) as store:
            end_fetcher(store)
            assert store.verify().bad == []
            agrees_with_disk(store)
    with Store(crowd.folder / "node0", memory=0) as store:
        assert store.remote("team").check(deep=True).problems == []
    longest = max(seconds for node in range(len(CLOCKS)) for seconds in crowd.ended(node))
    return (
        f"{crowd.killed['nodes']} nodes and {crowd.killed['fetchers']} fetchers killed, {outages} times"
        f" without the remote, clocks up to two hours apart: {wanted:,} results, {before - wanted:,} computed"
        f" once more ({', '.join(f'{count:,} of {kind}s' for kind, count in sorted(twice.items()))}),"
        f" {again:,} by a cold node; longest round {longest:.0f} s; nothing wrong was served"
    )
