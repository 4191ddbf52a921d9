"""The common base of wrappers that keep the samples of map-style datasets.

A subclass finds one sample or many, and keeps what it is given; this base adds the protocol of
`torch.utils.data`: ``len(d)``, ``d[i]``, ``d.__getitems__([i, …])`` with order and duplicates kept; filling
ahead of training; a check whether the wrapped dataset has changed. Assumes that the dataset keeps its length.
Must never hand out a private or magic attribute of the wrapped dataset as its own: pickle, copy and the
loaders ask for those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset

from castore.adapters.torch.changes import Changes
from castore.adapters.torch.prefill import fill
from castore.errors import InvalidValueError, OutOfRangeError
from castore.units import as_whole, shown


def check_index(index: Any, length: int) -> int:
    """The place of a sample, from 0 up.

    Args:
        index: an int, a NumPy integer or an integer tensor without dimensions; negative ones count from the
            end.
        length: how many samples there are.

    Raises:
        OutOfRangeError: there is no such sample.
        InvalidValueError: the index is no whole number: a bool, a float, a slice, a list.

    >>> check_index(-1, 10)
    9
    """
    if type(index) is not int:
        index = _whole(index)
    if 0 <= index < length:
        return int(index)
    if -length <= index < 0:
        return int(index) + length
    raise OutOfRangeError(f"index {index} is out of range: there are {length} samples")


def _whole(index: Any) -> int:
    number = as_whole(index)
    if number is None:
        raise InvalidValueError(
            f"an index is a whole number, not {type(index).__name__}: {shown(index)}; for several samples"
            " take torch.utils.data.Subset or __getitems__"
        )
    return number


def length_of(data: Any) -> int:
    """How many samples a dataset has; zarr's arrays have a shape and no length.

    Raises:
        InvalidValueError: the value is no map-style dataset.
    """
    if hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):
        if hasattr(data, "__len__") and getattr(data, "shape", True) != ():
            return len(data)
        if getattr(data, "shape", ()):
            return int(data.shape[0])
    advice = "pass one that has __len__ and takes indices from 0 up"
    if isinstance(data, IterableDataset):
        advice = "CachedIterableDataset keeps what a function makes of the items of an iterable one"
    raise InvalidValueError(f"{type(data)} is no map-style dataset; {advice}")


Self = TypeVar("Self", bound="DatasetWrapper")


class DatasetWrapper(Dataset[Any]):
    """A dataset in front of another, which keeps samples, can be filled ahead of training, and is closed.

    Args:
        data: anything with a length and integer indices: a map-style dataset, a list, a NumPy or zarr array.
        key: the user's name or config for the data; None where the fingerprint identifies the data, which
            then must not change.

    Raises:
        InvalidValueError: the value has no length or no indices.
    """

    def __init__(self, data: Any, key: object) -> None:
        self._data = data
        self._length = length_of(data)
        self._changes = Changes(data, key is None)

    def _one(self, index: int) -> Any:
        """The sample of a checked index."""
        raise NotImplementedError

    def _many(self, indices: list[int]) -> list[Any]:
        """The samples of checked indices, in their order."""
        raise NotImplementedError

    def _held(self, index: int) -> bool:
        """Whether the sample is cached."""
        raise NotImplementedError

    def _cache(self, indices: list[int]) -> int:
        """Read these samples and keep those that fit; return how many were kept."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what is shared with other processes, and the store."""
        raise NotImplementedError

    def __len__(self) -> int:
        self._changes.glance()
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._one(self._index(index))

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        return self._many([self._index(index) for index in indices])

    def __iter__(self) -> Iterator[Any]:
        return self._changes.passing(map(self._one, range(self._length)))

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prefetch(self, indices: Iterable[int]) -> int:
        """Read the uncached of ``indices``, and keep those that fit; return how many were added."""
        checked = dict.fromkeys(self._index(index) for index in indices)
        missing = [index for index in checked if not self._held(index)]
        return self._cache(missing) if missing else 0

    def fill(self, *, num_workers: int = 0, batch_size: int = 64, progress: bool | None = None) -> int:
        """Read all samples that are not cached, until there is no more room; return how many were added.

        Args:
            num_workers: processes that read, as in `torch.utils.data.DataLoader`.
            batch_size: samples that each process reads at a time.
            progress: show a bar; None shows one on a terminal.
        """
        return fill(self, num_workers=num_workers, batch_size=batch_size, progress=progress)

    def _index(self, index: Any) -> int:
        try:
            return check_index(index, self._length)
        except OutOfRangeError:
            self._changes.glance()  # raises if the dataset has grown
            raise

    def _sample(self, index: int) -> Any:
        """One sample of the wrapped dataset; see `_source`."""
        with self._changes.reading():
            return self._data[index]

    def _source(self, indices: Sequence[int]) -> list[Any]:
        """Samples of the wrapped dataset in the order of ``indices``, read once, in one call if possible.

        Raises:
            InvalidValueError: the dataset has been changed since it was wrapped.
        """
        distinct = list(dict.fromkeys(indices))
        fetch = getattr(self._data, "__getitems__", None)
        with self._changes.reading():
            if fetch is None or not distinct:
                read = [self._data[index] for index in distinct]
            else:
                read = self._as_samples(fetch(distinct))
        if len(read) != len(distinct):
            raise InvalidValueError(
                f"__getitems__ of {type(self._data)} gave {len(read)} samples for {len(distinct)} indices"
            )
        if len(distinct) == len(indices):
            return read
        samples = dict(zip(distinct, read, strict=True))
        return [samples[index] for index in indices]

    def _as_samples(self, batch: Any) -> list[Any]:
        # Columns of a batch, as many as samples by chance, would pass for samples.
        if isinstance(batch, Mapping | tuple | str | bytes):
            raise InvalidValueError(
                f"__getitems__ of {type(self._data)} gave a {type(batch).__name__}, not a list with a sample"
                " for each index; let it return a list, and make batches in collate_fn"
            )
        return list(batch)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that the wrapper lacks. Unpickling calls it before there is
        # any state.
        if name.startswith("_") or "_data" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        return getattr(self._data, name)

    def __castore_key__(self) -> Any:
        """A wrapper has the key of the dataset it wraps, since it returns the same samples."""
        return self._data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._data)})"
