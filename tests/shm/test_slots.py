"""The states of slots: only the documented transitions, and a word that differs after each."""

from __future__ import annotations

import itertools
import re

import pytest

from castore.shm.slots import _NEXT, STATE, Slots, SlotState

MOVES = {
    SlotState.WRITING: Slots.claim,
    SlotState.READY: Slots.publish,
    SlotState.EMPTY: Slots.release,
}


def _slots(count: int = 4, usable: int = 3) -> Slots:
    return Slots(memoryview(bytearray(Slots.needed(count))), usable)


def _bring(slots: Slots, index: int, state: SlotState) -> None:
    if state in (SlotState.WRITING, SlotState.READY):
        slots.claim(index)
    if state is SlotState.READY:
        slots.publish(index)


def test_slots_are_empty_at_first_and_those_beyond_out_of_range() -> None:
    slots = _slots(5, 3)
    states = [slots.state(index) for index in range(5)]
    assert states == [SlotState.EMPTY] * 3 + [SlotState.OUT_OF_RANGE] * 2
    assert _slots(3, 3).state(2) is SlotState.EMPTY


@pytest.mark.parametrize(("before", "after"), itertools.product(SlotState, MOVES))
def test_only_the_transitions_written_down_happen(before: SlotState, after: SlotState) -> None:
    slots = _slots()
    index = 3 if before is SlotState.OUT_OF_RANGE else 0
    _bring(slots, index, before)
    if after in _NEXT[before]:
        MOVES[after](slots, index)
        assert slots.state(index) is after
    else:
        with pytest.raises(AssertionError, match=before.name):
            MOVES[after](slots, index)
        assert slots.state(index) is before


def test_the_docstring_lists_exactly_the_transitions_that_the_code_allows() -> None:
    rows = re.findall(r"^    ([A-Z_]+) +([A-Z]+) +\w", SlotState.__doc__ or "", re.MULTILINE)
    written = {(SlotState[before], SlotState[after]) for before, after in rows}
    assert written == {(before, after) for before, following in _NEXT.items() for after in following}


def test_every_change_of_a_slot_gives_a_word_that_was_not_there_before() -> None:
    slots = _slots()
    seen = {slots.words[0]}
    for _ in range(1000):
        slots.claim(0)
        seen.add(slots.words[0])
        seen.add(slots.publish(0))
    slots.clear()
    seen.add(slots.words[0])
    assert len(seen) == 2002


def test_the_count_of_changes_wraps_around_and_leaves_the_state_alone() -> None:
    slots = _slots()
    slots.words[0] = (1 << 32) - 1 - STATE
    slots.claim(0)
    assert slots.words[0] == SlotState.WRITING


def test_clear_empties_all_but_those_out_of_range_and_leaves_neighbours_alone() -> None:
    slots = _slots()
    _bring(slots, 0, SlotState.READY)
    _bring(slots, 1, SlotState.WRITING)
    slots.clear()
    states = [slots.state(index) for index in range(4)]
    assert states == [SlotState.EMPTY] * 3 + [SlotState.OUT_OF_RANGE]


def test_the_lowest_byte_of_a_word_tells_others_0_1_or_2_and_never_that_it_is_written() -> None:
    slots = _slots()
    for state, byte in ((SlotState.EMPTY, 0), (SlotState.WRITING, 0), (SlotState.READY, 1)):
        slots.clear()
        _bring(slots, 0, state)
        assert slots.words[0] & 0xFF == byte
    assert slots.words[3] & 0xFF == 2
