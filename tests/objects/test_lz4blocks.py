"""LZ4 frames by hand: as strict as the lz4 package, and nothing it would not read."""

from __future__ import annotations

import lz4.frame
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castore import CorruptError
from castore.objects import lz4blocks
from castore.objects.codecs import CODECS, FRAME_SIZE, no_dictionary
from tests.helpers import mixed, noise, text

LEVELS = [-50, -1, 0, 1, 2, 3, 9, 16]
SIZES = [1, 5, 12, 13, 1_000, 65_536, 65_537, FRAME_SIZE - 1, FRAME_SIZE]


def by_the_package(data: bytes, level: int) -> bytes:
    return bytes(
        lz4.frame.compress(
            data,
            compression_level=level,
            block_size=lz4.frame.BLOCKSIZE_MAX256KB,
            content_checksum=True,
            store_size=True,
        )
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [noise, text, mixed, bytes])
def test_frames_of_castore_and_of_the_package_are_read_here(size: int, make: object) -> None:
    data = make(size)  # type: ignore[operator]  # one of the functions above
    for level in LEVELS:
        frame = CODECS["lz4"].compress(memoryview(data), level)
        assert lz4.frame.decompress(frame) == data
        assert len(frame) <= len(by_the_package(data, level)) * 1.02
        for written in (frame, by_the_package(data, level)):
            assert lz4blocks.decompress(written, size) == data


@pytest.mark.parametrize(
    "options", [{"block_size": 4}, {"block_checksum": True}, {"content_checksum": False}]
)
def test_frames_of_another_shape_are_left_to_the_package(options: dict[str, int]) -> None:
    data = text(FRAME_SIZE)
    frame = lz4.frame.compress(data, store_size=True, **options)
    assert lz4blocks.decompress(frame, len(data)) is None
    assert CODECS["lz4"].decompress(frame, len(data), no_dictionary) == data


@given(st.binary(max_size=80), st.integers(0, 100))
@settings(max_examples=500)
def test_whatever_is_no_frame_is_none(stored: bytes, size: int) -> None:
    assert lz4blocks.decompress(stored, size) is None


@pytest.mark.parametrize("data", [noise(40), text(3_000), text(9_000)])
def test_no_flipped_bit_gives_other_bytes(data: bytes) -> None:
    frame = CODECS["lz4"].compress(data, 0)
    harmless = 0
    for place in range(len(frame) * 8):
        bad = bytearray(frame)
        bad[place // 8] ^= 1 << place % 8
        try:
            assert CODECS["lz4"].decompress(bytes(bad), len(data), no_dictionary) == data
            assert lz4blocks.decompress(bytes(bad), len(data)) in (data, None)
            harmless += 1  # text repeats itself: a copy from another place may be equal
        except CorruptError:
            pass
    assert harmless < len(frame) // 20


@pytest.mark.parametrize("length", [3_000, 9_000])
@pytest.mark.parametrize("size", [1, 2_999, 3_001, 8_999, 9_001, FRAME_SIZE])
def test_a_frame_of_another_size_is_corrupt(length: int, size: int) -> None:
    with pytest.raises(CorruptError, match="belong"):
        CODECS["lz4"].decompress(CODECS["lz4"].compress(text(length), 0), size, no_dictionary)
