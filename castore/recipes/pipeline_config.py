"""EasyData's settings of a pipeline as dataclasses: the data, and the caching of the steps.

The settings configure the one `Pipeline`: a store at ``cache_dir``, its codec, its expiry, a bound on results
in RAM. Every field is checked when the object is made.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from datasets import Dataset

from castore.adapters.datasets.pipeline import Pipeline
from castore.adapters.datasets.ram_results import RamPipeline, RamResults
from castore.adapters.datasets.reports import PipelineResult, Progress
from castore.errors import InvalidValueError
from castore.recipes import registry, sources
from castore.recipes.runner import open_source
from castore.recipes.silence import silence
from castore.recipes.value_types import check_type
from castore.store import Store
from castore.units import parse_ttl

CacheType = Literal["memory", "disk", "hierarchical"]
"""Where `CacheStageConfig` keeps results: in RAM, on disk, or in RAM over disk."""
HashFn = Literal["content", "path", "combined"]
"""The identity of an input file for `CacheStageConfig`: its bytes, its path and state, or both."""


class _CheckedFields:
    """Checks that fields have the types of their annotations."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            what = f"{field.name} of {type(self).__name__}"
            check_type(getattr(self, field.name), hints[field.name], what)


@dataclasses.dataclass(frozen=True)
class CacheStageConfig(_CheckedFields):
    """Settings of the cache for a pipeline's steps.

    Attributes:
        enabled: whether the steps are cached.
        cache_type: ``"disk"`` keeps every step in the store; ``"memory"`` keeps only the results of the last
            runs, in this process; ``"hierarchical"`` does both.
        cache_dir: the store; None for the default one.
        memory_cache_size: the number of results that are kept in RAM.
        disk_cache_expiry: seconds, or a text like ``"7d"``, after which a step is computed again; ``"never"``
            for never; None for the store's setting.
        compression: the store's codec: ``"none"``, ``"gzip"``, ``"lz4"`` or ``"zstd"``.
        hash_fn: the identity of input files: their ``"content"``; their ``"path"``, with size and
            modification time, which reads nothing; or both, ``"combined"``, which computes the steps of a
            copied file again.

    Raises:
        InvalidValueError: a field has an invalid value.
    """

    enabled: bool = True
    cache_type: CacheType = "hierarchical"
    cache_dir: str | None = None
    memory_cache_size: int = 100
    disk_cache_expiry: int | float | str | None = None
    compression: Literal["none", "gzip", "lz4", "zstd"] = "zstd"
    hash_fn: HashFn = "combined"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_dir", _to_text(self.cache_dir))
        super().__post_init__()
        if self.memory_cache_size < 1:
            raise InvalidValueError(
                f"memory_cache_size of CacheStageConfig must be at least 1, not {self.memory_cache_size!r}; "
                'cache_type="disk" keeps nothing in RAM'
            )
        if self.disk_cache_expiry is not None:
            try:
                parse_ttl(self.disk_cache_expiry)
            except InvalidValueError as error:
                raise InvalidValueError(f"disk_cache_expiry of CacheStageConfig: {error}") from None


@dataclasses.dataclass(frozen=True)
class DatasetConfig(_CheckedFields):
    """One dataset of a pipeline.

    Attributes:
        data_files: a file, a folder or a pattern, or a list of them: see `Recipe.dataset_path`.
        cache_path: a store for this dataset alone; None for the pipeline's.
        cache_enabled: whether the steps of this dataset are cached.

    Raises:
        InvalidValueError: a field has an invalid value.
    """

    data_files: str | list[str]
    cache_path: str | None = None
    cache_enabled: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_path", _to_text(self.cache_path))
        files = self.data_files
        plain = [_to_text(item) for item in files] if isinstance(files, list | tuple) else _to_text(files)
        object.__setattr__(self, "data_files", plain)
        super().__post_init__()
        if not self.data_files:
            raise InvalidValueError(
                "data_files of DatasetConfig is empty; name a file, a folder or a pattern"
            )


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Datasets, and the caching of their results.

    Attributes:
        datasets: each a `DatasetConfig`, a path, or a loaded dataset.
        cache: the settings of the cache.

    Raises:
        InvalidValueError: a field has an invalid value.
    """

    datasets: Sequence[DatasetConfig | str | os.PathLike[str] | Dataset]
    cache: CacheStageConfig = dataclasses.field(default_factory=CacheStageConfig)
    _results: RamResults = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.cache, CacheStageConfig):
            raise InvalidValueError(f"cache of PipelineConfig must be a CacheStageConfig, not {self.cache!r}")
        if isinstance(self.datasets, str | bytes | Dataset) or not isinstance(self.datasets, Sequence):
            raise InvalidValueError(f"datasets of PipelineConfig must be a list, not {self.datasets!r}")
        items = [
            DatasetConfig(os.fspath(item)) if isinstance(item, str | os.PathLike) else item
            for item in self.datasets
        ]
        for item in items:
            if not isinstance(item, DatasetConfig | Dataset):
                raise InvalidValueError(
                    "an item of datasets of PipelineConfig must be a DatasetConfig, a path or a Dataset, "
                    f"not {item!r}"
                )
        object.__setattr__(self, "datasets", items)
        object.__setattr__(self, "_results", RamResults(self.cache.memory_cache_size))

    def pipeline(self, operators: Sequence[Any], dataset: DatasetConfig | None = None) -> Pipeline:
        """The pipeline with these settings.

        Args:
            operators: as for `Pipeline`; names and one-key maps as in a recipe are accepted, too.
            dataset: the dataset whose ``cache_path`` and ``cache_enabled`` apply.
        """
        cache = self.cache
        enabled = cache.enabled and (dataset is None or dataset.cache_enabled)
        options: dict[str, Any] = {
            "store": self._store(dataset),
            "codec": cache.compression,
            "use_cache": enabled and cache.cache_type != "memory",
        }
        made = [registry.make(*_parse_operator(operator)) for operator in operators]
        if enabled and cache.cache_type != "disk":
            return RamPipeline(made, results=self._results, **options)
        return Pipeline(made, **options)

    def _store(self, dataset: DatasetConfig | None) -> Store:
        place = self.cache.cache_dir if dataset is None or dataset.cache_path is None else dataset.cache_path
        return Store(place, codec=self.cache.compression, ttl=self.cache.disk_cache_expiry, memory=0)

    def load(self, dataset: DatasetConfig | Dataset, store: Store) -> Dataset:
        """One of the datasets, identified as ``hash_fn`` says.

        Raises:
            NotFoundError, InvalidValueError, OSError: the dataset's files are missing, or cannot be read.
        """
        if isinstance(dataset, Dataset):
            return dataset
        cache = self.cache
        with silence():
            return open_source(
                sources.find_all(dataset.data_files),
                store,
                cached=cache.enabled and dataset.cache_enabled and cache.cache_type != "memory",
                codec=cache.compression,
                identity=cache.hash_fn,
            )

    def run(
        self, operators: Sequence[Any], *, progress: Callable[[Progress], object] | None = None
    ) -> list[PipelineResult]:
        """Send each dataset through the operators; one result for each, in order."""
        results = []
        for dataset in self.datasets:
            assert isinstance(dataset, DatasetConfig | Dataset)
            pipeline = self.pipeline(operators, dataset if isinstance(dataset, DatasetConfig) else None)
            results.append(pipeline.run(self.load(dataset, pipeline.store), progress=progress))
        return results


def _parse_operator(operator: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(operator, Mapping) and len(operator) == 1:
        ((name, parameters),) = operator.items()
        return name, dict(parameters or {})
    return operator, {}


def _to_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value
