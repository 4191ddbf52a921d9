"""Nodes that share results over a remote run each block once, and give what one node alone gives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest

from castore import SharedTurn, Store
from castore.adapters.datasets import Pipeline, block_runner, block_step, cached_filter, cached_map
from castore.adapters.datasets.block_claims import BlockClaims
from castore.errors import InvalidValueError
from castore.remote.folder_bucket import FolderBucket
from tests.adapters.datasets.small_blocks import slow_blocks, small_blocks
from tests.helpers import in_processes
from tests.mount.conftest import until
from tests.remote.nodes import several_nodes

ROWS = 2600
#: Rows of about 620 bytes: a block has some two hundred of them, and the first one a thousand.
_PAD, _BLOCK_BYTES = "x" * 600, 1 << 17


def rows(count: int = ROWS) -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"n": list(range(count)), "text": [f"{n} {_PAD}" for n in range(count)]}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Has the stores `node0` to `node3` of four nodes, and the remote."""
    with several_nodes(tmp_path), small_blocks(_BLOCK_BYTES, 10_000):
        yield tmp_path


def logging(log: str, seconds: float = 0.0) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function of rows that notes each row which it sees; the log's name is of no account to its key."""
    os.environ["CASTORE_TEST_LOG"] = log

    def measure(row: dict[str, Any]) -> dict[str, Any]:
        import os
        import time

        with open(os.environ["CASTORE_TEST_LOG"], "a") as file:
            file.write(f"{row['n']}\n")
        if seconds:
            time.sleep(seconds)
        return {"length": len(row["text"])}

    return measure


def seen(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "log").read_text().split()]


def test_a_cold_node_runs_no_row_that_another_one_has_run(folder: Path) -> None:
    function = logging(str(folder / "log"))
    with Store(folder / "node0", remote="team") as store:
        first = cached_map(rows(), function, store=store)
        assert first["length"] == rows().map(len_of)["length"]
    assert sorted(seen(folder)) == list(range(ROWS))
    with Store(folder / "node1", remote="team") as store:
        other = cached_map(rows(), function, store=store)
        assert other[:] == first[:]
        assert other.features == first.features
        more = cached_map(rows(ROWS + 10), function, store=store)
        assert len(more) == ROWS + 10
    assert len(seen(folder)) < ROWS * 1.5  # the rows that were appended, and their block


def len_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(row["text"])}


def test_steps_of_a_pipeline_and_filters_are_shared(folder: Path) -> None:
    function = logging(str(folder / "log"))

    def run(node: str) -> datasets.Dataset:
        with Store(folder / node, remote="team") as store:
            kept = cached_filter(rows(), is_even, store=store)
            return Pipeline([function, len_twice], store=store).run(kept).dataset

    first = run("node0")
    assert sorted(seen(folder)) == list(range(0, ROWS, 2))
    assert run("node1")[:] == first[:]
    assert len(seen(folder)) == ROWS // 2


def is_even(row: dict[str, Any]) -> bool:
    return bool(row["n"] % 2 == 0)


def len_twice(row: dict[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * row["length"]}


def test_nodes_that_run_one_step_at_once_divide_its_blocks(folder: Path) -> None:
    function = logging(str(folder / "log"), 0.004)

    def run(number: int) -> list[int]:
        with Store(folder / f"node{number}", remote="team") as store:
            return list(cached_map(rows(), function, store=store)["length"])

    first, second = in_processes(2, run, timeout=300)
    assert first == second == rows().map(len_of)["length"]
    assert set(seen(folder)) == set(range(ROWS))
    # The first block of all is claimed too; a block may be run by both where a claim comes a moment too late.
    assert len(seen(folder)) < ROWS * 1.4


@pytest.mark.filterwarnings("ignore::castore.errors.CacheWarning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_nodes_that_run_a_function_at_once_that_remembers_rows_each_see_all_in_order(
    folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the first block takes, no node guesses from rows that it would have to see again.
    monkeypatch.setattr(block_runner, "_GUESS_SECONDS", 300.0)

    def run(number: int) -> list[int]:
        if ranks > 1:
            os.environ |= {"RANK": f"{number}", "WORLD_SIZE": f"{ranks}"}
        with Store(folder / f"node{number}", remote="team") as store:
            return list(cached_map(rows(), numbers_texts(), store=store)["number"])

    first, second = in_processes(2, run, timeout=300)
    function = numbers_texts()
    assert first == second == [function(row)["number"] for row in rows()]


def numbers_texts() -> Callable[[dict[str, Any]], dict[str, Any]]:
    numbers: dict[int, int] = {}
    return lambda row: {"number": numbers.setdefault(row["n"] % 777, len(numbers))}


class Failing:
    """Gives the numbers of rows, and fails at one of them, which does not count in its key."""

    at: int | None = None

    def __castore_key__(self) -> str:
        return "failing"

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == self.at:
            raise RuntimeError(f"row {self.at}")
        if row["n"] >= 1000:
            time.sleep(0.002)
        return {"number": row["n"]}


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_goes_on_after_errors_takes_no_results_of_other_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, num_proc: int
) -> None:
    """Regression: results of early calls stayed where parts of their block were there, and a rank gives rows
    other numbers as long as it leaves blocks to others.
    """
    monkeypatch.setenv("RANK", f"{rank}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    function = Failing()
    # The first block is quick, so nothing foretells that the others are slow.
    # In this order: `monkeypatch`, which ends later, would leave the value of `slow_blocks` to other tests.
    with (
        slow_blocks(20),
        mock.patch.object(block_step, "SLOW_SECONDS", 0.1),
        Store(folder / "node0", remote="team") as store,
    ):
        for function.at in range(1350, ROWS, 250):
            with contextlib.suppress(RuntimeError):  # unless that row has run
                cached_map(rows(), function, store=store, num_proc=num_proc)
        function.at = None
        result = cached_map(rows(), function, store=store, num_proc=num_proc)
    assert result["number"] == list(range(ROWS))


def test_ranks_begin_with_their_own_part_of_the_blocks_and_leave_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = logging(str(folder / "log"))
    parts: list[list[int]] = []
    for rank in (1, 0):
        monkeypatch.setenv("RANK", f"{rank}")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with Store(folder / f"node{rank}", remote="team") as store:
            result = cached_map(rows(), function, store=store)
        assert result["length"] == rows().map(len_of)["length"]
        parts.append(seen(folder))
        (folder / "log").write_text("")
    alone, after = parts
    assert sorted(alone) == list(range(ROWS))  # the other rank had not begun
    assert after == []
    # After the first block, which decides the features, every second one comes before those in between.
    assert alone != sorted(alone)


def test_steps_that_were_run_without_the_remote_are_offered_by_the_command(folder: Path) -> None:
    function = logging(str(folder / "log"))
    with Store(folder / "node0") as store:
        cached_map(rows(), function, store=store)
    assert len(seen(folder)) == ROWS
    command = [sys.executable, "-m", "castore", "--store", str(folder / "node0"), "remote", "offer", "team"]
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    assert told["offered"] > 1
    with Store(folder / "node1", remote="team") as store:
        assert cached_map(rows(), function, store=store)["length"] == rows().map(len_of)["length"]
    assert len(seen(folder)) == ROWS


def test_a_run_of_a_pipeline_begins_with_the_part_that_it_is_told(folder: Path) -> None:
    with Store(folder / "node0", remote="team") as store:
        result = Pipeline([logging(str(folder / "log"))], store=store).run(rows(), shard=(1, 2))
    assert result.dataset["length"] == rows().map(len_of)["length"]
    order = seen(folder)
    assert sorted(order) == list(range(ROWS))
    assert order != sorted(order), "every second block comes before those in between"


class Firsts:
    """Tells whether a text was there before, from some row on."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.texts: set[str] = set()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        is_new = row["text"] not in self.texts
        if row["n"] >= self.begin:
            self.texts.add(row["text"])
        return {"is_new": is_new, "known": len(self.texts)}

    def keeps(self, row: dict[str, Any]) -> bool:
        return bool(self(row)["is_new"])


def repeated(count: int) -> datasets.Dataset:
    texts = [f"{n * n % 701} {_PAD}" for n in range(count)]
    return datasets.Dataset.from_dict({"n": list(range(count)), "text": texts})


@pytest.mark.filterwarnings("ignore::castore.errors.CacheWarning")
@pytest.mark.parametrize("shard", [(0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("count", [100, ROWS])
def test_a_function_that_remembers_rows_sees_each_once_and_in_order_whatever_its_part(
    folder: Path, shard: tuple[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = repeated(count)
    with Store(folder / "node0", remote="team") as store:
        mapped = Pipeline([Firsts()], store=store).run(data, shard=shard).dataset
        assert mapped[:] == data.map(Firsts())[:]
        monkeypatch.setenv("RANK", str(shard[0]))
        monkeypatch.setenv("WORLD_SIZE", str(shard[1]))
        assert cached_filter(data, Firsts().keeps, store=store)[:] == data.filter(Firsts().keeps)[:]


@pytest.mark.filterwarnings("ignore::castore.errors.CacheWarning")
def test_a_function_that_begins_to_remember_once_blocks_were_left_to_others_ends_with_an_error(
    folder: Path,
) -> None:
    data = repeated(ROWS)
    with Store(folder / "node0", remote="team") as store:
        with pytest.raises(InvalidValueError, match="a run without a shard sees them in order"):
            Pipeline([Firsts(begin=1500)], store=store).run(data, shard=(0, 2))
        result = Pipeline([Firsts(begin=1500)], store=store).run(data).dataset
        assert result[:] == data.map(Firsts(begin=1500))[:]


@pytest.mark.parametrize(
    ("shard", "remote", "what"),
    [
        ((2, 2), "team", "there is no shard 2 of 2: count from 0 to 1"),
        ((0, 0), "team", "there is no shard 0 of 0: give at least one shard"),
        ("half", "team", r"a shard is two numbers, \(i, n\), not 'half'"),
        ((0, 2), None, "share a remote: give the store one with remote="),
    ],
)
def test_a_part_that_is_none_is_an_error(folder: Path, shard: Any, remote: str | None, what: str) -> None:
    with Store(folder / "node0", remote=remote) as store, pytest.raises(InvalidValueError, match=what):
        Pipeline([len_of], store=store).run(rows(), shard=shard)


def test_indices_count_from_the_first_row_whichever_rank_runs_a_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with Store(folder / "node0", remote="team") as store:
        result = cached_map(rows(), with_index, store=store, with_indices=True)
    assert result["place"] == list(range(ROWS))


def with_index(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {"place": index}


def test_the_blocks_of_a_killed_node_are_run_by_another(folder: Path) -> None:
    function = logging(str(folder / "log"), 0.004)
    child = os.fork()
    if not child:
        with Store(folder / "node0", remote="team") as store:
            cached_map(rows(), function, store=store)
        os._exit(0)
    until(lambda: (folder / "log").exists() and len(seen(folder)) > ROWS * 0.7)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with Store(folder / "node1", remote="team") as store:
        result = cached_map(rows(), function, store=store)
    assert result["length"] == rows().map(len_of)["length"]
    assert len(seen(folder)) < ROWS * 1.4


def test_a_remote_that_is_gone_ends_no_step(folder: Path) -> None:
    function = logging(str(folder / "log"))
    (folder / "bucket").rename(folder / "elsewhere")
    with Store(folder / "node0", remote="team") as store:
        assert len(cached_map(rows(), function, store=store)) == ROWS
    assert sorted(seen(folder)) == list(range(ROWS))


def wait_in_first_block(folder: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function whose first block ends when the file `go` is there, on the node that has CASTORE_TEST_WAITS.

    Its column has integers in the first rows. With CASTORE_TEST_LATE, there are fractions behind them.
    """
    os.environ["CASTORE_TEST_LOG"] = str(folder / "log")

    def measure(row: dict[str, Any]) -> dict[str, Any]:
        import os
        import time

        with open(os.environ["CASTORE_TEST_LOG"], "a") as file:
            file.write(f"{row['n']}\n")
        go = os.path.join(os.path.dirname(os.environ["CASTORE_TEST_LOG"]), "go")
        while row["n"] == 900 and os.environ.get("CASTORE_TEST_WAITS") and not os.path.exists(go):
            time.sleep(0.01)
        time.sleep(0.001)  # blocks that take no time are not claimed
        if os.environ.get("CASTORE_TEST_LATE"):
            return {"length": len(row["text"]) + (0.5 if row["n"] >= 800 else 0)}
        return {"length": len(row["text"])}

    return measure


@pytest.mark.parametrize("late", [False, True], ids=["right", "wrong"])
def test_a_node_goes_on_with_a_guess_of_the_features_while_another_makes_the_first_block(
    folder: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = wait_in_first_block(folder)
    if late:
        monkeypatch.setenv("CASTORE_TEST_LATE", "1")
    child = os.fork()
    if not child:
        os.environ["CASTORE_TEST_WAITS"] = "1"
        with Store(folder / "node0", remote="team") as store:
            cached_map(rows(), function, store=store)
        os._exit(0)
    until(lambda: (folder / "log").exists() and 900 in seen(folder))

    def run_other() -> list[float]:
        with Store(folder / "node1", remote="team") as store:
            return list(cached_map(rows(), function, store=store)["length"])

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run_other)
        # Without a guess, it would wait for the first block. A wrong one shows when values do not fit.
        try:
            until(lambda: len(set(seen(folder))) > (1000 if late else ROWS - 300))
        finally:
            (folder / "go").touch()
        found = other.result(300)
    assert os.waitpid(child, 0)[1] == 0
    lengths = rows().map(len_of)["length"]
    assert found == [length + 0.5 * (late and n >= 800) for n, length in enumerate(lengths)]
    if not late:
        assert sorted(seen(folder)) == sorted([*range(ROWS), *range(16)])


def test_a_node_that_waits_for_the_only_block_runs_no_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, few = wait_in_first_block(folder), list(range(1000))
    data = datasets.Dataset.from_dict({"n": few, "text": ["x"] * len(few)})
    child = os.fork()
    if not child:
        os.environ["CASTORE_TEST_WAITS"] = "1"
        with Store(folder / "node0", remote="team") as store:
            cached_map(data, function, store=store)
        os._exit(0)
    until(lambda: (folder / "log").exists() and 900 in seen(folder))
    waits, wait_for = threading.Event(), BlockClaims.wait_for

    def noted(claims: BlockClaims, digits: str) -> Any:
        waits.set()
        return wait_for(claims, digits)

    monkeypatch.setattr(BlockClaims, "wait_for", noted)

    def run_other() -> list[float]:
        with Store(folder / "node1", remote="team") as store:
            return list(cached_map(data, function, store=store)["length"])

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run_other)
        assert waits.wait(60)
        (folder / "go").touch()
        assert other.result(300) == [1] * len(few)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(seen(folder)) == few


def test_results_that_come_between_a_look_and_a_claim_are_taken_and_leave_no_claim(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = logging(str(folder / "log"))
    with Store(folder / "node0", remote="team") as store:
        cached_map(rows(), function, store=store)
    look = SharedTurn.look
    monkeypatch.setattr(SharedTurn, "look", lambda turn: turn._connection is not None and look(turn))
    with Store(folder / "node1", remote="team") as store:
        assert cached_map(rows(), function, store=store)["length"] == rows().map(len_of)["length"]
    assert sorted(seen(folder)) == list(range(ROWS))
    until(lambda: not list(FolderBucket(folder / "bucket").listing("claims/")))
