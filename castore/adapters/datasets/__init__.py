"""Hugging Face datasets over the store: a cache of datasets, cached `map` and `filter`, pipelines of operators."""

from __future__ import annotations

from castore.errors import MissingDependencyError

try:
    from castore.adapters.datasets.background import wait
    from castore.adapters.datasets.cache import DatasetCache
    from castore.adapters.datasets.explain import Explanation
    from castore.adapters.datasets.operator_keys import operator_fingerprint
    from castore.adapters.datasets.operators import cached_filter, cached_map
    from castore.adapters.datasets.pipeline import Pipeline
    from castore.adapters.datasets.reports import CacheWarning, PipelineResult, Progress, StepReport
    from castore.adapters.datasets.settings import CacheStageConfig, DatasetConfig, PipelineConfig
except ModuleNotFoundError as error:
    if error.name not in ("datasets", "pyarrow", "numpy", "yaml"):
        raise
    raise MissingDependencyError.of(error.name, "datasets") from error

__all__ = [
    "CacheStageConfig",
    "CacheWarning",
    "DatasetCache",
    "DatasetConfig",
    "Explanation",
    "Pipeline",
    "PipelineConfig",
    "PipelineResult",
    "Progress",
    "StepReport",
    "cached_filter",
    "cached_map",
    "operator_fingerprint",
    "wait",
]
