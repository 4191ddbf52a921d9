"""A fixture for the adapters' tests: random numbers that are the same in every run."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The weights that a test makes are the same in every run, so the test fails always or never."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
