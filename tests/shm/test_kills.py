"""Processes that share an arena and are killed, run out of memory, or write the same slots at once.

Each of them is a real process. The others work on, see whole records only, and get the space back.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import castore.shm
from castore.errors import SegmentError
from castore.shm.arena import Arena, Layout
from castore.shm.extents import Extents
from castore.shm.shared_frames import ObjectFrames, SharedFrames, _needed
from tests.helpers import LONG, in_small_shm
from tests.shm.forks import forked

ROOM = str(Path(castore.shm.__file__).parent)
SLOTS = 8


def text(slot: int, seed: int, length: int) -> bytes:
    """A record that tells its slot, its seed and its length, and whose bytes cannot be another's."""
    head = b"%d/%d/%d/" % (slot, seed, length)
    return (head + random.Random(f"{slot}/{seed}/{length}").randbytes(length))[: max(length, len(head))]


def is_whole(record: bytes, slot: int) -> bool:
    """Whether a record is one that was written for the slot, to its last byte."""
    found, seed, length, _ = record.split(b"/", 3)
    return int(found) == slot and record == text(slot, int(seed), int(length))


def held(extents: Extents, slot: int) -> bytes | None:
    record = extents.read(slot)
    return None if record is None else bytes(record)


def put(extents: Extents, slot: int, record: bytes) -> int:
    return extents.put(slot, [record[:7], record[7:]], len(record))


# --- a kill at every line -----------------------------------------------------------------------------------


def killed_at_line(line: int, task: Callable[[], object]) -> bool:
    """Run ``task`` in a child that is killed before it executes its ``line``-th line of castore.shm.

    Returns:
        False if the task had fewer lines, and ended.
    """

    def traced() -> None:
        lines = itertools.count(1)

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if not frame.f_code.co_filename.startswith(ROOM):
                return None
            if event == "line" and next(lines) == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        task()

    status = forked(traced)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0
    return False


def moments(task: Callable[[], object], folder: Path) -> list[int]:
    """The numbers of lines at which to kill ``task``, and the number behind its last line.

    The quick form has each line of the source twice: as it is executed first, and last.
    """

    def traced() -> None:
        lines: list[str] = []

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if not frame.f_code.co_filename.startswith(ROOM):
                return None
            if event == "line":
                lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return trace

        sys.settrace(trace)
        task()
        sys.settrace(None)
        (folder / "lines").write_text("\n".join(lines))

    assert forked(traced) == 0
    lines = (folder / "lines").read_text().splitlines()
    end = len(lines) + 1
    if LONG:
        return [*range(1, end + 1)]
    last = {line: number for number, line in enumerate(lines, 1)}
    first = {line: end - number for number, line in enumerate(reversed(lines), 1)}
    return sorted({*first.values(), *last.values(), end})


def filled(arena: Arena) -> tuple[Extents, dict[int, bytes]]:
    """Extents with records of some slots; slot 2 has lost its record, and left a free extent. Slot 3's is
    longer than all space before it that may become free, so its old and new places overlap if it moves.
    """
    extents = Extents(arena)
    records = {slot: text(slot, 0, length) for slot, length in enumerate((200, 201, 202, 1000))}
    with arena.lock():
        for slot, record in records.items():
            assert put(extents, slot, record)
        extents.remove(2)
    del records[2]
    return extents, records


OPERATIONS: dict[str, tuple[Callable[[Extents], object], set[int]]] = {
    "a new record": (lambda extents: put(extents, 5, text(5, 1, 300)), {5}),
    "a record written over": (lambda extents: put(extents, 1, text(1, 1, 190)), {1}),
    "a record that outgrows its extent": (lambda extents: put(extents, 1, text(1, 1, 900)), {1}),
    "a record that outgrows its extent so often that others move": (
        lambda extents: [put(extents, 1, text(1, 1, length)) for length in (300, 400, 500)], {1, 3},
    ),
    "a record in place of another": (
        lambda extents: extents.replace(0, 6, [text(6, 1, 180)], 180), {0, 6},
    ),
    "a record that moves to another's extent": (
        lambda extents: extents.replace(0, 3, [text(3, 1, 180)], 180), {0, 3},
    ),
    "a record in a free extent": (lambda extents: extents.replace(2, 2, [text(2, 1, 180)], 180), {2}),
    "a removal": (lambda extents: extents.remove(1), {1}),
    "a clear": (lambda extents: extents.clear(), {0, 1, 3}),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_kill_at_any_line_of_a_write_leaves_whole_records_and_usable_space(
    small_process: ProcessPoolExecutor, operation: str
) -> None:
    small_process.submit(_kill_at_lines_of_a_write, operation).result()


def _kill_at_lines_of_a_write(name: str) -> None:
    operation, touched = OPERATIONS[name]
    for line in itertools.count(1):
        with closing(Arena(None, Layout(SLOTS, extents=6), 4000, {})) as arena:
            extents, before = filled(arena)

            def work(arena: Arena = arena, extents: Extents = extents) -> None:
                with arena.lock():
                    operation(extents)

            if not killed_at_line(line, work):
                assert line > 15, "the child was killed at hardly any line: this tests nothing"
                return
            for slot in range(SLOTS):
                record = held(extents, slot)
                if slot in touched:
                    assert record is None or is_whole(record, slot), f"half a record after line {line}"
                else:
                    assert record == before.get(slot), f"another slot's record changed at line {line}"
            check_space(arena, extents)
            # The next process does the same, and all else.
            with arena.lock():
                operation(extents)
                check_space(arena, extents)
                for slot in (0, 3, 4):
                    assert put(extents, slot, text(slot, 2, 150)), f"space was lost at line {line}"
                assert all(held(extents, slot) == text(slot, 2, 150) for slot in (0, 3, 4))
                extents.clear()
                assert (extents.count, extents.used) == (0, 0)
                assert all(put(extents, slot, text(slot, 3, 600)) for slot in range(6))


def check_space(arena: Arena, extents: Extents) -> None:
    """No two extents overlap, no two slots share one, and each record lies in an extent in use."""
    ends = 0
    for number in range(extents.count):
        start, end = extents._rows[4 * number + 1 : 4 * number + 3]
        assert ends <= start <= end or start == end  # an empty extent overlaps none
        ends = max(ends, end)
    assert ends == extents.used <= extents.size
    used = [extent for number in range(extents.count) if (extent := extents.extent(number)) is not None]
    owners = [extent.owner for extent in used]
    assert sorted(owners) == [slot for slot in range(SLOTS) if extents.holds(slot)]


@pytest.mark.torture
def test_a_kill_at_any_line_of_an_offer_leaves_whole_frames_and_usable_space(
    small_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    small_process.submit(_kill_at_lines_of_an_offer, tmp_path).result()


def _kill_at_lines_of_an_offer(folder: Path) -> None:
    # One frame is evicted by each offer that is due, so both ways of writing are in it.
    length, lines = 500, [0]  # in place of 0, those at which to kill
    while lines:
        line = lines.pop(0)
        with closing(SharedFrames(folder, _needed(3, 64 + length), length)) as frames:
            object_ = ObjectFrames(frames, bytes(48))
            for number in range(2):
                object_.offer(number, text(number, 0, length))

            def offer(object_: ObjectFrames = object_) -> None:
                for number in (2, 3, 3, 3):
                    object_.offer(number, text(number, 0, length))

            if not line:
                lines = moments(offer, folder)
                continue
            was_killed = killed_at_line(line, offer)
            for number in range(4):
                frame = object_.read(number, 0, length)
                assert frame is None or frame == text(number, 0, length), f"half a frame after line {line}"
            if not was_killed:
                assert line > 60, "the child was killed at hardly any line: this tests nothing"
                assert not lines
                return
            for _ in range(4):
                found = object_.read(4, 0, length)
                object_.offer(4, text(4, 0, length))
            assert found == text(4, 0, length), f"no frame came in after line {line}"
    pytest.fail("the last line was not the last")


def test_a_process_killed_at_any_line_of_a_count_loses_no_count_of_others(
    small_process: ProcessPoolExecutor,
) -> None:
    small_process.submit(_kill_at_lines_of_a_count).result()


def _kill_at_lines_of_a_count() -> None:
    with closing(Arena(None, Layout(1, counters=2), 0, {})) as arena:
        tallies = arena.tallies()
        for line in itertools.count(1):
            before = tallies.total(1)
            tallies.add(1, 10)
            was_killed = killed_at_line(line, lambda: arena.tallies().add(1))
            assert tallies.total(1) - before in (10, 11)
            if not was_killed:
                assert line > 5, "the child was killed at hardly any line: this tests nothing"
                return


# --- many processes -----------------------------------------------------------------------------------------


#: Slots of records; each is written six times on average.
_RECORDS = 2000 if LONG else 800


def _write_many(arena: Arena, number: int, start: Any, ended: Any) -> None:
    extents, chance = Extents(arena), random.Random(number)
    start.wait(60)
    for _ in range(3 * _RECORDS // 2):
        slot = chance.randrange(_RECORDS)
        with arena.lock():
            assert put(extents, slot, text(slot, number, chance.randrange(20, 90)))
        seen = chance.randrange(_RECORDS)
        record = held(extents, seen)
        assert record is None or is_whole(record, seen)
    ended.put(number)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_thousands_of_small_records_of_many_processes_are_all_whole(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    # A record that outgrows its extent leaves the extent, so each slot may take two.
    with closing(Arena(None, Layout(_RECORDS, extents=2 * _RECORDS), 2 * _RECORDS * 128, {})) as arena:
        start, ended = context.Barrier(4), context.SimpleQueue()
        children = [
            context.Process(target=_write_many, args=(arena, number, start, ended)) for number in range(4)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(300)
        assert [child.exitcode for child in children] == [0] * 4
        extents = Extents(arena)
        records = {slot: record for slot in range(_RECORDS) if (record := held(extents, slot)) is not None}
        assert len(records) > 0.95 * _RECORDS
        assert all(is_whole(record, slot) for slot, record in records.items())
        assert {int(record.split(b"/")[1]) for record in records.values()} == set(range(4))


def _write_forever(arena: Arena, number: int, wrote: Any) -> None:
    extents, chance = Extents(arena), random.Random(number)
    for turn in itertools.count():
        slot = chance.randrange(3)
        with arena.lock():
            put(extents, slot, text(slot, number, 30_000 + chance.randrange(10_000)))
        if turn == 20:
            wrote.put(number)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_writers_of_the_same_slots_that_are_killed_one_after_another_never_leave_a_wrong_byte(
    method: str,
) -> None:
    context: Any = multiprocessing.get_context(method)
    rounds = 2 if method == "spawn" else 12 if LONG else 3
    with closing(Arena(None, Layout(3, extents=12), 12 * 40_000, {})) as arena:
        extents, wrote, chance = Extents(arena), context.SimpleQueue(), random.Random(0)
        seen: set[int] = set()
        for round_ in range(rounds):
            writers = [
                context.Process(target=_write_forever, args=(arena, 3 * round_ + number, wrote), daemon=True)
                for number in range(3)
            ]
            for writer in writers:
                writer.start()
            for _ in writers:
                wrote.get()
            for writer in writers:
                for _ in range(chance.randrange(20, 200)):
                    slot = chance.randrange(3)
                    record = held(extents, slot)
                    if record is not None:
                        assert is_whole(record, slot)
                        seen.add(int(record.split(b"/")[1]))
                assert writer.pid is not None
                os.kill(writer.pid, signal.SIGKILL)
                writer.join(60)
                assert writer.exitcode == -signal.SIGKILL
            with arena.lock():  # nobody holds it, and the slots can be set
                for slot in range(3):
                    assert put(extents, slot, text(slot, 999, 35_000))
            assert all(held(extents, slot) == text(slot, 999, 35_000) for slot in range(3))
        assert len(seen) > rounds, "hardly any writer was seen at work: this tests nothing"


def test_processes_that_use_up_an_arena_at_once_keep_all_that_was_reported_kept() -> None:
    with closing(Arena(None, Layout(400, extents=400), 100 * 128, {})) as arena:
        extents = Extents(arena)
        kept = Arena(None, Layout(400), 400, {})

        def work(number: int) -> None:
            for slot in range(number, 400, 4):
                with arena.lock():
                    kept.data[slot] = bool(put(extents, slot, text(slot, number, 100)))

        pids = []
        for number in range(4):
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    work(number)
                    status = 0
                finally:
                    os._exit(status)
            pids.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
        assert sum(kept.data) == 100
        for slot in range(400):
            record = held(extents, slot)
            assert (record is not None) == bool(kept.data[slot])
            assert record is None or is_whole(record, slot)
        kept.close()


def test_memory_that_ends_between_writers_is_an_error_for_each_and_never_a_bus_error() -> None:
    script = """
import os, sys
from castore.errors import FullError
from castore.shm.arena import Arena, Layout
from castore.shm.extents import Extents
arena = Arena(None, Layout(300, extents=300), 60 << 20, {})
extents = Extents(arena)
hog = os.open("/dev/shm/hog", os.O_RDWR | os.O_CREAT)
left = os.statvfs("/dev/shm"); os.posix_fallocate(hog, 0, left.f_bavail * left.f_frsize - (40 << 20))
for number in range(3):
    if not os.fork():
        full = 0
        for slot in range(number, 300, 3):
            with arena.lock():
                try:
                    extents.put(slot, [bytes([slot % 251]) * 400_000], 400_000)
                except FullError:
                    full += 1
        os._exit(10 if full else 11)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 10
held = [slot for slot in range(300) if extents.holds(slot)]
assert all(set(extents.read(slot)) == {slot % 251} for slot in held)
print(len(held) * 400_000 > 20 << 20, len(held) < 100)
os.ftruncate(hog, 0)
with arena.lock():
    print(bool(extents.put(299, [b"again"], 5)), bytes(extents.read(299)))
"""
    assert in_small_shm(script, "66M") == "True True\nTrue b'again'\n"


def test_a_child_forked_while_a_thread_holds_the_lock_writes_on() -> None:
    with closing(Arena(None, Layout(2, extents=2), 1000, {})) as arena:
        extents = Extents(arena)
        locked, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with arena.lock():
                locked.set()
                assert leave.wait(60)

        def write() -> None:
            with arena.lock():
                assert put(extents, 1, b"from the child")

        thread = threading.Thread(target=hold)
        thread.start()
        assert locked.wait(60)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                write()
                status = 0
            finally:
                os._exit(status)
        leave.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        assert held(extents, 1) == b"from the child"


def test_a_closed_arena_takes_no_record() -> None:
    arena = Arena(None, Layout(2, extents=2), 1000, {})
    arena.close()
    with pytest.raises(SegmentError, match="is closed"), arena.lock():
        pass
