"""The states of slots in shared memory: who may write one, and whether what was read from one is whole.

A slot is a place for one sample; its state is a word of 32 bits. The lowest byte is what others may know of it (0 empty,
1 set, 2 out of range), bit 8 says that it is being written, and the bits above count how often it changed.

Writers hold the segment's lock from claim to publication, so a slot found WRITING by who holds the lock is that of a
writer that died or failed, and is taken over. Readers take no lock: they look at the word, copy the sample, and look
again; a word that is READY and the same says that the copy is whole. That rests on stores becoming visible in their
order, and loads happening in theirs, as x86-64 has it.

Knows nothing of what lies in the slots. Must never change a word outside the lock.
"""

from __future__ import annotations

import enum
from array import array

_BITS = 32
#: The part of a word that is the state; what is above counts changes.
STATE = 0x1FF
_CHANGE = STATE + 1


class SlotState(enum.IntEnum):
    """What is known of a slot.

    ============  ==================  ===============================================================
    from          to                  when
    ============  ==================  ===============================================================
    EMPTY         WRITING             somebody sets it
    WRITING       READY               the sample is there as a whole
    WRITING       WRITING             its writer died or failed, and somebody else sets it
    WRITING       EMPTY               there is no room for the sample; or all are cleared
    READY         WRITING             it is overwritten
    READY         EMPTY               all are cleared
    OUT_OF_RANGE                      never: the cache has no room for this index
    ============  ==================  ===============================================================
    """

    EMPTY = 0
    READY = 1
    OUT_OF_RANGE = 2
    WRITING = 0x100


_NEXT: dict[int, frozenset[SlotState]] = {
    SlotState.EMPTY: frozenset({SlotState.WRITING}),
    SlotState.WRITING: frozenset({SlotState.WRITING, SlotState.READY, SlotState.EMPTY}),
    SlotState.READY: frozenset({SlotState.WRITING, SlotState.EMPTY}),
    SlotState.OUT_OF_RANGE: frozenset[SlotState](),
}


class Slots:
    """The words of ``count`` slots, of which the first ``usable`` can be set.

    `claim`, `publish`, `release` and `clear` assume that the caller holds the lock of the segment.

    Args:
        buffer: `needed(count)` bytes of the segment, zero at first.
        usable: how many slots have a place for a sample.
    """

    def __init__(self, buffer: memoryview, usable: int) -> None:
        #: For readers, who go without calls: ``words[i] & STATE`` is a `SlotState`.
        self.words = buffer.cast("I")
        self._usable = usable
        beyond = len(self.words) - usable
        if beyond and self.words[-1] != SlotState.OUT_OF_RANGE:
            # Whoever attaches at the same time writes the same.
            self.words[usable:] = memoryview(array("I", [SlotState.OUT_OF_RANGE]) * beyond)

    @staticmethod
    def needed(count: int) -> int:
        """Bytes that the words of ``count`` slots take."""
        return count * _BITS // 8

    def state(self, index: int) -> SlotState:
        """The state of a slot at this moment."""
        return SlotState(self.words[index] & STATE)

    def claim(self, index: int) -> None:
        """From here on readers leave the slot alone; its bytes may be written."""
        self._move(index, SlotState.WRITING)

    def publish(self, index: int) -> int:
        """Its bytes are there: readers may copy them. Returns the word, the mark of this very publication."""
        return self._move(index, SlotState.READY)

    def release(self, index: int) -> None:
        """There is nothing in the slot after all."""
        self._move(index, SlotState.EMPTY)

    def clear(self) -> None:
        """Empty all slots. Interrupted, it has emptied some."""
        for index in range(self._usable):
            if self.words[index] & STATE:
                self._move(index, SlotState.EMPTY)

    def _move(self, index: int, to: SlotState) -> int:
        word = self.words[index]
        # Looked up by the bare number, which a state equals: to make the state of it would take most of the time.
        assert to in _NEXT[word & STATE], f"slot {index}: {SlotState(word & STATE)!r} to {to!r}"
        word = ((word & ~STATE) + _CHANGE) % (1 << _BITS) | to
        self.words[index] = word
        return word
