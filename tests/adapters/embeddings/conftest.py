"""Fixtures of all tests on embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Have torch compute on one thread: the workers of pytest-xdist use all cores, and OpenMP's threads burn
    the time of a core while they wait for one.
    """
    was = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(was)
