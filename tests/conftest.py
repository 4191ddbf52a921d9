"""Fixtures shared by all tests."""

from __future__ import annotations

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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store without a RAM tier, so that every read reaches the disk."""
    with Store(tmp_path / "store", memory=0) as opened:
        yield opened
