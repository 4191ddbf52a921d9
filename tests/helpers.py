"""Helpers for several test files: bytes to put, a recount of the index, crowds of processes, and damage.

Bytes come from a seed, so that a failure can be repeated. Nothing here knows more of a store than its public
parts and its index's tables.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from blake3 import blake3

from castore import Store
from castore.objects.packs import PackRecord, scan
from castore.records import HEAD_SIZE, LOOSE

#: Whether this is the long form, which `make torture` runs of tests that are marked so.
LONG = os.environ.get("CASTORE_TORTURE") == "long"

_WORDS = [b"frame", b"blob", b"digest", b"seek", b"table", b"epoch", b"shard", b"token", b"sample", b"rank"]

T = TypeVar("T")


def text(size: int, seed: int = 0) -> bytes:
    """Bytes that compress well."""
    chance = random.Random(f"text {seed}")
    words = b" ".join(chance.choices(_WORDS, k=min(size, 2000) // 4 + 8))
    return (words * (size // len(words) + 1))[:size]


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return blake3(b"noise %d" % seed).digest(length=size)


def mixed(size: int, seed: int = 0) -> bytes:
    """Bytes of which about half can be saved, in every frame."""
    quiet, loud = text(size, seed), noise(size, seed)
    return b"".join((loud if at % 1024 < 512 else quiet)[at : at + 512] for at in range(0, size, 512))


def records(count: int, seed: int = 0) -> list[bytes]:
    """JSON records that have much in common: each compresses badly alone, and well with a dictionary."""
    chance = random.Random(f"records {seed}")
    words = [word.decode() for word in _WORDS]
    made = []
    for number in range(count):
        record = {
            "identifier": f"{seed}-{number:06}",
            "collection": chance.choice(["crawl", "books", "forum"]),
            "licence": chance.choice(["public domain", "CC-BY-4.0"]),
            "quality_score": round(chance.random(), 6),
            "annotations": {"language": "en", "duplicate_of": None, "toxicity": round(chance.random(), 4)},
            "text": " ".join(chance.choices(words, k=12)) + f" {chance.randrange(10**9)}",
        }
        made.append(json.dumps(record).encode())
    return made


def recount(store: Store) -> None:
    """Assert that what the index keeps beside its rows is what counting them gives."""
    db = store.index.connection()
    db.execute("BEGIN")
    try:
        entries, logical = db.execute("SELECT count(*), coalesce(sum(size), 0) FROM entries").fetchone()
        sql = "SELECT count(*), coalesce(sum(size), 0), coalesce(sum(stored), 0) FROM blobs"
        blobs, unique, stored = db.execute(sql).fetchone()
        records = [size for (size,) in db.execute("SELECT stored FROM blobs WHERE pack > 0")]
        packed = sum(records) + HEAD_SIZE * len(records)
        assert store.index.totals() == (entries, logical, blobs, unique, stored, packed)
        named = Counter(dict(db.execute("SELECT digest, count(*) FROM entries GROUP BY digest")))
        for (released,) in db.execute("SELECT digests FROM released"):
            named.update(released[start : start + 32] for start in range(0, len(released), 32))
        for digest, refs, orphaned in db.execute("SELECT digest, refs, orphaned FROM blobs"):
            assert refs == named.pop(digest, 0)
            assert (orphaned is None) == (refs > 0)
        assert not named, "an entry names a blob that has no row"
    finally:
        db.execute("ROLLBACK")


def agrees_with_disk(store: Store) -> None:
    """Assert that after a gc every row's bytes can be read, and that nothing is on disk that no row means."""
    store.gc(grace=0)
    assert store.verify().bad == []
    recount(store)
    assert store.gc(grace=0, dry_run=True).leftovers == []
    blobs = list(store.index.blobs())
    loose = {store.objects.loose.path(blob.digest, blob.codec) for blob in blobs if blob.pack == LOOSE}
    assert {str(path) for path in object_files(store)} == loose
    packs = store.objects.packs.ids()
    assert packs == [row[0] for row in store.index.connection().execute("SELECT id FROM packs ORDER BY id")]
    records = (found for pack in packs for found in scan(store.objects.packs.path(pack), pack))
    on_disk = {found.blob for found in records if isinstance(found, PackRecord)}
    assert {blob for blob in blobs if blob.pack > 0} <= on_disk


def in_processes(count: int, task: Callable[[int], object], *, timeout: float = 240.0) -> list[Any]:
    """Run ``task(0)`` to ``task(count - 1)``, each in a forked process, all at once; their results, in
    order.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)

    def run(number: int, sender: Any) -> None:
        try:
            barrier.wait(timeout)
            sender.send((True, task(number)))
        except BaseException:
            sender.send((False, traceback.format_exc()))
        finally:
            sender.close()

    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    children = [context.Process(target=run, args=(i, pipes[i][1])) for i in range(count)]
    for child in children:
        child.start()
    try:
        answers = [_answer(receiver, timeout) for receiver, _ in pipes]
        if all(good for good, _ in answers):
            for child in children:  # killed on its way out, it would leave behind what the next test finds
                child.join(240)
    finally:
        for child in children:
            child.kill()
            child.join()
        for pipe in pipes:
            pipe[0].close()
            pipe[1].close()
    failures = [answer for good, answer in answers if not good]
    assert not failures, f"{len(failures)} of {count} processes failed; the first:\n{failures[0]}"
    return [answer for _, answer in answers]


def wait_for_call(function: Any) -> None:
    """Wait until a thread of this process is inside a function: a waiting one shows nothing else."""
    wanted, deadline = function.__code__, time.monotonic() + 60
    while not any(wanted in _codes(frame) for frame in sys._current_frames().values()):
        assert time.monotonic() < deadline, f"nobody called {function.__qualname__}"
        time.sleep(0.001)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def in_small_process(task: Callable[..., T], *arguments: Any) -> T:
    """Return or raise as ``task(*arguments)`` does in a new process, which has imported little.

    For a test that forks hundreds of times: a fork of a process that has run thousands of tests, and the
    page faults after it, take a third of a second.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task, *arguments).result()


def _answer(receiver: Any, timeout: float) -> tuple[bool, Any]:
    if not receiver.poll(timeout):
        return False, f"no answer within {timeout} seconds"
    good, answer = receiver.recv()
    return good, answer


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Have the system refuse to make files of this process larger than so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def in_small_shm(script: str, size: str) -> str:
    """The output of a program that has a ``/dev/shm`` of its own, of this size."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def payload(store: Store, name: str) -> tuple[Path, int, int]:
    """Where the stored bytes of an entry lie: file, offset and length (a record's header not included)."""
    found = store.index.find(name)
    assert found is not None
    blob = found.blob
    if blob.pack == LOOSE:
        return Path(store.objects.loose.path(blob.digest, blob.codec)), 0, blob.stored
    return store.objects.packs.path(blob.pack), blob.offset, blob.stored


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Change bytes of a file in place, whatever its permissions say."""
    path.chmod(0o600)
    fd = os.open(path, os.O_WRONLY)
    try:
        assert os.pwrite(fd, data, offset) == len(data)
    finally:
        os.close(fd)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with path.open("rb") as file:
        file.seek(offset)
        old = file.read(1)[0]
    overwrite(path, offset, bytes([old ^ (1 << bit)]))


def object_files(store: Store) -> list[Path]:
    """Every loose object and temporary file on disk."""
    found = [path for path in (store.path / "objects").glob("??/*") if path.is_file()]
    return sorted(found + list((store.path / "tmp").iterdir()))


def statements_of(store: Store, act: Callable[[], object]) -> list[str]:
    """The statements that ``act`` has SQLite run for this thread, with their values."""
    asked: list[str] = []
    db = store.index.connection()
    db.set_trace_callback(asked.append)
    try:
        act()
    finally:
        db.set_trace_callback(None)
    return asked
