"""One large file in and out: castore beside the stock compressors, and beside `cp` for a known file."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import castore
from tools.bench import corpus
from tools.bench.harness import Bench, Contestant, Goal, Row, gigabytes_per_second
from tools.bench.peers import run

TITLE = "One large file, in and out"
ABOUT = (
    "A tar of files installed on the machine. castore hashes (BLAKE3) what it puts and checks what it gets; "
    "`zstd` and `lz4` keep checksums of 32 bits. castore's reads end with the bytes in the process; the "
    "tools write to `/dev/null`, which costs them nothing, or to a file in memory (tmpfs). Input is in the "
    "page cache, and memory is warmed: before each run as much of it as the file takes is written to and "
    "given back, because first touches of memory that has lain free are slow on the virtual machine that the "
    "figures are from. That helps castore's reads, whose result needs memory, and not a tool that writes to "
    "`/dev/null`; one read goes without, after three seconds in which nothing happens. Re-put is `put_file` "
    "of a file whose bytes the store has, under another name."
)


def rows(bench: Bench) -> Iterator[Row]:
    size = bench.size(1000, 64) * 10**6
    source = corpus.archive(bench.work.parent / "corpus", size)
    label = f"{size // 10**6} MB"
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=bench.work)))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        for codec in TOOLS:
            yield _put(source, scratch, codec, size, f"put_file, {codec}, {label}")
        yield _put_known(source, scratch, size, f"put_file of a known file, {label}")
        for codec in TOOLS:
            yield _read(source, scratch, memory, codec, size, f"whole read, {codec}, {label}")


#: The command behind each codec's format, and its name in the tables.
TOOLS = {
    "zstd": ("zstd -3 -T0", ["zstd", "-3", "-T0", "-q", "-f"]),
    "lz4": ("lz4 -1", ["lz4", "-1", "-q", "-f"]),
}


def _compress(codec: str, source: Path, target: Path) -> None:
    run(*TOOLS[codec][1], source, *(["-o"] if codec == "zstd" else []), target)


def _decompress(codec: str, source: Path, target: Path | str) -> None:
    run(codec, "-d", "-q", "-f", source, *(["-o"] if codec == "zstd" else []), target)


def _warm_memory(size: int) -> None:
    """Leave that much free memory that the machine really has, where its host may only have promised it."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.madvise(mmap.MADV_HUGEPAGE)
        room[:: mmap.PAGESIZE] = b"\1" * -(-size // mmap.PAGESIZE)


def _put(source: Path, scratch: Path, codec: str, size: int, name: str) -> Row:
    folder, packed = scratch / f"put-{codec}", scratch / "compressed"

    def put() -> None:
        with castore.Store(folder, codec=codec) as store:
            store.put_file("archive.tar", source)

    def afresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        packed.unlink(missing_ok=True)
        os.sync()  # the write-back of the previous contestant's pages is not measured
        _warm_memory(size)

    tool = TOOLS[codec][0]
    return Row(
        name,
        gigabytes_per_second(size),
        [
            Contestant("castore put_file", put, afresh, ours=True),
            Contestant(tool, lambda: _compress(codec, source, packed), afresh),
        ],
        reference=tool,
        goals=[Goal("castore put_file", 0.95, tool)],
    )


def _put_known(source: Path, scratch: Path, size: int, name: str) -> Row:
    store = castore.Store(scratch / "again")
    store.put_file("archive.tar", source)
    numbers, copy = count(), scratch / "copy"

    def afresh() -> None:
        copy.unlink(missing_ok=True)
        os.sync()
        _warm_memory(size)

    def put() -> None:
        store.put_file(f"again/{next(numbers)}.tar", source)

    return Row(
        name,
        gigabytes_per_second(size),
        [
            Contestant("castore put_file", put, afresh, ours=True),
            Contestant("cp", lambda: run("cp", source, copy), afresh),
        ],
        reference="cp",
        goals=[Goal("castore put_file", 2.0, "cp")],
    )


def _read(source: Path, scratch: Path, memory: Path, codec: str, size: int, name: str) -> Row:
    store = castore.Store(scratch / f"get-{codec}", codec=codec, memory=0)
    store.put_file("archive.tar", source)
    packed, plain = scratch / f"archive.{codec}", memory / "archive.tar"
    _compress(codec, source, packed)
    held: list[bytes] = []  # freeing the result is no part of reading it

    def afresh() -> None:
        held.clear()
        plain.unlink(missing_ok=True)
        _warm_memory(size)

    def rested() -> None:
        afresh()
        time.sleep(3)

    def read(whole: Callable[[], bytes | None]) -> None:
        data = whole()
        if data is None or len(data) != size:
            raise RuntimeError("castore did not give the archive back")
        held.append(data)

    def get() -> None:
        read(lambda: store.get("archive.tar"))

    def open_and_read() -> None:
        with store.open("archive.tar") as file:
            read(file.read)

    tool = f"{codec} -d to /dev/null"
    goal = 1.6 if codec == "zstd" else 1.0
    return Row(
        name,
        gigabytes_per_second(size),
        [
            Contestant("castore get", get, afresh, ours=True),
            Contestant("castore open().read()", open_and_read, afresh, ours=True),
            Contestant("castore get, memory not warmed", get, rested, ours=True),
            Contestant(tool, lambda: _decompress(codec, packed, "/dev/null"), afresh),
            Contestant(f"{codec} -d to tmpfs", lambda: _decompress(codec, packed, plain), afresh),
            Contestant("a plain file, read whole", lambda: read(source.read_bytes), afresh),
        ],
        reference=tool,
        goals=[Goal("castore get", goal, tool), Goal("castore open().read()", goal, tool)],
    )
