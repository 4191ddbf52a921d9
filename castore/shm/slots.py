"""The states of slots in shared memory: which process may write a slot, and whether a copy of it is valid.

A slot is a place for one record. A slot's state is a word of 32 bits. The lowest byte is public (0 empty, 1
set, 2 out of range), bit 8 means that the slot is being written, and the bits above count its changes.

Writers hold the arena's lock from `claim` to `publish`. So a slot that is WRITING when another process
holds the lock belongs to a writer that died or failed, and may be claimed again. Readers take no lock: a
reader loads the word, copies the record, and loads the word again. If the word is READY and unchanged, the
copy is valid. This protocol relies on stores becoming visible in program order, and on loads in program
order, as on x86-64.

Knows nothing of what lies in the slots. Must never: change a word outside the lock.
"""

from __future__ import annotations

import enum
from array import array

_BITS = 32
_WORD = (1 << _BITS) - 1
#: Mask of the state in a word; the bits above it count changes.
STATE = 0x1FF


class SlotState(enum.IntEnum):
    """State of a slot.

    ============  ==================  ===============================================================
    from          to                  when
    ============  ==================  ===============================================================
    EMPTY         WRITING             a process writes a record
    WRITING       READY               the record is complete
    WRITING       WRITING             the writer died or failed, and another writes a record
    WRITING       EMPTY               the writer died or failed, and the slot is emptied
    READY         WRITING             the record is overwritten
    READY         EMPTY               the record is removed, or its bytes go to another slot
    OUT_OF_RANGE                      never: no bytes belong to this slot
    ============  ==================  ===============================================================
    """

    EMPTY = 0
    READY = 1
    OUT_OF_RANGE = 2
    WRITING = 0x100


# The members as names of the module: on Python 3.11, finding a member in its class costs as much as a move.
_EMPTY, _READY, _WRITING = SlotState.EMPTY, SlotState.READY, SlotState.WRITING

_NEXT: dict[int, frozenset[SlotState]] = {
    SlotState.EMPTY: frozenset({SlotState.WRITING}),
    SlotState.WRITING: frozenset({SlotState.WRITING, SlotState.READY, SlotState.EMPTY}),
    SlotState.READY: frozenset({SlotState.WRITING, SlotState.EMPTY}),
    SlotState.OUT_OF_RANGE: frozenset[SlotState](),
}


class Slots:
    """The words of ``count`` slots. The first ``usable`` slots can be set.

    The caller must hold the arena's lock for `claim`, `publish`, `release` and `clear`.

    Args:
        buffer: `needed(count)` bytes of the segment, zero at first.
        usable: number of slots that have bytes for a record.
    """

    def __init__(self, buffer: memoryview, usable: int) -> None:
        #: Readers use the words without a method call: ``words[i] & STATE`` is a `SlotState`.
        self.words = buffer.cast("I")
        #: Number of slots that can be set.
        self.usable = usable
        beyond = len(self.words) - usable
        if beyond and self.words[-1] != SlotState.OUT_OF_RANGE:
            # A process that attaches at the same time writes the same values.
            self.words[usable:] = memoryview(array("I", [SlotState.OUT_OF_RANGE]) * beyond)

    @staticmethod
    def needed(count: int) -> int:
        """Bytes that the words of ``count`` slots take."""
        return count * _BITS // 8

    def state(self, index: int) -> SlotState:
        """The current state of a slot."""
        return SlotState(self.words[index] & STATE)

    def claim(self, index: int) -> None:
        """Make readers ignore the slot, so that its bytes may be written."""
        self._move(index, _WRITING)

    def publish(self, index: int) -> int:
        """Let readers copy the slot's bytes. Returns the word, which identifies this publication."""
        return self._move(index, _READY)

    def release(self, index: int) -> None:
        """Make the slot empty."""
        self._move(index, _EMPTY)

    def clear(self) -> None:
        """Empty all slots. If interrupted, some slots are empty."""
        for index in range(self.usable):
            if self.words[index] & STATE:
                self._move(index, _EMPTY)

    def _move(self, index: int, to: SlotState) -> int:
        word = self.words[index]
        # The look-up uses the plain int, which equals a SlotState: creating a SlotState would take most of
        # the time.
        assert to in _NEXT[word & STATE], f"slot {index}: {SlotState(word & STATE)!r} to {to!r}"
        # Adding 1 to a word whose state bits are all set clears them, and counts the change.
        word = (word | STATE) + 1 & _WORD | to
        self.words[index] = word
        return word
