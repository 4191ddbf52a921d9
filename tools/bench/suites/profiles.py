"""Profiles: what one operation asks of the kernel, and which functions take its time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import castore
from tools.bench import corpus, tracing
from tools.bench.harness import Bench, Study, drop_caches
from tools.bench.operations import OPERATIONS
from tools.bench.peers import Mount, squashfs

TITLE = "What an operation costs"
ABOUT = (
    "Counted, not timed. System calls are those of all threads of a process, by `strace -c`: what a run makes more than a "
    "shorter one, for each call more. FUSE requests are those that the daemon reads from `/dev/fuse`, for files of 20 KB in "
    "one folder that are opened, read to the end and closed, the first time with all caches empty and then once more. "
    "Functions are sampled with py-spy: the part of the time that is spent in them and in the C code that they "
    "call, but not in the Python functions that they call. Values are JSON records of 2 KB."
)
_LEAST = 0.02  # fewer of a kind are not an operation's own
_SHOWN = 6


def rows(bench: Bench) -> Iterator[Study]:
    yield _system_calls(bench.work / "calls", bench.size(2000, 500))
    yield _requests(bench.work / "mounts", bench.size(500, 100))
    yield _functions(bench.work / "functions", bench.size(30_000, 5000))


def _system_calls(work: Path, calls: int) -> Study:
    name, header = "System calls a value", ["operation", "which", "in all"]
    if why := tracing.no_strace():
        return _not_measured(name, header, why)
    lines = []
    for number, operation in enumerate(OPERATIONS):
        found = tracing.calls_each(operation, work / str(number), calls)
        lines.append([_named(operation), *_counts(found)])
    return Study(name, header, lines, labels=2)


def _requests(work: Path, files: int) -> Study:
    name, header = "FUSE requests a file", ["mount", "reading", "which", "in all"]
    if why := tracing.no_strace() or ("" if os.geteuid() == 0 else "dropping caches needs root"):
        return _not_measured(name, header, why)
    plain = work / "plain"
    names = corpus.small_files(plain, files, 20_000)
    image = squashfs(plain, work / "plain.squashfs", "zstd")
    with castore.Store(work / "castore") as store:
        for file in names:
            store.put_file(file, plain / file)
    mounts = {
        "castore": Mount.of_store(work / "castore", work / "mnt-castore"),
        "castore --pin": Mount.of_store(work / "castore", work / "mnt-castore-pin", "--pin"),
        "squashfuse_ll": Mount.of_squashfs(image, work / "mnt-squashfs"),
    }
    lines = []
    for mount, place in mounts.items():
        with ExitStack() as stack:
            stack.enter_context(place)
            for reading in ("cold", "warm"):
                if reading == "cold":
                    place.again()
                    drop_caches()
                with tracing.requests(place.root, work / f"trace-{place.root.name}-{reading}") as found:
                    for file in names:
                        _read(place.root / file)
                each = {kind: count / files for kind, count in found.items()}
                lines.append([_named(mount) if reading == "cold" else "", reading, *_counts(each)])
    return Study(name, header, lines, labels=3)


def _read(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    while os.read(descriptor, 65_536):
        pass
    os.close(descriptor)


def _functions(work: Path, calls: int) -> Study:
    name, header = "Functions that take the time", ["operation", "function", "part"]
    if why := tracing.no_profiler():
        return _not_measured(name, header, why)
    lines = []
    for number, operation in enumerate(OPERATIONS):
        if not operation.startswith("castore"):
            continue
        # A hit in memory is over before it is seen a few times.
        more = 20 if operation == "castore get, RAM hit" else 1
        found = tracing.functions(operation, work / str(number), calls * more)
        for place, (function, part) in enumerate(found[:_SHOWN]):
            lines.append([_named(operation) if place == 0 else "", f"`{function}`", f"{part:.0%}"])
    return Study(name, header, lines, labels=2)


def _counts(found: Mapping[str, float]) -> tuple[str, str]:
    """Each kind, most frequent first, and all together."""
    kinds = sorted(found.items(), key=lambda item: -item[1])
    shown = [f"{name} {count:.2f}" for name, count in kinds if count >= _LEAST]
    return ", ".join(shown) or "none", f"{sum(found.values()):.2f}"


def _named(what: str) -> str:
    return f"**{what}**" if what.startswith("castore") else what


def _not_measured(name: str, header: list[str], why: str) -> Study:
    return Study(name, header, [["not measured", *[""] * (len(header) - 1)]], note=f"Not measured: {why}.")
