"""Steps in blocks: what a change of the input costs, beside `datasets`, and how that grows with the rows."""

from __future__ import annotations

import itertools
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from castore.adapters.datasets import cached_map, wait
from castore.store import Store
from tools.bench import plots, recipe, textrun, texts
from tools.bench.harness import Bench, Contestant, Goal, Row, Study, seconds, verdict

TITLE = "A change costs its blocks"
ABOUT = (
    "Three maps, a map that measures and a filter (five steps) over text files installed on the machine, one "
    "a row, each run in a process of its own, whose imports do not count. `datasets` has its own cache "
    "beside its input. castore's `Pipeline` ends with every step compressed and stored. Each edit is another "
    "one in every round, so nothing of it was seen before. The rows that change lie side by side at a random "
    "place. Where nothing has changed, each runs once before the time is taken. "
    "The run of one batched map is in the benchmark's process, with a new store each time. "
    "For growth one batched map, said to be row-wise, runs over rows of 40 bytes."
)
_PICTURE = "change.png"
_PLAIN, _OURS = "datasets", "castore Pipeline"
_TWO = ", num_proc=2"
_RECIPE = "text"
_PARTS = (0.0, 0.001, 0.01, 0.1, 0.5, 1.0)
#: Goals: how many times as fast as the first run a run is after a small edit, and after a kill at half.
_SMALL_EDIT, _KILLED = 20, 1.8
#: Kills of one pipeline, and the goal for the rows that run in all, in times its rows.
_KILLS, _KILLED_OFTEN = 50, 1.2
#: The goal for the peak on the disk, in times that of `datasets`.
_PEAK = 0.5


def rows(bench: Bench) -> Iterator[Row | Study]:
    datasets.disable_progress_bars()
    size = bench.size(200, 40) * 10**6
    saved = texts.saved(bench.work.parent / "corpus", size)
    runs = Runs(saved, bench.work)
    yield runs.first(f"first run of five steps over {size // 10**6} MB of text")
    yield _batches(bench, datasets.load_from_disk(saved))
    yield runs.peaks()
    yield from runs.edited(bench)
    yield runs.killed_often(bench)
    yield _growth(bench)


class Runs:
    """Runs of the recipe in new processes.

    Args:
        saved: the input.
        work: an empty folder.
    """

    def __init__(self, saved: Path, work: Path) -> None:
        self._saved = saved
        self._work = work
        self._numbers = itertools.count()

    def _start(self, way: str, source: Path, cache: Path, **more: Any) -> textrun.Process:
        third = recipe.THIRD[_RECIPE][0]
        return textrun.Process(way, _RECIPE, third, source, cache, check=False, **more)

    def first(self, name: str) -> Row:
        """First runs, with one process and with two."""

        def contestant(way: str, num_proc: int | None) -> Contestant:
            folder = self._work / f"first {way} {num_proc}"
            suffix = _TWO if num_proc else ""

            def prepare() -> None:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                texts.copy(self._saved, folder / "input")

            return Contestant(
                (_PLAIN if way == "datasets" else _OURS) + suffix,
                lambda: self._start(way, folder / "input", folder / "cache", num_proc=num_proc).end().seconds,
                prepare,
                ours=way != "datasets",
            )

        ways = [("datasets", None), ("cache", None), ("datasets", 2), ("cache", 2)]
        return Row(
            name,
            seconds(),
            [contestant(*way) for way in ways],
            reference=_PLAIN,
            goals=[Goal(_OURS, 1.0, _PLAIN), Goal(_OURS + _TWO, 1.0, _PLAIN + _TWO)],
        )

    def peaks(self) -> Study:
        """The most that first runs take on the disk, beside their input."""
        lines, most = [], {}
        for way, name in (("datasets", _PLAIN), ("cache", _OURS)):
            folder = self._work / f"peak {way}"
            source = texts.copy(self._saved, folder / "input")
            before = recipe.size_on_disk(folder)
            process = self._start(way, source, folder / "cache")
            most[way] = process.peak(folder) - before
            process.end()
            after = recipe.size_on_disk(folder) - before
            lines.append([name, f"{most[way] / 1e6:.1f}", f"{after / 1e6:.1f}"])
            shutil.rmtree(folder)
        part = most["cache"] / most["datasets"]
        return Study(
            "Disk of a first run, MB beside the input",
            ["", "at most", "at the end"],
            lines,
            note="Files below the folders of the run, seen every 10 ms.",
            goals=[
                verdict(
                    part <= _PEAK,
                    f"peak disk of a first run: at most {_PEAK} times that of datasets: {part:.2f} times",
                )
            ],
        )

    def edited(self, bench: Bench) -> Iterator[Study]:
        """Runs over an input of which a part has changed, and after a kill."""
        table = datasets.load_from_disk(self._saved)
        ours, theirs = self._work / "ours", texts.copy(self._saved, self._work / "theirs")
        first = [self._start("cache", self._saved, ours / "store").end().seconds]
        self._start("datasets", theirs, self._work / "unused").end()
        times: dict[str, dict[str, list[float]]] = {}
        ran: dict[str, list[int]] = {}
        edits = [_part(part) for part in _PARTS] + ["1 % appended", "a row deleted"]
        for _ in range(bench.rounds):
            fresh = self._work / "fresh"
            first.append(self._start("cache", self._saved, fresh / "store").end().seconds)
            shutil.rmtree(fresh)
            for edit in edits:
                source = theirs
                if edit == _part(0):
                    # Else the files of the one would lie in the page cache, and not those of the other.
                    self._start("cache", source, ours / "store").end()
                    self._start("datasets", source, self._work / "unused").end()
                else:
                    source = self._work / f"edit {next(self._numbers)}"
                    changed = _edited(table, edit)
                    changed.save_to_disk(source, num_shards=1)
                found = self._start("cache", source, ours / "store").end()
                plain = self._start("datasets", source, self._work / "unused").end()
                each = times.setdefault(edit, {_PLAIN: [], _OURS: []})
                each[_OURS].append(found.seconds)
                each[_PLAIN].append(plain.seconds)
                ran.setdefault(edit, []).append(len(table) - found.reused[0])
                if source != theirs:
                    shutil.rmtree(source)
            killed = self._killed(statistics.median(first))
            times.setdefault("killed at half", {_PLAIN: [], _OURS: []})[_OURS].append(killed)
        medians = {
            edit: {way: statistics.median(found) if found else None for way, found in each.items()}
            for edit, each in times.items()
        }
        yield self._study(bench, medians, statistics.median(first), ran, len(table))

    def _killed(self, whole: float) -> float:
        """Seconds of a run after one that was killed after half of its time."""
        cache = self._work / "killed" / "store"
        process = self._start("cache", self._saved, cache)
        time.sleep(whole / 2)
        process.kill()
        ended = self._start("cache", self._saved, cache).end().seconds
        shutil.rmtree(cache.parent)
        return ended

    def killed_often(self, bench: Bench) -> Study:
        """The rows that run in all, where the process is killed again and again and goes on each time."""
        kills = 5 if bench.quick else _KILLS
        lines, parts = [], []
        for num_proc in (None, 2):
            folder = self._work / f"killed often {num_proc}"
            folder.mkdir()
            whole, ours = folder / "whole", folder / "ours"
            self._start("cache", self._saved, folder / "undisturbed", counter=whole).end()
            ours.touch()
            rows, killed = whole.stat().st_size, 0
            while True:
                enough = ours.stat().st_size + random.randrange(1, 2 * rows // kills)
                process = self._start("cache", self._saved, folder / "store", counter=ours, num_proc=num_proc)
                while killed < kills and ours.stat().st_size < enough and not process.has_ended():
                    time.sleep(0.001)
                if killed == kills or process.has_ended():
                    process.end()
                    break
                killed += process.kill()
            ran = ours.stat().st_size
            parts.append(ran / rows)
            way = _OURS + (_TWO if num_proc else "")
            lines.append([way, str(killed), f"{rows:,}", f"{ran:,}", f"{ran / rows:.3f}"])
            shutil.rmtree(folder)
        return Study(
            "Rows that run, in all steps, where a pipeline is killed and goes on each time",
            ["", "kills", "rows", "rows run", "times"],
            lines,
            note="SIGKILL after a random number of rows; the run after the last kill ends by itself.",
            goals=[
                verdict(
                    parts[0] <= _KILLED_OFTEN,
                    f"{lines[0][1]} kills: at most {_KILLED_OFTEN} times the rows run: {parts[0]:.2f} times",
                )
            ],
        )

    def _study(
        self, bench: Bench, medians: dict[str, Any], first: float, ran: dict[str, list[int]], count: int
    ) -> Study:
        plots.against_change(
            bench.pictures / _PICTURE,
            _PARTS,
            {way: [medians[_part(part)][way] for part in _PARTS] for way in (_PLAIN, _OURS)},
        )
        lines = []
        for edit, found in medians.items():
            plain, ours = found[_PLAIN], found[_OURS]
            rows_run = f"{round(statistics.median(ran[edit])):,}" if edit in ran else ""
            lines.append(
                [
                    edit,
                    "" if plain is None else f"{plain:.2f}",
                    f"{ours:.2f}",
                    "" if plain is None else f"{plain / ours:.2f}",
                    f"{first / ours:.1f}",
                    rows_run,
                ]
            )
        times = {edit: first / found[_OURS] for edit, found in medians.items()}
        same = medians[_part(0)]
        return Study(
            f"Run again after an edit, {count:,} rows",
            ["edit", "datasets, s", "castore, s", "times as fast", "times castore's first run", "rows run"],
            lines,
            note=f"castore's first run took {first:.2f} s. Killed: SIGKILL after half of that time.",
            goals=[
                verdict(
                    times[edit] >= _SMALL_EDIT,
                    f"{edit}: at least {_SMALL_EDIT} times as fast as the first run: {times[edit]:.1f} times",
                )
                for edit in ("1 % appended", "a row deleted")
            ]
            + [
                verdict(
                    times["killed at half"] >= _KILLED,
                    f"killed at half, and run again: at least {_KILLED:g} times as fast as the first run: "
                    f"{times['killed at half']:.2f} times",
                ),
                verdict(
                    same[_OURS] <= same[_PLAIN],
                    "nothing changed: at most the time of datasets' own cache hit: "
                    f"{same[_PLAIN] / same[_OURS]:.2f} times as fast",
                ),
            ],
            picture=_PICTURE,
        )


def _part(part: float) -> str:
    return "none changed" if not part else f"{100 * part:g} % changed"


def _edited(table: datasets.Dataset, edit: str) -> datasets.Dataset:
    """The input after an edit that was never made before."""
    tag, count = f"\n{random.getrandbits(64)}", len(table)
    if edit == "a row deleted":
        gone = random.randrange(count)
        return table.select([*range(gone), *range(gone + 1, count)])
    appends = edit.endswith("appended")
    length = max(1, round(count * float(edit.partition(" ")[0]) / 100))
    begin = 0 if appends else random.randrange(count - length + 1)
    rows = [{**row, "text": row["text"] + tag} for row in table.select(range(begin, begin + length))]
    made = datasets.Dataset.from_list(rows, features=table.features)
    if appends:
        return datasets.concatenate_datasets([table, made])
    before, behind = range(begin), range(begin + length, count)
    around = [table.select(places) if places else None for places in (before, behind)]
    parts = [part for part in (around[0], made, around[1]) if part is not None]
    return datasets.concatenate_datasets(parts)


# --- batches ------------------------------------------------------------------------------------------------


def _batches(bench: Bench, rows: datasets.Dataset) -> Row:
    """First runs of one function of batches, in one process."""
    folder = bench.work / "batches"

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    def plain() -> None:
        rows.map(_words, batched=True, load_from_cache_file=False, cache_file_name=f"{folder}/rows.arrow")

    def ours() -> None:
        with Store(folder / "store", memory=0) as store:
            cached_map(rows, _words, batched=True, store=store)
            wait()

    size = round(sum(pc.binary_length(chunk).sum().as_py() for chunk in rows.data["text"].chunks) / 1e6)
    return Row(
        f"first run of one batched map, the length of each word in {size} MB of text",
        seconds(),
        [Contestant(_PLAIN, plain, prepare), Contestant("castore cached_map", ours, prepare, ours=True)],
        reference=_PLAIN,
    )


def _words(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"words": [[len(word) for word in text.split()] for text in batch["text"]]}


# --- growth -------------------------------------------------------------------------------------------------


def _growth(bench: Bench) -> Study:
    sizes = [10**power for power in (range(4, 6) if bench.quick else range(4, 8))]
    found: dict[str, list[float]] = {
        "first run": [], "again, nothing changed": [], "1 % appended": [], "a row deleted": [],
    }  # fmt: skip
    for size in sizes:
        with Store(bench.work / f"growth {size}", memory=0) as store:
            for what, times in found.items():
                rounds = 1 if what == "first run" else bench.rounds
                times.append(statistics.median(_timed(store, _numbers(size, what)) for _ in range(rounds)))
        shutil.rmtree(bench.work / f"growth {size}")
    lines = [
        [what, *(f"{figure:.3g}" for figure in figures), f"{figures[-1] / figures[0]:.0f}"]
        for what, figures in found.items()
    ]
    return Study(
        "One row-wise map as the rows grow, s",
        ["", *(f"{size:,} rows" for size in sizes), "last by first"],
        lines,
        note="In one process, with the time to read, cut and hash the input. Up to 2,500 rows are one block.",
    )


def _timed(store: Store, table: pa.Table) -> float:
    data = datasets.Dataset(table)
    began = time.perf_counter()
    cached_map(data, _longer, batched=True, rowwise=True, store=store)
    return time.perf_counter() - began


def _longer(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"length": [len(text) for text in batch["text"]]}


def _numbers(size: int, edit: str) -> datasets.table.Table:
    """Rows of a number and a text of 32 letters, edited."""
    numbers = np.arange(size, dtype=np.int64)
    if edit == "a row deleted":
        numbers = np.delete(numbers, random.randrange(size))
    elif edit == "1 % appended":
        begin = random.getrandbits(40) + size
        numbers = np.concatenate([numbers, np.arange(begin, begin + size // 100)])
    texts_of = pc.binary_join_element_wise(
        pc.cast(pa.array(numbers * 2654435761 % (1 << 61)), pa.string()), "abcdefghijklmno", "-"
    )
    return datasets.table.InMemoryTable(pa.table({"number": numbers, "text": texts_of}))
