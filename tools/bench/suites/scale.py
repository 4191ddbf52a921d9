"""One store, from ten thousand to ten million entries: how costs and memory grow."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import castore
from castore.units import format_size
from tools.bench import plots
from tools.bench.costs import costs
from tools.bench.growing import PROBES, Growing, name_of, probes
from tools.bench.harness import Bench, Contestant, Goal, Row, Study, microseconds_each, seconds, verdict
from tools.bench.peers import Mount, run
from tools.bench.peers import castore as command

TITLE = "Ten million entries"
ABOUT = (
    "A store that grows from 10,000 to 10,000,000 entries, each of a blob of its own, in folders of 1,000. "
    "Ten thousand of them, evenly spread, hold JSON records of 2 KB, and those are read; the others are "
    "tiny, and packs are cut at an eighth of their size, so that there are as many as if all held 2 KB. "
    "Index, packs and names journal are made by `tools/bench/growing.py`. gc removes a million expired "
    "entries beside ten million others, while a process reads all the time and another puts a small value "
    "every few milliseconds."
)
_PICTURE = "growth.png"


def rows(bench: Bench) -> Iterator[Row | Study]:
    sizes = [10**power for power in (range(3, 6) if bench.quick else range(4, 8))]
    small, big = Growing(bench.work / "small"), Growing(bench.work / "big")
    mountpoint = bench.work / "mnt"
    try:
        small.grow(sizes[0])
        found = []
        for size in sizes:
            big.grow(size)
            found.append(costs(big.path, size, mountpoint, bench.rounds))
        yield _growth(bench.pictures, sizes, {what: [one[what] for one in found] for what in found[0]})
        yield from _beside_a_small_one(small, big, mountpoint)
        yield _limits(
            {
                **_measure_memory(big),
                **_measure_memory_of_mount(big, mountpoint, bench.size(10**6, 10**4)),
                **_measure_gc(big, bench.size(10**6, 10**4)),
            }
        )
    finally:
        for store in (small, big):
            shutil.rmtree(store.path, ignore_errors=True)


def _growth(pictures: Path, sizes: list[int], found: dict[str, list[float]]) -> Study:
    plots.growth(pictures / _PICTURE, sizes, found)
    lines = []
    for what, figures in found.items():
        scale, unit = (1e6, "µs") if figures[0] < 1e-3 else (1e3, "ms")
        cells = [f"{figure * scale:.3g}" for figure in figures]
        lines.append([what, unit, *cells, f"{figures[-1] / figures[0]:.2f}"])
    return Study(
        "What operations cost as the store grows",
        ["operation", "unit", *(f"{size:,} entries" for size in sizes), "last by first"],
        lines,
        labels=2,
        note=_REASONS,
        picture=_PICTURE,
    )


_REASONS = (
    "`get`, `put`, look-ups and listings go down B-trees, a page further for each ten- to thirtyfold number "
    "of entries. The small store's pages are all in SQLite's own cache of 8 MB; of the largest's, those near "
    "the leaves are read from the kernel's, at about a microsecond each, and its packs are read from memory "
    "that no cache of the processor holds. gc finds what has expired in an index of its own, and which packs "
    "are mostly dead is noted with them; what grows is that it looks at each pack's size. `stat` is flat but "
    "for the largest prefixes, which it sums up, and shows, below 200,000 entries only."
)


def _beside_a_small_one(small: Growing, big: Growing, mountpoint: Path) -> Iterator[Row]:
    stores = {f"{store.entries:,} entries": store for store in (small, big)}
    first, last = stores
    chosen = {label: probes(store.entries) for label, store in stores.items()}
    for label, names in chosen.items():
        chosen[label] = names * (PROBES // len(names))
        random.Random(1).shuffle(chosen[label])
    opened = {label: castore.Store(store.path, memory=0) for label, store in stores.items()}
    try:

        def get(label: str) -> None:
            store = opened[label]
            for name in chosen[label]:
                store.get(name)

        yield Row(
            "get by name, 2 KB",
            microseconds_each(PROBES),
            [
                Contestant(label, lambda label=label: get(label), ours=True)  # type: ignore[misc]
                for label in stores
            ],
            reference=first,
            goals=[Goal(last, 0.667, first)],  # 0.667 is one and a half times the time
        )
    finally:
        for store in opened.values():
            store.close()

    def stat(label: str) -> None:
        run(*command("--store", stores[label].path, "stat"))

    yield Row(
        "castore stat, a process of its own",
        seconds(),
        [
            Contestant(label, lambda label=label: stat(label), ours=True)  # type: ignore[misc]
            for label in stores
        ],
        reference=first,
        goals=[Goal(last, at_most=0.5)],
    )

    def unmount() -> None:
        if os.path.ismount(mountpoint):
            run(*command("umount", mountpoint))

    def mount(label: str) -> None:
        run(*command("--store", stores[label].path, "mount", mountpoint))

    try:
        yield Row(
            "castore mount, until it answers",
            seconds(),
            [
                Contestant(label, lambda label=label: mount(label), unmount, ours=True)  # type: ignore[misc]
                for label in stores
            ],
            reference=first,
            goals=[Goal(last, at_most=1.0)],
        )
    finally:
        unmount()


#: By what was measured: the goal in words, the figure as text, and whether it is good enough (None without a
#: goal).
Measured = dict[str, tuple[str, str, bool | None]]


def _limits(measured: Measured) -> Study:
    return Study(
        "With that many entries",
        ["what", "asked for", "measured"],
        [[what, asked, got] for what, (asked, got, _) in measured.items()],
        labels=1,
        goals=[
            verdict(reached, f"{what}, {asked}: {got}")
            for what, (asked, got, reached) in measured.items()
            if reached is not None
        ],
    )


def _measure_memory(store: Growing) -> Measured:
    found = _chore("scan", store)
    what = (
        f"memory of a process that read, asked for figures and listed {found['entries']:,} entries (most RSS)"
    )
    return {what: _at_most(found["memory"], 300e6, format_size)}


def _measure_memory_of_mount(store: Growing, mountpoint: Path, files: int) -> Measured:
    files = min(files, store.entries)
    with Mount.of_store(store.path, mountpoint):
        started = time.perf_counter()
        for number in range(files):
            descriptor = os.open(f"{mountpoint}/{name_of(number)}", os.O_RDONLY)
            os.read(descriptor, 65_536)
            os.close(descriptor)
        took = time.perf_counter() - started
        (record,) = (store.path / "locks").glob("mount-*.json")
        status = Path(f"/proc/{json.loads(record.read_text())['pid']}/status").read_text()
    memory = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    return {
        f"memory of a mount that served {files:,} files (RSS)": _at_most(memory, 500e6, format_size),
        "files that it served a second, each once": ("", f"{files / took:,.0f}", None),
    }


def _measure_gc(store: Growing, count: int) -> Measured:
    calm = _measure_waits(store, lambda: time.sleep(3))
    store.add_expired(count)
    found: dict[str, Any] = {}
    waits = _measure_waits(store, lambda: found.update(_chore("collect", store)))
    if found["expired"] != count:
        raise RuntimeError(f"gc removed {found['expired']} entries, not {count}")
    return {
        f"gc of {count:,} expired entries": _at_most(found["seconds"], 60, _in_seconds),
        "memory of that gc (most RSS)": ("", format_size(found["memory"]), None),
        "a reader's longest wait meanwhile, not counting for a processor": _at_most(
            waits["read"]["blocked"], 0.1, _in_milliseconds
        ),
        **{
            f"a {who}'s longest wait {when}": ("", _format_waits(found), None)
            for when, one in (("meanwhile", waits), ("without a gc", calm))
            for who, found in (("reader", one["read"]), ("writer", one["write"]))
        },
    }


def _format_waits(waits: dict[str, float]) -> str:
    return (
        f"{_in_milliseconds(waits['longest'])} "
        f"({_in_milliseconds(waits['blocked'])} without waiting for a processor)"
    )


def _at_most(figure: float, limit: float, format_figure: Any) -> tuple[str, str, bool]:
    return f"at most {format_figure(limit)}", format_figure(figure), figure <= limit


def _in_seconds(value: float) -> str:
    return f"{value:.1f} s"


def _in_milliseconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms"


def _measure_waits(store: Growing, work: Any) -> dict[str, dict[str, float]]:
    """The longest waits of a reader and of a writer, in processes of their own, during ``work``."""
    with _running_chore("read", store) as reader, _running_chore("write", store) as writer:
        work()
        return {"read": _read_figures(reader, "\n"), "write": _read_figures(writer, "\n")}


@contextmanager
def _running_chore(chore: str, store: Growing) -> Iterator[subprocess.Popen[str]]:
    process = _start(chore, store)
    try:
        if _stream(process.stdout).readline() != "ready\n":
            raise RuntimeError(f"`{chore}` did not get ready: {process.communicate()[1]}")
        yield process
    finally:
        process.kill()
        process.communicate()


def _read_figures(process: subprocess.Popen[str], end: str | None = None) -> dict[str, Any]:
    """The JSON that a chore prints at its end. ``end`` on its standard input may cause that end."""
    output, errors = process.communicate(end)
    if process.returncode:
        raise RuntimeError(f"a chore failed: {errors}")
    figures: dict[str, Any] = json.loads(output)
    return figures


def _chore(chore: str, store: Growing) -> dict[str, Any]:
    return _read_figures(_start(chore, store))


def _start(chore: str, store: Growing) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.bench.chores", chore, str(store.path), str(store.entries)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
