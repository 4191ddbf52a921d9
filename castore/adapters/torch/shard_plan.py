"""Assigns samples to shards, and orders the samples that a shard's epoch visits.

Pure: numbers in, numbers out; no torch, no files, no environment. Every process computes the plan for itself,
so the result must be the same in every process, on every machine and with every version of NumPy:
`Generator.permutation` promises no such thing, the raw bits of PCG64 do.

The seed alone puts the samples of a job into one order, the *base order*; shards are slices of it. So a
sample's shard does not depend on the epoch, which makes caching it pay. As far as slices of another size
allow, it does not depend on the number of shards either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from castore.errors import InvalidValueError

Indices = NDArray[np.int64]
"""Indices of samples, an int64 array of shape (n,)."""


@dataclass(frozen=True, slots=True)
class Step:
    """A division of the samples to visit into shards, and how far each shard has come.

    An epoch that is resumed with other shards has several steps: each divides the samples that the previous
    one left.
    """

    #: Samples of each shard.
    sizes: tuple[int, ...]
    #: How many samples of each shard are visited: fewer where a shard is cut to the capacity of its cache.
    kept: tuple[int, ...]
    #: How many samples of each shard have been visited.
    consumed: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.kept) == len(self.consumed) > 0:
            raise InvalidValueError(
                f"a step has {len(self.sizes)} sizes, {len(self.kept)} kept and {len(self.consumed)} "
                "consumed; give one of each for every shard"
            )
        for shard, (size, kept, consumed) in enumerate(
            zip(self.sizes, self.kept, self.consumed, strict=True)
        ):
            if not 0 <= consumed <= kept <= size:
                raise InvalidValueError(
                    f"shard {shard} has {size} samples, {kept} of them kept and {consumed} of those "
                    "consumed; no number may exceed the one before it"
                )

    def left(self) -> list[int]:
        """How many samples each shard has yet to visit."""
        return [kept - consumed for kept, consumed in zip(self.kept, self.consumed, strict=True)]

    def advanced(self, taken: Sequence[int]) -> Step:
        """This step after so many more samples were visited in each shard.

        Raises:
            InvalidValueError: a shard has fewer samples left.
        """
        if len(taken) != len(self.consumed):
            raise InvalidValueError(
                f"consumed has {len(taken)} numbers for {len(self.consumed)} shards; give one for each"
            )
        consumed = tuple(done + more for done, more in zip(self.consumed, taken, strict=True))
        return Step(self.sizes, self.kept, consumed)


def permutation(n: int, *key: int | str) -> Indices:
    """``range(n)`` in an order that depends on `n` and `key` and on nothing else.

    >>> permutation(8, 13).tolist()
    [3, 2, 7, 0, 4, 1, 5, 6]
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    draws = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(n)
    # Stable: the order of equal draws, however unlikely, must not depend on how this NumPy sorts.
    return np.argsort(np.asarray(draws), kind="stable").astype(np.int64, copy=False)


def shard_sizes(n: int, rooms: Sequence[int]) -> tuple[int, ...]:
    """How many of `n` samples each shard gets: in proportion to its room, rounded by largest remainder.

    Equal rooms give sizes that differ by at most one, the larger ones first.

    Args:
        n: samples.
        rooms: the room of each shard, in any unit.

    Raises:
        InvalidValueError: there are no shards, or no room.

    >>> shard_sizes(10, [1, 1, 1, 1]), shard_sizes(10, [300, 100, 0])
    ((3, 3, 2, 2), (8, 2, 0))
    """
    total = sum(rooms)
    if total <= 0 or min(rooms) < 0:
        raise InvalidValueError(
            f"rooms are {_shown(rooms)}; give a positive room for at least one shard, and no negative ones"
        )
    # Integers throughout: every machine must round the same.
    shares = [divmod(n * room, total) for room in rooms]
    first = sorted(range(len(rooms)), key=lambda shard: (-shares[shard][1], shard))
    lucky = set(first[: n - sum(share for share, _ in shares)])
    return tuple(share + (shard in lucky) for shard, (share, _) in enumerate(shares))


def slice_of(sizes: Sequence[int], shard: int) -> slice:
    """The slice of `shard` among shards of these sizes.

    >>> slice_of([3, 3, 2], 1)
    slice(3, 6, None)
    """
    start = sum(sizes[:shard])
    return slice(start, start + sizes[shard])


def epoch_order(members: Indices, *, shuffle: bool, seed: int, epoch: int, step: int, shard: int) -> Indices:
    """Positions within `members` in the order that an epoch visits them.

    The order is shuffled anew for each epoch, or follows the index, which suits sources in files best.

    Args:
        members: the indices of a shard's samples, in base order.
        step: the number of the epoch's step: the rest of a shard's epoch is another shard.
    """
    if not shuffle:
        return np.argsort(members, kind="stable").astype(np.int64, copy=False)
    return permutation(len(members), seed, "epoch", epoch, step, shard)


def remaining(n: int, seed: int, epoch: int, history: Sequence[Step], *, shuffle: bool = True) -> Indices:
    """The samples that an epoch has yet to visit after the steps of `history`, in base order.

    Samples that a step cut away, because caches could not hold them, do not come back in its epoch.

    Args:
        n: samples of the whole dataset.
        seed, epoch, shuffle: the values with which the steps were taken.
        history: the steps of this epoch, the oldest first; without steps, all samples remain.

    Raises:
        InvalidValueError: a step's shards do not add up to the samples that the previous step left.

    >>> remaining(8, 13, 0, []).tolist()
    [3, 2, 7, 0, 4, 1, 5, 6]
    >>> remaining(8, 13, 0, [Step(sizes=(4, 4), kept=(4, 4), consumed=(1, 3))], shuffle=False).tolist()
    [3, 2, 7, 6]
    """
    pool = permutation(n, seed)
    for number, step in enumerate(history):
        if sum(step.sizes) != len(pool):
            raise InvalidValueError(
                f"step {number} of the history cuts up {sum(step.sizes)} samples, where {len(pool)} are "
                "left; load the state that was saved for this dataset"
            )
        stops = list(accumulate(step.sizes))
        parts = []
        for shard, (stop, size, kept, consumed) in enumerate(
            zip(stops, step.sizes, step.kept, step.consumed, strict=True)
        ):
            members = pool[stop - size : stop - size + kept]
            order = epoch_order(members, shuffle=shuffle, seed=seed, epoch=epoch, step=number, shard=shard)
            left = np.ones(kept, dtype=np.bool_)
            left[order[:consumed]] = False
            parts.append(members[left])
        pool = np.concatenate(parts)
    return pool


def _shown(rooms: Sequence[int]) -> str:
    text = repr(list(rooms))
    return text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}"
