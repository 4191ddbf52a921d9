"""The command of `make strangers`: runs the suites whose checkouts are there, and names the missing ones."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from pathlib import Path

from tools.strangers.running import ROOT, Result, run
from tools.strangers.suites import SUITES, missing
from tools.strangers.table import as_json, as_text, write


def main(arguments: list[str] | None = None) -> int:
    """Run the suites; returns 0 if all ran and nothing failed."""
    parser = argparse.ArgumentParser(prog="make strangers REPOS=DIR", description=__doc__)
    parser.add_argument("repos", type=Path, help="the folder of the checkouts")
    parser.add_argument(
        "--only", action="append", choices=[suite.name for suite in SUITES], help="run this suite"
    )
    parser.add_argument("--json", action="store_true", help="print every case as JSON")
    parser.add_argument(
        "--left-out", action="store_true", help="run what is left out: does some of it pass by now?"
    )
    parser.add_argument("--page", type=Path, help="write the counts into this page")
    parser.add_argument(
        "--logs", type=Path, default=ROOT / ".strangers", help="folder for the suites' own words"
    )
    given, more = parser.parse_known_args(arguments)
    given.logs.mkdir(exist_ok=True)
    results = []
    for suite in SUITES:
        if given.only and suite.name not in given.only:
            continue
        problem = missing(suite, given.repos)
        if problem is not None:
            results.append(Result(suite, [], problem))
            continue
        print(f"{suite.name}: {suite.shows} …", file=sys.stderr, flush=True)
        log = given.logs / f"{suite.name.replace(', ', '-')}.log"
        results.append(run(suite, given.repos, log=log, left_out=given.left_out, arguments=more))
    print(as_json(results) if given.json else as_text(results))
    if given.page is not None:
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        write(
            given.page,
            [result for result in results if result.cases],
            f"{today}, {os.cpu_count()} cores, Python {platform.python_version()}",
        )
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
