"""Fixtures shared by all tests."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from castore import Store
from tests.helpers import LONG
from tests.warm import DATASETS, TORCH, WarmPython

#: Modules that most commands of the command line use, and the processes that castore starts.
_COMMANDS = (
    "castore.cli.commands",
    "castore.cli.std_streams",
    "castore.store",
    "castore.remote.remote",
    "castore.remote.transfer",
    "castore.remote.result_sharing",
    "castore.remote.page_trim",
    "castore_fuse.api",
    "castore_fuse.daemon",
    "castore_fuse.operations",
    "castore_fuse.view",
)

# A shell that starts this run in the background has it ignore Ctrl-C, and every process that the tests start
# inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says as much of the machine as of castore: one that stood still for a moment is no
# failure.
settings.register_profile("castore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("castore")

_ENVIRON = os.environ
_LONG_TIMEOUT = 1800  # seconds


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


_PASSED = pytest.StashKey[bool]()
#: Seconds from one removal of folders of tests to the next.
_REMOVAL_SECONDS = 60.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for `tmp_path` whether a test has passed."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


class _DoneWith:
    """The folders of tests that have passed, which go together once a minute.

    An ext4 without a journal looks at every inode that was freed in the last five seconds before it takes a
    new one. Where each test removed its files at once, that took a sixteenth of a run's processor time.
    """

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._begun = time.monotonic()

    def add(self, folder: Path) -> None:
        self._folders.append(folder)
        if time.monotonic() > self._begun + _REMOVAL_SECONDS:
            self.remove()

    def remove(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders, self._begun = [], time.monotonic()


@pytest.fixture(scope="session")
def _done_with() -> Iterator[_DoneWith]:
    folders = _DoneWith()
    yield folders
    folders.remove()


@pytest.fixture
def tmp_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _done_with: _DoneWith
) -> Iterator[Path]:
    """A folder of a test's own, as pytest's; that of a test that has failed stays."""
    path = tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
    yield path
    if request.node.stash.get(_PASSED, False):
        _done_with.add(path)


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


#: The modules of the processes that start others, by the name of the fixture that has one.
_WARM = {"warm_datasets": DATASETS, "warm_torch": TORCH, "warm_castore": _COMMANDS}
_STARTED = pytest.StashKey[dict[str, WarmPython]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have all workers of pytest-xdist use the same ones."""
    started = node.config.stash.setdefault(_STARTED, {})
    for name, modules in _WARM.items():
        if name not in started:
            started[name] = WarmPython(modules)
    node.workerinput["castore_warm"] = {name: warm.address for name, warm in started.items()}


def pytest_unconfigure(config: pytest.Config) -> None:
    """End those that were started for workers."""
    for warm in config.stash.get(_STARTED, {}).values():
        warm.close()


def _warm(config: pytest.Config, name: str) -> Iterator[WarmPython]:
    addresses: dict[str, str] = getattr(config, "workerinput", {}).get("castore_warm", {})
    warm = WarmPython(_WARM[name], addresses.get(name, ""))
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def warm_datasets(pytestconfig: pytest.Config) -> Iterator[WarmPython]:
    """Starts processes that have imported `datasets`."""
    yield from _warm(pytestconfig, "warm_datasets")


@pytest.fixture(scope="session")
def warm_torch(pytestconfig: pytest.Config) -> Iterator[WarmPython]:
    """Starts processes that have imported torch."""
    yield from _warm(pytestconfig, "warm_torch")


@pytest.fixture(scope="session")
def warm_castore(pytestconfig: pytest.Config) -> Iterator[WarmPython]:
    """Starts processes that have imported castore and its command line."""
    yield from _warm(pytestconfig, "warm_castore")


@pytest.fixture
def forked_processes(warm_castore: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes that castore starts (transfers, fetchers, mounts) forked from one that has imported
    it, and those that they start too.
    """
    monkeypatch.setattr(sys, "executable", os.fspath(warm_castore.executable))


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
