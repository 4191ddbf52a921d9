"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from castore import Store

# A shell that starts this run in the background has it ignore Ctrl-C, and every process that the tests start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store without a RAM tier, so that every read reaches the disk."""
    with Store(tmp_path / "store", memory=0) as opened:
        yield opened
