"""Loaders whose batches hold Keys in the place of features. Class, sampler, generator and workers stay.

There are three kinds. `joined_loader` does not read the raw data at all, because labels are cached too.
`replaced_loader` reads it, and replaces features by Keys, by index. `streaming_loader` is for streams: keys
are looked up by the key extractor's result. `collate_first_samples` reads the first samples, from which the
layout of a batch is learnt. Knows no models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from castore.adapters.embeddings.batch_places import (
    Place,
    RestOfBatch,
    format_place,
    get_at,
    has_same_items,
    is_same,
    replace_at,
)
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.adapters.embeddings.dataset_pass import KeyedCollate, NumberedDataset, NumberedSample
from castore.adapters.embeddings.frozen_encoders import RANDOM_ADVICE, refuse_random_numbers
from castore.adapters.embeddings.keys import ABSENT, Keys
from castore.errors import InvalidValueError, NotFoundError

# Number of samples that are read and collated twice, to learn the layout of a batch.
_FIRST_SAMPLES = 3


@dataclass(frozen=True)
class KeyColumn:
    """One column of one place's Keys.

    Attributes:
        place: number of the place.
        encoder: number of the column, `CachedEncoder._column`.
        source: number of its column in `Pass.rows`.
        first_key: the key of row 0.
    """

    place: int
    encoder: int
    source: int
    first_key: int


def _width(columns: Sequence[KeyColumn]) -> int:
    """The number of columns of Keys."""
    return 1 + max(column.encoder for column in columns)


class SampleKeys:
    """The Keys of every sample, for each place.

    Args:
        rows: from `Pass.rows`: int64 (n, calls).
        columns: the columns of Keys.
        places: the number of places.
    """

    def __init__(self, rows: torch.Tensor, columns: Sequence[KeyColumn], places: int) -> None:
        keys = torch.full((len(rows), places, _width(columns)), ABSENT, device="cpu")
        for column in columns:
            keys[:, column.place, column.encoder] = rows[:, column.source] + column.first_key
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, indices: torch.Tensor) -> list[Keys]:
        """The Keys of some samples, for each place; indices are int64 of shape (B,)."""
        found = self._keys[indices]
        return [Keys.of(found[:, place]) for place in range(found.shape[1])]


class JoinedDataset(Dataset[Any]):
    """Batches of Keys and cached labels; `__getitems__` gives a whole batch, collated.

    Args:
        keys: of every sample.
        rest: joins labels into a batch.
        index: the table of labels; None if there are none.
    """

    def __init__(self, keys: SampleKeys, rest: RestOfBatch, index: EmbeddingCache | None) -> None:
        self._keys = keys
        self._rest = rest
        self._index = index
        self._rows = None if index is None else index.rows(range(len(keys)))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Any:
        """A batch of one."""
        return self.__getitems__([range(len(self))[index]])

    def __getitems__(self, indices: list[int]) -> Any:
        values, wanted = {}, torch.as_tensor(indices, device="cpu")
        if self._index is not None and self._rows is not None:
            values = self._index.take(self._rows[wanted])
        return self._rest.join(values, self._keys.of(wanted))


class ReplacedCollate:
    """Collates raw samples, and puts Keys in the place of the cached features."""

    def __init__(
        self, collate: Callable[[list[Any]], Any], keys: SampleKeys, places: Sequence[Place]
    ) -> None:
        self._collate = collate
        self._keys = keys
        self._places = places

    def __call__(self, samples: list[NumberedSample]) -> Any:
        """The batch."""
        batch = self._collate([sample.value for sample in samples])
        numbers = torch.tensor([sample.number for sample in samples], device="cpu")
        return _with_keys(batch, self._places, self._keys.of(numbers))


class StreamingCollate:
    """Collates samples of a stream, and puts Keys, found by the key extractors, for the features."""

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        gather: KeyedCollate,
        tables: Sequence[EmbeddingCache],
        columns: Sequence[KeyColumn],
        places: Sequence[Place],
    ) -> None:
        self._collate = collate
        self._gather = gather
        self._tables = tables
        self._columns = columns
        self._places = places

    def __call__(self, samples: list[Any]) -> Any:
        """The batch.

        Raises:
            NotFoundError: an item was not there when the cache was filled.
        """
        keys = torch.full((len(self._places), len(samples), _width(self._columns)), ABSENT, device="cpu")
        # In the order of encoders and their calls, as the columns of `Pass.rows`.
        rows = [self._rows(encoder, own) for (encoder, _), own in self._gather.keys(samples).items()]
        for column in self._columns:
            keys[column.place, :, column.encoder] = rows[column.source] + column.first_key
        return _with_keys(self._collate(samples), self._places, [Keys.of(own) for own in keys])

    def _rows(self, encoder: int, extracted: list[bytes]) -> torch.Tensor:
        rows = self._tables[encoder].find(extracted)
        if bool((rows < 0).any()):
            raise NotFoundError(
                "the stream has an item that it did not have when the cache was filled; call "
                "cache_embeddings again to encode it"
            )
        return rows


class FirstBatches(NamedTuple):
    """Batches of a loader's first samples.

    Attributes:
        one: of them all.
        backwards: of them all, the last one first.
        others: for each of them, of the others.
        sizes: of ``one``, and of each of ``others``.
    """

    one: Any
    backwards: Any
    others: list[Any]
    sizes: tuple[int, int]


def collate_first_samples(loader: DataLoader[Any], role: str) -> FirstBatches:
    """The batches that the loader's collate function makes of the first samples.

    Raises:
        InvalidValueError: there are no samples, or they differ from one reading to the next.
    """
    if loader.batch_sampler is None:
        raise InvalidValueError(
            f"the {role} loader has batch_size=None, so its samples are not "
            "put into batches; give it a batch size"
        )
    dataset = loader.dataset
    # A stream may draw the order of its items; their keys make up for that.
    is_stream = isinstance(dataset, IterableDataset)
    with nullcontext() if is_stream else refuse_random_numbers(f"the {role} loader's dataset", RANDOM_ADVICE):
        first = _read_first(dataset)
        again = first if is_stream else _read_first(dataset)
        if not first:
            raise InvalidValueError(f"the {role} loader's dataset is empty")
        if len(first) == 1:
            first, again = first * 2, again * 2
        collate = loader.collate_fn
        one = collate(first)
    if not is_same(one, collate(again)):
        raise InvalidValueError(
            f"the {role} loader's dataset gives another sample for the same index; {RANDOM_ADVICE}"
        )
    others = [collate(first[:place] + first[place + 1 :]) for place in range(len(first))]
    return FirstBatches(one, collate(first[::-1]), others, (len(first), len(first) - 1))


def check_features(first: FirstBatches, layout: Any, places: Sequence[Place], role: str) -> None:
    """Check that features come in the order of the samples, and depend on no other sample of the batch.

    Args:
        first: batches of the first samples.
        layout: of a batch.
        places: of the features.
        role: of the loader, for messages.

    Raises:
        InvalidValueError: they do not.
    """
    count = first.sizes[0]
    for place in places:
        part, whole = get_at(layout, place), get_at(first.one, place)
        if not has_same_items(part, whole, get_at(first.backwards, place), range(count - 1, -1, -1)):
            raise InvalidValueError(
                f"the {role} loader's collate function puts samples into another order, or makes"
                f" {format_place(place)} of the order in which they come, so that embeddings would be kept"
                " under the keys of other items; keep the order (and sort behind the encoder), or leave the"
                " encoder uncached with CacheType.NONE"
            )
        for missing, other in enumerate(first.others):
            kept = [number for number in range(count) if number != missing]
            if not has_same_items(part, whole, get_at(other, place), kept):
                raise InvalidValueError(
                    f"{format_place(place)} of an item of the {role} loader depends on the other items of"
                    " its batch, so its embedding cannot be kept for other batches; make it of the item"
                    " alone, or leave the encoder uncached with CacheType.NONE"
                )


def _read_first(dataset: Any) -> list[Any]:
    if isinstance(dataset, IterableDataset):
        return list(islice(dataset, _FIRST_SAMPLES))
    return [dataset[index] for index in range(min(_FIRST_SAMPLES, len(dataset)))]


def joined_loader(loader: DataLoader[Any], dataset: JoinedDataset) -> DataLoader[Any]:
    """A loader that reads no raw data."""
    return _copy_loader(loader, dataset=dataset, collate_fn=_return_batch)


def replaced_loader(loader: DataLoader[Any], keys: SampleKeys, places: Sequence[Place]) -> DataLoader[Any]:
    """A loader that reads raw data, without the features that are cached."""
    collate = ReplacedCollate(loader.collate_fn, keys, places)
    return _copy_loader(loader, dataset=NumberedDataset(loader.dataset), collate_fn=collate)


def streaming_loader(loader: DataLoader[Any], collate: StreamingCollate) -> DataLoader[Any]:
    """A loader of an iterable dataset, without the features that are cached."""
    return _copy_loader(loader, collate_fn=collate)


def is_cached(loader: DataLoader[Any]) -> bool:
    """Whether a loader is one of those that are made here."""
    return isinstance(loader.dataset, JoinedDataset) or isinstance(
        loader.collate_fn, ReplacedCollate | StreamingCollate
    )


def _copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of a loader, of any class, that draws the same random numbers in the same order."""
    changed = copy.copy(loader)
    # A loader refuses another dataset, for reasons that do not hold before the first epoch.
    changed.__dict__.update(changes, _iterator=None)
    return changed


def _with_keys(batch: Any, places: Sequence[Place], keys: Sequence[Keys]) -> Any:
    for place, own in zip(places, keys, strict=True):
        batch = replace_at(batch, place, own)
    return batch


def _return_batch(batch: Any) -> Any:
    return batch
