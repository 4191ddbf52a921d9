"""Folders of tests: each test has one of its own, and those of tests that have passed go together once a
minute.

An ext4 without a journal looks at every inode that was freed in the last five seconds before it takes a new
one. Where each test removed its files at once, that took a sixteenth of a run's processor time.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

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
    """The folders of tests that have passed."""

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
