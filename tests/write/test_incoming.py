"""Streams and files that are written: kept whole at their end, or not at all, in bounded memory."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from castore import (
    InvalidNameError,
    InvalidValueError,
    NameConflictError,
    SerializationError,
    Store,
    StoreError,
    TooLargeError,
)
from castore.objects.codecs import FRAME_SIZE
from castore.write.incoming import BUFFERED_BYTES
from tests.helpers import agrees_with_disk, files_up_to, mixed, noise, text

SIZES = [
    0, 1, FRAME_SIZE - 1, FRAME_SIZE, FRAME_SIZE + 1, BUFFERED_BYTES - 1, BUFFERED_BYTES, BUFFERED_BYTES + 1,
    BUFFERED_BYTES + FRAME_SIZE, BUFFERED_BYTES + 5 * FRAME_SIZE + 12_345,
]  # fmt: skip
CODECS = ["auto", "zstd", "lz4", "gzip", "none"]


def in_tmp(store: Store) -> list[Path]:
    """Files that are on their way."""
    return [path for path in (store.path / "tmp").iterdir() if path.is_file()]


@pytest.mark.parametrize(
    ("size", "codec"),
    [  # each size with two codecs that are neighbours, and in `make torture` with all
        pytest.param(size, codec, marks=[pytest.mark.matrix] * ((row + column) % len(CODECS) > 1))
        for row, size in enumerate(SIZES)
        for column, codec in enumerate(CODECS)
    ],
)
def test_a_stream_is_kept_as_it_was_read(store: Store, size: int, codec: str) -> None:
    data = mixed(size)
    seen: list[int] = []
    entry = store.put_stream("a", io.BytesIO(data), codec=codec, metadata={"k": 1}, progress=seen.append)
    assert store.get("a") == data
    assert (entry.size, entry.metadata, sum(seen)) == (size, {"k": 1}, size)
    assert store.put("b", data).digest == entry.digest
    assert store.verify().bad == []
    agrees_with_disk(store)


@pytest.mark.parametrize("step", [1_000, FRAME_SIZE, 3 * FRAME_SIZE + 7, 50_000_000])
def test_a_file_may_be_written_in_pieces_of_any_size(store: Store, step: int) -> None:
    data = mixed(BUFFERED_BYTES + 1_234_567)
    with store.create("a") as file:
        for start in range(0, len(data), step):
            piece = bytearray(data[start : start + step])
            assert file.write(piece) == len(piece)
            piece[:] = bytes(len(piece))  # the caller's buffer is its own again
        assert file.tell() == len(data)
        with pytest.raises(InvalidValueError, match=r"'a' has no entry: the block of .* has not ended"):
            _ = file.entry
    assert file.entry == store.entry("a")
    assert file.entry.size == len(data)  # without a check for None
    assert store.get("a") == data


def test_what_a_blob_is_stored_as_shows_in_its_first_bytes(store: Store) -> None:
    with store.create("text") as file:
        file.write(text(BUFFERED_BYTES + FRAME_SIZE))
    with store.create("noise") as file:
        file.write(noise(BUFFERED_BYTES + FRAME_SIZE))
    assert [entry.codec for entry in store.entries()] == ["none", "zstd"]


def _fail(file: Any, size: int) -> None:
    file.write(mixed(size))
    raise KeyError("the writer fails")


@pytest.mark.parametrize("size", [100, BUFFERED_BYTES + FRAME_SIZE])
@pytest.mark.parametrize("before", [None, b"what was there"])
def test_an_exception_keeps_nothing_and_what_was_there(store: Store, size: int, before: bytes | None) -> None:
    if before is not None:
        store.put("a", before)
    with pytest.raises(KeyError, match="the writer fails"), store.create("a") as file:
        _fail(file, size)
    with pytest.raises(KeyError, match="the writer fails"), store.create("a") as file, io.TextIOWrapper(file):
        _fail(file, size)
    with pytest.raises(InvalidValueError, match="it ended with an error; read `entry` after the block"):
        _ = file.entry
    assert store.get("a") == before
    assert in_tmp(store) == []
    agrees_with_disk(store)


def test_nothing_is_seen_before_the_end(store: Store) -> None:
    with store.create("a") as file:
        file.write(mixed(BUFFERED_BYTES + FRAME_SIZE))
        file.close()
        assert "a" not in store
        assert len(in_tmp(store)) == 1
        with pytest.raises(ValueError, match="'a', which is closed"):
            file.write(b"x")
    assert "a" in store


def test_a_file_that_nobody_ends_leaves_nothing(store: Store) -> None:
    block = store.create("a")
    block.__enter__().write(noise(BUFFERED_BYTES + FRAME_SIZE))
    assert len(in_tmp(store)) == 1
    del block
    gc.collect()
    assert in_tmp(store) == []
    assert "a" not in store


def test_programs_write_through_it(store: Store) -> None:
    array = np.arange(100_000)
    with store.create("lines") as file, io.TextIOWrapper(file, encoding="utf-8") as lines:
        lines.writelines(f"{number}\n" for number in range(1_000))
    with store.create("zip") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("member", b"inside")
    with store.create("tar") as file, tarfile.open(fileobj=file, mode="w|") as tar:
        tar.add(__file__, "member")
    with store.create("gzip") as file, gzip.open(file, "wb") as packed:
        packed.write(b"inside")
    with store.create("npy") as file:
        np.save(file, array)
    with store.create("pickle") as file:
        pickle.dump({"a": 1}, file)
    assert store.get("lines", b"").split() == [b"%d" % number for number in range(1_000)]
    assert zipfile.ZipFile(store.open("zip")).read("member") == b"inside"
    with tarfile.open(fileobj=store.open("tar")) as tar:
        assert tar.getnames() == ["member"]
    assert gzip.decompress(store.get("gzip", b"")) == b"inside"
    assert (np.load(store.open("npy")) == array).all()
    assert pickle.loads(store.get("pickle", b"")) == {"a": 1}


def test_what_cannot_be_put_is_refused_with_a_word_of_what_to_do(store: Store) -> None:
    store.put("folder/a", b"x")
    with pytest.raises(InvalidNameError):
        store.create("../a")
    with pytest.raises(NameConflictError), store.create("folder"):
        pass
    with pytest.raises(SerializationError, match="encode text first"), store.create("b") as file:
        file.write("text")  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match="encode text first"):
        store.put_stream("b", io.StringIO("text"))  # type: ignore[arg-type]
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(reading, "rb", buffering=0) as pipe, pytest.raises(InvalidValueError, match="set_blocking"):
        store.put_stream("b", pipe)
    os.close(writing)
    assert list(store) == ["folder/a"]
    assert in_tmp(store) == []


def test_a_budget_holds_for_streams(tmp_path: Path) -> None:
    with Store(tmp_path / "s", max_size="9MB", memory=0) as store:
        store.put("old", noise(2_000_000, 1))
        store.put_stream("new", io.BytesIO(noise(BUFFERED_BYTES)))
        assert list(store) == ["new"]
        with pytest.raises(TooLargeError):
            store.put_stream("large", io.BytesIO(noise(BUFFERED_BYTES + 10 * FRAME_SIZE)))
        assert in_tmp(store) == []


@pytest.mark.parametrize("size", [100, BUFFERED_BYTES + FRAME_SIZE])
def test_bytes_that_are_known_are_kept_once(store: Store, size: int) -> None:
    data = noise(size)
    store.put("a", data)
    before = store.stat().stored
    with store.create("b") as file:
        file.write(data)
    assert store.stat().stored == before
    assert store.get("b") == data
    assert in_tmp(store) == []


def test_a_stream_takes_memory_by_the_frame_and_not_by_its_length(tmp_path: Path) -> None:
    """512 MB go through a process that may not have as much."""
    script = f"""
import io, resource
from castore import Store

class Zeros(io.RawIOBase):
    left = 512_000_000
    def read(self, size=-1):
        size = min(size, self.left)
        self.left -= size
        return bytes(size)

with Store({str(tmp_path / "s")!r}, memory=0) as store:
    store.put("warm", bytes(20_000_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert store.put_stream("a", Zeros(), codec="lz4").size == 512_000_000
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100_000_000


@pytest.mark.parametrize("size", [100, BUFFERED_BYTES + 4 * FRAME_SIZE])
def test_a_killed_writer_leaves_nothing_to_see_and_gc_takes_the_rest(store: Store, size: int) -> None:
    store.put("a", b"what was there")

    def write(ready: Any) -> None:
        with store.create("a") as file:
            file.write(noise(size))
            ready.send(True)
            signal.pause()

    context = get_context("fork")
    seen, ready = context.Pipe(duplex=False)
    child = context.Process(target=write, args=(ready,))
    child.start()
    assert seen.recv()
    left = in_tmp(store)
    assert len(left) == (1 if size > BUFFERED_BYTES else 0)
    assert store.gc().leftovers == []  # its writer lives
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    assert store.get("a") == b"what was there"
    assert sorted(store.gc().leftovers) == sorted(map(str, left))
    assert in_tmp(store) == []
    agrees_with_disk(store)


def test_a_forked_child_neither_goes_on_nor_takes_the_file_away(store: Store) -> None:
    data = noise(BUFFERED_BYTES + FRAME_SIZE)
    context = get_context("fork")
    answers, sender = context.Pipe(duplex=False)

    def inherit(block: Any, file: Any) -> None:
        problems = []
        acts: list[Callable[[], object]] = [
            lambda: file.write(b"x"),
            lambda: block.__exit__(None, None, None),
        ]
        for act in acts:
            try:
                act()
            except InvalidValueError as error:
                problems.append(str(error))
        sender.send(problems)

    block = store.create("a")
    with block as file:
        file.write(data)
        child = context.Process(target=inherit, args=(block, file))
        child.start()
        first, second = answers.recv()
        child.join()
        assert "a forked child cannot continue it" in first
        assert second == first
        file.write(b"end")
    assert store.get("a") == data + b"end"


def test_many_threads_write_files_of_their_own(store: Store) -> None:
    def write(number: int) -> None:
        with store.create(f"n{number}") as file:
            for part in range(6):
                file.write(mixed(BUFFERED_BYTES // 4, seed=number * 10 + part))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert store.get(f"n{number}") == b"".join(
            mixed(BUFFERED_BYTES // 4, seed=number * 10 + p) for p in range(6)
        )
    agrees_with_disk(store)


def test_a_stream_that_is_none_and_a_block_that_is_not_entered_say_what_to_do(store: Store) -> None:
    with pytest.raises(
        InvalidValueError, match="takes a file that can be read, not bytes; `put` keeps bytes"
    ):
        store.put_stream("a", b"bytes")  # type: ignore[arg-type]
    block: Any = store.create("a")
    with pytest.raises(
        InvalidValueError, match=r"a context manager, not a file: use `with store.create\('a'\) as file"
    ):
        block.write(b"x")
    with pytest.raises(InvalidValueError, match=r"as file: file.entry`"):
        block.entry  # noqa: B018
    with pytest.raises(AttributeError):
        block.nothing  # noqa: B018
    assert list(store) == []


@pytest.mark.parametrize("codec", ["none", "auto"])
@pytest.mark.parametrize("limit", [4 << 20, 0], ids=["in the middle", "at the first frame"])
def test_nothing_is_kept_of_a_file_after_a_write_that_failed(store: Store, codec: str, limit: int) -> None:
    pieces = [noise(1 << 20, number) for number in range(16)]
    store.put("a", b"old")
    failed = 0
    creation = store.create("a", codec=codec)
    file = creation.__enter__()
    for number, piece in enumerate(pieces):
        with files_up_to(limit) if number < 12 else contextlib.nullcontext():
            try:
                file.write(piece)
            except (OSError, StoreError):
                failed += 1
    with pytest.raises(StoreError, match=r"an earlier write of this file failed .*nothing of it is kept"):
        creation.__exit__(None, None, None)
    assert failed > 2
    assert store.get("a") == b"old"
    assert in_tmp(store) == []
    store.put("b", b"".join(pieces), codec=codec)
    assert store.get("b") == b"".join(pieces)
    agrees_with_disk(store)
