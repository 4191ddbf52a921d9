"""Running a recipe: from its files, through its operators, to where the result goes.

The input is a step like any other: read once, kept compressed, and not even looked at where the first
operator's result is known already.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from typing import Any

import datasets

from castore.adapters.datasets import dataset_entries, exporting, space, step_runner
from castore.adapters.datasets.background import wait
from castore.adapters.datasets.config import Recipe
from castore.adapters.datasets.explain import Explanation
from castore.adapters.datasets.lazy_dataset import LateDataset
from castore.adapters.datasets.mixing import Mixture, identify, mixed, read
from castore.adapters.datasets.pipeline import Pipeline, ProgressCallback
from castore.adapters.datasets.quiet import quiet
from castore.adapters.datasets.reports import StepReport
from castore.adapters.datasets.sources import SAVED, Source, Telling, find
from castore.adapters.datasets.tables import our_fingerprint
from castore.errors import CastoreError
from castore.store import Store


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a recipe.

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
    fingerprint = our_fingerprint(identify(source, store))
    return pipeline.explain(_unread(fingerprint, lambda: input_of(recipe, pipeline)))


def estimate(recipe: Recipe, store: Store) -> space.Estimate:
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
    progress: ProgressCallback | None = None,
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
    exporting.check(recipe.export_path, keep_stats=recipe.keep_stats_in_res_ds)
    if store is None:
        store = Store(recipe.ds_cache_dir, memory=0)
    pipeline = pipeline_of(recipe, store)
    source = source_of(recipe)
    exporting.check_apart(recipe.export_path, source.files)
    with quiet():
        try:
            # A run that goes on behind its checkpoint never looks at its input.
            dataset = _open_input(source, recipe, pipeline, late=pipeline.use_checkpoint)
            result = pipeline.run(dataset, progress=progress)
            size = exporting.export(
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
    """The dataset of files, with a fingerprint that tells them; if it is in the store it is read when looked at.

    Args:
        source: the files.
        store: where the dataset is kept.
        cached: whether it is.
        codec: of what is kept.
        temp_dir: where it lies uncompressed while it is used; default below the store.
        telling: what tells files from others: their content, their path (with size and time of change), or
            both.
        late: read what is not cached when it is looked at, for who may never look.

    Raises:
        InvalidValueError, FullError, OSError: see `read`.
    """
    digits = identify(source, store, telling)
    if isinstance(source, Source) and source.kind == SAVED:
        # Mapped where it is: nothing is gained by another copy.
        dataset = read(source, "")
        dataset._fingerprint = our_fingerprint(digits)
        return dataset
    if not cached:
        fingerprint = our_fingerprint(digits)

        def run() -> datasets.Dataset:
            return step_runner.run(store, lambda file: read(source, file.parent), fingerprint, temp_dir)

        return _unread(fingerprint, run) if late else run()
    name = step_runner.step_name("source", digits)

    def load() -> datasets.Dataset:
        return step_runner.run_or_load(
            store,
            name,
            lambda file: read(source, file.parent),
            {"step": "source", "kind": "source", "key": digits, "input": "", "operator": "", "parts": {}},
            dataset_entries.Options(codec, None, store.settings.ttl),
            rows_in=0,
            temp_dir=temp_dir,
        ).dataset

    return _late(store, name, load) or load()


def _unread(fingerprint: str, load: Callable[[], datasets.Dataset]) -> LateDataset:
    """A dataset of which nothing is known before it is read but which one it is."""
    return LateDataset(datasets.DatasetInfo(), None, fingerprint, None, None, load)


def _late(store: Store, name: str, load: Callable[[], datasets.Dataset]) -> datasets.Dataset | None:
    """The dataset of that name, to be read when it is looked at; None if it is not all there."""
    try:
        files = dataset_entries.files_of(store, name)
    except CastoreError:
        return None  # and `load` says what of it is damaged
    state, info = json.loads(files.state), datasets.DatasetInfo.from_dict(json.loads(files.info))
    record = dataset_entries.metadata_of(store, name)
    if record is None:
        return None
    split = None if state["_split"] is None else datasets.Split(state["_split"])
    size = sum(blob.size for _, blob in files.data)
    return LateDataset(info, split, state["_fingerprint"], record["rows_out"], size, load)
