"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from castore import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store without a RAM tier, so that every read reaches the disk."""
    with Store(tmp_path / "store", memory=0) as opened:
        yield opened
