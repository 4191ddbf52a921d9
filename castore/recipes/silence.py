"""Silences the bars and log lines of the datasets library: its findings reach users as castore's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import datasets


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Silence the library for the length of a block; blocks may nest."""
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
