"""The epoch of a dataset and the progress in it, kept in shared memory for all copies of the dataset.

DataLoader workers hold copies, and persistent workers keep their copies over epochs: a change to the training
process's own copy would never reach them. So every copy attaches to one small segment, with a word that
changes whenever the rest changes. This module also writes and parses the saved state of a checkpoint. Reading
a sample must never touch more of the segment than that word.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from castore.adapters.torch.shard_plan import Step
from castore.errors import InvalidValueError
from castore.shm.segments import Segment

# The number of changes, and the bytes of JSON that follow.
_CHANGES, _LENGTH, _WORDS = range(3)
_TEXT = 8 * _WORDS
# The size reserves memory only as far as it is used: one page, except for jobs of thousands of shards that
# were resumed in many worlds.
_SIZE = 1 << 20

_VERSION = 1


class EpochProgress:
    """An epoch and the steps taken in it; a forked or pickled copy shows the same."""

    def __init__(self) -> None:
        self._segment = Segment(None, _SIZE, {"kind": "progress"}, reserve=_TEXT)
        self._words = self._segment.buffer[:_TEXT].cast("Q")

    def __getstate__(self) -> Segment:
        return self._segment

    def __setstate__(self, segment: Segment) -> None:
        self._segment = segment
        self._words = segment.buffer[:_TEXT].cast("Q")

    @property
    def changes(self) -> int:
        """The number of writes so far: a reader that remembers another number must read again."""
        return self._words[_CHANGES]

    def read(self) -> tuple[int, int, list[Step]]:
        """The number of changes, the epoch, and its steps."""
        with self._segment.lock():
            changes, length = self._words[_CHANGES], self._words[_LENGTH]
            text = bytes(self._segment.buffer[_TEXT : _TEXT + length])
        if not text:
            return changes, 0, []
        epoch, steps = json.loads(text)
        return changes, epoch, [Step(*map(tuple, step)) for step in steps]

    def write(self, epoch: int, steps: Sequence[Step]) -> None:
        """Have all copies continue from here.

        Raises:
            InvalidValueError: the steps do not fit in the segment.
        """
        counts = [[step.sizes, step.kept, step.consumed] for step in steps]
        text = json.dumps([epoch, counts], separators=(",", ":")).encode()
        if _TEXT + len(text) > _SIZE:
            raise InvalidValueError(
                f"an epoch that was resumed {len(steps)} times in other worlds is too long a story "
                f"({len(text)} bytes, at most {_SIZE - _TEXT}); begin with the next epoch: set_epoch"
            )
        with self._segment.lock():
            self._segment.reserve(_TEXT, _TEXT + len(text))
            self._segment.buffer[_TEXT : _TEXT + len(text)] = text
            self._words[_LENGTH] = len(text)
            self._words[_CHANGES] += 1

    def close(self) -> None:
        """Leave the segment; the last to leave removes it."""
        self._segment.close()


def dump_state(n: int, seed: int, shuffle: bool, epoch: int, steps: Sequence[Step]) -> dict[str, Any]:
    """A state for a checkpoint, of plain numbers, lists and dicts.

    Args:
        n: samples of the whole dataset.
        seed, shuffle: what decides the order, together with the epoch.
        steps: the steps of the epoch, the oldest first.
    """
    history = [{"sizes": [*step.sizes], "kept": [*step.kept], "consumed": [*step.consumed]} for step in steps]
    return {
        "version": _VERSION, "n": n, "seed": seed, "shuffle": shuffle, "epoch": epoch, "history": history,
    }  # fmt: skip


def parse_state(state: Any, n: int, seed: int, shuffle: bool) -> tuple[int, list[Step]]:
    """The epoch and the steps of a saved state.

    Raises:
        InvalidValueError: the state is none, or belongs to other data, another seed or another order.
    """
    try:
        for name, here in (("version", _VERSION), ("n", n), ("seed", seed), ("shuffle", shuffle)):
            if state[name] != here:
                raise InvalidValueError(
                    f"the state was saved with {name}={state[name]!r}, and here it is {here!r}; "
                    "make the dataset as it was made then, or start the epoch anew"
                )
        epoch = int(state["epoch"])
        steps = [
            Step(*(tuple(map(int, step[name])) for name in ("sizes", "kept", "consumed")))
            for step in state["history"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidValueError):
            raise
        raise InvalidValueError(
            f"this is no state of a LazyShardDataset ({type(error).__name__}: {error}); load what state_dict "
            "gave"
        ) from error
    totals = [n, *(sum(step.left()) for step in steps[:-1])]
    for total, step in zip(totals, steps, strict=False):
        if sum(step.sizes) != total:
            raise InvalidValueError(
                f"a step of the state cuts up {sum(step.sizes)} samples, where {total} are left; "
                "load what state_dict gave"
            )
    return epoch, steps
