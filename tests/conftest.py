"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from castore import Store

# A shell that starts this run in the background has it ignore Ctrl-C, and every process that the tests start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says as much of the machine as of castore: one that stood still for a moment is no failure.
settings.register_profile("castore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("castore")

_ENVIRON = os.environ


@pytest.fixture(autouse=True)
def _one_environment() -> None:
    """Undo what `datasets` does after a map in processes: it puts a copy in the place of `os.environ`.

    rich reads the mapping that was there when it was imported, so variables set for a test would not reach it.
    """
    os.environ = _ENVIRON  # noqa: B003


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store without a RAM tier, so that every read reaches the disk."""
    with Store(tmp_path / "store", memory=0) as opened:
        yield opened
