"""One large file in and out: castore beside the stock compressors."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import castore
from tools.bench import corpus
from tools.bench.harness import Bench, Contestant, Goal, Row, gigabytes_per_second
from tools.bench.peers import run

TITLE = "One large file, in and out"
ABOUT = (
    "A tar of files installed on the machine. castore hashes (BLAKE3) what it puts and checks what it gets; "
    "`zstd` and `lz4` keep checksums of 32 bits. castore's `get` ends with the bytes in the process; the tools write "
    "to `/dev/null`, which costs them nothing, or to a file in memory (tmpfs). Input is in the page cache."
)


def rows(bench: Bench) -> Iterator[Row]:
    size = bench.size(512, 64) * 10**6
    source = corpus.archive(bench.work.parent / "corpus", size)
    label = f"{size // 10**6} MB"
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=bench.work)))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        yield _put(source, scratch, size, f"put_file, {label}")
        for codec in ("zstd", "lz4"):
            yield _get(source, scratch, memory, codec, size, f"whole get, {codec}, {label}")


def _put(source: Path, scratch: Path, size: int, name: str) -> Row:
    def put(codec: str) -> None:
        castore.Store(scratch / f"put-{codec}", codec=codec).put_file("archive.tar", source)

    packed = scratch / "compressed"

    def afresh(codec: str) -> None:
        shutil.rmtree(scratch / f"put-{codec}", ignore_errors=True)
        packed.unlink(missing_ok=True)
        os.sync()  # nobody pays for writing back what the contestant before left dirty

    return Row(
        name,
        gigabytes_per_second(size),
        [
            Contestant("castore put_file, zstd", lambda: put("zstd"), lambda: afresh("zstd"), ours=True),
            Contestant(
                "zstd -3 -T0",
                lambda: run("zstd", "-3", "-T0", "-q", "-f", source, "-o", packed),
                lambda: afresh("tool"),
            ),
            Contestant("castore put_file, lz4", lambda: put("lz4"), lambda: afresh("lz4"), ours=True),
            Contestant(
                "lz4 -1", lambda: run("lz4", "-1", "-q", "-f", source, packed), lambda: afresh("tool")
            ),
        ],
        reference="zstd -3 -T0",
        goals=[Goal("castore put_file, zstd", 0.9, "zstd -3 -T0")],
    )


def _get(source: Path, scratch: Path, memory: Path, codec: str, size: int, name: str) -> Row:
    store = castore.Store(scratch / f"get-{codec}", codec=codec, memory=0)
    store.put_file("archive.tar", source)
    packed, plain = scratch / f"archive.{codec}", memory / "archive.tar"
    if codec == "zstd":
        run("zstd", "-3", "-T0", "-q", "-f", source, "-o", packed)
    else:
        run("lz4", "-1", "-q", "-f", source, packed)

    def get() -> None:
        data = store.get("archive.tar")
        if data is None or len(data) != size:
            raise RuntimeError("castore did not give the archive back")

    def decompress(target: Path | str) -> None:
        if codec == "zstd":
            run("zstd", "-d", "-q", "-f", packed, "-o", target)
        else:
            run("lz4", "-d", "-q", "-f", packed, target)

    tool = f"{codec} -d"
    return Row(
        name,
        gigabytes_per_second(size),
        [
            Contestant("castore get", get, ours=True),
            Contestant(f"{tool} to /dev/null", lambda: decompress("/dev/null")),
            Contestant(f"{tool} to tmpfs", lambda: decompress(plain), lambda: plain.unlink(missing_ok=True)),
        ],
        reference=f"{tool} to /dev/null",
        goals=[Goal("castore get", 1.5, f"{tool} to /dev/null")] if codec == "zstd" else [],
    )
