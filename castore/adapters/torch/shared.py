"""SharedCache: samples in slots of shared memory, one copy for all workers and ranks of a node.

Interface and idea are stocaching's (https://github.com/charl-ai/stochastic-caching). The cache checks samples
when they are set, and copies them when they are read. Must never hand out memory that others see, nor a
sample that is not whole. The read path is deliberately flat: a word, a copy, the word again (see
`castore.shm.slots`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from castore.adapters.torch.ranks import common_name
from castore.adapters.torch.slot_storage import GIB, Columns, Records, SlotStorage, limit_of, plan
from castore.adapters.torch.tensor_specs import Structure
from castore.errors import FullError, InvalidValueError, OutOfRangeError, SegmentError, SlotError
from castore.shm.arena import Arena
from castore.shm.free_space import shm_size
from castore.shm.slots import STATE, Slots, SlotState
from castore.units import as_whole, format_size

_log = logging.getLogger(__name__)
_READY = int(SlotState.READY)


class SharedCache:
    """A list of slots in shared memory, one for each sample that fits.

    The dataset makes the cache in its ``__init__``. Workers and ranks access the same memory under every
    start method, and the last user frees it. The index decides which samples are kept: the first
    ``len(cache)``.

    Args:
        size_limit_gib: GiB for samples, fractions too, or a text like "32GB". The slots' states take 4 more
            bytes for each sample of the dataset; ragged samples take 36 more each.
        dataset_len: how many samples the dataset has.
        data_dims: the dimensions of a sample, such as (3, 32, 32). A dimension that varies is None; None
            instead of all dimensions if even their number varies. For samples of several tensors a tuple or
            dict of such.
        dtype: the dtype of the samples; one for all tensors of a sample, or a tuple or dict like `data_dims`.
        name: processes of this user that give the same name share one cache. None: under torchrun the ranks
            of a node share the cache that each makes first, second, ... with the same arguments; otherwise
            the cache is private to this process and those that inherit it or receive it from here.

    Raises:
        InvalidValueError: an argument makes no sense, or not one sample fits in the limit.
        FullError: ``/dev/shm`` or the machine's memory has no space for it.
        SegmentError: the name is in use for a cache with other arguments.

    >>> cache = SharedCache(0.001, dataset_len=100, data_dims=(3, 8, 8))
    >>> cache.get_slot(7) is None
    True
    >>> cache.set_slot(7, torch.full((3, 8, 8), 5, dtype=torch.uint8))
    >>> cache.get_slot(7).sum()
    tensor(960)
    """

    def __init__(
        self,
        size_limit_gib: float | str,
        dataset_len: int,
        data_dims: Any,
        dtype: Any = torch.uint8,
        *,
        name: str | None = None,
    ) -> None:
        structure = Structure(data_dims, dtype)
        limit = limit_of(size_limit_gib)
        count = _index(dataset_len, "dataset_len")
        if count < 1:
            raise InvalidValueError(f"dataset_len is {count}; a cache is for at least one sample")
        layout, size = plan(structure, count, limit)
        description = {
            "kind": "SharedCache", "dataset_len": count, "slots": layout.usable, **structure.describe(),
            **({"size": limit} if structure.varies else {}),
        }  # fmt: skip
        if name is None:
            name = common_name("shared", description)
        self._attach(Arena(name, layout, size, description), structure)
        # Log text: a handler that keeps its records would keep the cache's memory.
        _log.info("%s", repr(self))

    def _attach(self, arena: Arena, structure: Structure) -> None:
        self._arena = arena
        self._structure = structure
        self._words = arena.slots.words
        self._count = len(self._words)
        self._slots = arena.slots.usable
        self._storage: SlotStorage = (
            Records(arena, structure) if structure.varies else Columns(arena, structure)
        )
        self._read = self._storage.read
        self._private: memoryview | None = None
        self._thread = threading.local()
        self._logged_full = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._arena, self._structure.arguments)

    def __repr__(self) -> str:
        return (
            f"SharedCache({self._arena.name!r}, {self._slots} of {self._count} samples, "
            f"{format_size(self._arena.segment.size)})"
        )

    def __len__(self) -> int:
        """The number of slots. For ragged samples, whose fitting number is unknown, the length of the
        dataset.
        """
        return self._slots

    def get_slot(self, idx: int, allow_oob_idx: bool = True, allow_empty_slot: bool = True) -> Any:
        """A copy of sample ``idx``, or None.

        Args:
            idx: index in the dataset, from 0.
            allow_oob_idx: whether an index beyond the cache, but not beyond the dataset, gives None.
            allow_empty_slot: whether an empty slot gives None.

        Raises:
            OutOfRangeError: `idx` is no index of the dataset, or beyond the cache and that is not allowed. An
                IndexError.
            SlotError: the slot is empty and that is not allowed. A RuntimeError.
        """
        if type(idx) is int and 0 <= idx < len(words := self._words):
            word = words[idx]
            if word & _READY:  # of the states, READY alone has this bit
                sample = self._read(idx)
                if words[idx] == word:
                    return sample
        return self._get(self._index(idx), allow_oob_idx, allow_empty_slot)

    def get_slots(self, indices: Iterable[int]) -> list[Any]:
        """Copies of many samples at once, None for each missing sample; order and duplicates are kept.

        Faster than single calls. The tensors of one call share a storage, which only the caller has.

        Raises:
            OutOfRangeError: an index is not in the dataset.
        """
        chosen = self._indices(indices)
        words = self._words
        before = [words[index] for index in chosen]
        ready = [index for index, word in zip(chosen, before, strict=True) if word & _READY]
        samples = iter(self._storage.gather(ready))
        found = [next(samples) if word & _READY else None for word in before]
        if [words[index] for index in chosen] == before:
            return found
        # Some slots changed during the copy: read those again, one by one.
        return [
            sample if words[index] == word else self.get_slot(index)
            for index, word, sample in zip(chosen, before, found, strict=True)
        ]

    def get_batch(self, indices: Iterable[int], out: Any = None) -> Any:
        """Copies of many samples as one batch; None if a sample is missing.

        A batch is a tensor of shape (number of indices, dimensions of a sample), or a tuple or dict of such.
        Faster than `get_slots`, whose samples a loader has to put together; see `collate`.

        Args:
            indices: indices in the dataset, in any order, also several times.
            out: a batch of this form and size on the CPU, to be filled and returned: several times as fast
                as memory that is new for every batch, and straight to a GPU if it is pinned. After None its
                content is undefined.

        Raises:
            OutOfRangeError: an index is not in the dataset.
            InvalidValueError: the cache is for ragged samples, or `out` has another form, shape or dtype.

        >>> cache = SharedCache(0.001, dataset_len=10, data_dims=(2,))
        >>> cache.set_slots([0, 1], [torch.tensor([5, 6], dtype=torch.uint8)] * 2)
        >>> batch = torch.empty(2, 2, dtype=torch.uint8)
        >>> cache.get_batch([1, 0], out=batch) is batch
        True
        """
        chosen = self._indices(indices)
        # Of ragged samples the storage says that they make no batch.
        filled = out is not None and not self._structure.varies
        parts = self._structure.take_batch(len(chosen), out) if filled else None
        words = self._words
        while True:
            before = [words[index] for index in chosen]
            if not all(word & _READY for word in before):
                return None
            batch = self._storage.batch(chosen, parts)
            if [words[index] for index in chosen] == before:
                return batch if out is None else out

    def set_slot(
        self, idx: int, value: Any, allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Keep a copy of ``value`` as sample ``idx``, if there is room for it.

        If another process or thread was quicker, its sample stays and nothing is raised.

        Args:
            idx: index in the dataset, from 0.
            value: a sample of the announced structure.
            allow_oob_idx: whether to do nothing if the cache has no room for the sample; otherwise that is an
                error.
            allow_overwrite: whether to replace a sample that is there.

        Raises:
            InvalidValueError: the value has another shape, dtype or form than announced.
            OutOfRangeError: `idx` is no index of the dataset, or beyond the cache and that is not allowed. An
                IndexError.
            SlotError: this thread itself has set the slot, and overwriting is not allowed. A RuntimeError.
            FullError: there is no room for a ragged sample and that is not allowed; or, allowed or not, other
                users have filled ``/dev/shm``. A sample that was to be replaced is gone then.
        """
        index = self._index(idx)
        if self._within(index, allow_oob_idx) and self._is_open(index, allow_overwrite):
            values = self._structure.take(index, value)
            with self._arena.lock():
                kept = self._set(index, values, allow_overwrite)
            self._check_kept(index, kept, allow_oob_idx)

    def set_slots(
        self,
        indices: Iterable[int],
        values: Iterable[Any],
        allow_oob_idx: bool = True,
        allow_overwrite: bool = False,
    ) -> None:
        """`set_slot` for many samples at once; sets none if one of them is refused."""
        chosen, samples = self._indices(indices), list(values)
        if len(chosen) != len(samples):
            raise InvalidValueError(
                f"{len(chosen)} indices came with {len(samples)} values; give one for each"
            )
        todo = [
            (index, self._structure.take(index, sample))
            for index, sample in zip(chosen, samples, strict=True)
            if self._within(index, allow_oob_idx) and self._is_open(index, allow_overwrite)
        ]
        with self._arena.lock():
            kept = [self._set(index, parts, allow_overwrite) for index, parts in todo]
        for (index, _), one in zip(todo, kept, strict=True):
            self._check_kept(index, one, allow_oob_idx)

    def __getitem__(self, idx: int) -> Any:
        """A copy of sample ``idx``, which must be set; negative indices count from the last slot."""
        return self._get(self._place(idx), False, False)

    def __setitem__(self, idx: int, value: Any) -> None:
        """Keep a copy of ``value`` as sample ``idx``, in place of an earlier one."""
        self.set_slot(self._place(idx), value, allow_oob_idx=False, allow_overwrite=True)

    @property
    def array(self) -> Any:
        """All slots as one tensor of shape (len(cache), *data_dims), or a tuple or dict of such.

        The tensor also shows samples that are set later, and zeros in empty slots. Not for ragged samples.
        Writes to it change only this process's view, and the pages of memory that were written to show no
        later changes, in `aux_array` neither: clone what you change.
        """
        return self._storage.view(self._mapped()[self._arena.layout.data_at :])

    @property
    def aux_array(self) -> torch.Tensor:
        """The state of every sample of the dataset: 0 not set, 1 set, 2 out of the cache's range; uint8.

        The tensor also shows later changes. Writes to it change only this process's view, as of `array`.
        """
        words = self._arena.layout.table(self._mapped(), "slots")
        # The lowest byte of each word has this purpose: see castore.shm.slots.
        return torch.frombuffer(words, dtype=torch.uint8).view(self._count, -1)[:, 0]

    def clear(self) -> None:
        """Empty all slots, for all processes."""
        with self._arena.lock():
            self._storage.clear()

    def close(self) -> None:
        """Leave the cache; the last user frees the memory. Happens by itself once the cache is unused."""
        self._words = self._words[:0]
        self._private = None
        self._arena.close()

    # --- reading
    # --------------------------------------------------------------------------------------------------

    def _get(self, index: int, allow_oob_idx: bool, allow_empty_slot: bool) -> Any:
        if not self._within(index, allow_oob_idx):
            return None
        while (word := self._words[index]) & _READY:
            sample = self._read(index)
            if self._words[index] == word:
                return sample
        if allow_empty_slot:
            return None
        if word & STATE == SlotState.WRITING:
            # The writer holds the lock: once this thread has the lock, the sample is there, or the writer has
            # died.
            with self._arena.lock():
                if self._words[index] & _READY:
                    return self._read(index)
        raise SlotError(f"slot {index} is empty; set it first, or ask with get_slot, which then answers None")

    def _mapped(self) -> memoryview:
        if self._private is None:
            self._private = self._arena.segment.private()
        return self._private

    # --- writing
    # --------------------------------------------------------------------------------------------------

    def _is_open(self, index: int, allow_overwrite: bool) -> bool:
        """Whether the slot may be set now; that may have changed by the time this thread holds the lock."""
        word = self._words[index]
        if allow_overwrite or word & _READY == 0:
            return True
        if self._own()[index] == word:
            raise SlotError(
                f"slot {index} holds a sample that was set from here; pass allow_overwrite=True to put "
                "another there"
            )
        return False

    def _own(self) -> memoryview:
        """The words under which this thread published: a thread that meets its own word was not outrun by
        another.
        """
        own: memoryview | None = getattr(self._thread, "words", None)
        if own is None:
            own = self._thread.words = memoryview(bytearray(Slots.needed(len(self)))).cast("I")
        return own

    def _set(self, index: int, values: list[torch.Tensor], allow_overwrite: bool) -> bool:
        """Write a sample; False if there is no space for it. The caller holds the lock."""
        if not allow_overwrite and self._words[index] & _READY:
            return True
        word = self._storage.write(index, values)
        self._own()[index] = word
        return bool(word)

    def _check_kept(self, index: int, kept: bool, allow_oob_idx: bool) -> None:
        if kept:
            return
        message = f"{self!r} is full: sample {index} does not fit; make it with a larger limit to keep more"
        if not allow_oob_idx:
            raise FullError(message)
        if not self._logged_full:
            self._logged_full = True
            _log.info("%s", message)

    # --- indices
    # --------------------------------------------------------------------------------------------------

    def _within(self, index: int, allow_oob_idx: bool) -> bool:
        """Whether the cache has a slot for the index."""
        if index < len(self):
            return True
        if not allow_oob_idx:
            raise OutOfRangeError(f"index {index} is out of range: the cache has {len(self)} slots")
        return False

    def _index(self, idx: Any) -> int:
        index = _index(idx, "an index")
        if 0 <= index < len(self._words):
            return index
        self._check_open()
        raise OutOfRangeError(f"index {index} is out of range: the dataset has {len(self._words)} samples")

    def _indices(self, indices: Iterable[Any]) -> list[int]:
        chosen = list(indices)
        if set(map(type, chosen)) - {int}:
            chosen = [_index(index, "an index") for index in chosen]
        if chosen and (min(chosen) < 0 or max(chosen) >= len(self._words)):
            for index in chosen:
                self._index(index)
        return chosen

    def _place(self, idx: Any) -> int:
        index = _index(idx, "an index")
        self._check_open()
        if not -len(self) <= index < len(self):
            raise OutOfRangeError(f"index {index} is out of range: the cache has {len(self)} slots")
        return index % len(self)

    def _check_open(self) -> None:
        if self._arena.segment.closed:
            raise SegmentError(f"{self!r} is closed")


def get_shm_size() -> float:
    """The size of ``/dev/shm`` in GiB. A cache cannot be larger, and other users' segments count too.

    >>> cache = SharedCache(min(0.01, 0.5 * get_shm_size()), dataset_len=10, data_dims=(3, 8, 8))
    """
    return shm_size() / GIB


def _attached(arena: Arena, arguments: Sequence[Any]) -> SharedCache:
    cache = SharedCache.__new__(SharedCache)
    cache._attach(arena, Structure(*arguments))
    return cache


def _index(value: Any, what: str) -> int:
    number = as_whole(value)
    if number is None:
        raise InvalidValueError(f"{what} is a whole number, not {value!r}")
    return number
