"""Reports a run's progress to a callback, a few times a second at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from castore.adapters.datasets.reports import Progress, StepReport
from castore.adapters.datasets.steps import Step

_REPORT_SECONDS = 0.1


class ProgressMeter:
    """Knows the steps and the callback.

    Args:
        steps: the steps of the run.
        callback: the callback, or None.
    """

    def __init__(self, steps: Sequence[Step], callback: Callable[[Progress], object] | None) -> None:
        self._steps = steps
        self._callback = callback

    def begin(self, number: int, rows: int) -> None:
        """Report that a step begins, with so many rows to do."""
        self._report(number, 0, rows, None)

    def end(self, number: int, report: StepReport) -> None:
        """Report that a step has ended."""
        rows = report.rows_in or 0
        self._report(number, rows, rows, report)

    def make_counter(self, number: int, rows: int) -> Callable[[int], None] | None:
        """A function to call with the rows done since the last call; None if there is no callback."""
        if self._callback is None:
            return None
        done, due = 0, time.monotonic() + _REPORT_SECONDS

        def count(more: int) -> None:
            nonlocal done, due
            done += more
            if time.monotonic() >= due:
                due = time.monotonic() + _REPORT_SECONDS
                self._report(number, min(done, rows), rows, None)

        return count

    def _report(self, number: int, done: int, rows: int, report: StepReport | None) -> None:
        if self._callback is not None:
            step = self._steps[number]
            self._callback(Progress(number, len(self._steps), step.name, step.kind, done, rows, report))
