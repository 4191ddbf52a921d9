"""Runs a recipe: from its files, through its operators, to the place of the result.

The input is a step like any other: it is read once, kept compressed, and not even opened where the result of
the first operator is known already.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets

from castore.adapters.datasets.background import wait
from castore.adapters.datasets.blame import Blame
from castore.adapters.datasets.disk_space import Estimate
from castore.adapters.datasets.explain import Explanation
from castore.adapters.datasets.pipeline import Pipeline
from castore.adapters.datasets.reports import Progress, StepReport
from castore.adapters.datasets.source_step import (
    dataset_of_key,
    find_kept_input,
    identify_by,
    input_of_units,
    last_input_keys,
    open_input,
    with_files,
)
from castore.adapters.datasets.source_units import DependentFileError, KeptUnit
from castore.recipes import export
from castore.recipes.by_file import find_units
from castore.recipes.mixture import Mixture, find_sources, identify, may_name_files, read
from castore.recipes.noted_files import compare, find_files, find_nearest, note_files
from castore.recipes.recipe import Recipe
from castore.recipes.seen_files import SeenFiles
from castore.recipes.silence import silence
from castore.recipes.source_rows import find_place
from castore.recipes.sources import SAVED, FileIdentity, Source, find
from castore.store import Store


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of running a recipe.

    Attributes:
        project_name: the recipe's project name.
        export_path: the path of the result.
        exported: bytes of the result.
        rows_in, rows_out: rows of the source, and rows of the result.
        seconds: the duration of the whole run.
        steps: one report for each step.
        files: the files of the source.
        files_read: those whose rows were read in this run; all others were kept, or not needed.
        seconds_saved: seconds that reading took of those files whose rows were kept, where that is known.
    """

    project_name: str
    export_path: str
    exported: int
    rows_in: int
    rows_out: int
    seconds: float
    steps: list[StepReport]
    files: int = 0
    files_read: int = 0
    seconds_saved: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON."""
        return {**dataclasses.asdict(self), "steps": [step.to_dict() for step in self.steps]}


@dataclasses.dataclass
class FilesReport:
    """How a run came to the rows of its files: see `Outcome`."""

    files_read: int = 0
    seconds_saved: float = 0.0

    def count(self, kept: Sequence[KeptUnit]) -> None:
        """Count the files of some units."""
        self.files_read = sum(len(unit.rows) for unit in kept if unit.new is not None)
        self.seconds_saved = sum(unit.seconds for unit in kept if unit.new is None)


def make_pipeline(recipe: Recipe, store: Store) -> Pipeline:
    """The pipeline of a recipe.

    Raises:
        InvalidValueError: an operator, or a parameter of one, is wrong.
    """
    return Pipeline(
        recipe.operators(),
        store=store,
        name=recipe.project_name,
        codec=recipe.cache_compress or store.settings.codec,
        use_cache=recipe.use_cache,
        use_checkpoint=recipe.use_checkpoint,
        num_proc=recipe.num_proc if recipe.num_proc > 1 else None,
        temp_dir=recipe.temp_dir,
    )


def find_source(recipe: Recipe) -> Source | Mixture:
    """The files of a recipe.

    Raises:
        NotFoundError, InvalidValueError: the files are missing, of no known kind, or of several kinds.
    """
    parts = recipe.parts()
    return find_sources(parts, recipe.max_sample_num) if parts else find(recipe.dataset_path)


def load_input(recipe: Recipe, pipeline: Pipeline, *, lazy: bool = False) -> datasets.Dataset:
    """The dataset of a recipe's source; with ``lazy``, an uncached dataset too is read at first use.

    Raises:
        NotFoundError, InvalidValueError, OSError: the source is missing, or cannot be read.
    """
    return _open_input(find_source(recipe), recipe, pipeline, lazy=lazy)


def _open_input(
    source: Source | Mixture,
    recipe: Recipe,
    pipeline: Pipeline,
    *,
    lazy: bool,
    report: FilesReport | None = None,
) -> datasets.Dataset:
    return open_source(
        source,
        pipeline.store,
        cached=pipeline.use_cache,
        codec=pipeline.codec,
        temp_dir=recipe.temp_dir,
        lazy=lazy,
        report=report,
    )


def explain(recipe: Recipe, store: Store) -> list[Explanation]:
    """Explain for each step of a recipe whether its result is kept, and if not, what has changed.

    Reads files only to identify them.

    Raises:
        CastoreError, OSError: the recipe is wrong, or its files are missing.
    """
    pipeline = make_pipeline(recipe, store)
    source, seen = find_source(recipe), SeenFiles(store)
    key = identify(source, store, seen=seen)

    def load() -> datasets.Dataset:
        return load_input(recipe, pipeline)

    try:
        dataset: datasets.Dataset = input_of_units(key, find_units(source, seen, store, None), store, load)
    except DependentFileError:
        dataset = find_kept_input(store, key, load) or dataset_of_key(key, load)
    explanations = pipeline.explain(dataset)
    before = find_nearest(store, last_input_keys(store, pipeline.name), source.files, seen)
    return explanations if before is None else with_files(explanations, compare(before, source.files, seen))


def blame(recipe: Recipe, store: Store, row: int) -> Blame:
    """Find out where a row of a recipe's result comes from: file and row, and what each step did to it.

    Reads results that are kept, and runs no step.

    Args:
        recipe: a recipe that was run over the files as they are now.
        store: the store of the run.
        row: the number of the row in the result, from 0.

    Raises:
        InvalidValueError: the recipe keeps no steps, or its result has no such row.
        NotFoundError: the result of the run is not kept.
        CastoreError, OSError: the recipe is wrong, or its files are missing.
    """
    pipeline = make_pipeline(recipe, store)
    source, seen = find_source(recipe), SeenFiles(store)
    key = identify(source, store, seen=seen)
    with silence():

        def load() -> datasets.Dataset:
            return load_input(recipe, pipeline)

        found = pipeline.blame(find_kept_input(store, key, load) or dataset_of_key(key, load), row)
    place = find_place(source, find_files(store, key), found.rows_in)
    return dataclasses.replace(found, source=place)


def estimate(recipe: Recipe, store: Store) -> Estimate:
    """Estimate the disk space that a recipe will take; reads its source.

    Raises:
        CastoreError, OSError: the recipe is wrong, or its files are missing.
    """
    pipeline = make_pipeline(recipe, store)
    with silence():
        return pipeline.estimate_space(load_input(recipe, pipeline))


def run_steps(recipe: Recipe, store: Store) -> None:
    """Have all steps of a recipe in the store, and write no result: one node's part of a run on several.

    Raises:
        CastoreError, OSError: as for `process`.
        Exception: an exception of an operator.
    """
    pipeline = make_pipeline(recipe, store)
    with silence():
        try:
            pipeline.run(_open_input(find_source(recipe), recipe, pipeline, lazy=False))
        finally:
            wait()


def process(
    recipe: Recipe,
    *,
    store: Store | None = None,
    shard: tuple[int, int] | None = None,
    progress: Callable[[Progress], object] | None = None,
    exported: Callable[[int], object] | None = None,
) -> Outcome:
    """Run a recipe.

    Args:
        recipe: the recipe to run.
        store: the store of the steps; by default the recipe's ``ds_cache_dir``, or else the default store.
        shard: the part of the blocks to begin with, where nodes share steps: see `Pipeline.run`.
        progress: a callback that receives the run's progress.
        exported: a function called with the number of rows of each written piece of the result.

    Raises:
        CastoreError, OSError: the recipe is wrong, its files are missing, or the disk is full.
        Exception: an exception of an operator; the steps before that operator are kept.
    """
    began = time.perf_counter()
    export.check_path(recipe.export_path, keep_stats=recipe.keep_stats_in_res_ds)
    if store is None:
        store = Store(recipe.ds_cache_dir, memory=0)
    pipeline = make_pipeline(recipe, store)
    source = find_source(recipe)
    paths = [path for path, _ in recipe.parts()] or [recipe.dataset_path]
    export.check_apart(recipe.export_path, source.files, paths)
    report = FilesReport()
    with silence():
        try:
            # A run that continues after its checkpoint never reads its input.
            dataset = _open_input(source, recipe, pipeline, lazy=pipeline.use_checkpoint, report=report)
            result = pipeline.run(dataset, shard=shard, progress=progress)
            size = export.export(
                result.dataset, recipe.export_path, exported, keep_stats=recipe.keep_stats_in_res_ds
            )
        finally:
            # Wait after a Ctrl-C too: the next run must find the finished steps.
            wait()
    known = result.steps[0].rows_in if result.steps else None
    return Outcome(
        recipe.project_name,
        os.path.abspath(recipe.export_path),
        size,
        len(dataset) if known is None else known,
        len(result.dataset),
        round(time.perf_counter() - began, 3),
        result.steps,
        len(source.files),
        report.files_read,
        round(report.seconds_saved, 6),
    )


def open_source(
    source: Source | Mixture,
    store: Store,
    *,
    cached: bool,
    codec: str,
    temp_dir: str | os.PathLike[str] | None = None,
    identity: FileIdentity = "content",
    lazy: bool = False,
    report: FilesReport | None = None,
) -> datasets.Dataset:
    """The dataset of files, with a fingerprint that identifies them. A stored dataset is read at first use.

    Args:
        source: the files.
        store: the store of the dataset.
        cached: whether the dataset is kept.
        codec: the codec of the kept dataset.
        temp_dir: the folder of the uncompressed dataset while it is used; by default below the store.
        identity: the identity of files: their content, their path (with size and modification time), or both.
        lazy: read an uncached dataset at first use too, for a run that may never use it.
        report: receives the files that were read.

    Raises:
        InvalidValueError, FullError, OSError: see `read`.
    """
    seen = SeenFiles(store)
    key = identify(source, store, identity, seen)
    if isinstance(source, Source) and source.kind == SAVED:
        # Map the dataset where it is: another copy gains nothing.
        return identify_by(key, read(source, ""))

    files_report = FilesReport() if report is None else report

    def read_all(folder: Path) -> datasets.Dataset:
        rows = read(source, folder)
        seen.check(source.files)
        files_report.files_read, files_report.seconds_saved = len(source.files), 0.0
        return rows

    def note(kept: Sequence[KeptUnit]) -> None:
        files_report.count(kept)
        note_files(store, key, source.files, seen, [rows for unit in kept for rows in unit.rows])

    dataset = open_input(
        key,
        read_all,
        store,
        cached=cached,
        codec=codec,
        temp_dir=temp_dir,
        # Files that rows name count, so such rows are read in any case.
        lazy=lazy and not may_name_files(source),
        find_units=lambda folder: find_units(source, seen, store, folder),
        note_units=note,
    )
    if cached and identity != "path":
        note_files(store, key, source.files, seen, None)
    return dataset
