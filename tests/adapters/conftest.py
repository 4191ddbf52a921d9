"""A fixture for the adapters' tests: random numbers that are the same in every run."""

from __future__ import annotations

import multiprocessing
import sys

import pytest

# Each server that is started from here on has torch for all its processes. Without torch it goes on without.
multiprocessing.set_forkserver_preload(["torch.utils.data"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The weights that a test makes are the same in every run, so the test fails always or never."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
