"""Blocks of calls: the results of a function over a stream, kept as the rows pass and found the next time.

A stream has no first row that all passes share, and its next row is not known before that row is read. So a
block is a run of consecutive calls of the function, and the first call alone gives the block's key. The entry
`CALLS_FOLDER`/<key> holds the digest of each call's arguments, and the value that the call returned. A pass
looks a block up when the block's first row arrives, and then compares row by row. No row waits for the rows
behind it.

A block ends:

- before a row that differs from the kept block's next row; another block may begin with that row;
- after a row with a certain digest, which is the same row in every pass;
- with a shard, and with a pass that is broken off;
- after some seconds of the function's work, which a kill would lose.

The function may refer to what changes while a stream lives: a global, an attribute of an object. So a pass
takes the function's fingerprint when it begins, and once more before it keeps what the function has returned.

Must never give the result of a call whose arguments differ, nor keep one that would not come back exactly.
Must never keep one of a function that has become another meanwhile.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from castore.adapters.datasets.call_values import (
    Before,
    Packed,
    dump_result,
    load_result,
    pack_arguments,
    unpack_arguments,
)
from castore.adapters.datasets.cutting import ends_at
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.named_files import states_named_by
from castore.adapters.datasets.operator_description import identify
from castore.adapters.datasets.operator_keys import operator_fingerprint
from castore.adapters.datasets.rowwise import check_alike, is_worth_trying, parts_of
from castore.adapters.datasets.rowwise_batches import join_results, pick_rows, rows_of, split_result
from castore.errors import (
    CacheWarning,
    CorruptError,
    FullError,
    SerializationError,
    StoreError,
    TooLargeError,
    UnhashableError,
    warn,
)
from castore.keys.encoder import fingerprint, key
from castore.serialize.serializers import dump, load
from castore.store import Store

#: The folder of blocks of calls, each named by its key.
CALLS_FOLDER = ".datasets/streams"
#: Bytes of arguments, and calls, of a block on average.
TARGET_BYTES, TARGET_CALLS = 1 << 21, 2000
#: A block ends when its calls have taken so many seconds.
TARGET_SECONDS = 5.0
# A block has no more than so many times the target.
_MOST = 4
# A pass works so many times as long as the function's last fingerprint took before it takes the next one.
_BETWEEN_FINGERPRINTS = 20
_DIGEST = 16
# Counts in keys.
_VERSION = 3


class Block(NamedTuple):
    """A kept block: the digests of its calls, one behind the other, and their results."""

    digests: bytes
    records: list[bytes]

    def digest(self, place: int) -> bytes:
        """The digest of one call; b"" behind the last."""
        return self.digests[place * _DIGEST : (place + 1) * _DIGEST]

    def begins_as(self, other: Block) -> bool:
        """Whether it has all that another block has."""
        is_same = self.records[: len(other.records)] == other.records
        return is_same and self.digests.startswith(other.digests)


class KeptCalls:
    """The kept calls of one function.

    Args:
        store: the store.
        title: the function's name, for warnings.
        kind: ``"map"`` or ``"filter"``, for errors.
        given: identifies the function, in place of its code and state.
        options: how blocks are stored.
    """

    def __init__(
        self, store: Store, title: str, kind: str, given: str | None, options: StorageOptions
    ) -> None:
        self.title = title
        #: Rows of the largest batch on which a function that is declared row-wise was tried, by its key.
        self.tried: dict[bytes, int] = {}
        self._store = store
        self._kind = kind
        self._given = given
        self._options = options
        self._warned: set[str] = set()

    def __deepcopy__(self, memo: object) -> KeptCalls:
        return self  # `datasets` copies what it interleaves; the blocks are the same

    def key(self, function: Callable[..., Any], keywords: dict[str, Any]) -> bytes:
        """The digest of all that a result depends on now, beside the arguments of its call.

        Raises:
            UnhashableError: a part of the function or of a keyword has no stable hash.
        """
        operator = identify(function, self.title, self._given)
        what = f"{self._kind}(..., fn_kwargs=...)"
        passed = operator_fingerprint(keywords, what, texts=operator.texts)
        counted = {"version": _VERSION, "operator": operator.fingerprint, "keywords": passed}
        return bytes.fromhex(key(counted))

    def find(self, key: bytes, digest: bytes) -> Block | None:
        """The block whose first call has that digest, if it is kept and intact."""
        try:
            data = self._store.get(_name(key, digest))
        except StoreError as error:
            self._warn_of_store(error)
            return None
        if data is None:
            return None
        try:
            digests, records = load(data, "msgpack")
        except (CorruptError, TypeError, ValueError):
            return None
        is_whole = isinstance(digests, bytes) and isinstance(records, list)
        if not is_whole or not records or len(digests) != _DIGEST * len(records):
            return None
        return Block(digests, records)

    def keep(self, key: bytes, block: Block) -> bool:
        """Keep a block; False, with a warning, if the store has no room, or is gone."""
        name = _name(key, block.digest(0))
        try:
            # Another pass began at the same row at the same time, and came further.
            there = self.find(key, block.digest(0)) if self._store.entry(name) is not None else None
            if there is not None and there.begins_as(block):
                return True
            self._store.put(
                name,
                dump([block.digests, block.records], "msgpack")[1],
                codec=self._options.codec,
                level=self._options.level,
                ttl=self._options.seconds_to_live,
                metadata={"calls": len(block.records)},
            )
        except (FullError, TooLargeError) as error:
            self.warn("room", f"results of {self.title!r} are not kept, and it runs again next time: {error}")
            return False
        except StoreError as error:
            self._warn_of_store(error)
            return False
        return True

    def _warn_of_store(self, error: StoreError) -> None:
        self.warn(
            "store", f"results of {self.title!r} are neither found nor kept, and it runs each time: {error}"
        )

    def warn(self, about: str, text: str) -> None:
        """Warn once in a process."""
        if about not in self._warned:
            self._warned.add(about)
            warn(text, CacheWarning)


def _name(key: bytes, digest: bytes) -> str:
    return f"{CALLS_FOLDER}/{blake3(key + digest).hexdigest()[:40]}"


class _Call(NamedTuple):
    """A call's arguments, also as bytes, their digest, and whether a block ends behind the call."""

    arguments: Sequence[Any]
    packed: Packed
    digest: bytes
    ends: bool


class _Slot:
    """The place of a call in a block that is being made; its result, once that is there."""

    __slots__ = ("block", "digest", "record")

    def __init__(self, block: _NewBlock, digest: bytes) -> None:
        self.block = block
        self.digest = digest
        self.record: bytes | None = None


class _NewBlock:
    """A block that is being made.

    Attributes:
        key: the function's key when the block began.
        slots: its calls.
        awaited: how many of these have not returned.
        size, seconds: bytes of the results, and the time that the function took.
    """

    def __init__(self, key: bytes | None) -> None:
        self.key = key
        self.slots: list[_Slot] = []
        self.awaited = 0
        self.size, self.seconds = 0, 0.0

    def is_full(self) -> bool:
        """Whether it is large, or has taken long, enough."""
        return (
            self.size >= _MOST * TARGET_BYTES
            or len(self.slots) >= _MOST * TARGET_CALLS
            or self.seconds >= TARGET_SECONDS
        )

    def parts(self) -> Iterator[Block]:
        """Its runs of calls that have results, each of them a block."""
        for has_result, run in itertools.groupby(self.slots, lambda slot: slot.record is not None):
            if has_result:
                slots = list(run)
                records = [slot.record for slot in slots if slot.record is not None]
                yield Block(b"".join(slot.digest for slot in slots), records)


class Pass:
    """One pass over a stream. To be used in one thread at a time, and closed at the end.

    Args:
        kept: the kept calls.
        function: the function.
        present: returns the function's present key, as `KeptCalls.key`.
        shard: returns what distinguishes the present shard of the stream from others: blocks end with it, so
            that they are found when shards come in another order.
    """

    def __init__(
        self,
        kept: KeptCalls,
        function: Callable[..., Any],
        present: Callable[[], bytes],
        shard: Callable[[], Any],
    ) -> None:
        self._kept = kept
        self._function = function
        self._present = present
        self._key = self._take_key()
        self._shard = shard
        self._at: Any = None
        self._found: Block | None = None
        self._next = 0
        self._new: _NewBlock | None = None
        self._unkept: dict[_NewBlock, None] = {}  # in order
        self._whole: dict[bytes, _NewBlock] = {}  # by the first digest; not kept yet
        self._whole_size = 0
        self._has_run = False
        self._has_room = True
        self._process = os.getpid()
        keep_left_over()
        _open.add(self)

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        """The function's result for these arguments: from a block, or by a call."""
        call = self._identify(arguments)
        if call is None:
            return self._function(*arguments, **keywords)
        if (found := self._find(call)) is not None:
            return _give(*found, arguments)
        slot, before = self._begin(call), Before.of(arguments, call.packed)
        began = time.perf_counter()
        output = self._function(*arguments, **keywords)
        self._take(slot, before, arguments, output, time.perf_counter() - began)
        return output

    async def call_async(self, *arguments: Any, **keywords: Any) -> Any:
        """As `call`, for a coroutine function, of which many calls wait at the same time."""
        call = self._identify(arguments)
        if call is None:
            return await self._function(*arguments, **keywords)
        if (found := self._find(call)) is not None:
            return _give(*found, arguments)
        slot, before = self._begin(call), Before.of(arguments, call.packed)
        began = time.perf_counter()
        output = await self._function(*arguments, **keywords)
        self._take(slot, before, arguments, output, time.perf_counter() - began)
        return output

    def call_rows(self, *arguments: Any, **keywords: Any) -> Any:
        """As `call`, for a batch of a function that treats each row alone: each row counts as a call."""
        rows = rows_of(arguments)
        calls = [self._identify(row) for row in rows or ()]
        known = [call for call in calls if call is not None]
        if not known or len(known) < len(calls):
            return self.call(*arguments, **keywords)
        title = self._kept.title
        found = [self._find(call) or self._begin(call) for call in known]
        slots = {place: item for place, item in enumerate(found) if isinstance(item, _Slot)}
        pieces = {place: item[1] for place, item in enumerate(found) if not isinstance(item, _Slot)}
        is_argument = any(item[0] for item in found if not isinstance(item, _Slot))
        if slots:
            part = arguments if not pieces else pick_rows(arguments, list(slots))
            batch = self._to_try(part, len(slots))
            before, began = Before.of(part, pack_arguments(part)), time.perf_counter()
            output = self._function(*part, **keywords)
            seconds = (time.perf_counter() - began) / len(slots)
            made = split_result(output, len(slots), title)
            if batch is not None:
                self._try_rowwise(batch, made, keywords)
            pieces.update(zip(slots, made, strict=True))
            pairs = [(piece, known[place].arguments) for piece, place in zip(made, slots, strict=True)]
            for slot, record in zip(slots.values(), self._records(before, part, output, pairs), strict=True):
                self._end(slot, record, seconds)
            if len(slots) == len(found):
                return output
            is_argument = is_argument or _is_argument(output, part)
        joined = join_results([pieces[place] for place in range(len(found))], title)
        return _give(is_argument, joined, arguments)

    def _to_try(self, arguments: Sequence[Any], count: int) -> Packed | None:
        """A batch that is tried in parts, before the function may change it; None if it is not tried."""
        if self._key is None or not is_worth_trying(count, self._kept.tried.get(self._key, 0)):
            return None
        self._kept.tried[self._key] = count
        return pack_arguments(arguments)

    def _try_rowwise(self, batch: Packed, made: list[Any], keywords: dict[str, Any]) -> None:
        """Run a batch in parts, some rows alone, and compare the results with those for the whole batch.

        The parts in between show a function that leaves one row out and gives another one twice.

        Raises:
            InvalidValueError: the results differ.
        """
        title = self._kept.title
        for part in parts_of(len(made)):
            output = self._function(*pick_rows(unpack_arguments(batch), list(part)), **keywords)
            for place, alone in zip(part, split_result(output, len(part), title), strict=True):
                one, other = (
                    item if isinstance(item, dict) else {"its result": item} for item in (made[place], alone)
                )
                for column in {**one, **other}:
                    values = one.get(column), other.get(column)
                    check_alike(title, column, f"row {place} of a batch", *values)

    def close(self) -> None:
        """Keep what is there. Later, where the iteration has been ended inside a call of the store."""
        if self._process != os.getpid():
            return  # a fork of an iteration
        if _is_in_store():
            _left_over.append(self)
            return
        _open.discard(self)
        self._cut()
        for block in list(self._unkept):
            self._finish(block)
        self._keep()

    # Finding

    def _take_key(self) -> bytes | None:
        """The function's present key; None, with a warning, if it has none any more."""
        began = time.perf_counter()
        try:
            return self._present()
        except UnhashableError as error:
            self._warn_inexact(str(error))
            return None
        finally:
            self._key_taken = time.perf_counter()
            self._key_took = self._key_taken - began

    def _renew_key(self) -> bytes | None:
        """Take the function's present key for the calls that follow, in blocks of their own if it changed."""
        key = self._take_key()
        if key != self._key:
            self._key, self._found, self._new = key, None, None
        return key

    def _identify(self, arguments: Sequence[Any]) -> _Call | None:
        """The identity of a call; None, with a warning, if the function or its arguments have none."""
        if self._key is None:
            return None
        try:
            packed = pack_arguments(arguments)
        except SerializationError as error:
            self._warn_inexact(f"rows that it gets cannot be told apart: {error}")
            self._cut()
            return None
        named = [] if packed.is_fixed else states_named_by(arguments)
        data = packed.data + fingerprint(named).encode() if named else packed.data
        digest = blake3(data).digest(_DIGEST)
        size = max(packed.size, TARGET_BYTES // TARGET_CALLS)
        return _Call(arguments, packed, digest, ends_at(digest, size, TARGET_BYTES))

    def _find(self, call: _Call) -> tuple[bool, Any] | None:
        """The result of a call, if it is the next one of the present block, or begins a kept one."""
        if (shard := self._shard()) != self._at:
            self._at = shard
            self._cut()
        if self._found is not None:
            place, self._next = self._next, self._next + 1
            if self._found.digest(place) == call.digest:
                return self._load(self._found.records[place], call)
            self._found = None
        if self._new is not None:
            return None
        if call.digest in self._whole:
            self._keep()
        if self._key is None:
            return None
        self._found, self._next = self._kept.find(self._key, call.digest), 1
        return None if self._found is None else self._load(self._found.records[0], call)

    def _load(self, record: bytes, call: _Call) -> tuple[bool, Any] | None:
        try:
            return load_result(record, call.arguments)
        except (CorruptError, SerializationError):  # of a class that is not there any more, say
            self._found = None
            return None

    # Keeping

    def _begin(self, call: _Call) -> _Slot:
        """A place for the result of a call that is not kept."""
        if self._new is None:
            self._new = _NewBlock(self._key)
            self._unkept[self._new] = None
        slot = _Slot(self._new, call.digest)
        self._new.slots.append(slot)
        self._new.awaited += 1
        if call.ends:
            self._new = None
        return slot

    def _take(
        self, slot: _Slot, before: Before, arguments: Sequence[Any], output: Any, seconds: float
    ) -> None:
        """Take the result of one call."""
        [record] = self._records(before, arguments, output, [(output, before.held)])
        self._end(slot, record, seconds)

    def _records(
        self, before: Before, arguments: Sequence[Any], output: Any, pieces: list[tuple[Any, Sequence[Any]]]
    ) -> list[bytes | None]:
        """The pieces of a result, with the arguments of each before the call, as bytes; None, with a warning,
        where they cannot be kept.
        """
        try:
            if before.is_overwritten_in(output):
                is_argument = _is_argument(output, arguments)
                return [self._dumped(*piece, is_argument=is_argument) for piece in pieces]
            self._warn_inexact("it changes values of its input in place and does not return them")
        except SerializationError as error:
            self._warn_inexact(f"it changes its input to what has no exact bytes: {error}")
        return [None] * len(pieces)

    def _dumped(self, piece: Any, arguments: Sequence[Any], *, is_argument: bool) -> bytes | None:
        try:
            return dump_result(piece, arguments, is_argument=is_argument)
        except SerializationError as error:
            self._warn_inexact(f"its results do not come back exactly: {error}")
            return None

    def _end(self, slot: _Slot, record: bytes | None, seconds: float) -> None:
        """Take the result of a call, and keep the block if that was its last."""
        slot.record, block = record, slot.block
        block.awaited -= 1
        block.size += _DIGEST + len(record or b"")
        block.seconds += seconds
        if not self._has_run:
            self._has_run = True
            self._renew_key()  # the first call may have loaded what the function needs
        if self._new is block and (record is None or block.is_full()):
            self._new = None
        if self._new is not block and not block.awaited:
            self._finish(block)

    def _cut(self) -> None:
        """End the present block."""
        block, self._new = self._new, None
        if block is not None and not block.awaited:
            self._finish(block)

    def _finish(self, block: _NewBlock) -> None:
        """Keep a block that is whole, at once unless the function's fingerprint takes long."""
        self._unkept.pop(block, None)
        if block.slots[0].digest in self._whole:
            self._keep()
        self._whole[block.slots[0].digest] = block
        self._whole_size += block.size
        waited = time.perf_counter() - self._key_taken
        enough = min(_BETWEEN_FINGERPRINTS * self._key_took, TARGET_SECONDS)
        if waited >= enough or self._whole_size >= _MOST * TARGET_BYTES:
            self._keep()

    def _keep(self) -> None:
        """Keep the whole blocks, but not those in which the function has become another one."""
        blocks, self._whole, self._whole_size = list(self._whole.values()), {}, 0
        if not blocks:
            return
        key = self._renew_key()
        for block in blocks:
            if key is not None and block.key == key:
                for part in block.parts():
                    # A store that is full stays so until the next pass: other results would give way.
                    self._has_room = self._has_room and self._kept.keep(key, part)
            elif key is not None:
                self._kept.warn(
                    "changed",
                    f"some results of {self._kept.title!r} are not kept, and it runs again for these rows: a "
                    "value that it refers to changed meanwhile; where results depend on it, as on the rows "
                    "seen so far, they cannot be kept; a value that is only loaded late belongs under "
                    "functools.cache, or is left out with __getstate__",
                )
            block.slots.clear()  # they refer to the block: results would stay until Python collects cycles

    def _warn_inexact(self, why: str) -> None:
        self._kept.warn("exact", f"results of {self._kept.title!r} are not kept, and it runs again: {why}")


def _is_argument(output: Any, arguments: Sequence[Any]) -> bool:
    """Whether a function returned the dict that it was given."""
    return bool(arguments) and type(output) is dict and output is arguments[0]


def _give(is_argument: bool, output: Any, arguments: Sequence[Any]) -> Any:
    """A kept result as the function gave it: `datasets` drops columns also in an input that is returned."""
    if not is_argument or not arguments or type(arguments[0]) is not dict:
        return output
    arguments[0].clear()
    arguments[0].update(output)
    return arguments[0]


# --- passes that nobody ends --------------------------------------------------------------------------------

# An exception holds the iterations that it came through, and may be held itself until the program ends.
# Python's garbage collector may end an iteration at any moment, also inside a call of the store. That call
# must not be interrupted by another.
_open: weakref.WeakSet[Pass] = weakref.WeakSet()
_left_over: list[Pass] = []


def keep_left_over() -> None:
    """Keep the blocks of passes that ended inside a call of the store."""
    if _left_over:
        passes = list(_left_over)
        _left_over.clear()
        for one in passes:
            one.close()


def _is_in_store() -> bool:
    """Whether this thread is inside a call of the store, or of what lies below it."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("castore.") and not module.startswith("castore.adapters."):
            return True
        frame = frame.f_back
    return False


def _end_all() -> None:
    keep_left_over()
    for one in list(_open):
        one.close()


atexit.register(_end_all)
