"""Joins several sources to one dataset: all of each in order, or samples of each by their weights.

Rows are drawn as Data-Juicer's code draws them: each source is shuffled with the seed 42. Must never change
the files that it reads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import datasets
import numpy as np

from castore.errors import InvalidValueError
from castore.keys.encoder import key
from castore.recipes import sources
from castore.recipes.seen_files import SeenFiles
from castore.recipes.sources import FileIdentity, Source
from castore.store import Store

_SEED = 42


class Mixture(NamedTuple):
    """Several sources.

    Attributes:
        parts: the sources, in order.
        weights: one weight for each source; weights count only with a limit.
        limit: the number of samples in all, or None for all samples.
    """

    parts: tuple[Source, ...]
    weights: tuple[float, ...]
    limit: int | None

    @property
    def files(self) -> tuple[str, ...]:
        """All files of all parts."""
        return tuple(file for part in self.parts for file in part.files)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(part.size for part in self.parts)


def find_sources(parts: Sequence[tuple[str, float]], limit: int | None) -> Source | Mixture:
    """The files of paths with weights.

    Raises:
        NotFoundError, InvalidValueError: see `castore.recipes.sources.find`.
    """
    found = tuple(sources.find(path) for path, _ in parts)
    if len(found) == 1 and limit is None:
        return found[0]
    return Mixture(found, tuple(weight for _, weight in parts), limit)


def may_name_files(source: Source | Mixture) -> bool:
    """Whether rows of a source or a mixture may name files, such as images."""
    parts = source.parts if isinstance(source, Mixture) else (source,)
    return any(sources.may_name_files(part) for part in parts)


def identify(
    source: Source | Mixture,
    store: Store | None,
    identity: FileIdentity = "content",
    seen: SeenFiles | None = None,
) -> str:
    """A key for a source or a mixture; see `castore.recipes.sources.identify`."""
    if isinstance(source, Source):
        return sources.identify(source, store, identity, seen)
    parts = [sources.identify(part, store, identity, seen) for part in source.parts]
    # Without a limit all rows are taken, whatever the weights are.
    drawn = None if source.limit is None else [source.limit, list(_sample_counts(source)), np.__version__]
    return key(["mixture", parts, drawn])


def read(source: Source | Mixture, folder: str | os.PathLike[str]) -> datasets.Dataset:
    """The dataset of a source or a mixture; see `castore.recipes.sources.read`."""
    if isinstance(source, Source):
        return sources.read(source, folder)
    shares = [None] * len(source.parts) if source.limit is None else _sample_counts(source)
    drawn = [
        _draw(sources.read(part, folder), share, part)
        for part, share in zip(source.parts, shares, strict=True)
        if share != 0
    ]
    try:
        return datasets.concatenate_datasets(drawn)
    except ValueError as error:  # columns of one name and two types
        raise InvalidValueError(
            f"the sources of dataset cannot be joined: {' '.join(str(error).split())}; give their columns "
            "the same types"
        ) from error


def _sample_counts(mixture: Mixture) -> list[int]:
    assert mixture.limit is not None
    total = sum(mixture.weights)
    return [min(mixture.limit, math.ceil(mixture.limit * weight / total)) for weight in mixture.weights]


def _draw(dataset: datasets.Dataset, count: int | None, source: Source) -> datasets.Dataset:
    if count is None or count == len(dataset):
        return dataset
    if not len(dataset):
        raise InvalidValueError(
            f"{source.path!r} has no rows, and {count} are to be drawn from it; remove this source"
        )
    # A larger count than the rows that exist repeats all of them.
    order = np.random.default_rng(_SEED).permutation(len(dataset))
    return dataset.select(order[np.arange(count) % len(dataset)])
