"""The output of `make strangers` as a table or JSON, and its block in docs/reliability.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from tools.strangers.running import Result

_BLOCK = re.compile(r"(?<=<!-- strangers -->\n).*?(?=<!-- /strangers -->)", re.DOTALL)
_HEAD = "| suite | what stands in | passed | failed | left out |\n|---|---|---|---|---|\n"


def as_json(results: list[Result]) -> str:
    """Every case of every suite, with its end and the reason."""
    return json.dumps(
        [
            {
                "suite": result.suite.name,
                "problem": result.problem,
                **{end: result.count(end) for end in ("passed", "failed", "left out")},
                "cases": [case._asdict() for case in result.cases],
            }
            for result in results
        ],
        indent=1,
    )


def as_text(results: list[Result]) -> str:
    """Counts, then the failures, then the reasons of the cases left out."""
    lines = [f"{'suite':16}{'passed':>8}{'failed':>8}{'left out':>10}"]
    for result in results:
        counts = [result.count(end) for end in ("passed", "failed", "left out")]
        lines.append(f"{result.suite.name:16}{counts[0]:8}{counts[1]:8}{counts[2]:10}")
    for result in results:
        if result.problem is not None:
            lines += ["", f"{result.suite.name}: {result.problem}"]
        failed = [case for case in result.cases if case.end == "failed"]
        if failed:
            lines += ["", f"{result.suite.name}, failed:"]
            lines += [f"  {case.name}: {case.why.splitlines()[0] if case.why else ''}" for case in failed]
        reasons = _reasons(result)
        if reasons:
            lines += ["", f"{result.suite.name}, left out:"]
            lines += [f"  {count:4}  {why}" for why, count in reasons.most_common()]
    return "\n".join(lines)


def _reasons(result: Result) -> Counter[str]:
    return Counter(case.why for case in result.cases if case.end == "left out")


def write(page: Path, results: list[Result], on: str) -> None:
    """Put the rows of these suites into a page's table, between its markers; rows of other suites stay."""
    text = page.read_text()
    found = _BLOCK.search(text)
    if found is None:
        raise ValueError(f"{page} has lost its markers <!-- strangers -->")
    rows = {row.split("|")[1].strip(): row for row in re.findall(r"^\| .*\|$", found[0], re.MULTILINE)[1:]}
    for result in results:
        counts = " | ".join(str(result.count(end)) for end in ("passed", "failed", "left out"))
        rows[result.suite.name] = f"| {result.suite.name} | {result.suite.shows} ({on}) | {counts} |"
    page.write_text(text[: found.start()] + _HEAD + "\n".join(rows.values()) + "\n" + text[found.end() :])
