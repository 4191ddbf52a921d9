"""Running a recipe: from its files, through its operators, to where the result goes.

The input is a step like any other: read once, kept compressed, and not even looked at where the first
operator's result is known already.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import datasets

from castore.adapters.datasets import Estimate, Explanation, Pipeline, Progress, StepReport, wait
from castore.adapters.datasets.source_step import open_input, told_by, unread
from castore.recipes import export
from castore.recipes.mixture import Mixture, identify, mixed, read
from castore.recipes.quiet import quiet
from castore.recipes.recipe import Recipe
from castore.recipes.sources import SAVED, Source, Telling, find
from castore.store import Store


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a recipe.

    Attributes:
        project_name: the recipe's.
        export_path: where the result is.
        exported: its bytes.
        rows_in, rows_out: of the source, and of the result.
        seconds: all it took.
        steps: one report for each.
    """

    project_name: str
    export_path: str
    exported: int
    rows_in: int
    rows_out: int
    seconds: float
    steps: list[StepReport]

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON."""
        return dataclasses.asdict(self)


def pipeline_of(recipe: Recipe, store: Store) -> Pipeline:
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


def source_of(recipe: Recipe) -> Source | Mixture:
    """The files of a recipe.

    Raises:
        NotFoundError, InvalidValueError: they are not there, or cannot be told apart.
    """
    parts = recipe.parts()
    return mixed(parts, recipe.max_sample_num) if parts else find(recipe.dataset_path)


def input_of(recipe: Recipe, pipeline: Pipeline, *, late: bool = False) -> datasets.Dataset:
    """The dataset of a recipe's source; ``late``: one that is not kept is read when it is looked at, too.

    Raises:
        NotFoundError, InvalidValueError, OSError: it is not there, or cannot be read.
    """
    return _open_input(source_of(recipe), recipe, pipeline, late=late)


def _open_input(
    source: Source | Mixture, recipe: Recipe, pipeline: Pipeline, *, late: bool
) -> datasets.Dataset:
    return open_source(
        source,
        pipeline.store,
        cached=pipeline.use_cache,
        codec=pipeline.codec,
        temp_dir=recipe.temp_dir,
        late=late,
    )


def explain(recipe: Recipe, store: Store) -> list[Explanation]:
    """For each step of a recipe whether it is kept, and if not, what has changed.

    Reads files only to tell them apart.

    Raises:
        CastoreError, OSError: the recipe is wrong, or its files are not there.
    """
    pipeline = pipeline_of(recipe, store)
    source = source_of(recipe)
    return pipeline.explain(unread(identify(source, store), lambda: input_of(recipe, pipeline)))


def estimate(recipe: Recipe, store: Store) -> Estimate:
    """How much disk a recipe will take; reads its source.

    Raises:
        CastoreError, OSError: the recipe is wrong, or its files are not there.
    """
    pipeline = pipeline_of(recipe, store)
    with quiet():
        return pipeline.estimate_space(input_of(recipe, pipeline))


def process(
    recipe: Recipe,
    *,
    store: Store | None = None,
    progress: Callable[[Progress], object] | None = None,
    exported: Callable[[int], object] | None = None,
) -> Outcome:
    """Run a recipe.

    Args:
        recipe: what to do.
        store: where steps are kept; default the recipe's ``ds_cache_dir``, else the default store.
        progress: told how far the run is.
        exported: called with the rows of each piece of the result that is written.

    Raises:
        CastoreError, OSError: the recipe is wrong, its files are not there, or the disk is full.
        Exception: what an operator raised; the steps before it are kept.
    """
    began = time.perf_counter()
    export.check(recipe.export_path, keep_stats=recipe.keep_stats_in_res_ds)
    if store is None:
        store = Store(recipe.ds_cache_dir, memory=0)
    pipeline = pipeline_of(recipe, store)
    source = source_of(recipe)
    export.check_apart(recipe.export_path, source.files)
    with quiet():
        try:
            # A run that goes on behind its checkpoint never looks at its input.
            dataset = _open_input(source, recipe, pipeline, late=pipeline.use_checkpoint)
            result = pipeline.run(dataset, progress=progress)
            size = export.export(
                result.dataset, recipe.export_path, exported, keep_stats=recipe.keep_stats_in_res_ds
            )
        finally:
            # After a Ctrl-C too: the steps that are done must be there the next time.
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
    )


def open_source(
    source: Source | Mixture,
    store: Store,
    *,
    cached: bool,
    codec: str,
    temp_dir: str | os.PathLike[str] | None = None,
    telling: Telling = "content",
    late: bool = False,
) -> datasets.Dataset:
    """The dataset of files, with a fingerprint that tells them. A dataset in the store is read at first use.

    Args:
        source: the files.
        store: where the dataset is kept.
        cached: whether it is.
        codec: of what is kept.
        temp_dir: where it lies uncompressed while it is used; default below the store.
        telling: what tells files from others: their content, their path (with size and time of change), or
            both.
        late: read an uncached dataset at first use too, for a run that may never use it.

    Raises:
        InvalidValueError, FullError, OSError: see `read`.
    """
    digits = identify(source, store, telling)
    if isinstance(source, Source) and source.kind == SAVED:
        # Mapped where it is: nothing is gained by another copy.
        return told_by(digits, read(source, ""))
    return open_input(
        digits,
        lambda folder: read(source, folder),
        store,
        cached=cached,
        codec=codec,
        temp_dir=temp_dir,
        late=late,
    )
