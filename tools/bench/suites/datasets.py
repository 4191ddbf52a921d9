"""Hugging Face datasets: castore's cached steps beside `datasets`' own cache, on disk and in time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from castore.adapters.datasets import DatasetCache, cached_map, operator_fingerprint, wait
from castore.adapters.datasets.mapped_files import COPIES_FOLDER
from castore.gc.collect import remove_blobs
from castore.store import Store
from tools.bench import recipe, textrun, texts
from tools.bench.harness import Bench, Contestant, Goal, Row, Study, milliseconds, seconds, verdict
from tools.bench.peers import Mount, run

TITLE = "Hugging Face datasets"
ABOUT = (
    "Text files installed on the machine, one a row. The five steps are three maps, a map that measures and "
    "a filter; the recipe for token ids has a tokenizer with 50 000 pieces (int32) for its third step. "
    "`datasets` runs `map` and `filter` with its own cache, uncompressed Arrow files beside its input; "
    "castore runs the same calls as `cached_map` and `cached_filter`, or the same steps as a `Pipeline`. All "
    "of them give the same rows. A rerun opens the saved input, hashes the operators, and ends with the "
    "first row of the last step; imports and closing the store do not count; 1.2 times the time is a ratio "
    "of 0.834. castore decodes the first rows of a step, and one pass over it, where they are; for whatever "
    "else is asked it maps the step, which without a mount it decompresses for that once: `and its last row` "
    "is that time, and `mapped before` says where it was done already. Through a mount nothing is "
    "decompressed but what is read. `first batch` is of one map; the compressed file is in the page cache, "
    "mounts are put up anew. `Hasher` is what `datasets` hashes functions with."
)
_PLAIN, _CALLS, _PIPELINE = (
    "datasets, its cache warm",
    "castore cached_map, cached_filter",
    "castore Pipeline",
)
_UNMAPPED, _MOUNTED = "castore Pipeline, not yet mapped", "castore Pipeline, through a mount"
_LAST = "castore Pipeline, not yet mapped, and its last row"
# The goal is at most 1.2 times the time of `datasets`.
_NEAR = 0.834
_SMALLER = 0.3
_STEPS = {
    "text": ["map", "map", "map", "map that measures", "filter"],
    "tokens": ["map", "map", "map to token ids", "map that measures", "filter"],
}


def rows(bench: Bench) -> Iterator[Row | Study]:
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = bench.work / "hugging-face"
    corpus, size = bench.work.parent / "corpus", bench.size(200, 10) * 10**6
    saved = texts.saved(corpus, size)
    for name in recipe.THIRD:
        with ExitStack() as stack:
            steps = Steps(name, saved, bench.work / name)
            yield steps.space(f"{size // 10**6} MB of text")
            mounted = steps.mount(bench.work / name / "mount", stack)
            yield steps.in_one_process(f"all-hit rerun, {name}, in one process")
            yield steps.in_processes(f"all-hit rerun, {name}, in a new process", mounted)
        shutil.rmtree(bench.work / name)
    with ExitStack() as stack:
        size = bench.size(1000, 64) * 10**6
        yield _first_batch(
            bench.work / "batch", texts.saved(corpus, size), f"first batch of {size // 10**6} MB", stack
        )
    shutil.rmtree(bench.work / "batch")
    yield from _hashing(bench.size(400, 40) * 10**6)


class Steps:
    """A recipe that has been run in all ways, so that each way has its cache.

    Args:
        name: of the recipe.
        saved: the input.
        folder: for the caches; it is created.
    """

    def __init__(self, name: str, saved: Path, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._third = recipe.THIRD[name][0]
        folder.mkdir()
        self._theirs, self._ours = texts.copy(saved, folder / "plain"), texts.copy(saved, folder / "input")
        self._chain = recipe.operators(name, self._third, lambda: textrun.documents(saved))
        ran = [self._process(way, self._cache(way)).end() for way in ("datasets", "calls", "cache")]
        if len({(each.rows, each.digest) for each in ran}) > 1:
            raise RuntimeError(f"castore's result is not that of plain datasets: {ran}")

    def _cache(self, way: str) -> Path:
        return self._folder / way / "store"

    def _process(self, way: str, cache: Path, *, check: bool = True, last: bool = False) -> textrun.Process:
        source = self._theirs if way == "datasets" else self._ours
        return textrun.Process(way, self._name, self._third, source, cache, check=check, last=last)

    def space(self, label: str) -> Study:
        """Disk space of the caches, step by step before any rerun, and after one."""
        files = sorted(self._theirs.glob("cache-*.arrow"), key=lambda file: file.stat().st_mtime_ns)
        theirs = [file.stat().st_size for file in files]
        calls, before = recipe.size_on_disk(self._cache("calls")), recipe.size_on_disk(self._cache("cache"))
        rerun = self._process("cache", self._cache("cache"), check=False).end()
        after, total = (
            recipe.size_on_disk(self._cache("cache")),
            recipe.size_on_disk(self._theirs, "cache-*.arrow"),
        )
        self._process("cache", self._cache("cache"), check=False, last=True).end()
        mapped = recipe.size_on_disk(self._cache("cache"))
        _forget_maps(self._cache("cache"))
        lines = [
            [f"step {number}: {what}", *_sizes(ours, plain)]
            for number, (what, ours, plain) in enumerate(
                zip(_STEPS[self._name], rerun.stored, theirs, strict=True), 1
            )
        ]
        found = {
            _PIPELINE: before,
            _CALLS: calls,
            f"{_PIPELINE}, after a rerun": after,
            f"{_PIPELINE}, last step mapped without a mount": mapped,
        }
        lines += [[f"**all on disk: {way}**", *_sizes(size, total)] for way, size in found.items()]
        return Study(
            f"Disk that the cache takes after five steps: {self._name}, from {label}",
            ["", "castore", "datasets", "ratio"],
            lines,
            note="Of a filter `datasets` keeps the numbers of the rows, castore the rows. To be mapped "
            "without a mount, a step is decompressed into the store once; gc takes that copy first.",
            goals=[
                verdict(
                    size <= _SMALLER * total,
                    f"disk after five steps, {self._name}: {way}, at most {_SMALLER:g} "
                    f"times datasets': {size / total:.3f} times",
                )
                for way, size in found.items()
            ],
        )

    def mount(self, root: Path, stack: ExitStack) -> Path:
        """Mount a copy of the Pipeline's store, with nothing in it decompressed."""
        store = self._folder / "mounted" / "store"
        shutil.copytree(self._cache("cache"), store)
        _forget_maps(store)
        stack.enter_context(Mount.of_store(store, root))
        return store

    def in_one_process(self, name: str) -> Row:
        """Reruns in this process, where everything is imported and cached."""

        def again(way: str) -> float:
            source = self._theirs if way == "datasets" else self._ours
            ran = textrun.run(way, self._chain, source, self._cache(way), check=False)
            if not all(ran.hits):
                raise RuntimeError(f"a rerun of {way} was to come from the cache: {ran}")
            return ran.seconds

        return Row(
            name,
            milliseconds(),
            [
                Contestant(_PLAIN, partial(again, "datasets")),
                Contestant(_CALLS, partial(again, "calls"), ours=True),
                Contestant(_PIPELINE, partial(again, "cache"), ours=True),
            ],
            reference=_PLAIN,
            goals=[Goal(way, _NEAR, _PLAIN) for way in (_CALLS, _PIPELINE)],
        )

    def in_processes(self, name: str, mounted: Path) -> Row:
        """Reruns in a process of their own each, as a script that is run again."""

        def again(way: str, cache: Path, last: bool = False) -> float:
            ran = self._process(way, cache, check=False, last=last).end()
            if not all(ran.hits):
                raise RuntimeError(f"a rerun of {way} was to come from the cache: {ran}")
            return ran.seconds

        def unmapped() -> None:
            _forget_maps(ours)
            os.sync()

        ours = self._cache("cache")
        ways = [
            (_PLAIN, "datasets", self._cache("datasets"), os.sync),
            (_CALLS, "calls", self._cache("calls"), os.sync),
            (_PIPELINE, "cache", ours, os.sync),
            (_MOUNTED, "cache", mounted, os.sync),
            (_LAST, "cache", ours, unmapped),
            (_UNMAPPED, "cache", ours, unmapped),
        ]
        return Row(
            name,
            milliseconds(),
            # One way writes a whole step. Without `sync` the next way would pay for writing that back.
            [
                Contestant(label, partial(again, way, cache, label == _LAST), prepare, ours=way != "datasets")
                for label, way, cache, prepare in ways
            ],
            reference=_PLAIN,
            goals=[Goal(way, _NEAR, _PLAIN) for way in (_CALLS, _PIPELINE, _MOUNTED, _UNMAPPED)],
        )


def _sizes(ours: int, theirs: int) -> list[str]:
    return [f"{ours / 1e6:.1f} MB", f"{theirs / 1e6:.1f} MB", f"{ours / theirs:.3f}"]


def _forget_maps(folder: Path) -> None:
    """Remove the steps that were decompressed for mapping from a store, as gc does."""
    with Store(folder) as store:
        maps = list(store.entries(COPIES_FOLDER))
        store.delete_many(entry.name for entry in maps)
        remove_blobs(store.parts, [bytes.fromhex(entry.digest) for entry in maps])


# --- first batch --------------------------------------------------------------------------------------------

_TOOL = "zstd -d, then Dataset.from_file"
_STREAM, _HIT, _HIT_MOUNTED = (
    "castore DatasetCache.stream",
    "castore cached_map, mapped before",
    "castore cached_map, through a mount",
)
_HIT_UNMAPPED = "castore cached_map, not yet mapped"
_ROWS = 32


def _first_batch(folder: Path, source: Path, name: str, stack: ExitStack) -> Row:
    folder.mkdir()
    plain, packed, unpacked = folder / "plain.arrow", folder / "packed.zst", folder / "unpacked.arrow"
    dataset = datasets.load_from_disk(source)
    expected = dataset.map(recipe.strip_lines, cache_file_name=str(plain))[:_ROWS]
    run("zstd", "-3", "-T0", "-q", plain, "-o", packed)
    plain.unlink()
    with Store(folder / "store") as store:
        cached_map(dataset, recipe.strip_lines, store=store)
        wait()
        step = next(entry.name.rpartition("/")[0] for entry in store.entries("steps"))
    shutil.copytree(folder / "store", folder / "mounted")
    mount = stack.enter_context(Mount.of_store(folder / "mounted", folder / "mount"))

    def check(batch: dict[str, Any]) -> None:
        if {column: list(batch[column]) for column in expected} != expected:
            raise RuntimeError("a first batch is not what was mapped")

    def decompress() -> None:
        run("zstd", "-d", "-q", packed, "-o", unpacked)
        check(datasets.Dataset.from_file(str(unpacked))[:_ROWS])

    def hit(place: Path) -> None:
        with Store(place) as store:
            check(cached_map(datasets.load_from_disk(source), recipe.strip_lines, store=store)[:_ROWS])

    def stream() -> None:
        with Store(folder / "store") as store:
            check(next(iter(DatasetCache(store).stream(step).iter(_ROWS))))

    def afresh() -> None:
        unpacked.unlink(missing_ok=True)
        os.sync()  # the write-back of the previous contestant's pages is not measured

    def remounted() -> None:
        mount.again()
        os.sync()

    def unmapped() -> None:
        _forget_maps(folder / "store")
        os.sync()

    def mapped() -> None:
        with Store(folder / "store") as store:
            cached_map(dataset, recipe.strip_lines, store=store)[len(dataset) - 1]
        os.sync()

    return Row(
        name,
        milliseconds(),
        [
            Contestant(_TOOL, decompress, afresh),
            Contestant(_STREAM, stream, os.sync, ours=True),
            Contestant(_HIT_MOUNTED, partial(hit, folder / "mounted"), remounted, ours=True),
            Contestant(_HIT_UNMAPPED, partial(hit, folder / "store"), unmapped, ours=True),
            Contestant(_HIT, partial(hit, folder / "store"), mapped, ours=True),
        ],
        reference=_TOOL,
        goals=[Goal(way, 5, _TOOL) for way in (_STREAM, _HIT_MOUNTED, _HIT_UNMAPPED, _HIT)],
    )


# --- hashing ------------------------------------------------------------------------------------------------

_OURS, _THEIRS = "castore operator_fingerprint", "datasets Hasher.hash"


def _hashing(size: int) -> Iterator[Row]:
    from datasets.fingerprint import Hasher

    rng = np.random.default_rng(20_26)
    operator: list[Callable[..., Any]] = []

    def new() -> None:
        operator[:] = [_closing_over(rng.random(size // 4, dtype=np.float32))]

    new()
    for name, prepare in (("for the first time", new), ("again", lambda: None)):
        yield Row(
            f"hashing an operator with {size // 10**6} MB of array, {name}",
            seconds(),
            [
                Contestant(_THEIRS, lambda: _ignore_result(Hasher.hash(operator[0])), prepare),
                Contestant(
                    _OURS, lambda: _ignore_result(operator_fingerprint(operator[0])), prepare, ours=True
                ),
            ],
            reference=_THEIRS,
            goals=[Goal(_OURS, 1, _THEIRS)],
        )


def _closing_over(array: np.ndarray[Any, Any]) -> Callable[..., Any]:
    def operator(sample: dict[str, Any]) -> dict[str, Any]:
        return {"weight": float(array[len(sample["text"]) % len(array)])}

    return operator


def _ignore_result(_: object) -> None:
    """Drop a call's result: a work function that returns a number would replace its own time."""
