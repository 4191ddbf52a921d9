"""Rows, contestants and the loop that times them.

Knows nothing of castore or of any peer. May assume that it is alone on the machine. Must never judge by one
run, and never let one contestant find caches that another did not have.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Unit:
    """How seconds become the figure that a row reports.

    `amount` is the work of one run: files, gigabytes or calls. With `rate` the figure is amount per second,
    and more is better. Without, the figure is seconds per piece of work times `scale`, and less is better.
    """

    name: str
    amount: float
    rate: bool = True
    scale: float = 1.0

    def figure(self, seconds: float) -> float:
        return self.amount / seconds if self.rate else seconds / self.amount * self.scale


def per_second(amount: float, name: str) -> Unit:
    """A rate: `per_second(2000, "files/s")`."""
    return Unit(name, amount)


def gigabytes_per_second(size: int) -> Unit:
    return Unit("GB/s", size / 1e9)


def microseconds_each(calls: int) -> Unit:
    return Unit("µs", calls, rate=False, scale=1e6)


def milliseconds() -> Unit:
    return Unit("ms", 1, rate=False, scale=1e3)


def seconds() -> Unit:
    return Unit("s", 1, rate=False)


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Contestant:
    """One way to do a row's work.

    `work` is timed; a float that it returns replaces the measured seconds. `prepare` is not timed and runs
    before every run, before caches are dropped. `packed` are files and folders whose bytes are read into the
    kernel's cache after that: a row without the disk. `ours` is true for castore, false for its peers.
    `skipped` is the reason why this machine cannot run it: the contestant then has a line without figures.
    """

    name: str
    work: Callable[[], float | None]
    prepare: Callable[[], None] = _nothing
    ours: bool = False
    skipped: str = ""
    packed: Sequence[Path] = ()


@dataclass(frozen=True)
class Goal:
    """A contestant's target: `factor` times as good as `against`, or a figure of at most `at_most`."""

    contestant: str
    factor: float = 1.0
    against: str | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Row:
    """One question. Ratios are against `reference`, the name of one of the contestants, if it is given.

    `conclude` makes a study from the row's result.
    """

    name: str
    unit: Unit
    contestants: Sequence[Contestant]
    reference: str | None = None
    cold: bool = False
    goals: Sequence[Goal] = ()
    conclude: Callable[[Result], Study] | None = None


@dataclass(frozen=True)
class Study:
    """A table without contestants: simulated or counted figures, or conclusions from a row.

    The first `labels` columns are words, the others figures. `goals` are sentences of `verdict`. `picture` is
    the name of a file in `Bench.pictures`, and `note` stands below the table.
    """

    name: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    labels: int = 1
    note: str = ""
    goals: Sequence[str] = ()
    picture: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


REACHED, MISSED, NOT_MEASURED = "reached", "**missed**", "*not measured*"


def verdict(reached: bool, what: str) -> str:
    """The sentence for a goal: reached or missed, and by what.

    In `what`, the last colon precedes the figure.
    """
    return f"{REACHED if reached else MISSED}: {what}"


@dataclass(frozen=True)
class Bench:
    """A suite's surroundings: an empty folder of its own, its pictures' folder, and the size of the job."""

    work: Path
    pictures: Path
    quick: bool
    rounds: int

    def size(self, full: int, quick: int) -> int:
        """`full`, or `quick` in a quick run."""
        return quick if self.quick else full


class Suite(Protocol):
    """A module in `tools/bench/suites`.

    `rows` sets up, yields rows and studies, and cleans up when it is closed. A suite that some machines
    cannot run has a function `why_not` as well: the reason, or an empty text.
    """

    TITLE: str
    ABOUT: str

    def rows(self, bench: Bench) -> Iterator[Row | Study]: ...


@dataclass
class Timing:
    """Figures of one contestant, one a round; none if `skipped` gives a reason."""

    name: str
    ours: bool
    figures: list[float] = field(default_factory=list)
    skipped: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.figures)


@dataclass
class Result:
    """A row after its rounds; `skipped` is the reason if there are no figures."""

    name: str
    unit: str
    more_is_better: bool
    cold: bool
    reference: str | None
    timings: list[Timing]
    goals: list[Goal]
    skipped: str = ""

    def ratio(self, name: str, against: str) -> float:
        """How many times as good as `against` the contestant is. Above 1 is better, whatever the unit."""
        mine, other = self.timing(name).median, self.timing(against).median
        return mine / other if self.more_is_better else other / mine

    def timing(self, name: str) -> Timing:
        return next(timing for timing in self.timings if timing.name == name)

    def why_not(self, name: str | None) -> str:
        """The reason why a contestant has no figures; empty if it has some, or if `name` is None."""
        return self.skipped or (self.timing(name).skipped if name is not None else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        timings = [Timing(**timing) for timing in data["timings"]]
        return cls(**{**data, "timings": timings, "goals": [Goal(**goal) for goal in data["goals"]]})


def drop_caches() -> None:
    """Empties the kernel's page, dentry and inode caches. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def measure(row: Row, rounds: int, tick: Callable[[str], None] = lambda _: None) -> Result:
    """Run the contestants of a row in turn, `rounds` times over, and return their figures.

    Args:
        row: The question.
        rounds: Number of runs of each contestant, after one untimed run each if the row is warm.
        tick: Called with the name of each contestant before it runs.
    """
    names = [contestant.name for contestant in row.contestants]
    assert row.reference in (*names, None), f"row {row.name!r} compares with nobody in it"
    result = Result(
        name=row.name,
        unit=row.unit.name,
        more_is_better=row.unit.rate,
        cold=row.cold,
        reference=row.reference,
        timings=[
            Timing(contestant.name, contestant.ours, skipped=contestant.skipped)
            for contestant in row.contestants
        ],
        goals=list(row.goals),
    )
    if row.cold and os.geteuid() != 0:
        result.skipped = "dropping the kernel's caches needs root"
        return result
    # Round 0 warms up.
    for turn in range(1 if row.cold else 0, rounds + 1):
        for contestant in row.contestants:
            timing = result.timing(contestant.name)
            if timing.skipped:
                continue
            tick(f"{contestant.name}, {f'round {turn} of {rounds}' if turn else 'warming'}")
            try:
                figure = row.unit.figure(_run(contestant, cold=row.cold))
            except Exception as error:
                if contestant.ours:
                    raise
                # A peer that fails costs its own figures, not those of the others.
                timing.figures.clear()
                timing.skipped = " ".join(f"it failed: {error}".split())[:300]
                continue
            if turn:
                timing.figures.append(figure)
    return result


def _read_into_cache(path: Path) -> None:
    """Have the kernel's cache hold the bytes of a file, or of all files below a folder."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink():
            with open(file, "rb", buffering=0) as stream:
                while stream.read(1 << 20):
                    continue


def _run(contestant: Contestant, *, cold: bool) -> float:
    """Run once; returns the seconds."""
    contestant.prepare()
    gc.collect()
    if cold:
        drop_caches()
    for path in contestant.packed:
        _read_into_cache(path)
    start = time.perf_counter()
    own = contestant.work()
    elapsed = time.perf_counter() - start
    return elapsed if own is None else own
