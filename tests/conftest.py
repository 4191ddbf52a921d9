"""Fixtures shared by all tests."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from castore import Store
from castore.system.worker_processes import give_bars_a_lock_of_their_own
from tests.helpers import LONG

pytest_plugins = ["tests.temporary_folders", "tests.warm_fixtures"]

# A shell that starts this run in the background has it ignore Ctrl-C, and every process that the tests start
# inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says as much of the machine as of castore: one that stood still for a moment is no
# failure.
settings.register_profile("castore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("castore")


# Children that tests kill are parted from this process's bars, too: see the module.
os.register_at_fork(after_in_child=give_bars_a_lock_of_their_own)

_ENVIRON = os.environ
_LONG_TIMEOUT = 7200  # seconds; on a slow machine 10,000 interleavings take more than 1,800


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the rest of each matrix to `make torture`, which also gives its tests more time."""
    left_out = [] if LONG else [item for item in items if item.get_closest_marker("matrix")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    for item in items:
        if "torture" in item.path.parts:
            item.add_marker(pytest.mark.torture)
            if LONG and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_LONG_TIMEOUT))


_frozen_modules = 0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the collector of garbage: there is little yet, and its looks take seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        _pass_over_imports()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _pass_over_imports_of_others() -> None:
    if len(sys.modules) > _frozen_modules + 50:
        gc.collect()
        _pass_over_imports()


def _pass_over_imports() -> None:
    """Let the collector pass over what was imported and collected: with it, each full collection takes half a
    second, and some tests ask for dozens.
    """
    global _frozen_modules
    gc.freeze()
    _frozen_modules = len(sys.modules)


# Extension modules report objects that Python does not free, so the collector has all back at the very end.
# pytest collects several times before, which would take a second.
atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def _one_environment() -> None:
    """Undo what `datasets` does after a map in processes: it puts a copy in the place of `os.environ`.

    rich reads the mapping that was there when it was imported, so variables set for a test would not reach
    it.
    """
    os.environ = _ENVIRON  # noqa: B003


@pytest.fixture(autouse=True)
def _signals_act_as_before() -> Iterator[None]:
    """Fail a test that leaves a handler of a signal.

    Forked children inherit it. One with a handler of SIGTERM does not end when a pool of processes is
    terminated.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store without a RAM tier, so that every read reaches the disk."""
    with Store(tmp_path / "store", memory=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def small_process() -> Iterator[ProcessPoolExecutor]:
    """One process that has imported little and run no tests, as `in_small_process` starts for each task.

    A fork of a process that has run thousands of tests takes long.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of the torture tests. The hook is here because pytest-xdist's controller loads no
    deeper conftest.
    """
    lines = [
        (report.nodeid.rpartition("::")[2], value)
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, value in report.user_properties
        if name == "figure"
    ]
    if lines:
        terminalreporter.section("figures of the torture tests")
    for test, sentence in lines:
        terminalreporter.line(f"{test}: {sentence}")
