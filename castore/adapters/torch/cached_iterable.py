"""CachedIterableDataset: keeps what a slow function makes of each item of an iterable dataset.

An item of an iterable dataset cannot be asked for before it is made, so only work behind the iteration can be
saved. The wrapped dataset yields items that are cheap: paths, addresses, rows, numbers. The function makes
samples of them, and each sample is an entry of a store, named by the function and the item. So the order of
the items does not matter: another epoch, another shuffle, other workers and an epoch that was broken off find
what is there.

Assumes that the function returns the same sample for the same item every time. Must never read ahead of the
samples that are asked for.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from blake3 import blake3
from torch.utils.data import IterableDataset

from castore import Store
from castore.adapters.left_out import facts_left_out
from castore.adapters.torch.changes import Changes
from castore.adapters.torch.dataset_identity import RANDOM_ADVICE, key_and_doubts
from castore.adapters.torch.kept_samples import KeptSamples
from castore.adapters.torch.samples import MISSING, pack, unpack
from castore.errors import SerializationError

_DIGITS = 40
_STATE = ("state_dict", "load_state_dict")
# Characters of a file's name.
_LONGEST_NAME = 255
# Levels of an item in which files are looked for, and types of values that name none.
_DEEPEST = 16
_NUMBERS = frozenset({int, float, bool, bytes, type(None)})


class CachedIterableDataset(IterableDataset[Any]):
    """An iterable dataset behind a function whose results are kept in a store.

    Args:
        dataset: an iterable dataset, or any other iterable that can be iterated anew. Its items are what
            `CachedDataset` takes as samples. Workers and ranks share the items as it says itself.
        transform: makes a sample of an item; slow, and the same every time.
        store: a `castore.Store`, or the folder of one. A store that is opened here has no RAM tier, since
            every worker would fill its own.
        key: what identifies the function: a name, or a config for `castore.key`. By default its fingerprint:
            its code, its parameters.
        item_key: a function of an item that returns what distinguishes it from all others. By default the
            whole item counts, and of files that it names by paths the size and the time of change.

    Raises:
        UnhashableError: ``transform`` has no fingerprint; the message names the part. Pass ``key``.
        StoreError: the folder cannot be used.

    >>> import tempfile
    >>> def square(number):
    ...     return {"square": number ** 2}
    >>> cached = CachedIterableDataset([3, 1, 2], square, tempfile.mkdtemp())
    >>> [sample["square"] for sample in cached], cached.hits, cached.misses
    ([9, 1, 4], 0, 3)
    >>> [sample["square"] for sample in cached], cached.hits, cached.misses
    ([9, 1, 4], 3, 3)
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        transform: Callable[[Any], Any],
        store: Store | str | os.PathLike[str],
        key: object = None,
        *,
        item_key: Callable[[Any], Any] | None = None,
    ) -> None:
        self._data = dataset
        self._transform = transform
        self._item_key = item_key
        #: The folder of the samples in the store.
        self.key, doubts = key_and_doubts(transform, key)
        self._changes = Changes(transform, key is None)
        self._kept = KeptSamples(store, "CachedIterableDataset")
        self.store = self._kept.store
        if doubts is not None:
            doubts.compare(self.store, "transform", RANDOM_ADVICE)
        for name in _STATE:  # not by `__getattr__`: loaders read an object's own attributes
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __iter__(self) -> Iterator[Any]:
        return self._changes.passing(self._samples(iter(self._data)))

    def __bool__(self) -> bool:
        return bool(self._data)  # a dataset without a length is true

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type] # an error that says so, if it has no length

    def name_of(self, item: Any) -> str:
        """The name of the entry of an item's sample in the store.

        Raises:
            SerializationError: the item, or what ``item_key`` returned, has no exact bytes.
        """
        identity = item if self._item_key is None else self._item_key(item)
        try:
            hasher = blake3(pack(identity))
            if facts := facts_left_out(identity):
                hasher.update(repr(facts).encode())
        except SerializationError as error:
            raise SerializationError(
                f"an item of the dataset cannot be told from others: {error}; or pass item_key=..."
            ) from None
        if self._item_key is None:
            hasher.update(b"".join(map(_file_state, _texts(item))))
        digits = hasher.hexdigest()[:_DIGITS]
        return f"{self.key}/{digits[:3]}/{digits}.safetensors"

    def _samples(self, items: Iterator[Any]) -> Iterator[Any]:
        # Not `map`: a StopIteration of the function would end the epoch early, and nobody would notice.
        for item in items:
            yield self._sample(item)

    def _sample(self, item: Any) -> Any:
        self._changes.glance()
        name = self.name_of(item)
        [sample] = self._kept.find([name])
        if sample is not MISSING:
            return sample
        with self._changes.reading():
            made = pack(self._transform(item))
        if self._changes.keeps:
            self._kept.keep({name: made})
        # Unpack the record even of a sample just made: the first epoch gets exactly what later epochs get.
        return unpack(made)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that the wrapper lacks. Unpickling calls it before there is
        # any state.
        if name.startswith("_") or name in _STATE or "_data" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        return getattr(self._data, name)

    # Counters

    @property
    def hits(self) -> int:
        """Samples that came from the store, in all processes that have a copy of this dataset."""
        return self._kept.counts.hits

    @property
    def misses(self) -> int:
        """Samples that the function made, in all processes that have a copy of this dataset."""
        return self._kept.counts.misses

    def close(self) -> None:
        """Release the counters, and close the store if it was opened here."""
        self._kept.close()

    def __enter__(self) -> CachedIterableDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _texts(item: Any, depth: int = 0) -> Iterator[str]:
    """Texts that may name a file: the item itself, or the values in it, at any depth."""
    if isinstance(item, str):
        # Words without a slash are not looked up where they come by the hundred.
        if "/" in item or (depth <= 1 and _is_file(item)):
            yield item
    elif isinstance(item, os.PathLike):
        yield os.fspath(item)
    elif depth < _DEEPEST:
        for value in _values_in(item):
            yield from _texts(value, depth + 1)


def _values_in(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return [name for name in item if isinstance(name, str) and "/" in name] + [*item.values()]
    if isinstance(item, list | tuple | deque):
        return () if _NUMBERS.issuperset(map(type, item)) else item
    if isinstance(item, set | frozenset):
        return sorted((name for name in item if isinstance(name, str | os.PathLike)), key=os.fspath)
    if isinstance(item, np.ndarray) and item.dtype.kind in "UT":
        return item.ravel().tolist()  # type: ignore[no-any-return]
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in dataclasses.fields(item)]
    return ()


def _is_file(text: str) -> bool:
    """Whether a text without a slash is the name of a file in the present folder."""
    return len(text) <= _LONGEST_NAME and os.path.isfile(text)


def _file_state(path: str) -> bytes:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a text that is no possible path
        return b"-"
    if not stat.S_ISREG(found.st_mode):  # what comes into a folder changes no item
        return b"-"
    return b"%d %d " % (found.st_size, found.st_mtime_ns)
