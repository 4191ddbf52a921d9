"""Sixteen processes, one store, for as long as it takes."""

from __future__ import annotations

from collections.abc import Callable

from castore import Store
from tests.torture.crowd import PROCESSES, crowd


def test_sixteen_processes_do_everything_at_once(
    store: Store, scale: Callable[[float, float], float], figure: Callable[[str], None]
) -> None:
    seconds = scale(0.6, 600.0)
    done = crowd(store, seconds)
    assert done > 10 * seconds
    figure(
        f"{PROCESSES} processes did {done:,} operations in {seconds:.0f} s; no error, index and disk agree"
    )
