"""The frames decoded ahead: each of a sequential reader's once and in time, none of a random reader's."""

from __future__ import annotations

import random

import pytest

from castore_fuse.handles import ReadAhead


def read(sequence: ReadAhead, frames: list[int]) -> list[int]:
    """The frames requested while those were read, with the kernel's two requests a frame."""
    asked: list[int] = []
    for frame in frames:
        for _ in range(2):
            asked += sequence.next_frames(frame, frame)
    return asked


@pytest.mark.parametrize("limit", [1, 2, 8, 64])
def test_sequential_reader_has_every_frame_asked_for_once(limit: int) -> None:
    asked = read(ReadAhead(limit), list(range(200)))
    assert asked == list(range(1, asked[-1] + 1))
    assert 199 <= asked[-1] <= 199 + limit


def test_window_opens_step_by_step() -> None:
    sequence = ReadAhead(8)
    ahead = [len(read(sequence, [frame])) for frame in range(12)]
    assert ahead[0] <= 2
    assert max(ahead) <= 8
    assert sum(ahead) >= 12


def test_random_reader_has_nothing_decoded_for_it() -> None:
    chance = random.Random(0)
    frames = [chance.randrange(0, 10_000) for _ in range(500)]
    asked = read(ReadAhead(8), frames)
    assert len(asked) <= 20


def test_reader_that_jumps_and_goes_on_is_sequential_again() -> None:
    sequence = ReadAhead(8)
    read(sequence, list(range(20)))
    asked = read(sequence, list(range(500, 520)))
    assert asked == list(range(asked[0], asked[-1] + 1))
    assert 501 <= asked[0] <= 502
    assert asked[-1] >= 519


def test_no_limit_means_no_reading_ahead() -> None:
    assert read(ReadAhead(0), list(range(50))) == []
