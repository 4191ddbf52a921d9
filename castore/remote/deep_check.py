"""Reads objects of a bucket whole: their bytes must be those of their names, and each blob that of its rows.

An object can be what its name says while rows of a tree lie about it: a writer with bad memory, or a bad
one, names other frames, another digest or another size. Such bytes are refused by readers, and this finds
them before. Each object is read once, in memory of some megabytes. Writes nothing, and takes nothing from
the store: a dictionary, too, must be in the bucket.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgpack
import zstandard
from blake3 import blake3

from castore.errors import (
    CorruptError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
)
from castore.objects.codecs import CODECS, FRAME_SIZE, WithDictionary
from castore.objects.dictionaries import Dictionary, derive_number
from castore.objects.frames import frame_length, read_table
from castore.objects.packs import PACK_LIMIT
from castore.remote.bucket import Bucket
from castore.remote.keys import dictionary_key
from castore.remote.pages import FRAME, Row, frame_of

# Dictionaries that are kept in memory.
_LOADED = 32

#: All that a row says of its blob, but for the object that has it: few bytes, since a remote has many rows.
#: Claims are in the order of the places that they name.
Claim: TypeAlias = bytes
_START_BYTES = 8


def claim_of(row: Row) -> Claim:
    """The claim that a row makes about its blob."""
    place = row.place
    said: bytes = msgpack.packb((row.digest, row.size, place.stored, place.codec, place.frames))
    return place.offset.to_bytes(_START_BYTES, "big") + said


class Damage(NamedTuple):
    """The damage of an object.

    Attributes:
        why: its bytes are not those of its name; None if they are.
        untrue: claims that are not so. Not known if the object itself is damaged, and empty then.
        dictionaries: those that blobs need and that are damaged or gone, by number, and why.
    """

    why: str | None
    untrue: list[Claim]
    dictionaries: dict[int, str]


class DeepCheck:
    """Reads objects of a bucket, several at once if several threads ask.

    Args:
        bucket: has them.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._dictionary = lru_cache(_LOADED)(self._load_dictionary)
        self._lost: dict[int, str] = {}
        self._lock = threading.Lock()

    def damage(self, key: str, claims: Iterable[Claim] = ()) -> Damage:
        """The damage of an object.

        Args:
            key: of an object that is named by its digest.
            claims: of all its rows.

        Raises:
            RemoteError: the bucket cannot be used.
        """
        hasher, window = blake3(), _Window(_pieces(claims))
        untrue: dict[Claim, None] = {}
        dictionaries: dict[int, str] = {}
        try:
            for data in self._bucket.stream(key):
                hasher.update(data)
                self._compare(window.take(data), untrue, dictionaries)
        except RemoteMissingError:
            return Damage("it is missing", [], {})
        if hasher.hexdigest() != key.rpartition("/")[2]:
            return Damage("its bytes have another digest", [], {})
        self._compare(window.rest(), untrue, dictionaries)
        return Damage(None, list(untrue), dictionaries)

    def _compare(
        self,
        pieces: Iterable[tuple[_Blob, int, memoryview | None]],
        untrue: dict[Claim, None],
        dictionaries: dict[int, str],
    ) -> None:
        """Compare pieces with the claims that have them, and note what is wrong."""
        for blob, frame, stored in pieces:
            try:
                blob.take(frame, stored, self._decompressor)
            except _LostDictionaryError as error:
                blob.is_unknown = True
                dictionaries[error.number] = error.why
            except CorruptError:
                untrue[blob.claim] = None

    def _decompressor(self, number: int) -> zstandard.ZstdDecompressor:
        with self._lock:  # many objects need the same one
            if number not in self._lost:
                try:
                    return self._dictionary(number).decompressor()
                except (RemoteUnreachableError, RemoteDeniedError):
                    raise
                except RemoteMissingError:
                    self._lost[number] = "it is missing"
                except (RemoteError, CorruptError) as error:
                    self._lost[number] = str(error)
            raise _LostDictionaryError(number, self._lost[number])

    def _load_dictionary(self, number: int) -> Dictionary:
        data = self._bucket.get(dictionary_key(number)).data
        if derive_number(data) != number:
            raise CorruptError("its bytes are not those of its number")
        return Dictionary(data)


class _LostDictionaryError(Exception):
    """A dictionary is damaged or gone, so nobody can say whether a claim is true."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number, self.why = number, why


class _Blob:
    """A blob as a claim has it. Its frames are compared one after the other as they come."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.start = int.from_bytes(claim[:_START_BYTES], "big")
        said = msgpack.unpackb(claim[_START_BYTES:])
        self.digest, self.size, self.stored, self._codec, self._frames = said
        #: The stored length of each frame in bytes.
        self.lengths = [length for length, _ in FRAME.iter_unpack(self._frames)]
        #: Whether nobody can know if it is such a blob.
        self.is_unknown = False
        self._hasher = blake3()
        self._tails = bytearray()
        self._next = 0

    @property
    def is_record(self) -> bool:
        """Whether a store would keep it in a pack: it is one frame, and has no seek table."""
        return self.start > 0 and self.lengths == [self.stored] and self.stored <= PACK_LIMIT

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Where each frame begins and ends, and its number; and at last the seek table, as if it were one."""
        at = self.start
        for frame, length in enumerate(self.lengths):
            yield at, at + length, frame
            at += length
        if not self.is_record:
            yield at, self.start + self.stored, len(self.lengths)

    def take(self, frame: int, stored: memoryview | None, with_dictionary: WithDictionary) -> None:
        """Compare the next piece; None for one that cannot be.

        Raises:
            CorruptError: the claim is false.
        """
        if self.is_unknown:
            return
        if stored is None or frame != self._next:  # one before was false
            raise CorruptError("a frame is missing")
        if frame == len(self.lengths):
            self._check_table(stored)
            return
        if frame_of(stored) != self._frames[frame * FRAME.size :][: FRAME.size]:
            raise CorruptError("a frame differs")
        data = CODECS[self._codec].decompress(stored, frame_length(self.size, frame), with_dictionary)
        self._hasher.update(data)
        self._tails += stored[-4:]
        self._next += 1
        if self._next == len(self.lengths) and self._hasher.digest() != self.digest:
            raise CorruptError("the content has another digest")

    def _check_table(self, stored: memoryview) -> None:
        end = self.stored - len(stored)

        def read_at(offset: int, length: int) -> bytes:
            if offset < end:
                raise CorruptError("the seek table is longer than what lies behind the frames")
            return bytes(stored[offset - end : offset - end + length])

        table = read_table(self._codec, self.size, self.stored, read_at)
        at = 0
        for number, length in enumerate(self.lengths):
            if table.offsets[number] != at or table.length(number) != length:
                raise CorruptError("the seek table has other frames")
            table.check(number, self._tails[4 * number : 4 * number + 4])
            at += length


#: Where a frame begins and ends, which blob's, its number, and the blob.
_Piece: TypeAlias = "tuple[int, int, int, int, _Blob]"


def _pieces(claims: Iterable[Claim]) -> Iterator[_Piece]:
    """The frames and seek tables of all blobs, in the order of their starts. Blobs that no longer have one,
    and those that begin later, take no memory.
    """
    heap: list[_Piece] = []
    for number, claim in enumerate(sorted(claims)):
        blob = _Blob(claim)
        while heap and heap[0][0] < blob.start:
            yield heapq.heappop(heap)
        for start, end, frame in blob.pieces():
            heapq.heappush(heap, (start, end, number, frame, blob))
    while heap:
        yield heapq.heappop(heap)


class _Window:
    """The bytes of an object that a piece still needs, while they come in order.

    Args:
        pieces: in the order of their starts.
    """

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._next = next(pieces, None)
        self._kept = bytearray()
        self._start = 0

    def take(self, data: bytes) -> Iterator[tuple[_Blob, int, memoryview | None]]:
        """The pieces that are whole once these bytes have come: their blobs, numbers and bytes. None for one
        that is longer than any.
        """
        self._kept += data
        yield from self._whole(is_over=False)
        # The pieces come in the order of their starts: nothing before the next one's is needed again.
        end = self._start + len(self._kept)
        needed = end if self._next is None else min(end, self._next[0])
        del self._kept[: needed - self._start]
        self._start = needed

    def rest(self) -> Iterator[tuple[_Blob, int, memoryview | None]]:
        """The pieces that are left at the end of the object; None for one that lies behind it."""
        return self._whole(is_over=True)

    def _whole(self, *, is_over: bool) -> Iterator[tuple[_Blob, int, memoryview | None]]:
        end = self._start + len(self._kept)
        with memoryview(self._kept) as kept:
            while self._next is not None:
                start, stop, _, frame, blob = self._next
                is_possible = start <= stop <= start + _longest(frame, blob)
                if is_possible and stop <= end:
                    with kept[start - self._start : stop - self._start] as stored:
                        yield blob, frame, stored
                elif is_possible and not is_over:
                    break
                else:
                    yield blob, frame, None
                self._next = next(self._pieces, None)


def _longest(frame: int, blob: _Blob) -> int:
    """The most bytes that a frame takes, or the seek table behind them."""
    return 2 * FRAME_SIZE if frame < len(blob.lengths) else blob.stored
