"""Fixtures of the tests that try hard to break a store: how long they try, and where their figures go.

Each test has a quick form, which runs with all other tests, and a long form, which `make torture` runs
(CASTORE_TORTURE=long). Both forms must fail if they did not reach the case that they test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.helpers import LONG
from tests.mount.conftest import mountpoint  # noqa: F401 (a fixture)
from tests.torture.victims import exerciser, make_victim

_T = TypeVar("_T")


@pytest.fixture(scope="session", autouse=True)
def _daemons_log_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the daemons' logs out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", os.fspath(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_exerciser_is_left() -> Iterator[None]:
    yield
    if exerciser.cache_info().currsize:
        with exerciser() as server:
            assert server.stdin is not None
            server.stdin.close()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A store with blobs of all kinds, closed, and beside it a folder of the user's own."""
    return make_victim(tmp_path)


@pytest.fixture
def scale() -> Callable[[_T, _T], _T]:
    """``scale(quick, long)`` returns the value for this run's form."""
    return lambda quick, long: long if LONG else quick


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """``figure("200 of 200 kills hit …")`` records a sentence: printed, and for docs/reliability.md."""
    return lambda sentence: record_property("figure", sentence)
