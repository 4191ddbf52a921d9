"""A remote on object storage at 30 ms: pushed to, pulled from, mounted before it is here; beside its peers.

Each contestant begins each round with nothing: an empty bucket or prefix, a store that is made anew, a mount
that is mounted anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path

import psutil

import castore
from castore.units import format_size
from tools.bench import corpus, texts
from tools.bench.growing import Growing, name_of
from tools.bench.harness import (
    Bench,
    Contestant,
    Goal,
    Row,
    Study,
    gigabytes_per_second,
    per_second,
    seconds,
    verdict,
)
from tools.bench.network_epochs import REMOTE, SAMPLES, SIZE, STORE
from tools.bench.object_storage import BANDWIDTH, BUCKET, DELAY, NOT_COMPRESSIBLE, Storage, program
from tools.bench.peers import OURS, PEERS, PROJECT, HungError, Mount, Reader, run
from tools.bench.peers import castore as command
from tools.bench.reads import READERS, random_places, read_at_random, read_through

TITLE = "A remote on object storage"
ABOUT = (
    "SeaweedFS on the same machine, with its bytes in memory, stands for a bucket. A relay in a process of "
    "its own (`tools/bench/link.py`) stands for the network: what goes to the server takes 30 ms, a new "
    "connection 30 ms more, and 100 MB/s are shared by all connections, each way. Clients, relay and server "
    "share the processors, so what costs processor time is slower here than between machines. `the link` is "
    "no program: it is what 100 MB/s would take for the bytes as they are. boto3's transfer manager uploads "
    "file by file with its default threads, and rclone and s3fs-fuse run with their defaults; boto3 and "
    "`rclone copy` do a part of the work, and their time is multiplied. Text is JSON Lines of documents "
    "that are installed on the machine, which castore keeps compressed (zstd) and the others keep as it is. "
    "Samples are Python source of 20 KB each, which mosaicml-streaming and litdata keep in zstd too, in "
    "chunks of 8 MB (their default is 64 MB, which would be few chunks of this set). Samples are read by "
    "two workers of a DataLoader in random order: castore's as files of a mount, or a batch by a `get_many` "
    "after a pull, lazy or with all bytes; or beside a pull (`begin_pull`), in windows of 500; those batches "
    "are handed on with `SharedBatches`. The "
    "time of the first epoch includes the mount, the pull, or the opening of the streamed dataset, but no "
    "imports. All rows begin with the kernel's caches dropped, and "
    "pulls and reads with a store or a cache that has nothing, unless the row says otherwise."
)
LINK, RCLONE, S3FS = "the link", "rclone mount", "s3fs-fuse"
_PROCESSES, _WORKERS = 8, 2
# Seconds after which an epoch of a peer is begun again, and how often in all: at times a
# worker of mosaicml-streaming (0.13.0) waits for a shard for ever.
_EPOCH_SECONDS, _TRIES = 60, 5
_MB = 10**6


def rows(bench: Bench) -> Iterator[Row | Study]:
    with Storage() as storage:
        yield from _many_files(bench, storage)
        yield from _shards(bench, storage)
        yield from _names(bench, storage)
        yield from _large_file(bench, storage)
        yield from _epochs(bench, storage)


class Node(AbstractContextManager["Node"]):
    """A store that knows a remote and has nothing of it, its mount, and its fetcher.

    Args:
        folder: of the store and of the mount.
        url: of the remote.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.store, self.root, self._url = folder / STORE, folder / "mnt", url

    def afresh(self) -> None:
        """Have an empty store, without a mount."""
        self.leave()
        shutil.rmtree(self.store, ignore_errors=True)
        with castore.Store(self.store) as store:
            store.add_remote(REMOTE, self._url, read_only=True)

    def leave(self) -> None:
        """Unmount, and end the fetcher: the next reader starts another."""
        if os.path.ismount(self.root):
            run(*command("umount", self.root))
        for process in self.fetchers():
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait()

    def mount(self) -> None:
        run(*command("--store", self.store, "mount", self.root, "--remote", REMOTE))

    def mount_afresh(self) -> None:
        self.afresh()
        self.mount()

    def fetchers(self) -> list[psutil.Process]:
        """The processes that fetch for the store."""
        words = ["castore.remote.fetcher", os.fspath(self.store)]
        found = psutil.process_iter(["cmdline"])
        return [process for process in found if (process.info["cmdline"] or [])[-2:] == words]

    def __exit__(self, *_: object) -> None:
        self.leave()


# Push and pull


def _many_files(bench: Bench, storage: Storage) -> Iterator[Row]:
    files, part = bench.size(100_000, 5000), bench.size(1000, 200)
    folder = bench.work / "files"
    names = corpus.small_files(folder, files, 2000)
    numbers = count()
    with castore.Store(bench.work / "files.castore") as store:
        store.put_many((f"files/{name}", (folder / name).read_bytes()) for name in names)

        def push() -> None:
            store.push(to=REMOTE)

        def add_and_push() -> None:
            run(*command("--store", other, "add", folder))
            with castore.Store(other) as fresh:
                fresh.push(to=REMOTE)

        other = bench.work / "added.castore"

        def afresh(pusher: Path) -> None:
            storage.link.shape(0)
            if pusher == other:
                shutil.rmtree(other, ignore_errors=True)
            with castore.Store(pusher) as known:
                if REMOTE in known.remotes():
                    known.remove_remote(REMOTE)
                known.add_remote(REMOTE, storage.url(f"files-{next(numbers)}"))
            storage.link.shape(DELAY, BANDWIDTH)

        upload = partial(_upload_files, folder, part, files, numbers)
        boto3 = f"boto3's transfer manager, {part} of the files"
        yield Row(
            f"push of {files} files of 2 KB",
            per_second(files, "files/s"),
            [
                Contestant("castore push", push, partial(afresh, store.path), ours=True),
                Contestant("castore add, then push", add_and_push, partial(afresh, other), ours=True),
                Contestant(boto3, upload),
            ],
            reference=boto3,
            cold=True,
            goals=[Goal("castore push", 50, boto3)],
        )
    shutil.rmtree(folder)


def _upload_files(folder: Path, part: int, files: int, numbers: Iterator[int]) -> float:
    return _client("transfer_manager", f"plain-{next(numbers)}", folder, part) * files / part


def _client(*words: object) -> float:
    """The seconds that a client of `tools.bench.network_clients` tells."""
    line = [sys.executable, "-m", "tools.bench.network_clients", *map(str, words)]
    done = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the client {words[0]} failed: {done.stderr[-2000:]}")
    return float(done.stdout)


def _shards(bench: Bench, storage: Storage) -> Iterator[Row]:
    number, length = bench.size(32, 4), bench.size(64, 16) * _MB
    size, part = number * length, number // 4
    folder, copied = bench.work / "shards", bench.work / "copied"
    paths = texts.shards(folder, number, length)
    some = bench.work / "some"
    some.mkdir()
    for path in paths[:part]:
        (some / path.name).hardlink_to(path)
    numbers = count()
    rclone = f"rclone copy, {part} of {number} shards"
    link = Contestant(LINK, lambda: size / BANDWIDTH)
    label = f"{size // _MB} MB of text shards"

    def copy(source: str | Path, target: str | Path) -> float:
        start = time.perf_counter()
        run(program("rclone"), "copy", "--header-upload", f"Content-Type: {NOT_COMPRESSIBLE}", source, target)
        return (time.perf_counter() - start) * number / part

    with castore.Store(bench.work / "shards.castore") as store:
        for path in paths:
            store.put_file(f"shards/{path.name}", path)

        def afresh() -> None:
            storage.again()  # else the server would need memory for the shards of all rounds
            storage.link.shape(0)
            if REMOTE in store.remotes():
                store.remove_remote(REMOTE)
            store.add_remote(REMOTE, storage.url("shards"))
            storage.link.shape(DELAY, BANDWIDTH)

        def push() -> None:
            store.push(to=REMOTE)

        yield Row(
            f"push of {label}",
            gigabytes_per_second(size),
            [
                Contestant("castore push", push, afresh, ours=True),
                link,
                Contestant(rclone, lambda: copy(some, f"bench:{BUCKET}/plain-{next(numbers)}"), afresh),
            ],
            reference=LINK,
            cold=True,
            goals=[Goal("castore push", 2.5, LINK)],
        )
        afresh()
        push()
    for path in some.iterdir():
        storage.upload(f"plain/{path.name}", path)
    with Node(bench.work / "puller", storage.url("shards")) as node:

        def pull() -> None:
            with castore.Store(node.store) as store:
                store.pull(remote=REMOTE)

        yield Row(
            f"pull of {label}",
            gigabytes_per_second(size),
            [
                Contestant("castore pull", pull, node.afresh, ours=True),
                link,
                Contestant(
                    rclone,
                    lambda: copy(f"bench:{BUCKET}/plain", copied),
                    partial(shutil.rmtree, copied, ignore_errors=True),
                ),
            ],
            reference=LINK,
            cold=True,
            goals=[Goal("castore pull", 2.5, LINK)],
        )
    for made in (folder, some, copied, bench.work / "shards.castore", bench.work / "puller"):
        shutil.rmtree(made, ignore_errors=True)
    storage.again()


# Mounts


def _names(bench: Bench, storage: Storage) -> Iterator[Row]:
    names = bench.size(10**6, 10**4)
    big = Growing(bench.work / "names.castore")
    big.grow(names)
    storage.link.shape(0)
    with castore.Store(big.path) as store:
        store.add_remote(REMOTE, storage.url("names")).push()
    shutil.rmtree(big.path)
    storage.link.shape(DELAY, BANDWIDTH)
    with ExitStack() as stack:
        new, known = (
            stack.enter_context(Node(bench.work / name, storage.url("names"))) for name in ("new", "known")
        )
        known.mount_afresh()

        def work(node: Node) -> None:
            node.mount()
            if not (node.root / name_of(0)).read_bytes():
                raise RuntimeError(f"{node.root} has an empty file")

        work_known = partial(work, known)
        known.leave()
        work_known()
        first, later = "castore mount, the first time", "castore mount, from then on"
        yield Row(
            f"mount of a commit of {names} names, until a file is read",
            seconds(),
            [
                Contestant(first, partial(work, new), new.afresh, ours=True),
                Contestant(later, work_known, known.leave, ours=True),
            ],
            goals=[Goal(first, at_most=3), Goal(later, at_most=1)],
        )


def _large_file(bench: Bench, storage: Storage) -> Iterator[Row | Study]:
    size, pieces = bench.size(512, 64) * _MB, bench.size(400, 200)
    [path] = texts.shards(bench.work / "text", 1, size)
    name = path.name
    storage.link.shape(0)
    with castore.Store(bench.work / "text.castore") as store:
        stored = store.put_file(name, path).stored
        store.add_remote(REMOTE, storage.url("text")).push()
    storage.upload(f"plain/{name}", path)
    storage.link.shape(DELAY, BANDWIDTH)
    with ExitStack() as stack:
        node = stack.enter_context(Node(bench.work / "reader", storage.url("text")))
        peers = _peer_mounts(bench, stack, storage)

        def contestants(work: Callable[[Path], None]) -> list[Contestant]:
            ours = Contestant("castore", partial(work, node.root / name), node.mount_afresh, ours=True)
            return [ours, *(_peer(label, mount, name, work) for label, mount in peers.items())]

        link = Contestant(LINK, lambda: size / BANDWIDTH)
        yield Row(
            f"cold, {size // _MB} MB of text in order",
            gigabytes_per_second(size),
            [link, *contestants(partial(_read_in_order, size))],
            reference=LINK,
            cold=True,
            goals=[Goal("castore", 2, LINK)],
        )
        places, obstore = random_places(size, pieces), "obstore's ranges"
        ranges = Contestant(obstore, lambda: _client("ranges", f"plain/{name}", size, pieces))
        others = [Goal("castore", 1, label) for label in peers]
        yield Row(
            f"cold, {pieces} random reads of 64 KB, {READERS} readers",
            per_second(pieces, "reads/s"),
            [ranges, *contestants(partial(_read_places, places))],
            reference=obstore,
            cold=True,
            goals=[Goal("castore", 0.8, obstore), *others],
        )
        yield _under_load(node, storage, name, size, stored)
    shutil.rmtree(bench.work / "text.castore")


def _read_in_order(size: int, path: Path) -> None:
    read_through(path, size)


def _read_places(places: list[list[int]], path: Path) -> None:
    read_at_random(path, places)


def _peer_mounts(bench: Bench, stack: ExitStack, storage: Storage) -> dict[str, Mount | str]:
    """Mounts of the bucket by others, or the reason why this machine has none."""
    root = bench.work / "mnt-rclone"
    rclone: list[str | os.PathLike[str]] = [
        program("rclone"), "mount", f"bench:{BUCKET}", root, "--read-only", "--daemon",
        "--cache-dir", bench.work / "rclone",
    ]  # fmt: skip
    found: dict[str, Mount | str] = {
        RCLONE: stack.enter_context(Mount(root, rclone, ["fusermount3", "-u", root]))
    }
    if shutil.which("s3fs") is None:
        return found | {S3FS: "there is no s3fs: install the Debian package s3fs"}
    root, keys = bench.work / "mnt-s3fs", bench.work / "s3fs-keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{os.environ['AWS_ACCESS_KEY_ID']}:{os.environ['AWS_SECRET_ACCESS_KEY']}")
    region = os.environ["AWS_REGION"]
    s3fs: list[str | os.PathLike[str]] = [
        "s3fs", BUCKET, root, "-o",
        f"ro,use_path_request_style,url={storage.endpoint},passwd_file={keys},endpoint={region}",
    ]  # fmt: skip
    return found | {S3FS: stack.enter_context(Mount(root, s3fs, ["fusermount3", "-u", root]))}


def _peer(label: str, mount: Mount | str, name: str, work: Callable[[Path], None]) -> Contestant:
    if isinstance(mount, str):
        return Contestant(label, lambda: None, skipped=mount)
    return Contestant(label, partial(work, mount.root / "plain" / name), mount.again)


def _under_load(node: Node, storage: Storage, name: str, size: int, stored: int) -> Study:
    """One download for many processes, and the memory of the one that downloads."""
    node.mount_afresh()
    before = storage.link.carried()[1]
    readers = [
        subprocess.Popen(["cat", node.root / name], stdout=subprocess.DEVNULL) for _ in range(_PROCESSES)
    ]
    if any(reader.wait() for reader in readers):
        raise RuntimeError(f"a reader of {node.root / name} failed")
    came = storage.link.carried()[1] - before
    [fetcher] = node.fetchers()
    status = Path(f"/proc/{fetcher.pid}/status").read_text()
    memory = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
    times = came / stored
    one = f"what {_PROCESSES} processes download that read {size // _MB} MB of text cold"
    most = "memory of the fetcher meanwhile (most RSS)"
    return Study(
        f"{_PROCESSES} processes read one file at once",
        ["what", "measured"],
        [
            ["bytes of the file, as stored", format_size(stored)],
            ["bytes that came over the link", format_size(came)],
            [most, format_size(memory)],
        ],
        goals=[
            verdict(times <= 1.05, f"{one}, at most 1.05 times its stored bytes: {times:.2f} times"),
            verdict(memory <= 200e6, f"{most}, at most 200 MB: {format_size(memory)}"),
        ],
    )


# Epochs


class Streamer(AbstractContextManager["Streamer"]):
    """A process of `tools.bench.network_epochs` that can be started anew, with nothing.

    An epoch of a peer that does not end is no figure: it begins anew.

    Args:
        what: a name in `tools.bench.network_epochs.CONTESTANTS`.
        samples: number of samples.
        folder: for all that it keeps.
        node: the store in that folder, for castore.
    """

    def __init__(self, what: str, samples: int, folder: Path, node: Node | None = None) -> None:
        self._what, self._samples, self._folder, self._node = what, samples, folder, node
        self._reader: Reader | None = None
        self._epochs, self._tries = 0, _TRIES

    def afresh(self) -> None:
        """Have a process that has read nothing, and a folder with nothing in it."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._node is not None:
            self._node.afresh()
        self.start()

    def start(self) -> None:
        environment = PEERS if self._node is None else OURS
        program = "tools.bench.network_epochs"
        patience = _EPOCH_SECONDS if self._node is None else 10 * _EPOCH_SECONDS
        self._reader = Reader(
            self._what, self._samples, _WORKERS, self._folder, environment, program, patience
        )
        self._epochs = 0

    def epoch(self) -> float:
        assert self._reader is not None
        try:
            seconds = self._reader.read(1)
        except HungError as error:
            if self._node is not None or not self._tries:
                raise
            print(f"{error}: it begins anew", file=sys.stderr)
            self._tries -= 1
            before = self._epochs
            self.afresh()
            for _ in range(before + 1):
                seconds = self.epoch()
            return seconds
        self._epochs += 1
        return seconds

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.__exit__(None, None, None)
            self._reader = None

    def __exit__(self, *_: object) -> None:
        self._end()


def _epochs(bench: Bench, storage: Storage) -> Iterator[Row]:
    # The time that each contestant takes to begin weighs less in a larger set.
    for samples in (bench.size(5000, 500), bench.size(25_000, 1000)):
        storage.again()
        yield from _epochs_of(bench, storage, samples, bench.work / f"{samples}-{SAMPLES}")


def _epochs_of(bench: Bench, storage: Storage, samples: int, folder: Path) -> Iterator[Row]:
    source, url = folder / SAMPLES, storage.url("castore")
    names = corpus.small_files(source, samples, SIZE)
    storage.link.shape(0)
    with castore.Store(folder / "samples.castore") as store:
        store.put_many((f"{SAMPLES}/{name}", (source / name).read_bytes()) for name in names)
        store.add_remote(REMOTE, url).push()
    for peer in ("mosaic", "litdata"):
        packed = folder / "packed" / peer
        python = PROJECT / PEERS / "bin" / "python"
        run("env", "-C", PROJECT, python, "-m", "tools.bench.network_epochs", "pack", peer, source, packed)
        for path in packed.iterdir():
            if path.is_file():
                storage.upload(f"{peer}/{path.name}", path)
    ours, lazy, pulled = "castore, mount", "castore, pull --lazy", "castore, pull"
    beside, local = "castore, begin_pull", "castore, local mount"
    mosaic, litdata = "mosaicml-streaming", "litdata"
    label, unit = f"{samples} samples of 20 KB, {_WORKERS} workers", per_second(samples, "samples/s")
    with ExitStack() as stack:

        def streamer(what: str, with_node: bool) -> Streamer:
            own = folder / what
            node = stack.enter_context(Node(own, url)) if with_node else None
            return stack.enter_context(Streamer(what, samples, own, node))

        ways = {
            ours: streamer("castore", True),
            lazy: streamer("castore-lazy", True),
            pulled: streamer("castore-pulled", True),
            beside: streamer("castore-streamed", True),
            mosaic: streamer("mosaic", False),
            litdata: streamer("litdata", False),
        }
        storage.link.shape(DELAY, BANDWIDTH)
        yield Row(
            f"cold, first epoch, {label}",
            unit,
            [
                Contestant(name, way.epoch, way.afresh, ours=name not in (mosaic, litdata))
                for name, way in ways.items()
            ],
            reference=mosaic,
            cold=True,
            goals=[Goal(beside, 1.5, mosaic), Goal(beside, 1.5, litdata)],
        )
        ways[local] = streamer("castore-local", True)
        with castore.Store(folder / "castore-local" / STORE) as store:
            store.add_remote(REMOTE, url, read_only=True).pull()
        ways[local].start()
        ways[local].epoch()
        yield Row(
            f"cold, second epoch, {label}",
            unit,
            [Contestant(name, way.epoch, ours=name not in (mosaic, litdata)) for name, way in ways.items()],
            reference=local,
            cold=True,
            goals=[Goal(ours, 0.95, local)],
        )
