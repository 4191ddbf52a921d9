"""`make torture`: the long form of tests/torture, and whole matrices, with the figures in
docs/reliability.md.

Each test that ran gets a new row, with the figures that it printed. The rows of other tests stay, so that a
part can be run alone (ARGS="-k soak"). Failures are written as plainly as figures. Each row is written as
soon as its test ends: a run that hangs loses none of the earlier rows.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / "docs" / "reliability.md"
_BLOCK = re.compile(r"(?<=<!-- torture -->\n).*?(?=<!-- /torture -->)", re.DOTALL)
_HEAD = "| shown by | figures | on |\n|---|---|---|\n"


class Figures:
    """A pytest plugin that writes the figures that each test recorded, and its outcome, into a page."""

    def __init__(self, page: Path, on: str) -> None:
        self._page = page
        self._on = on

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            return
        name = report.nodeid.rpartition("::")[2]
        figures = [str(value) for key, value in report.user_properties if key == "figure"]
        if report.failed:
            figures.append("**failed**" if report.when == "call" else f"**failed** in its {report.when}")
        if figures and (report.when == "call" or report.failed):
            write(self._page, name, "; ".join(figures), self._on)


def write(page: Path, name: str, figures: str, on: str) -> None:
    """Put a row into the page's table, in place of that test's earlier row."""
    text = page.read_text()
    found = _BLOCK.search(text)
    assert found is not None, f"{page} has lost its markers"
    rows = dict(re.findall(r"^\| `(.*?)` (\|.*\|)$", found[0], re.MULTILINE))
    rows[name] = f"| {figures.replace('|', '/')} | {on} |"
    table = _HEAD + "".join(f"| `{name}` {rest}\n" for name, rest in sorted(rows.items()))
    page.write_text(text[: found.start()] + table + text[found.end() :])


def main(arguments: list[str]) -> int:
    """Run the tests and write the page; returns pytest's exit code."""
    os.chdir(_ROOT)
    os.environ["CASTORE_TORTURE"] = "long"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    where = (
        f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python "
        f"{platform.python_version()}"
    )
    figures = Figures(_PAGE, f"{today}, {where}")
    chosen = ["tests", "-m", "torture or matrix", "-v", "-o", "faulthandler_timeout=0"]
    return int(pytest.main([*chosen, *arguments], plugins=[figures]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
