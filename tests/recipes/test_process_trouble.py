"""`castore process`: failures, their messages, and the state after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from tests.cli.conftest import Cli, Ran, cli, folder  # noqa: F401 - fixtures
from tests.helpers import LONG, flip, payload
from tests.recipes.recipes import exported, hits, recipe
from tests.warm import Started

# Errors have notes since Python 3.11.
IN_ROW = ", in row 30 of the step's input" if sys.version_info >= (3, 11) else ""

# Failures


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"steps": ["clean_link_mapper"]}, 2,
         "recipe.yaml:4: there is no operator 'clean_link_mapper'; did you mean 'clean_links_mapper'?"),
        ({"use_cash": True}, 2, "recipe.yaml:3: there is no key 'use_cash'; did you mean 'use_cache'?"),
        ({"dataset_path": "data/dem.jsonl"}, 1,
         "there is no data at dataset_path 'data/dem.jsonl'; did you mean 'demo.jsonl'?"),
        ({"export_path": "out.xml"}, 2, "export_path 'out.xml' has the unknown ending '.xml'"),
        ({"text_keys": "content"}, 2,
         "there is no column 'content' for clean_links_mapper, only 'text', 'n'"),
        ({"steps": ["my_ops.breaks"]}, 1,
         (f"step 'breaks' failed at {{place}}/my_ops.py:24{IN_ROW}: RuntimeError: cannot stand 30; "
          "the steps before it are kept")),
        ({"steps": ["my_ops.breaks"], "np": 2}, 1,
         (f"step 'breaks' failed at {{place}}/my_ops.py:24{IN_ROW}: RuntimeError: cannot stand 30; "
          "the steps before it are kept")),
        ({"steps": ["my_ops.ends"]}, 1, "step 'ends' failed at {place}/my_ops.py:28: SystemExit: 3"),
        ({"steps": ["my_ops.Nothing"]}, 2, "recipe.yaml:4: my_ops has no 'Nothing'"),
        ({"steps": ["sys.maxsize"]}, 2, "recipe.yaml:4: sys.maxsize is 9223372036854775807, and no operator"),
        ({"ds_cache_dir": "/proc/nowhere"}, 1, "cannot make a store at /proc/nowhere"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_says_what_to_do(
    here: Callable[..., Ran],
    place: Path,
    change: dict[str, Any],
    code: int,
    words: str,
) -> None:
    keys = {"export_path": "out.jsonl", **change}
    ran = here("--config", recipe(place, keys.pop("steps", ["clean_links_mapper"]), **keys))
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert words.replace("{place}", str(place)) in ran.err


def test_a_missing_recipe_and_a_truth_that_is_none_are_said(cli: Cli, place: Path) -> None:  # noqa: F811
    ran = cli("process", "--config", "nowhere.yaml")
    assert (ran.code, ran.err) == (1, "castore: nowhere.yaml: No such file or directory\n")
    ran = cli("process", "--config", recipe(place), "--use_cache", "maybe")
    assert (ran.code, "'maybe' is neither true nor false" in ran.err) == (2, True)
    ran = cli("process", "--config", recipe(place), "--cache-compress", "zip")
    assert (ran.code, "cache_compress must be 'zstd'" in ran.err) == (2, True)


def test_a_damaged_step_runs_again_and_is_said(cli: Cli, place: Path) -> None:  # noqa: F811
    path = recipe(place)
    assert cli("process", "--config", path).code == 0
    rows = exported(place)
    with Store(place / "store") as store:
        name = next(
            entry.name
            for entry in store.entries("steps")
            if "deduplicator" in entry.name and entry.name.endswith(".arrow")
        )
        file, offset, length = payload(store, name)
        flip(file, offset + length // 2)
    ran = cli("process", "--config", path, "--json")
    assert ran.code == 0
    assert "is damaged and runs again" in ran.err
    assert ran.err.count("\n") == 1
    assert hits(ran) == [True] * 6 + [False]
    assert exported(place) == rows
    assert hits(cli("process", "--config", path, "--json")) == [True] * 7


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    disk = place / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12M", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("mode", [{}, {"use_checkpoint": True}, {"use_cache": False}], ids=str)
def test_a_disk_that_fills_up_in_a_step_is_said_and_the_rest_goes_on_later(
    place: Path,
    small_disk: Path,
    castore: Callable[..., Started],
    cli: Cli,  # noqa: F811
    mode: dict[str, Any],
) -> None:  # fmt: skip
    (place / "tiny.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(2000)))
    given = {"dataset_path": "tiny.jsonl", "temp_dir": str(small_disk / "temp"), **mode}
    start = castore("process", "--config", recipe(place, ["my_ops.marks", "my_ops.grows"], **given))
    _, err = start.communicate()
    assert start.returncode == 1
    last = err.decode().splitlines()[-1]
    assert "is full" in last
    assert "free some space" in last
    assert not (place / "outputs").exists()
    assert (place / "marks").stat().st_size == 2000
    assert list(small_disk.rglob("*.arrow")) == []
    # With another second step the first step does not run again, if its result was kept.
    ran = cli("process", "--config", recipe(place, ["my_ops.marks", "clean_links_mapper"], **given))
    assert (ran.code, ran.err) == (0, "")
    assert (place / "marks").stat().st_size == (4000 if mode == {"use_cache": False} else 2000)


# The state after a kill


def test_ctrl_c_leaves_what_is_done(
    place: Path,
    castore: Callable[..., Started],
    cli: Cli,  # noqa: F811
) -> None:
    (place / "interrupt").touch()
    path = recipe(place, ["my_ops.marks", "my_ops.interrupted"])
    start = castore("process", "--config", path)
    _, err = start.communicate(timeout=300)
    assert (start.returncode, err) == (130, b"castore: interrupted\n")
    rows = (place / "marks").stat().st_size
    ran = cli("process", "--config", path, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert hits(ran) == [True, False]
    assert (place / "marks").stat().st_size == rows


def until(true: Callable[..., bool], seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def working(place: Path, start: Started) -> set[int]:
    """The workers of a run, once each of two workers has finished a row."""
    pids: set[int] = set()
    while len(pids) < 2:
        assert start.poll() is None, start.communicate()
        time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            pids = {int(line) for line in (place / "pids").read_text().split("\n")[:-1]}
    return pids


def session(leader: int) -> list[str]:
    """The commands of the processes of a session that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "stat").read_text().rpartition(")")[2].split()
            if int(words[3]) == leader and words[0] not in "ZX":
                found.append((place / "cmdline").read_text())
    return found


ENDINGS = [
    (signal.SIGINT, True, 130, b"castore: interrupted\n"),
    (signal.SIGINT, False, 130, b"castore: interrupted\n"),
    (signal.SIGTERM, False, 143, b"castore: terminated\n"),
    (signal.SIGTERM, True, 143, b"castore: terminated\n"),
    (signal.SIGKILL, False, -9, b""),
]


@pytest.mark.parametrize(
    ("number", "to_all", "code", "words", "step"),
    [
        # Each signal, to all and to the run alone. A step of another kind has its workers from the same
        # place: the first ending says so.
        *[
            pytest.param(*ending, "my_ops.tells", marks=[pytest.mark.matrix] * (at in (1, 3)))
            for at, ending in enumerate(ENDINGS)
        ],
        *[
            pytest.param(*ending, "my_ops.Tells", marks=[pytest.mark.matrix] * (at > 0))
            for at, ending in enumerate(ENDINGS)
        ],
    ],
)
def test_workers_end_with_the_run_that_started_them(
    place: Path,
    castore: Callable[..., Started],
    cli: Cli,  # noqa: F811
    number: int,
    to_all: bool,
    code: int,
    words: bytes,
    step: str,
) -> None:
    path = recipe(place, ["my_ops.marks", step], num_proc=2)
    start = castore("process", "--config", path, start_new_session=True)
    try:
        assert start.pid not in working(place, start)
        (os.killpg if to_all else os.kill)(start.pid, number)
        # A leftover process would still hold the stream of the messages.
        _, err = start.communicate(timeout=240)
        assert (start.returncode, err) == (code, words)
        until(lambda: not session(start.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(start.pid, signal.SIGKILL)
    if number == signal.SIGKILL:
        return  # the first step may not have reached the store yet
    rows = (place / "marks").stat().st_size
    (place / "quick").touch()
    ran = cli("process", "--config", path, "--json", "--np", "1")
    assert (ran.code, ran.err) == (0, "")
    assert hits(ran)[0]
    assert (place / "marks").stat().st_size == rows


def test_sigterm_leaves_what_is_done_of_a_run_without_workers(
    place: Path, castore: Callable[..., Started], cli: Cli  # noqa: F811
) -> None:  # fmt: skip
    path = recipe(place, ["my_ops.marks", "my_ops.tells"])
    start = castore("process", "--config", path)
    until((place / "pids").exists)
    start.terminate()
    _, err = start.communicate(timeout=240)
    assert (start.returncode, err) == (143, b"castore: terminated\n")
    rows = (place / "marks").stat().st_size
    (place / "quick").touch()
    ran = cli("process", "--config", path, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert hits(ran) == [True, False]
    assert (place / "marks").stat().st_size == rows


_KILLS = 3 if LONG else 2
SLOW = ["my_ops.slow", {"text_length_filter": {"min_len": 100}}, "my_ops.slower", "document_deduplicator"]


@pytest.mark.torture
@pytest.mark.parametrize("mode", ["use_cache", "use_checkpoint"])
def test_runs_killed_at_random_points_come_to_the_same_end(
    place: Path, castore: Callable[..., Started], cli: Cli, mode: str  # noqa: F811
) -> None:  # fmt: skip
    chance = random.Random(mode)
    path, rows = recipe(place, SLOW, **{mode: True}), place / "rows"
    rows.touch()
    # The points are rows of one of the two slow steps. A killed step runs again, so each run comes to its
    # point.
    for _ in range(_KILLS):
        more = rows.stat().st_size + chance.randrange(1, 150)
        start = castore("process", "--config", path, "--json")
        until(lambda more=more, start=start: rows.stat().st_size >= more or start.poll() is not None)
        assert start.poll() is None, start.communicate()
        start.kill()
        start.communicate()
    (place / "quick").touch()
    assert cli("process", "--config", path).code == 0
    survived = exported(place)
    (place / "outputs/demo.jsonl").unlink()
    assert cli("process", "--config", path, "--no-use-checkpoint", "--no-use-cache").code == 0
    assert survived == exported(place)
    ran = cli("process", "--config", path, "--json")
    assert all(hits(ran))
    with Store(place / "store") as store:
        assert store.verify().bad == []
