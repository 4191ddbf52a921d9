"""Hugging Face datasets over the store: a cache of datasets, cached `map` and `filter`, operator pipelines.

`cache` keeps datasets by name. `map_filter` and `pipeline` run a step only if its key is not in the store.
`dataset_fingerprint` and `operator_keys` make the keys, `step_runner` runs one step once among all processes,
`block_runner` finds those blocks of it whose results are not kept, `block_maker` makes these, each as
`block_step` runs one block, here or in `block_workers`, and those that `call_watch` finds slow from
`block_parts`. `checkpoint` keeps only the latest step.
`streams` runs steps of iterable datasets, and `call_blocks` keeps what their functions return.
`dataset_entries` lays datasets out in the store; `stored_table` and `lazy_table` bring the rows back.
`castore.recipes` uses `source_step`, `source_units`, `file_digests` and `ram_results` beside the modules of
the public names.

May import: all below the adapters.

Must never: import `castore.recipes`, except for its settings (`_SETTINGS`), which are public under this name
too, and those only at first use; write what `datasets.load_from_disk` cannot read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from castore.errors import MissingDependencyError

if TYPE_CHECKING:
    from castore.recipes.pipeline_config import (
        CacheStageConfig,
        CacheType,
        DatasetConfig,
        HashFn,
        PipelineConfig,
    )

try:
    from castore.adapters.datasets.background import wait
    from castore.adapters.datasets.blame import Blame, BlameStep, RowRange, SourceRow
    from castore.adapters.datasets.cache import DatasetCache, StorableDataset
    from castore.adapters.datasets.disk_space import Estimate
    from castore.adapters.datasets.explain import Explanation, FileChanges
    from castore.adapters.datasets.map_filter import cached_filter, cached_map
    from castore.adapters.datasets.operator_keys import operator_fingerprint
    from castore.adapters.datasets.pipeline import Pipeline, ProgressCallback
    from castore.adapters.datasets.reports import PipelineResult, Progress, StepReport
    from castore.errors import CacheWarning
except ModuleNotFoundError as error:
    if error.name not in ("datasets", "pyarrow", "numpy"):
        raise
    raise MissingDependencyError.of(error.name, "datasets") from error

__all__ = [
    "Blame",
    "BlameStep",
    "CacheStageConfig",
    "CacheType",
    "CacheWarning",
    "DatasetCache",
    "DatasetConfig",
    "Estimate",
    "Explanation",
    "FileChanges",
    "HashFn",
    "Pipeline",
    "PipelineConfig",
    "PipelineResult",
    "Progress",
    "ProgressCallback",
    "RowRange",
    "SourceRow",
    "StepReport",
    "StorableDataset",
    "cached_filter",
    "cached_map",
    "operator_fingerprint",
    "wait",
]

_SETTINGS = ("CacheStageConfig", "CacheType", "DatasetConfig", "HashFn", "PipelineConfig")

if not TYPE_CHECKING:  # a type checker would accept any name as present

    def __getattr__(name: str) -> Any:
        if name not in _SETTINGS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from castore.recipes import pipeline_config

        return getattr(pipeline_config, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_SETTINGS})
