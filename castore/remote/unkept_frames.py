"""Bytes of a remote that are served without being kept: pins fill the store's budget, or its disk is full.

The fetcher answers with stored frames then, and the reader checks and decodes them. No neighbours come along,
so this is slower than bytes that are kept, and far better than an error.
"""

from __future__ import annotations

import threading
import time
from itertools import accumulate

from castore.errors import CorruptError, FullError, TooLargeError
from castore.objects.codecs import CODECS
from castore.objects.frames import frame_length
from castore.parts import Parts
from castore.remote.fetcher_client import FetcherClient
from castore.remote.pages import FRAME, Row, frame_of
from castore.system.forks import reset_after_fork

#: Errors of a store that has no room to keep fetched bytes.
NOT_KEPT = (FullError, TooLargeError)
#: Stored bytes, and frames, that come in one answer at most, if one frame is not larger.
SPAN_BYTES, SPAN_FRAMES = 1 << 20, 64
# Seconds for which nobody tries again to keep what is fetched.
_FULL_SECONDS = 5.0


class RoomState:
    """Whether the store had room for fetched bytes a moment ago. Threads may share it."""

    def __init__(self) -> None:
        self._full: tuple[float, FullError | TooLargeError | None] = (0.0, None)

    def require(self) -> None:
        """Raise the error of a moment ago again, if there was one: nothing is fetched only to be dropped."""
        until, error = self._full
        if error is not None and time.monotonic() < until:
            raise error

    def note(self, error: FullError | TooLargeError) -> None:
        """Remember that there was no room."""
        self._full = time.monotonic() + _FULL_SECONDS, error


def frame_span(row: Row, first: int) -> tuple[int, int, int]:
    """The frames that come together, from the first one: the number behind the last, and where their stored
    bytes begin and end, counted from the blob's first.
    """
    ends = [0, *accumulate(length for length, _ in FRAME.iter_unpack(row.place.frames))]
    stop = first + 1
    while stop < min(len(ends) - 1, first + SPAN_FRAMES) and ends[stop + 1] - ends[first] <= SPAN_BYTES:
        stop += 1
    return stop, ends[first], ends[stop]


def check_frames(stored: bytes, row: Row, first: int, stop: int, where: str) -> list[bytes]:
    """Stored bytes of the frames from one up to another, each compared with its digest in the tree.

    Raises:
        CorruptError: they are others.
    """
    frames: list[bytes] = []
    at = 0
    for number in range(first, stop):
        known = row.place.frames[number * FRAME.size :][: FRAME.size]
        length, _ = FRAME.unpack(known)
        frames.append(stored[at : at + length])
        if frame_of(frames[-1]) != known:
            raise CorruptError(
                f"frame {number} of {row.name!r} in {where} differs from what the tree says;"
                " `castore remote check --deep` tells more",
                digest=row.digest.hex(),
                where=where,
            )
        at += length
    return frames


class UnkeptFrames:
    """The frames of one blob, fetched for each read. Threads may share it.

    Args:
        parts: of the store, whose dictionaries decode them.
        fetcher: fetches them.
        remote: name of the remote.
        row: of the blob.
    """

    def __init__(self, parts: Parts, fetcher: FetcherClient, remote: str, row: Row) -> None:
        self._parts = parts
        self._fetcher = fetcher
        self._remote = remote
        self._row = row
        self._span: tuple[int, list[bytes]] = (0, [])
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def load(self, index: int) -> bytes:
        """A frame, decoded.

        Raises:
            CorruptError: the remote's bytes are damaged.
            RemoteError: the remote cannot be used.
        """
        row = self._row
        return CODECS[row.place.codec].decompress(
            self._stored(index), frame_length(row.size, index), self._parts.objects.dictionaries.decompressor
        )

    def _stored(self, index: int) -> bytes:
        with self._lock:
            first, frames = self._span
            if not first <= index < first + len(frames):
                answer = self._fetcher.call("frames", remote=self._remote, row=self._row, first=index)
                stop, _, _ = frame_span(self._row, index)
                frames = check_frames(answer, self._row, index, stop, f"remote {self._remote!r}")
                first, self._span = index, (index, frames)
            return frames[index - first]
