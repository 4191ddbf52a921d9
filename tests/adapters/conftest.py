"""What the adapters' tests share: random numbers that are the same in every run."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights that a test makes are the same in every run, so that it fails always or never."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
