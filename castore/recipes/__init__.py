"""Recipes: YAML files with Data-Juicer's keys that name the input data, the operators, and the export.

`recipe` reads and checks a recipe. `registry` finds its operators, and `operators` are those that come with
castore. `sources` and `mixture` are its input: `by_file` and `file_reader` read each file once, and
`noted_files` remembers which files there were. `runner` sends the input through a `Pipeline` to `export`.
`pipeline_config` has EasyData's settings of the same pipeline.

May import: of `castore.adapters.datasets` the modules of `Pipeline` and of what it reports, `source_step`,
`source_units`, `file_digests` and `ram_results`; and all below. Not the package itself, which gives out the
settings here under its own name.

Must never: keep anything by itself: the pipeline decides what is kept, and under which key.
"""

from __future__ import annotations

from castore.errors import MissingDependencyError

try:
    from castore.recipes.pipeline_config import (
        CacheStageConfig,
        CacheType,
        DatasetConfig,
        HashFn,
        PipelineConfig,
    )
    from castore.recipes.recipe import Recipe, parse, read
    from castore.recipes.registry import make, register
    from castore.recipes.runner import Outcome, blame, estimate, explain, process
except ModuleNotFoundError as error:
    if error.name != "yaml":
        raise
    raise MissingDependencyError.of(error.name, "datasets") from error

__all__ = [
    "CacheStageConfig",
    "CacheType",
    "DatasetConfig",
    "HashFn",
    "Outcome",
    "PipelineConfig",
    "Recipe",
    "blame",
    "estimate",
    "explain",
    "make",
    "parse",
    "process",
    "read",
    "register",
]
