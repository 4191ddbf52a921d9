"""A pipeline of five steps over much text, as it goes in life: run, run again, changed, killed and resumed.

Each stage is a process of its own, and each result is compared with that of plain `datasets`. `make bench` shows it over 200 MB; the
tests over a little.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.bench import recipe, texts
from tools.bench.textrun import Process, Ran

STEPS = 5
_RECIPE = "text"
# As parts of an uninterrupted run: earlier there is nothing to resume, later nothing to do.
_KILLED = (0.25, 0.9)


class Stage(NamedTuple):
    """One thing that happened.

    Attributes:
        name: what.
        ran: what the run that finished tells.
        plain: what plain `datasets` tells of the same rows.
        note: when it was killed.
        wanted: what its steps' hits should be; None for any number from the first step on.
    """

    name: str
    ran: Ran
    plain: Ran
    note: str = ""
    wanted: list[bool] | None = None

    @property
    def equal(self) -> bool:
        """Whether the rows are those of plain `datasets`."""
        return self.ran.digest == self.plain.digest and self.ran.rows == self.plain.rows > 0

    @property
    def as_wanted(self) -> bool:
        """Whether the steps that should have run have run, and no others."""
        hits = self.ran.hits
        if self.wanted is not None:
            return hits == self.wanted
        return len(hits) == STEPS and hits == sorted(hits, reverse=True)


def stages(work: Path, corpus: Path, size: int, rng: random.Random) -> Iterator[Stage]:
    """Runs them one after the other.

    Args:
        work: an empty folder.
        corpus: where the texts are, or are put.
        size: bytes of text.
        rng: when to kill.
    """
    saved = texts.saved(corpus, size)
    theirs, ours = texts.copy(saved, work / "plain"), texts.copy(saved, work / "input")
    first, changed = recipe.THIRD[_RECIPE]
    plain = {
        third: Process("datasets", _RECIPE, third, theirs, work / "unused").end()
        for third in (first, changed)
    }

    def stage(name: str, way: str, third: int, wanted: list[bool]) -> Stage:
        ran = Process(way, _RECIPE, third, ours, work / way).end()
        return Stage(name, ran, plain[third], "; ".join(ran.warned), wanted)

    for way in ("cache", "checkpoint"):
        begun = stage(f"{way}: first run", way, first, [False] * STEPS)
        yield begun
        yield stage(f"{way}: run again", way, first, [True] * STEPS)
        kept = [way == "cache"] * 2
        yield stage(f"{way}: step 3 changed", way, changed, [*kept, False, False, False])
        shutil.rmtree(work / way)
        note = _kill(way, begun.ran.seconds, ours, work / way, rng)
        ran = Process(way, _RECIPE, first, ours, work / way).end()
        yield Stage(f"{way}: killed, then resumed", ran, plain[first], note)


def _kill(way: str, seconds: float, source: Path, cache: Path, rng: random.Random) -> str:
    """Has a run killed at a random point."""
    after = rng.uniform(*_KILLED) * seconds
    process = Process(way, _RECIPE, recipe.THIRD[_RECIPE][0], source, cache, check=False)
    time.sleep(after)
    return f"killed after {after:.1f} s" if process.kill() else "had ended before it was killed"
