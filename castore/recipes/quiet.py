"""Having the datasets library draw no bars and log no lines: what it finds reaches users as our errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import datasets


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """For the length of a block; nests."""
    bars = datasets.utils.is_progress_bar_enabled()
    verbosity = datasets.utils.logging.get_verbosity()
    datasets.utils.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if bars:
            datasets.utils.enable_progress_bars()
