"""Five steps over much text: run, run again, changed, killed and resumed.

Each result is compared with that of plain `datasets`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.bench import longrun
from tools.bench.harness import Bench, Study, verdict

TITLE = "A pipeline over much text"
ABOUT = (
    "Three maps, a map that measures and a filter (five steps) over text files installed on the machine, "
    "each run in a process of its own, once; its imports do not count. Killed means SIGKILL at a random "
    "point of the work, before the run that is shown. Equal means that features and all rows are those of "
    "plain `datasets` in the same order. Plain `datasets` ran once with an empty cache; castore's first run "
    "also compresses every step, and has everything stored when it ends."
)


def rows(bench: Bench) -> Iterator[Study]:
    size = bench.size(200, 10) * 10**6
    found = list(longrun.stages(bench.work, bench.work.parent / "corpus", size, random.Random()))
    plain = found[0].plain
    lines = [["plain `datasets`, first run", f"{plain.seconds:.2f} s", "", "", ""]]
    lines += [
        [
            stage.name,
            f"{stage.ran.seconds:.2f} s",
            f"{sum(stage.ran.hits)} of {longrun.STEPS}",
            "yes" if stage.equal else "**no**",
            stage.note,
        ]
        for stage in found
    ]
    yield Study(
        f"Five steps over {size // 10**6} MB of text, {plain.rows} documents left at the end",
        ["run", "time", "steps not run", "equal to plain", "remarks"],
        lines,
        goals=[
            verdict(all(stage.equal for stage in found), "every result is that of plain `datasets`"),
            verdict(
                all(stage.as_wanted for stage in found),
                "every run runs the steps that it has to, and no others",
            ),
        ],
    )
