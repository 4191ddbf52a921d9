"""Profiles: the system calls and FUSE requests of one operation, and the functions that take its time."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import castore
from tools.bench import corpus, tracing
from tools.bench.harness import Bench, Study, drop_caches
from tools.bench.operations import OPERATIONS
from tools.bench.peers import Mount, squashfs
from tools.bench.reads import PIECE

TITLE = "What an operation costs"
ABOUT = (
    "Counted, not timed. System calls are those of all threads of a process, by `strace -c`: what a run "
    "makes more than a shorter one, for each call more. FUSE requests are those that the daemon reads from "
    "`/dev/fuse`, for files of 20 KB in one folder that are opened, read to the end and closed, the first "
    "time with all caches empty and then once more. Functions are sampled with py-spy: the part of the "
    "processor time of all threads that is spent in them and in the C code that they call, but not in the "
    "Python functions that they call; of the all-hit reruns, where time is spread over hundreds of "
    "functions, in stages with all that they call. Values are JSON records of 2 KB, samples 12 KB of random "
    "bytes, embeddings 384 float32; reruns are the five steps of the suite `datasets`, over 10 MB of text."
)
_LEAST, _LEAST_PART = 0.02, 0.01  # rarer ones are not the operation's own, or not worth a line
_SHOWN = 6
# One cold reading is too short for a sampler.
_TIMES = 3


def rows(bench: Bench) -> Iterator[Study]:
    yield _system_calls(bench.work / "calls", bench.size(2000, 500))
    yield _requests(bench.work / "mounts", bench.size(500, 100))
    yield _functions(bench.work / "functions", bench.size(30_000, 5000))
    yield _daemon(bench.work / "daemon", bench.size(256, 16) * 10**6, bench.size(2000, 100))


def _system_calls(work: Path, calls: int) -> Study:
    name, header = "System calls an operation", ["operation", "which", "in all"]
    if why := tracing.no_strace():
        return _not_measured(name, header, why)
    lines = []
    for number, (operation, what) in enumerate(OPERATIONS.items()):
        found = tracing.calls_each(operation, work / str(number), what.calls(calls))
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
                    _read_each(place.root, names)
                each = {kind: count / files for kind, count in found.items()}
                lines.append([_named(mount) if reading == "cold" else "", reading, *_counts(each)])
    return Study(name, header, lines, labels=3)


def _read_each(root: Path, names: list[str]) -> None:
    for name in names:
        _read(root / name)


def _read(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    while os.read(descriptor, 65_536):
        pass
    os.close(descriptor)


def _functions(work: Path, calls: int) -> Study:
    name, header = "Functions that take the time", ["operation", "function", "part"]
    if why := tracing.no_profiler():
        return _not_measured(name, header, why)
    lines: list[list[str]] = []
    for number, (operation, what) in enumerate(OPERATIONS.items()):
        if operation.startswith("castore") or what.stages:
            found = tracing.parts(operation, work / str(number), what.calls(calls), what.stages)
            lines += _greatest(operation, found)
    return Study(name, header, lines, labels=2)


def _greatest(operation: str, found: list[tuple[str, float]]) -> Iterator[list[str]]:
    for place, (function, part) in enumerate(found[:_SHOWN]):
        yield [_named(operation) if place == 0 else "", f"`{function}`", f"{part:.0%}"]


def _daemon(work: Path, size: int, files: int) -> Study:
    name, header = "Functions of a mount's daemon that take the time", ["reading, cold", "function", "part"]
    if why := tracing.no_profiler() or ("" if os.geteuid() == 0 else "dropping caches needs root"):
        return _not_measured(name, header, why)
    small, large = corpus.small_files(work / "small", files, 20_000), corpus.archive(work, size)
    with castore.Store(work / "castore") as store:
        store.put_file("large", large)
        for file in small:
            store.put_file(f"small/{file}", work / "small" / file)

    def pieces(root: Path) -> None:
        with open(root / "large", "rb", buffering=0) as file:
            for place in random.Random(corpus.SEED).sample(range(size // PIECE), size // PIECE // 4):
                os.pread(file.fileno(), PIECE, place * PIECE)

    readings: dict[str, Callable[[Path], object]] = {
        f"castore, {size // 10**6} MB in order": lambda root: _read(root / "large"),
        f"castore, random reads of {PIECE // 1024} KB": pieces,
        f"castore, {files} files of 20 KB": lambda root: _read_each(root / "small", small),
        f"castore, find over {files} names": lambda root: list(os.walk(root)),
    }
    lines: list[list[str]] = []
    with Mount.of_store(work / "castore", work / "mnt") as mount:
        for reading, read in readings.items():
            found = Counter[str]()
            for _ in range(_TIMES):
                mount.again()
                drop_caches()
                with tracing.functions(tracing.daemon(mount.root), work, pauses=False) as spent:
                    read(mount.root)
                found += spent
            lines += _greatest(reading, tracing.shares(found))
    return Study(name, header, lines, labels=2)


def _counts(found: Mapping[str, float]) -> tuple[str, str]:
    """Each kind, most frequent first, and the sum."""
    kinds, total = sorted(found.items(), key=lambda item: -item[1]), max(0.0, sum(found.values()))
    shown = [f"{name} {count:.2f}" for name, count in kinds if count >= max(_LEAST, _LEAST_PART * total)]
    return ", ".join(shown) or "none", f"{total:.2f}"


def _named(what: str) -> str:
    return f"**{what}**" if what.startswith("castore") else what


def _not_measured(name: str, header: list[str], why: str) -> Study:
    return Study(name, header, [["not measured", *[""] * (len(header) - 1)]], note=f"Not measured: {why}.")
