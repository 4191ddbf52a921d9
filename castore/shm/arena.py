"""An arena: one segment with all that a cache shares between processes, laid out in one place.

An arena has counters that add up over processes, tables of its cache, a state for each slot, and data: the
bytes of the slots. Either the cache divides the data itself (slots of one size), or `Extents` allocates it
(records of any length). The cache decides how a slot is found, and which record gives way.

A `Layout` computes the place of each part from numbers that all processes have, so no place is stored. The
creator reserves the tables before others can attach.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from castore.shm.segments import Segment
from castore.shm.slots import Slots
from castore.shm.tallies import Tallies

#: Of all parts and extents: suits processors' caches, and every type of number.
ALIGNMENT = 64
#: Numbers in an extent's row, see `castore.shm.extents`.
EXTENT_ROW = 4

#: `struct` codes of the numbers of tables: 1, 4 and 8 bytes, unsigned.
Code = Literal["B", "I", "Q"]


class Table(NamedTuple):
    """A table of numbers in an arena."""

    name: str
    code: Code
    length: int


class Layout:
    """The parts of an arena and their places.

    Args:
        slots: number of slots.
        usable: number of slots that can be set, the first ones. Default: all.
        extents: the most records that `Extents` allocates space for. None if the cache divides the data.
        counters: number of counters.
        tables: the cache's own tables.

    >>> layout = Layout(10, counters=2, tables=[Table("uses", "B", 10)])
    >>> layout.data_at == layout.reserved
    True
    """

    def __init__(
        self,
        slots: int,
        *,
        usable: int | None = None,
        extents: int | None = None,
        counters: int = 0,
        tables: Sequence[Table] = (),
    ) -> None:
        self.usable = slots if usable is None else usable
        self.extents = extents
        self.counters = counters
        self._places: dict[str, tuple[Code, int, int]] = {}
        self._end = 0
        for table in tables:
            self._add(*table)
        self._add("counters", "B", Tallies.needed(counters) if counters else 0)
        self._add("slots", "B", Slots.needed(slots))
        if extents is not None:
            self._add("allocated", "Q", 1)
            self._add("wasted", "Q", 1)
            self._add("extent of slot", "I", slots)
        #: Bytes that the creator reserves: all tables but the extents' rows, which are reserved when used.
        self.reserved = self._end
        if extents is not None:
            self._add("rows", "Q", EXTENT_ROW * extents)
        #: Offset of the slots' bytes, which take the rest of the segment.
        self.data_at = self._end

    def _add(self, name: str, code: Code, length: int) -> None:
        size = length * memoryview(b"").cast(code).itemsize
        self._places[name] = code, self._end, size
        self._end = round_up(self._end + size)

    def offset(self, name: str) -> int:
        """Offset of a table in the segment."""
        return self._places[name][1]

    def table(self, buffer: memoryview, name: str) -> memoryview:
        """A table in a mapping of the segment."""
        code, start, size = self._places[name]
        return buffer[start : start + size].cast(code)


class Arena:
    """A segment with a layout. Attaches to an arena in use, or else creates it.

    An arena can be inherited by a fork, and pickled: the copy attaches to the same segment.

    Args:
        name: as for `Segment`.
        layout: the arena's parts. All processes must compute the same layout from ``description``.
        size: bytes for the slots; as for `Segment`, a function is called only by the creator.
        description: what identifies the cache and decides the layout, as a JSON object.
        advice: what to do if the descriptions differ, for the error message.

    Raises:
        As `Segment`.
    """

    def __init__(
        self,
        name: str | None,
        layout: Layout,
        size: int | Callable[[], int],
        description: Mapping[str, Any],
        *,
        advice: str = "take another name",
    ) -> None:
        def total() -> int:
            return layout.data_at + (size() if callable(size) else size)

        # Bytes that the cache divides itself are reserved whole: it writes them in any order.
        reserve = None if layout.extents is None else layout.reserved
        self._attach(Segment(name, total, description, reserve=reserve, advice=advice), layout)

    def _attach(self, segment: Segment, layout: Layout) -> None:
        self.segment = segment
        self.name = segment.name
        #: Slots, extents and tables are changed under this lock. It ends with the process.
        self.lock = segment.lock
        #: Leaves the arena. The last process to leave frees the memory.
        self.close = segment.close
        self.layout = layout
        self.slots = Slots(layout.table(segment.buffer, "slots"), layout.usable)
        #: The bytes of the slots.
        self.data = segment.buffer[layout.data_at :]

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.segment, self.layout)

    @property
    def size(self) -> int:
        """Bytes for the slots."""
        return len(self.data)

    def table(self, name: str) -> memoryview:
        """One of the tables, writable."""
        return self.layout.table(self.segment.buffer, name)

    def tallies(self) -> Tallies:
        """The counters."""
        return Tallies(self.segment, self.layout.offset("counters"), self.layout.counters)


def round_up(size: int) -> int:
    """The next multiple of the alignment of an arena's parts."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _attached(segment: Segment, layout: Layout) -> Arena:
    arena = Arena.__new__(Arena)
    arena._attach(segment, layout)
    return arena
