"""Children that put, replace, delete, collect and compact until they are killed at a random moment.

A child's operations follow from its number, so it reports only how many are done: a byte for each operation
that returned. The phase in which the kill hit is in memory that the child shares with its parent.
"""

from __future__ import annotations

import functools
import mmap
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from castore import Store
from castore.index.transaction import Write
from castore.repair import doctor
from tests.helpers import agrees_with_disk, mixed
from tests.torture.kills import after

#: The phases of an operation in which a kill can hit.
PHASES = [
    "between two operations",
    "while preparing",
    "in a transaction",
    "after a commit, before it was acknowledged",
]
KINDS = ["put", "put_many", "delete", "gc"]
_SIZES = [100, 3_000, 40_000, 600_000]
_CODECS = ["auto", "zstd", "lz4", "gzip", "none"]

#: The content of the store: the version of each name.
Names = dict[str, int]


class Operation(NamedTuple):
    """One operation of a child: names get versions, or are removed (None)."""

    kind: str
    changes: dict[str, int | None]
    codec: str


class Fate(NamedTuple):
    """The end of a child: how many operations it did, and the operation and phase that the kill hit."""

    done: int
    kind: str
    phase: str


@functools.cache
def value(name: str, version: int) -> bytes:
    """The value of a name in a version; the larger ones have several frames."""
    folder, _, number = name.partition("/")
    size = 80 if folder == "tiny" else _SIZES[int(number) % 4]
    return b"%s %d " % (name.encode(), version) + mixed(size, int(number))


def plan(number: int) -> Iterator[Operation]:
    """The operations of child ``number``, for as long as it lives."""
    chance = random.Random(number)
    while True:
        kind = chance.choices(KINDS, [30, 15, 40, 15])[0]
        version, codec = chance.randrange(4), chance.choice(_CODECS)
        if kind == "gc":
            changes: dict[str, int | None] = {}
        elif kind == "put" or (kind == "delete" and chance.random() < 0.7):
            changes = {f"large/{chance.randrange(12)}": version}
        else:
            changes = {f"tiny/{tiny}": version for tiny in chance.sample(range(80), 40)}
        if kind == "delete":
            changes = dict.fromkeys(changes)
        yield Operation(kind, changes, codec)


def _do(store: Store, operation: Operation) -> None:
    kind, changes, codec = operation
    values = [(name, value(name, version)) for name, version in changes.items() if version is not None]
    if kind == "put":
        store.put(*values[0], codec=codec)
    elif kind == "put_many":
        store.put("expired", mixed(30_000, len(values)), ttl=0.001)  # for gc to remove
        store.put_many(values, codec=codec)
    elif kind == "gc":
        store.gc(grace=0)
    else:
        store.delete_many(changes)


def _child(path: Path, number: int, acknowledge: int, where: mmap.mmap) -> None:
    def in_phase(phase: int) -> None:
        where[1] = phase

    after(Write, "begin", None, lambda: in_phase(2))()
    after(Write, "commit", None, lambda: in_phase(3))()
    with Store(path, memory=0) as store:
        for operation in plan(number):
            where[0], where[1] = KINDS.index(operation.kind), 1
            _do(store, operation)
            in_phase(0)
            os.write(acknowledge, b".")


def _kill(path: Path, number: int, chance: random.Random) -> Fate:
    """Fork child ``number``, and kill it at a random moment of its work."""
    where = mmap.mmap(-1, 2)
    reading, acknowledge = os.pipe()
    child = os.fork()
    if not child:
        try:
            _child(path, number, acknowledge, where)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(acknowledge)
    with open(reading, "rb", buffering=0) as pipe:
        first = pipe.read(1)
        time.sleep(chance.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        done = len(first) + len(pipe.readall())
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"child {number} failed by itself"
    return Fate(done, KINDS[where[0]], PHASES[where[1]])


def _names_of(store: Store) -> Names:
    """The content of the store. Compares each name's bytes with those that were put."""
    names = [entry.name for entry in store.entries() if "/" in entry.name]
    found = {}
    for name, data in zip(names, store.get_many(names), strict=True):
        assert data is not None, f"{name} is listed and cannot be read"
        version = int(data[:40].split(b" ", 2)[1])
        assert data == value(name, version), f"{name} has bytes that nobody put"
        found[name] = version
    return found


def _apply(names: Names, operation: Operation) -> Names:
    changed = {**names, **operation.changes}
    return {name: version for name, version in changed.items() if version is not None}


def kill_at_random(
    path: Path, count: int, enough: Callable[[Counter[tuple[str, str]], int], bool] = lambda hits, left: True
) -> tuple[Counter[tuple[str, str]], int]:
    """Kill ``count`` children, and up to five times as many until what was hit is ``enough``. After each kill
    the store must hold what the children acknowledged, and nothing else.

    Returns:
        The number of kills by operation and phase, and how many kills left something behind for gc.
    """
    chance = random.Random(1)
    names: Names = {}
    hits: Counter[tuple[str, str]] = Counter()
    left = 0
    Store(path).close()
    for number in range(5 * count):
        if number >= count and enough(hits, left):
            break
        fate = _kill(path, number, chance)
        hits[fate.kind, fate.phase] += 1
        operations = plan(number)
        for _ in range(fate.done):
            names = _apply(names, next(operations))
        with Store(path, memory=0) as store:
            found = _names_of(store)
            # The operation that the kill hit was done completely, or not at all.
            assert found in (names, _apply(names, next(operations))), f"child {number}, killed in {fate}"
            names = found
            left += bool(store.gc(grace=0, dry_run=True).leftovers)
            if number % 4 == 3:  # otherwise the next child finds the leftovers of this one
                agrees_with_disk(store)
    with Store(path, memory=0) as store:
        agrees_with_disk(store)
        assert _names_of(store) == names
    assert all(finding.mended for finding in doctor.examine(path))
    assert doctor.examine(path) == []
    return hits, left
