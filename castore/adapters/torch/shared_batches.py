"""SharedBatches: a collate function whose batches lie in shared memory that is used again and again.

A worker of a `DataLoader` hands each batch on in new shared memory, and the kernel clears all of its pages.
For samples that lie in memory this is most of a loader's time. Here a worker puts its batches into the
buffers of a `castore.shm.buffer_pool`, and what it sends names the buffers. In the loader's process a batch
becomes what it was: its tensors lie in the buffers, and a buffer is free once no tensor lies in it.

Must never: change what the collate function has returned, but for where tensors lie.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import uuid
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from castore.adapters.torch.batch_collate import collate
from castore.errors import InvalidValueError, SegmentError
from castore.shm.buffer_pool import BufferPool, BufferReceiver, Message

# A smaller tensor travels as bytes of the message.
_SMALLEST = 4096
# Of tensors whose values are numbers, each in bytes of its own.
_NUMBERS = re.compile(r"torch\.(bool|u?int(8|16|32|64)|bfloat16|float(16|32|64|8_\w+)|complex\d+)")
_DTYPES = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and _NUMBERS.fullmatch(str(dtype))
)


class SharedBatches:
    """Collates samples in shared memory that is used again, for a `DataLoader` with workers.

    Each worker keeps as many buffers as batches of its are on the way or in use, and takes a buffer again
    when no tensor of the loader's process lies in it any more. A batch that is kept keeps its memory: nothing
    is written to a tensor that somebody still has, in this process or in a child that Python has forked.
    So a batch is used like any other, with these differences: its tensors are not shared memory of torch
    (``is_shared()`` is False, so that a further process gets a copy) and cannot be enlarged in place.

    Without workers, and for tensors on a GPU, sparse ones, subclasses and the like, nothing is changed.

    Args:
        collate_fn: makes a batch of a list of samples, and returns whatever can be pickled. By default
            samples are collated as by `collate`, directly in shared memory. Tensors of another function's
            batch, of 4 KiB or more, are copied there.

    Raises:
        InvalidValueError: ``collate_fn`` cannot be called.

    >>> from torch.utils.data import DataLoader
    >>> loader = DataLoader(torch.arange(6).float(), batch_size=3, num_workers=2, collate_fn=SharedBatches())
    >>> [batch.tolist() for batch in loader]
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """

    def __init__(self, collate_fn: Callable[[Any], Any] | None = None) -> None:
        if collate_fn is not None and not callable(collate_fn):
            raise InvalidValueError(f"collate_fn is a function, not a {type(collate_fn).__name__}")
        self._set(uuid.uuid4().hex, collate_fn, os.getpid())

    def _set(self, name: str, collate_fn: Callable[[Any], Any] | None, made_in: int | None) -> None:
        self._name, self._collate_fn = name, collate_fn
        # A loader that a worker makes for itself hands its batches to nobody.
        self._made_in = made_in
        self._sender: _Sender | None = None
        #: Of this object and its copies in this process.
        self._receiver = _receivers.setdefault(name, BufferReceiver())

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_loader, (self._name, self._collate_fn)

    def __repr__(self) -> str:
        return "SharedBatches()" if self._collate_fn is None else f"SharedBatches({self._collate_fn!r})"

    def __call__(self, samples: Any) -> Any:
        """A batch of the samples; in a worker, what becomes the batch in the loader's process."""
        if get_worker_info() is None or self._made_in == os.getpid():
            return (self._collate_fn or collate)(samples)
        if self._sender is None or self._sender.process != os.getpid():
            self._sender = _Sender(self._name)
        return self._sender.make(samples, self._collate_fn)


def _of_loader(name: str, collate_fn: Callable[[Any], Any] | None) -> SharedBatches:
    copy = SharedBatches.__new__(SharedBatches)
    copy._set(name, collate_fn, None)
    return copy


_receivers: weakref.WeakValueDictionary[str, BufferReceiver] = weakref.WeakValueDictionary()


class _Sent:
    """A batch that a worker sends: in the loader's process it is the batch."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, self._parts

    def __getitem__(self, item: Any) -> Any:
        raise TypeError(
            "a worker's SharedBatches returns what becomes a batch in the loader's process; a function that "
            "works on batches goes inside: SharedBatches(my_collate)"
        )


def _receive(name: str, pool: str, dropped: list[int], data: bytes) -> Any:
    receiver = _receivers.get(name)
    if receiver is None:
        raise SegmentError(
            "a batch in shared memory has reached a process that does not have its loader's collate function"
        )
    receiver.drop(pool, dropped)
    return _Unpickler(data, receiver).load()


class _Place(NamedTuple):
    """Where a tensor of a batch lies: its number in the batch, and what is needed to find it there.

    Attributes:
        number: in the batch; one tensor may be in it twice.
        dtype, shape, stride: of the tensor.
        source: the buffer with its bytes, or the bytes.
    """

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    source: Message | bytes

    def tensor_in(self, memory: Any) -> torch.Tensor:
        """The tensor in memory of its size."""
        if 0 in self.shape:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.stride)

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Sender:
    """A worker's side: collates into buffers, and pickles batches that name them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = BufferPool()
        self.process = self._pool.process
        # The tensors that lie in buffers already, and the buffers' numbers, by the tensors' id.
        self._stacked: dict[int, tuple[torch.Tensor, int]] = {}
        # The tensors of the batch, and where they lie, by their id.
        self._placed: dict[int, tuple[torch.Tensor, _Place]] = {}

    def make(self, samples: Any, collate_fn: Callable[[Any], Any] | None) -> _Sent:
        """Collate a batch, and have it travel."""
        dropped, is_sent = self._pool.begin_round(), False
        try:
            if collate_fn is not None:
                batch = collate_fn(samples)
            elif isinstance(samples, list):
                batch = collate_by_type(samples, collate_fn_map=self._by_type())
            else:
                batch = samples
            data = io.BytesIO()
            # Now, not where the batch is sent: there an error would be told to nobody, and the loader wait.
            _Pickler(data, self._pass_on).dump(batch)
            is_sent = True
            return _Sent(self._name, self._pool.name, dropped, data.getvalue())
        finally:
            self._stacked.clear()
            self._placed.clear()
            self._pool.end_round(is_sent=is_sent)

    def _by_type(self) -> dict[Any, Any]:
        """The functions of `default_collate`, with a user's own."""
        if default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
            return default_collate_fn_map
        return {**default_collate_fn_map, torch.Tensor: self._stack}

    def _stack(self, samples: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """`torch.stack` into a buffer, for samples that can be stacked there."""
        first = samples[0]
        if _is_plain(first) and all(type(sample) is torch.Tensor for sample in samples):
            size = first.nbytes * len(samples)
            taken = self._pool.take(size) if size >= _SMALLEST else None
            if taken is not None:
                number, buffer = taken
                memory = torch.frombuffer(buffer.bytes(size), dtype=first.dtype)
                stacked = memory.view(len(samples), *first.shape)
                try:
                    torch.stack(samples, out=stacked)
                except (RuntimeError, TypeError):
                    pass  # of several shapes or dtypes: torch's own way has a result, or words, for them
                else:
                    self._stacked[id(stacked)] = stacked, number
                    return stacked
        made: torch.Tensor = collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
        return made

    def _pass_on(self, value: Any) -> _Place | None:
        """Where a tensor will lie; None for what travels in its own way."""
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        known = self._placed.get(id(value))
        if known is not None:
            return known[1]
        stride = value.stride() if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
        place = _Place(len(self._placed), value.dtype, tuple(value.shape), stride, b"")
        stacked = self._stacked.get(id(value))
        if stacked is not None:
            place = place._replace(source=self._pool.send(stacked[1]))
        elif value.nbytes < _SMALLEST:
            memory = bytearray(value.nbytes)
            place.tensor_in(memory).copy_(value)
            place = place._replace(source=bytes(memory))
        else:
            taken = self._pool.take(value.nbytes)
            if taken is None:
                return None
            number, buffer = taken
            place.tensor_in(buffer.bytes(value.nbytes)).copy_(value)
            place = place._replace(source=self._pool.send(number))
        self._placed[id(value)] = value, place
        return place


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values, dtype, shape and order of a tensor are all that there is to it."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype in _DTYPES
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_nested or any(getattr(tensor, "names", ())))
        # An expanded tensor is larger than its memory.
        and tensor.untyped_storage().nbytes() >= tensor.nbytes
    )


class _Pickler(ForkingPickler):
    """Pickles a batch, and passes its tensors on."""

    def __init__(self, file: io.BytesIO, pass_on: Callable[[Any], _Place | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._pass_on = pass_on

    def persistent_id(self, value: Any) -> _Place | None:
        """Where a tensor lies; None for what is pickled in its own way."""
        return self._pass_on(value)


class _Unpickler(pickle.Unpickler):
    """Makes a batch again, with its tensors in the memory that a receiver has."""

    def __init__(self, data: bytes, receiver: BufferReceiver) -> None:
        super().__init__(io.BytesIO(data))
        self._receiver = receiver
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, place: _Place) -> torch.Tensor:
        """The tensor that lies there."""
        if place.number not in self._tensors:
            memory: bytearray | memoryview
            if isinstance(place.source, bytes):
                memory = bytearray(place.source)
            else:
                memory = self._receiver.receive(place.source, place.size)
            self._tensors[place.number] = place.tensor_in(memory)
        return self._tensors[place.number]
