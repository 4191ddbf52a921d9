"""How a row reads one large file: in order, or in pieces at random places by several readers at once."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.bench import corpus

#: Bytes of a call that reads in order, bytes at each random place, and readers at random places.
CHUNK, PIECE, READERS = 2**20, 65_536, 4


def read_through(path: Path, size: int) -> None:
    """Read a file of `size` bytes in order.

    Raises:
        RuntimeError: it came short.
    """
    buffer, left = bytearray(CHUNK), size
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            left -= got
    if left:
        raise RuntimeError(f"{path} is {left} bytes short")


def random_places(size: int, pieces: int) -> list[list[int]]:
    """Offsets for each reader, all different, in a file of `size` bytes."""
    offsets = random.Random(corpus.SEED).sample(range(size // PIECE), pieces)
    return [[number * PIECE for number in offsets[reader::READERS]] for reader in range(READERS)]


def read_at_random(path: Path, places: list[list[int]]) -> None:
    """Read a piece at each of the places, each reader with a descriptor of its own.

    Raises:
        RuntimeError: a piece came short.
    """
    with ThreadPoolExecutor(READERS) as pool:
        for done in [pool.submit(_read_pieces, path, offsets) for offsets in places]:
            done.result()


def _read_pieces(path: Path, offsets: list[int]) -> None:
    with path.open("rb", buffering=0) as file:
        for offset in offsets:
            if len(os.pread(file.fileno(), PIECE, offset)) != PIECE:
                raise RuntimeError(f"{path} came short at {offset}")
