"""The processes of a step: none waits for the first block, or for a slow one, and each row runs once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pytest

from castore import Store, layout
from castore.adapters.datasets import CacheWarning, Pipeline, cached_map, wait
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.errors import FullError
from tests.adapters.datasets.small_blocks import small_blocks, told
from tests.mount.conftest import until

#: The first block has the 1,000 rows whose types decide; the others have some two hundred each.
ROWS, FIRST = 2600, 1000
_PAD, _BLOCK_BYTES = "x" * 600, 1 << 17


@pytest.fixture(autouse=True)
def blocks() -> Iterator[None]:
    with small_blocks(_BLOCK_BYTES, 10_000):
        yield


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the number of each row that ran, a line each."""
    log = tmp_path / "log"
    monkeypatch.setenv("CASTORE_TEST_LOG", str(log))
    return log


def rows(count: int = ROWS) -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"n": list(range(count)), "text": [f"{n} {_PAD}" for n in range(count)]}
    )


def note(row: dict[str, Any]) -> None:
    with open(os.environ["CASTORE_TEST_LOG"], "a") as file:
        file.write(f"{row['n']}\n")


def seen(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


def wait_for_rows(count: int) -> None:
    """Wait until so many rows have run."""
    until(lambda: len(seen(Path(os.environ["CASTORE_TEST_LOG"]))) >= count)


def measure(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    return {"length": len(row["text"])}


def waits_in_first_block(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    if row["n"] == FIRST - 100:
        wait_for_rows(FIRST + 1000)
    return {"length": len(row["text"])}


def waits_in_second_block(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    if row["n"] == FIRST + 50:
        wait_for_rows(FIRST + 700)
    return {"length": len(row["text"])}


def batch_waits_in_first_block(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    for n in batch["n"]:
        note({"n": n})
    if batch["n"][0] == FIRST - 100:
        wait_for_rows(FIRST + 1000)
    return {"length": [len(text) for text in batch["text"]]}


def fraction_late(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    return {"length": row["n"] + (0.5 if row["n"] >= FIRST - 100 else 0)}


def unlike_late(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    return {"tags": [row["n"]] if row["n"] >= FIRST - 100 else []}


def null_first(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    return {"length": None if row["n"] < 50 else row["n"]}


def many_columns(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    return {f"column {number}": row["n"] for number in range(400)}


def nothing(row: dict[str, Any]) -> None:
    note(row)


def changes_its_row(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    row["text"] = row["text"][:5]
    row["list"] = [row["n"]]
    return row


def fails_in_first_block(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    if row["n"] == FIRST - 100:
        raise OSError("row 900 is broken")
    return {"length": len(row["text"])}


@pytest.mark.parametrize("function", [waits_in_first_block, waits_in_second_block])
def test_one_process_goes_on_while_the_other_takes_long_for_a_block(
    function: Callable[..., Any], store: Store, log: Path
) -> None:
    made = cached_map(rows(), function, store=store, num_proc=2)
    assert sorted(seen(log)) == list(range(ROWS))
    assert told(made) == told(rows().map(measure))


def test_one_process_goes_on_while_the_other_takes_long_for_the_first_of_many_batches(
    store: Store, log: Path
) -> None:
    made = cached_map(
        rows(), batch_waits_in_first_block, store=store, num_proc=2, batched=True, batch_size=100
    )
    assert sorted(seen(log)) == list(range(ROWS))
    assert told(made) == told(rows().map(measure))


@pytest.mark.parametrize("num_proc", [2, 3])
@pytest.mark.parametrize(
    "function", [null_first, many_columns, nothing, changes_its_row], ids=lambda function: function.__name__
)
def test_each_row_runs_once_whatever_the_first_ones_show(
    function: Callable[..., Any], num_proc: int, store: Store, log: Path
) -> None:
    made = cached_map(rows(), function, store=store, num_proc=num_proc)
    assert sorted(seen(log)) == list(range(ROWS))
    assert told(made) == told(rows().map(function))


@pytest.mark.parametrize("function", [fraction_late, unlike_late], ids=lambda function: function.__name__)
def test_types_of_the_first_rows_that_are_not_those_of_the_first_block_cost_work_alone(
    function: Callable[..., Any], store: Store, log: Path
) -> None:
    made = cached_map(rows(), function, store=store, num_proc=2)
    ran = Counter(seen(log))
    assert set(ran) == set(range(ROWS))
    assert max(ran.values()) <= 2
    assert {n for n in ran if ran[n] > 1}.isdisjoint(range(FIRST))
    assert told(made) == told(rows().map(function))
    log.unlink()
    assert told(cached_map(rows(), function, store=store)) == told(made)
    assert not log.exists()


def test_an_error_in_the_first_block_is_the_error_and_no_row_runs_again(store: Store, log: Path) -> None:
    with pytest.raises(OSError, match="row 900 is broken"):
        cached_map(rows(), fails_in_first_block, store=store, num_proc=2)
    assert max(Counter(seen(log)).values()) == 1
    assert FIRST - 50 not in seen(log)


class Relative:
    """A map that remembers its first row, and nothing else."""

    def __init__(self) -> None:
        self.first: int | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.first = row["n"] if self.first is None else self.first
        return {"to first": row["n"] - self.first}


def test_a_function_that_remembers_the_first_row_alone_sees_all_in_one_process(store: Store) -> None:
    with pytest.warns(CacheWarning, match="remembers rows") as warned:
        made = Pipeline([Relative()], store=store, num_proc=2).run(rows()).dataset
    assert [warning.filename for warning in warned] == [__file__]
    assert made["to first"] == list(range(ROWS))


class CountsFrom:
    """A map that counts the rows from one row on."""

    def __init__(self, begin: int) -> None:
        self.begin, self.count = begin, 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.count += row["n"] >= self.begin
        return {"count": self.count}


@pytest.mark.parametrize("begin", [FIRST + 50, ROWS - 300])
@pytest.mark.parametrize("num_proc", [2, 3])
def test_a_function_that_begins_to_remember_behind_the_first_block_sees_all_in_one_process(
    num_proc: int, begin: int, store: Store
) -> None:
    for _ in range(2):
        with pytest.warns(CacheWarning, match="remembers rows"):
            made = cached_map(rows(), CountsFrom(begin), store=store, num_proc=num_proc)
        assert made["count"] == [max(0, n + 1 - begin) for n in range(ROWS)]
        wait()
        assert [*store.entries(BLOCKS_FOLDER)] == []
        store.delete_many([entry.name for entry in store.entries("")])


class RelativeToMarked:
    """A map that remembers one row of the first block, and waits there for the file `go`."""

    def __init__(self) -> None:
        self.marked = 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == FIRST - 100:
            until(lambda: Path(os.environ["CASTORE_TEST_LOG"]).with_name("go").exists())
            self.marked = row["n"]
        return {"to marked": row["n"] - self.marked}


@pytest.mark.filterwarnings("ignore:.*remembers rows:castore.errors.CacheWarning")
def test_no_block_is_kept_before_the_first_one_shows_that_nothing_is_remembered(
    store: Store, log: Path
) -> None:
    def run() -> datasets.Dataset:
        return cached_map(rows(), RelativeToMarked(), store=store, num_proc=2)

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(run)
        try:
            until(lambda: len([*(store.path / layout.WORK).rglob("*.block")]) >= 3)
            assert [*store.entries(BLOCKS_FOLDER)] == []
        finally:
            log.with_name("go").touch()
        assert coming.result()["to marked"] == [n - (FIRST - 100) * (n >= FIRST - 100) for n in range(ROWS)]
    assert [*store.entries(BLOCKS_FOLDER)] == []


@pytest.mark.filterwarnings("ignore:the folder of temporary files needs:castore.errors.CacheWarning")
@pytest.mark.parametrize(("num_proc", "size"), [(1, "1M"), (2, "512k"), (2, "1M")])
def test_a_full_disk_of_the_files_is_said(num_proc: int, size: str, store: Store, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        if num_proc == 1:  # results that are no larger than blocks need no file
            Pipeline([adds], store=store, temp_dir=disk).run(rows())
        made = Pipeline([grows if num_proc == 1 else adds], store=store, num_proc=num_proc, temp_dir=disk)
        with pytest.raises(FullError, match=f"the disk of {disk} is full .*name another folder"):
            made.run(rows())
        assert [path for path in disk.rglob("*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def adds(row: dict[str, Any]) -> dict[str, Any]:
    return {"more": row["text"]}


def grows(row: dict[str, Any]) -> dict[str, Any]:
    return {"more": "x" * 80_000}


def test_a_full_disk_that_an_operator_writes_to_is_not_taken_for_that_of_the_files(
    store: Store, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    path = str(disk / "more")

    def writes(row: dict[str, Any]) -> dict[str, Any]:
        Path(path).write_bytes(bytes(1_000_000))
        return row

    try:
        with pytest.raises(OSError, match="No space left on device") as raised:
            cached_map(rows(), writes, store=store)
        assert not isinstance(raised.value, FullError)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_files_through_which_rows_pass_are_gone_with_the_step(store: Store, log: Path) -> None:
    cached_map(rows(), measure, store=store, num_proc=2)
    assert [path for path in (store.path / layout.WORK).rglob("*") if path.is_file()] == []


# --- workers that are killed --------------------------------------------------------------------------------

#: Rows at which a process is killed once, eight blocks from one to the next: no block is hit by three.
_MANY, _DEADLY = 7000, (1200, 2800, 4400, 6000)


def is_killed_once(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] in _DEADLY:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{os.environ['CASTORE_TEST_LOG']}.{row['n']}", os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
    return {"length": len(row["text"])}


def assert_all_killed(log: Path, warned: int) -> None:
    """Each deadly row has killed a process. Two that die at once are told in one warning."""
    assert all(Path(f"{log}.{row}").exists() for row in _DEADLY)
    assert len(_DEADLY) / 2 <= warned <= len(_DEADLY)


def test_a_step_outlives_any_number_of_killed_workers_as_long_as_it_gets_on(store: Store, log: Path) -> None:
    """Regression: the third one ended it, however many blocks were done between."""
    with pytest.warns(CacheWarning, match="a worker process of 'is_killed_once' was killed") as warned:
        result = cached_map(rows(_MANY), is_killed_once, num_proc=2, store=store)
    assert result["length"][:] == [len(text) for text in rows(_MANY)["text"]]
    assert_all_killed(log, len(warned))


def test_a_fresh_run_goes_on_behind_the_blocks_that_it_has_made_itself(store: Store, log: Path) -> None:
    """Else a run whose workers are killed now and then would never end."""
    cached_map(rows(_MANY), is_killed_on_demand, num_proc=2, store=store)
    assert Counter(seen(log)) == dict.fromkeys(range(_MANY), 1)
    log.unlink()
    Path(f"{log}.deadly").touch()
    with pytest.warns(CacheWarning, match="was killed") as warned:
        cached_map(rows(_MANY), is_killed_on_demand, num_proc=2, store=store, load_from_cache_file=False)
    assert_all_killed(log, len(warned))
    assert set(seen(log)) == set(range(_MANY))
    # Each kill costs the blocks that run. Begun anew each time, the step would run three times its rows.
    assert len(seen(log)) < 2 * _MANY


def is_killed_on_demand(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    if os.path.exists(f"{os.environ['CASTORE_TEST_LOG']}.deadly"):
        is_killed_once(row)
    return {"length": len(row["text"])}


def is_killed_beside_a_child(row: dict[str, Any]) -> dict[str, Any]:
    place = f"{os.environ['CASTORE_TEST_LOG']}.child"
    if row["n"] == 1500 and not os.path.exists(place):
        Path(place).write_text("")
        test = os.getppid()
        if not os.fork():
            while os.path.exists(place) and os.path.exists(f"/proc/{test}"):
                time.sleep(0.01)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"length": len(row["text"])}


def test_a_worker_is_missed_although_a_process_that_it_has_forked_lives_on(store: Store, log: Path) -> None:
    """Regression: the pool waited for the end of that process."""
    child = Path(f"{log}.child")
    try:
        with pytest.warns(CacheWarning, match="was killed"):
            result = cached_map(rows(), is_killed_beside_a_child, num_proc=2, store=store)
        assert child.exists()
        assert result["length"][:] == [len(text) for text in rows()["text"]]
    finally:
        child.unlink()  # it ends now


def is_killed_each_time(row: dict[str, Any]) -> dict[str, Any]:
    note(row)
    if row["n"] == 1500 and os.path.exists(f"{os.environ['CASTORE_TEST_LOG']}.deadly"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"length": len(row["text"])}


def test_a_row_that_kills_every_worker_ends_the_step_and_the_blocks_before_are_kept(
    store: Store, log: Path
) -> None:
    (deadly := Path(f"{log}.deadly")).touch()
    with (
        pytest.warns(CacheWarning, match="was killed") as warned,
        pytest.raises(RuntimeError, match="'is_killed_each_time' were killed 3 times at one block") as ended,
    ):
        cached_map(rows(), is_killed_each_time, num_proc=2, store=store)
    assert len(warned) == 2
    assert Counter(seen(log))[1500] == 3
    # The other process is at the same block each time, perhaps.
    told = re.findall(r"([\d,]+) to ([\d,]+)", str(ended.value))
    blocks = [(int(first.replace(",", "")), int(last.replace(",", ""))) for first, last in told]
    assert any(FIRST <= first <= 1500 <= last < ROWS for first, last in blocks)
    assert len(blocks) <= 2
    deadly.unlink()
    log.unlink()
    result = cached_map(rows(), is_killed_each_time, num_proc=2, store=store)
    assert result["length"][:] == [len(text) for text in rows()["text"]]
    assert min(seen(log)) >= FIRST
