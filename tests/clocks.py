"""Time that passes at once: a short expiry, slept out, would at times be over on a busy machine before it
should.
"""

from __future__ import annotations

import time

import pytest


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float, *clocks: str) -> None:
    """Set those clocks of this process ahead, or all: the date (``time``) and the ``monotonic`` one."""
    for name in clocks or ("time", "monotonic"):
        _set_ahead(monkeypatch, name, seconds)


def _set_ahead(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> None:
    before = getattr(time, name)
    monkeypatch.setattr(time, name, lambda: before() + seconds)
