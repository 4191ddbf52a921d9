"""The pytest plugin of every suite: leaves out the cases of the table, and records how each case ended.

The record is the file in ``CASTORE_STRANGERS_RECORD``, with one JSON object a line: first the chosen cases,
then each case's end as soon as it is known. A chosen case without an end died with its process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tools.strangers.left_out import reason_for

RECORD = "CASTORE_STRANGERS_RECORD"
SUITE = "CASTORE_STRANGERS_SUITE"
#: If set, run only the cases that are left out.
OTHERS = "CASTORE_STRANGERS_LEFT_OUT"
_KEPT = 400


def case_name(nodeid: str) -> str:
    """The name of a case in tables: its node id without the path of its file.

    >>> case_name("tests/test_core.py::TestCache::test_get[0]")
    'TestCache::test_get[0]'
    """
    return nodeid.partition("::")[2] or nodeid


def record(**line: Any) -> None:
    """Add a line to the record."""
    with open(os.environ[RECORD], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the cases, and record the chosen ones and the reasons for the others."""
    suite, others = os.environ[SUITE], OTHERS in os.environ
    reasons = {item: reason_for(suite, case_name(item.nodeid)) for item in items}
    chosen = [item for item in items if (reasons[item] is not None) == others]
    dropped = [item for item in items if item not in set(chosen)]
    record(chosen=[case_name(item.nodeid) for item in chosen])
    for item in dropped:
        if not others:
            record(case=case_name(item.nodeid), end="left out", why=reasons[item])
    config.hook.pytest_deselected(items=dropped)
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record how a case ended: the worst result of its phases."""
    item.stash[_PHASES] = []
    result = yield
    phases = item.stash[_PHASES]
    failed = [why for end, why in phases if end == "failed"]
    skipped = [why for end, why in phases if end == "skipped"]
    if failed:
        record(case=case_name(item.nodeid), end="failed", why=failed[0])
    elif skipped:
        record(case=case_name(item.nodeid), end="left out", why=f"the suite itself skips it: {skipped[0]}")
    elif phases:
        record(case=case_name(item.nodeid), end="passed", why="")
    return result


_PHASES = pytest.StashKey[list[tuple[str, str]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Collect how each phase of a case ended."""
    report = yield
    item.stash[_PHASES].append((report.outcome, _reason(report)))  # type: ignore[attr-defined]
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that cannot be collected as a failed case."""
    if report.failed:
        record(case=report.nodeid, end="failed", why=_reason(report))


def _reason(report: Any) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr or "")
    return f"{report.when}: " * (getattr(report, "when", "call") in ("setup", "teardown")) + message[:_KEPT]
