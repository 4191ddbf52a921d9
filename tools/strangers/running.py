"""Runs a suite in a process of its own, and counts how its cases ended.

A suite writes only into a working folder that is removed afterwards. A case counts as passed only if the
record has that; a chosen case without an end has failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tools.strangers.left_out import LEFT_OUT
from tools.strangers.recording import OTHERS, RECORD, SUITE
from tools.strangers.suites import Suite

ROOT = Path(__file__).parents[2]
#: Seconds for one case; a suite that hangs ends when its cases time out.
CASE_SECONDS = 300
# No suite accesses a hub, no checkout gets a __pycache__, and pytest loads only the plugins named here.
_QUIET = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}  # fmt: skip


class Case(NamedTuple):
    """A case of a suite, its end (``passed``, ``failed`` or ``left out``), and why it did not pass."""

    name: str
    end: str
    why: str


class Result(NamedTuple):
    """The result of a suite.

    Attributes:
        suite: the suite.
        cases: all its cases.
        problem: why the suite did not run, or not as it should; else None.
    """

    suite: Suite
    cases: list[Case]
    problem: str | None

    def count(self, end: str) -> int:
        """How many cases ended in that way."""
        return sum(case.end == end for case in self.cases)

    @property
    def good(self) -> bool:
        """Whether it ran and nothing failed."""
        return self.problem is None and self.count("failed") == 0


def run(
    suite: Suite, repos: Path, *, log: Path, left_out: bool = False, arguments: Iterable[str] = ()
) -> Result:
    """Run a suite from its checkout.

    Args:
        suite: its checkout is complete.
        repos: the folder of the checkouts.
        log: gets the suite's output.
        left_out: run only the cases that are left out.
        arguments: additional ones for pytest.
    """
    with tempfile.TemporaryDirectory(prefix="castore-strangers-") as folder:
        work = Path(folder)
        record = work / "record.jsonl"
        checkout = (repos / suite.folder).resolve()
        environment = {
            **os.environ, **_QUIET, RECORD: str(record), SUITE: suite.name,
            **({OTHERS: "1"} if left_out else {}),
            # castore's root comes first, because checkouts have a `tools` too. castore's `tests` is no
            # package, so the checkout's package wins.
            "PYTHONPATH": f"{ROOT}:{checkout}", "TMPDIR": folder, "HF_HOME": f"{folder}/hf",
            "DATA_JUICER_CACHE_HOME": f"{folder}/data-juicer", "XDG_CACHE_HOME": f"{folder}/cache",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        with log.open("w") as out:
            code = subprocess.run(
                _command(suite, checkout, work, arguments),
                cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                check=False,
            ).returncode  # fmt: skip
        cases = read_cases(record)
    return Result(suite, cases, _problem(suite, cases, code, log, left_out or bool(arguments)))


def _command(suite: Suite, checkout: Path, work: Path, arguments: Iterable[str]) -> list[str]:
    if not suite.tests:
        return [sys.executable, "-m", suite.plugin, str(checkout), *arguments]
    return [
        # Without a cut, pytest looks into every folder beside the checkout and above it.
        sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(checkout),
        "--confcutdir", str(checkout), "--import-mode=importlib",
        "-p", "pytest_timeout", "-p", "tools.strangers.recording", "-p", suite.plugin, "-p",
        "no:cacheprovider",
        f"--basetemp={work}/pytest", f"--timeout={CASE_SECONDS}", "--tb=short", "-q",
        *(str(checkout / test) for test in suite.tests), *arguments,
    ]  # fmt: skip


def read_cases(record: Path) -> list[Case]:
    """The cases of a record, in its order. Chosen cases without an end have failed."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    ends = {line["case"]: Case(line["case"], line["end"], line["why"]) for line in lines if "case" in line}
    chosen = [name for line in lines for name in line.get("chosen", ())]
    lost = [Case(name, "failed", "its process died") for name in chosen if name not in ends]
    return [*ends.values(), *lost]


def _problem(suite: Suite, cases: list[Case], code: int, log: Path, partial: bool) -> str | None:
    # pytest ends with 0, or with 1 if a case failed; any other code means that it did not run.
    if not cases or code not in (0, 1):
        return f"the suite did not run (exit code {code}): see {log}"
    names = [case.name for case in cases]
    stale = [] if partial else [
        pattern for pattern in LEFT_OUT.get(suite.name, {}) if not any(re.fullmatch(pattern,
        name) for name in names)
    ]  # fmt: skip
    if stale:
        return f"left_out.py leaves out {stale[0]!r}, which is no case of this checkout"
    return None
