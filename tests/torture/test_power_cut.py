"""A recording file system (powercut_fs.py) under a store, a power cut at every flush, and the disk after it.

With ``durable=True``, all acknowledged entries are there with their bytes. Without it, entries may be
missing, and the index may have to be rebuilt; bytes are never other ones.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from castore import CastoreError, Store
from castore.repair import doctor
from tests.helpers import mixed, noise
from tests.torture.hurting import shim
from tests.torture.powercut import Disk, events

Scale = Callable[[Any, Any], Any]
Figure = Callable[[str], None]
SHIM = Path(__file__).with_name("powercut_fs.py")


def value(name: int, version: int) -> bytes:
    """The bytes of a version of a name: small, loose, or of several frames."""
    size = (300, 3_000, 20_000, 600_000)[name % 4]
    return (noise if name % 3 else mixed)(size + version, 1_000 * name + version)


WRITER = """
import os, sys
from castore import Store
from tests.torture.test_power_cut import value

root, durable, count = sys.argv[1], sys.argv[2] == "durable", int(sys.argv[3])
ack = lambda text: os.path.exists(f"{root}/.ack-{text}")
with Store(root + "/store", memory=0, durable=durable) as store:
    for turn in range(count):
        name = turn % 13
        version = turn // 13
        if turn % 11 == 10:
            ack(f"deleting {name} 0")
            store.delete(f"n/{name}")
            ack(f"deleted {name} 0")
            continue
        ack(f"putting {name} {version}")
        if turn % 7 == 3:
            store.put_many([(f"n/{name}", value(name, version))])
        else:
            store.put(f"n/{name}", value(name, version))
        ack(f"put {name} {version}")
        if turn % 17 == 16:
            store.gc(grace=0)
    store.index.snapshot_journal()
"""


@contextmanager
def recording(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A mounted recording file system, and its log."""
    folder, root, log = tmp_path / "behind", tmp_path / "root", tmp_path / "log"
    folder.mkdir()
    root.mkdir()
    with shim(root, SHIM, folder, root, log):
        yield root, log


class Acknowledged:
    """The acknowledged state: for each name the versions it may have, None for no entry."""

    def __init__(self) -> None:
        self.may_be: dict[int, set[int | None]] = {}
        self.ever: dict[int, set[int]] = {}

    def see(self, text: str) -> None:
        what, name, version = text.split()
        number, new = int(name), None if what.startswith("delet") else int(version)
        if what in ("put", "deleted"):
            self.may_be[number] = {new}
        else:
            self.may_be[number] = self.may_be.get(number, {None}) | {new}
            if new is not None:
                self.ever.setdefault(number, set()).add(new)


def record(tmp_path: Path, mode: str, count: int) -> Path:
    with recording(tmp_path) as (root, log):
        done = subprocess.run(
            [sys.executable, "-c", WRITER, root, mode, str(count)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    return log


def read_back(path: Path, acknowledged: Acknowledged, told: str) -> dict[int, int | None]:
    """The version of each name that is there; other bytes fail the test."""
    found: dict[int, int | None] = {}
    with Store(path, memory=0) as store:
        for name, versions in acknowledged.ever.items():
            got = store.get(f"n/{name}")
            matching = [version for version in versions if got == value(name, version)]
            assert got is None or matching, f"{told}: other bytes under n/{name}"
            found[name] = matching[0] if matching else None
    return found


def test_durable_puts_are_all_there_after_a_power_cut_at_any_flush(
    tmp_path: Path, scale: Scale, figure: Figure
) -> None:
    log = record(tmp_path, "durable", scale(12, 200))
    chance, disk, acknowledged = random.Random(8), Disk(), Acknowledged()
    flushes = cuts = acked = 0
    target = tmp_path / "cut"
    for event in events(log):
        if event[0] in ("fsync", "fsyncdir") and acknowledged.may_be:
            flushes += 1
            for kept in scale((0.0, chance.random()), (0.0, 1.0, chance.random())):
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                disk.after_cut(target, chance, kept)
                told = f"cut before flush {flushes}, {kept:.2f} of what was not flushed is there"
                found = read_back(target / "store", acknowledged, told)
                for name, version in found.items():
                    assert version in acknowledged.may_be[name], (
                        f"{told}: n/{name} is {version}, not {acknowledged.may_be[name]}"
                    )
                    acked += acknowledged.may_be[name] != {None}
                cuts += 1
            if cuts % 30 == 0:
                assert all(finding.mended for finding in doctor.examine(target / "store"))
                assert doctor.examine(target / "store") == []
        if event[0] == "ack":
            acknowledged.see(event[1])
        else:
            disk.see(event)
    assert flushes > scale(40, 500), f"only {flushes} flushes"
    assert acked > cuts
    figure(
        f"durable: {cuts} power cuts at {flushes} flushes, {acked} acknowledged "
        "entries looked for: all there, right bytes"
    )


def cut_at(stops: set[int], all_events: list[list[Any]], chance: random.Random, target: Path) -> Counter[str]:
    """Cut the power before each of these events; returns the outcomes."""
    disk, acknowledged = Disk(), Acknowledged()
    ended: Counter[str] = Counter()
    for at, event in enumerate(all_events):
        if at == len(all_events) // 2:  # by now the kernel has written the first names out by itself
            for folder in ("/", "/store", "/store/objects"):
                disk.see(["fsyncdir", folder])
        if at in stops:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            disk.after_cut(target, chance, chance.choice([0.0, 1.0, chance.random(), chance.random()]))
            ended.update(read_back_quick(target / "store", acknowledged, f"cut at event {at}"))
        if event[0] == "ack":
            acknowledged.see(event[1])
        else:
            disk.see(event)
    return ended


def read_back_quick(path: Path, acknowledged: Acknowledged, told: str) -> Iterator[str]:
    """The outcomes for a store that was not durable; other bytes fail the test."""
    if not (path / "castore.json").exists():
        yield "no store yet"
        return
    try:
        found = read_back(path, acknowledged, told)
    except CastoreError:
        yield "index made anew"
        if not (path / "castore.json").read_bytes().strip(b"\0"):
            return
        doctor.rebuild_index(path)
        found = read_back(path, acknowledged, f"{told}, rebuilt")
    missing = sum(version not in acknowledged.may_be[name] for name, version in found.items())
    yield "entries missing" if missing else "nothing missing"


def test_without_durable_a_power_cut_costs_entries_and_never_gives_other_bytes(
    tmp_path: Path, scale: Scale, figure: Figure
) -> None:
    log = record(tmp_path, "quick", scale(40, 600))
    all_events = list(events(log))
    chance = random.Random(9)
    ended: Counter[str] = Counter()
    cuts = 0
    for _ in range(10):  # few cuts hit unflushed data, and the writer's pace decides which do
        stops = set(chance.sample(range(len(all_events) // 2, len(all_events)), scale(50, 500)))
        ended += cut_at(stops, all_events, chance, tmp_path / "cut")
        cuts += len(stops)
        if ended["entries missing"] + ended["index made anew"] > 0:
            break
    else:
        pytest.fail("the cuts cut nothing")
    figure(f"not durable: {cuts} power cuts, no other bytes; {dict(ended)}")
