"""Keys to rows, a batch at once: 128-bit digests in sorted arrays, which may lie in a mapped file.

A key is 16 bytes. A 64-bit int is stored as itself, beside a mark that a digest has only with a chance of 2
to the -128. Anything else is the BLAKE3 of its canonical encoding (keys.py). A look-up is a binary search for
the first half and a comparison of both halves. There is a large table that was sorted once, and a small one
of later keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3

from castore.errors import UnhashableError
from castore.keys.encoder import CONFIGS, Encoder

#: Second half of an int's key.
_INTEGER_MARK = int.from_bytes(blake3(b"castore embeddings: an integer key").digest(8), "little")
#: Key of a row without an item.
NO_KEY = np.zeros(2, np.uint64)
_MASK = (1 << 64) - 1
_WORD = range(-(1 << 63), 1 << 63)

Digests = np.ndarray[Any, np.dtype[np.uint64]]
RowNumbers = np.ndarray[Any, np.dtype[np.int64]]


def key_digests(keys: Iterable[Any]) -> Digests:
    """The 128 bits of each key.

    Args:
        keys: int, str, bytes, or tuples of those, also as scalars of NumPy and torch; int64 tensors and
            integer arrays are quickest.

    Returns:
        Shape (n, 2).

    Raises:
        UnhashableError: a key is of another kind.
    """
    if isinstance(keys, torch.Tensor):
        keys = keys.numpy()
    if isinstance(keys, range):
        keys = np.arange(keys.start, keys.stop, keys.step)
    if isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "iu":
        if keys.dtype != np.uint64:
            return _integer_digests(keys.astype(np.int64))
        keys = keys.tolist()
    found = list(keys)
    if all(type(key) is int and key in _WORD for key in found):
        return _integer_digests(np.array(found, np.int64))
    return np.frombuffer(b"".join(map(_key_digest, found)), np.uint64).reshape(-1, 2)


def _integer_digests(keys: RowNumbers) -> Digests:
    table = np.empty((len(keys), 2), np.uint64)
    table[:, 0] = keys.view(np.uint64)
    table[:, 1] = _INTEGER_MARK
    return table


def _key_digest(key: Any) -> bytes:
    key = _plain(key)
    if type(key) is int and key in _WORD:
        return (key & _MASK).to_bytes(8, "little") + _INTEGER_MARK.to_bytes(8, "little")
    _check_kind(key, "the key")
    return blake3(Encoder(CONFIGS).encode(key, "the key")).digest(16)


def _plain(key: Any) -> Any:
    """The Python value of a key that NumPy or torch holds, as their arrays give one for each element."""
    if isinstance(key, np.integer | np.str_ | np.bytes_):
        return key.item()
    if isinstance(key, torch.Tensor) and key.ndim == 0 and _is_integer(key.dtype):
        return key.item()
    return tuple(map(_plain, key)) if type(key) is tuple else key


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _check_kind(key: Any, what: str) -> None:
    if type(key) is tuple:
        for place, part in enumerate(key):
            _check_kind(part, f"{what}[{place}]")
    elif type(key) not in (int, str, bytes):
        raise UnhashableError(f"{what} is {type(key).__name__}; keys are int, str, bytes, or tuples of those")


class KeyIndex(NamedTuple):
    """Keys in the order of their first half, and the row of each."""

    first: Digests
    second: Digests
    rows: RowNumbers

    @classmethod
    def of(cls, keys: Digests, rows: RowNumbers) -> KeyIndex:
        """Sort keys; of equal keys the first one stays first."""
        order = np.argsort(keys[:, 0], kind="stable")
        return cls(keys[order, 0], keys[order, 1], rows[order])

    def with_more(self, keys: Digests, rows: RowNumbers) -> KeyIndex:
        """A copy of this table with a few more keys."""
        more = KeyIndex.of(keys, rows)
        places = np.searchsorted(self.first, more.first, side="right")
        return KeyIndex(*(np.insert(old, places, new) for old, new in zip(self, more, strict=True)))

    def find(self, keys: Digests) -> RowNumbers:
        """The row of each key, or -1."""
        found = np.full(len(keys), -1, np.int64)
        size = len(self.first)
        if size == 0 or len(keys) == 0:
            return found
        first, second = np.ascontiguousarray(keys[:, 0]), keys[:, 1]
        places = np.searchsorted(self.first, first)
        asking = np.arange(len(keys))
        while len(asking):
            # Keys with the same first half lie side by side, and are compared one after the other.
            inside = places < size
            asking, places = asking[inside], places[inside]
            near = self.first[places] == first[asking]
            asking, places = asking[near], places[near]
            same = self.second[places] == second[asking]
            found[asking[same]] = self.rows[places[same]]
            asking, places = asking[~same], places[~same] + 1
        return found


EMPTY_INDEX = KeyIndex(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64))
