"""A pipeline of five steps over much text, as users run it: run, run again, changed, killed and resumed.

Each stage is a process of its own, and each result is compared with that of plain `datasets`. `make bench`
runs it over 200 MB; the tests run it over less.
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
# Parts of an uninterrupted run: earlier there is nothing to resume, later nothing left to do.
_KILLED = (0.25, 0.9)


class Stage(NamedTuple):
    """One run of the pipeline.

    Attributes:
        name: of the stage.
        ran: the figures of the run that finished.
        plain: the figures of plain `datasets` for the same rows.
        note: when the run was killed.
        wanted: the hits that its steps should have; None for any number of hits from the first step on.
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
        """Whether exactly the steps that should have run have run."""
        hits = self.ran.hits
        if self.wanted is not None:
            return hits == self.wanted
        return len(hits) == STEPS and hits == sorted(hits, reverse=True)


def stages(work: Path, corpus: Path, size: int, rng: random.Random) -> Iterator[Stage]:
    """Run the stages one after the other.

    Args:
        work: an empty folder.
        corpus: the folder of the texts, which are made if they are missing.
        size: bytes of text.
        rng: chooses the moments of the kills.
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
    """Start a run, and kill it at a random point."""
    after = rng.uniform(*_KILLED) * seconds
    process = Process(way, _RECIPE, recipe.THIRD[_RECIPE][0], source, cache, check=False)
    time.sleep(after)
    return f"killed after {after:.1f} s" if process.kill() else "had ended before it was killed"
