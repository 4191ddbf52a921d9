"""A pipeline of five steps over much text, as users run it: run, run again, changed, killed and resumed, and
over an input that has changed.

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

import datasets

from tools.bench import recipe, texts
from tools.bench.textrun import Process, Ran

STEPS = 5
#: Ways to keep the results of steps.
WAYS = ("cache", "checkpoint")
#: Edits of the input, with their names for people.
EDITS = {"append": "1 % of the rows appended", "delete": "a row in the middle deleted"}
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


def stages(
    work: Path,
    corpus: Path,
    size: int,
    rng: random.Random,
) -> Iterator[Stage]:
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

    for way in WAYS:
        begun = stage(f"{way}: first run", way, first, [False] * STEPS)
        yield begun
        yield stage(f"{way}: run again", way, first, [True] * STEPS)
        kept = [way == "cache"] * 2
        yield stage(f"{way}: step 3 changed", way, changed, [*kept, False, False, False])
        if way == "cache":
            for edit, name in EDITS.items():
                yield _edited(work, saved, edit, name)
        shutil.rmtree(work / way)
        note = _kill(way, begun.ran.seconds, ours, work / way, rng)
        ran = Process(way, _RECIPE, first, ours, work / way).end()
        yield Stage(f"{way}: killed, then resumed", ran, plain[first], note)


def _edited(work: Path, saved: Path, edit: str, name: str) -> Stage:
    """A run over an edited input, by plain `datasets` and by castore, which knows the input as it was."""
    rows = datasets.load_from_disk(saved)
    if edit == "append":
        more = [
            {**row, "text": f"{row['text']}\n{number}"}
            for number, row in enumerate(rows.take(max(1, len(rows) // 100)))
        ]
        rows = datasets.concatenate_datasets([rows, datasets.Dataset.from_list(more, features=rows.features)])
    else:
        rows = rows.select([number for number in range(len(rows)) if number != len(rows) // 2])
    rows.save_to_disk(work / edit, num_shards=1)
    third = recipe.THIRD[_RECIPE][0]
    ran = Process("cache", _RECIPE, third, work / edit, work / "cache").end()
    plain = Process("datasets", _RECIPE, third, work / edit, work / "unused").end()
    note = f"{len(rows) - ran.reused[0]:,} of {len(rows):,} rows ran; plain {plain.seconds:.2f} s"
    return Stage(f"cache: {name}", ran, plain, note, [False] * STEPS)


def _kill(way: str, seconds: float, source: Path, cache: Path, rng: random.Random) -> str:
    """Start a run, and kill it at a random point."""
    after = rng.uniform(*_KILLED) * seconds
    process = Process(way, _RECIPE, recipe.THIRD[_RECIPE][0], source, cache, check=False)
    time.sleep(after)
    return f"killed after {after:.1f} s" if process.kill() else "had ended before it was killed"
