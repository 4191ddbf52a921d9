"""A fixture of the bench's tests: a collector with little to look at."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Hide what earlier tests imported from the collector, until the end of the run.

    The harness collects before each timed run, and each time would take as long as all that is imported.
    """
    gc.collect()
    gc.freeze()
