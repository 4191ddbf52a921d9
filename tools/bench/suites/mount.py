"""Files through a mount: castore beside the plain files and squashfuse_ll.

Every contestant reads the same names in the same shuffled order with the same calls. For cold rows each mount
is taken down and put up again before the kernel's caches are dropped, so no daemon keeps anything either.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import castore
from tools.bench import corpus
from tools.bench.harness import Bench, Contestant, Goal, Row, Unit, gigabytes_per_second, per_second
from tools.bench.peers import Mount, squashfs

TITLE = "Files through a mount"
ABOUT = (
    "Small files are 20 KB of Python source each, read whole in a shuffled order with the system calls that a loader "
    "in C makes: open, read to the end, close. Python's own `open(path, 'rb')` has a row of its own: before 3.14 it asks "
    "every file whether it is a terminal, a question that no FUSE file system can keep the kernel from passing on; "
    "the large file is a tar of files installed on the machine, read in order, 1 MiB a call. Squashfs images are "
    "made with mksquashfs's defaults (128 KiB blocks). The plain files lie on the same disk."
)
CHUNK = 2**20


def rows(bench: Bench) -> Iterator[Row]:
    size, count = bench.size(512, 64) * 10**6, bench.size(2000, 300)
    with ExitStack() as stack:
        places, names = _set_up(bench, stack, size, count)
        large = gigabytes_per_second(size)
        small = per_second(count, "files/s")
        label = f"{count} files of 20 KB"
        goals = [Goal("castore --pin", 0.9, "plain files")]
        chosen = ["plain files", "castore --pin", "castore", "squashfuse_ll, zstd"]

        def read_small(root: Path) -> None:
            _read_each(root, names)

        def read_large(root: Path) -> None:
            _read_through(root / "large.tar", size)

        def open_small(root: Path) -> None:
            _open_each(root, names)

        yield _row(f"warm, {label}", small, read_small, places, chosen, goals)
        yield _row(f"warm, {label}, with Python's open()", small, open_small, places, chosen)
        yield _row(f"warm, {size // 10**6} MB in order", large, read_large, places, chosen, goals)
        yield _row(f"cold, {label}", small, read_small, places, chosen, cold=True)
        yield _row(
            f"cold, {size // 10**6} MB in order",
            large,
            read_large,
            places,
            ["squashfuse_ll, zstd", "castore", "castore, lz4", "squashfuse_ll, lz4", "plain files"],
            [Goal("castore", 1.3, "squashfuse_ll, zstd")],
            cold=True,
        )


Place = tuple[Path, Callable[[], None]]


def _set_up(bench: Bench, stack: ExitStack, size: int, count: int) -> tuple[dict[str, Place], list[str]]:
    """Stores, images and mounts; returns root and remount of each contestant, and the small files' names."""
    plain = bench.work / f"plain-{count}-{size}"
    names = [f"small/{name}" for name in corpus.small_files(plain / "small", count, 20_000)]
    random.Random(corpus.SEED).shuffle(names)
    if not (plain / "large.tar").exists():
        (plain / "large.tar").hardlink_to(corpus.archive(bench.work.parent / "corpus", size))
    places: dict[str, Place] = {"plain files": (plain, lambda: None)}
    for codec in ("zstd", "lz4"):
        image = squashfs(plain, bench.work / f"{plain.name}.{codec}.squashfs", codec)
        mount = stack.enter_context(Mount.of_squashfs(image, bench.work / f"mnt-squashfs-{codec}"))
        places[f"squashfuse_ll, {codec}"] = mount.root, mount.again
    variants = [("castore", "zstd", ()), ("castore --pin", "zstd", ("--pin",)), ("castore, lz4", "lz4", ())]
    for number, (name, codec, flags) in enumerate(variants):
        store = _store(bench.work / f"{plain.name}.{codec}.castore", codec, plain, names)
        mount = stack.enter_context(Mount.of_store(store, bench.work / f"mnt-castore-{number}", *flags))
        places[name] = mount.root, mount.again
    return places, names


def _store(folder: Path, codec: str, plain: Path, names: list[str]) -> Path:
    with castore.Store(folder, codec=codec) as store:
        for name in [*names, "large.tar"]:
            if store.entry(name) is None:
                store.put_file(name, plain / name)
    return folder


def _row(
    name: str,
    unit: Unit,
    read: Callable[[Path], None],
    places: dict[str, Place],
    chosen: list[str],
    goals: list[Goal] | None = None,
    *,
    cold: bool = False,
) -> Row:
    contestants = []
    for contestant in chosen:
        root, again = places[contestant]
        contestants.append(_contestant(contestant, read, root, again if cold else None))
    return Row(name, unit, contestants, reference=chosen[0], cold=cold, goals=goals or [])


def _contestant(
    name: str, read: Callable[[Path], None], root: Path, again: Callable[[], None] | None
) -> Contestant:
    prepare = again or (lambda: None)
    return Contestant(name, lambda: read(root), prepare, ours=name.startswith("castore"))


def _read_each(root: Path, names: list[str]) -> None:
    for name in names:
        descriptor = os.open(f"{root}/{name}", os.O_RDONLY)
        got = len(os.read(descriptor, 65_536)) + len(os.read(descriptor, 65_536))
        os.close(descriptor)
        if got != 20_000:
            raise RuntimeError(f"{root}/{name} came short")


def _open_each(root: Path, names: list[str]) -> None:
    for name in names:
        with open(f"{root}/{name}", "rb") as file:
            if len(file.read()) != 20_000:
                raise RuntimeError(f"{root}/{name} came short")


def _read_through(path: Path, size: int) -> None:
    buffer, left = bytearray(CHUNK), size
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            left -= got
    if left:
        raise RuntimeError(f"{path} is {left} bytes short")
