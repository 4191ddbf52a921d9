"""Files through a mount: castore beside the plain files, squashfuse_ll, and the kernel's squashfs and EROFS.

Every contestant reads the same names in the same shuffled order with the same calls. For cold rows each mount
is unmounted and mounted again before the kernel's caches are dropped, so no daemon keeps a cache either. For
rows of packed bytes, what each contestant reads from its disk is read into the kernel's cache after that.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import castore
from tools.bench import corpus, plots, report
from tools.bench.harness import (
    Bench,
    Contestant,
    Goal,
    Result,
    Row,
    Study,
    Unit,
    gigabytes_per_second,
    per_second,
)
from tools.bench.peers import Mount, erofs, no_kernel_mount, no_ratarmount, squashfs, tar
from tools.bench.reads import READERS, random_places, read_at_random, read_through

TITLE = "Files through a mount"
ABOUT = (
    "Small files are 20 KB of Python source each, read whole in a shuffled order with the system calls that "
    "a loader in C makes: open, read to the end, close. Python's own `open(path, 'rb')` has a row of its "
    "own: before 3.14 it asks every file whether it is a terminal, a question that no FUSE file system can "
    "keep the kernel from passing on; the large file is a tar of files installed on the machine, read in "
    "order, 1 MiB a call. Squashfs images are made with mksquashfs's defaults (128 KiB blocks), and read by "
    "squashfuse_ll and, mounted by root, by the kernel itself. EROFS images are made with mkfs.erofs's "
    "defaults (lz4hc, physical clusters of 4 KiB). In rows of packed bytes the images and the store's files "
    "are in the page cache, and nothing that was decoded is, so the disk is out of the way; the shards are "
    "the large file, cut. ratarmount shows a tar of the same files: for the small ones uncompressed, since "
    "of a compressed one it decodes a whole frame for each, and for the large one in the frames of zstd that "
    "pzstd makes. The plain files lie on the same disk. Random reads are of 64 KB at places of the large "
    "file that no two readers share, by four threads with a descriptor each. The names are those of small "
    "files, 1000 to a folder; `find` and `ls -lR` run as programs of their own."
)
KERNEL = "kernel's squashfs, zstd"
FUSED = "squashfuse_ll, zstd"
EROFS = "kernel's EROFS, lz4hc"
#: Pieces into which the large file is cut, as tars of samples are for training.
SHARDS = 4
TAR, TAR_ZST = "ratarmount, tar", "ratarmount, tar.zst"
_EPOCHS = ("first", "second")


class Place(NamedTuple):
    """Where a contestant reads.

    Attributes:
        root: of its files.
        again: mounts it anew.
        packed: the file, or the folder, that it reads itself; None for plain files.
    """

    root: Path
    again: Callable[[], None]
    packed: Path | None


#: By contestant; for one that this machine cannot run, the reason.
Places = dict[str, Place | str]


def rows(bench: Bench) -> Iterator[Row]:
    size, count = bench.size(512, 64) * 10**6, bench.size(2000, 300)
    with ExitStack() as stack:
        places, names = _set_up(bench, stack, size, count)
        large = gigabytes_per_second(size)
        small = per_second(count, "files/s")
        label, whole = f"{count} files of 20 KB", f"{size // 10**6} MB in order"
        pinned = Goal("castore --pin", 0.95, "plain files")
        chosen = ["plain files", "castore --pin", "castore", FUSED]

        def read_small(root: Path) -> None:
            _read_each(root, names)

        def read_large(root: Path) -> None:
            read_through(root / "large.tar", size)

        def read_shards(root: Path) -> None:
            for shard in _shards():
                read_through(root / shard, size // SHARDS)

        def open_small(root: Path) -> None:
            _open_each(root, names)

        goals = [pinned, Goal("castore", 1.6, FUSED)]
        yield _row(f"warm, {label}", small, read_small, places, [*chosen, TAR], goals)
        yield _row(f"warm, {label}, with Python's open()", small, open_small, places, chosen)
        yield _row(f"warm, {whole}", large, read_large, places, chosen, [pinned])
        goals = [Goal("castore", 1.3, FUSED)]
        yield _row(f"cold, {label}", small, read_small, places, [*chosen, KERNEL, TAR], goals, cold=True)
        yield _two_epochs(f"two epochs of {label}", small, read_small, places, bench.pictures / "epochs.png")
        chosen = [FUSED, KERNEL, "castore", "castore, lz4", "squashfuse_ll, lz4", "plain files"]
        whole_row = [*chosen, TAR_ZST]
        goals = [Goal("castore", 1.5, FUSED), Goal("castore", 1.5, KERNEL), Goal("castore, lz4", 2, FUSED)]
        yield _row(f"cold, {whole}", large, read_large, places, whole_row, goals, cold=True)
        beside = [EROFS, KERNEL, FUSED, "squashfuse_ll, lz4", "castore", "castore, lz4"]
        as_erofs = Goal("castore, lz4", 0.8, EROFS)
        ahead = [Goal("castore", 1.3, by) for by in (KERNEL, FUSED)]
        row = f"packed bytes cached, {label}"
        yield _row(row, small, read_small, places, beside, [as_erofs], packed=True)
        row = f"packed bytes cached, {SHARDS} shards of {size // SHARDS // 10**6} MB in order"
        yield _row(row, large, read_shards, places, beside, [as_erofs, *ahead], packed=True)
        yield _row(f"packed bytes cached, {whole}", large, read_large, places, beside, packed=True)
        pieces = bench.size(2000, 200)
        random_row = f"cold, {pieces} random reads of 64 KB, {READERS} readers"
        scattered = random_places(size, pieces)

        def read_pieces(root: Path) -> None:
            read_at_random(root / "large.tar", scattered)

        unit, goals = per_second(pieces, "reads/s"), [Goal("castore", 1.5, FUSED)]
        yield _row(random_row, unit, read_pieces, places, chosen, goals, cold=True)
    yield from _name_rows(bench)


def _name_rows(bench: Bench) -> Iterator[Row]:
    """Many names: the cost of walking a tree without reading a file."""
    count = bench.size(100_000, 5000)
    with ExitStack() as stack:
        places = _set_up_names(bench, stack, count)
        chosen, goals = [FUSED, "castore", KERNEL, "plain files"], [Goal("castore", 1, FUSED)]
        find = partial(_run_scan, ["find"], count)
        ls = partial(_run_scan, ["ls", "-lR"], count)
        unit = per_second(count, "names/s")
        yield _row(f"cold, find over {count} names", unit, find, places, chosen, goals, cold=True)
        yield _row(f"cold, ls -lR over {count} names", unit, ls, places, chosen, goals, cold=True)
        yield _row(f"warm, ls -lR over {count} names", unit, ls, places, chosen, goals)


def _set_up(bench: Bench, stack: ExitStack, size: int, count: int) -> tuple[Places, list[str]]:
    """Make stores, images and mounts.

    Returns root and remount of each contestant, and the small files' names.
    """
    plain = bench.work / f"plain-{count}-{size}"
    names = [f"small/{name}" for name in corpus.small_files(plain / "small", count, 20_000)]
    random.Random(corpus.SEED).shuffle(names)
    if not (plain / "large.tar").exists():
        (plain / "large.tar").hardlink_to(corpus.archive(bench.work.parent / "corpus", size))
    _cut(plain, size)
    places: Places = {"plain files": Place(plain, lambda: None, None)}
    for codec in ("zstd", "lz4"):
        image = squashfs(plain, bench.work / f"{plain.name}.{codec}.squashfs", codec)
        mount = stack.enter_context(Mount.of_squashfs(image, bench.work / f"mnt-squashfs-{codec}"))
        places[f"squashfuse_ll, {codec}"] = Place(mount.root, mount.again, image)
        if codec == "zstd":
            places[KERNEL] = _by_the_kernel(stack, "squashfs", image, bench.work / "mnt-kernel")
    image = bench.work / f"{plain.name}.erofs"
    if shutil.which("mkfs.erofs", path=f"{os.environ['PATH']}:/usr/sbin"):
        image = erofs(plain, image, "lz4hc")
        places[EROFS] = _by_the_kernel(stack, "erofs", image, bench.work / "mnt-erofs")
    else:
        places[EROFS] = "there is no mkfs.erofs: make it with tools/setup.sh bench"
    variants = [("castore", "zstd", ()), ("castore --pin", "zstd", ("--pin",)), ("castore, lz4", "lz4", ())]
    for number, (name, codec, flags) in enumerate(variants):
        store = _store(bench.work / f"{plain.name}.{codec}.castore", codec, plain, names)
        mount = stack.enter_context(Mount.of_store(store, bench.work / f"mnt-castore-{number}", *flags))
        places[name] = Place(mount.root, mount.again, store)
    places |= _by_ratarmount(stack, plain, bench.work)
    return places, names


def _shards() -> list[str]:
    return [f"shards/{number}.tar" for number in range(SHARDS)]


def _cut(plain: Path, size: int) -> None:
    """Cut the large file into shards."""
    with (plain / "large.tar").open("rb") as file:
        for name in _shards():
            (plain / name).parent.mkdir(exist_ok=True)
            (plain / name).write_bytes(file.read(size // SHARDS))


def _set_up_names(bench: Bench, stack: ExitStack, count: int) -> Places:
    plain, folder = bench.work / "plain-names", bench.work / "names.castore"
    made = {f"{number // 1000:03}/{number:06}.json": b'{"id": %d}' % number for number in range(count)}
    for name, data in made.items():
        target = plain / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    with castore.Store(folder) as store:
        store.put_many(made.items())
    image = squashfs(plain, bench.work / "names.squashfs", "zstd")
    fused = stack.enter_context(Mount.of_squashfs(image, bench.work / "mnt-names-squashfs"))
    ours = stack.enter_context(Mount.of_store(folder, bench.work / "mnt-names-castore"))
    return {
        "plain files": Place(plain, lambda: None, None),
        FUSED: Place(fused.root, fused.again, image),
        "castore": Place(ours.root, ours.again, folder),
        KERNEL: _by_the_kernel(stack, "squashfs", image, bench.work / "mnt-names-kernel"),
    }


def _by_the_kernel(stack: ExitStack, kind: str, image: Path, root: Path) -> Place | str:
    if why := no_kernel_mount(kind):
        return why
    mount = stack.enter_context(Mount.by_the_kernel(kind, image, root))
    return Place(mount.root, mount.again, image)


def _by_ratarmount(stack: ExitStack, plain: Path, work: Path) -> Places:
    if why := no_ratarmount():
        return {TAR: why, TAR_ZST: why}
    places: Places = {}
    for name, suffix in ((TAR, "tar"), (TAR_ZST, "tar.zst")):
        archive = tar(plain, work / f"{plain.name}.{suffix}")
        mount = stack.enter_context(Mount.of_ratarmount(archive, work / f"mnt-{suffix}"))
        places[name] = Place(mount.root, mount.again, archive)
    return places


def _store(folder: Path, codec: str, plain: Path, names: list[str]) -> Path:
    with castore.Store(folder, codec=codec) as store:
        for name in [*names, "large.tar", *_shards()]:
            if store.entry(name) is None:
                store.put_file(name, plain / name)
    return folder


def _row(
    name: str,
    unit: Unit,
    read: Callable[[Path], None],
    places: Places,
    chosen: list[str],
    goals: list[Goal] | None = None,
    *,
    cold: bool = False,
    packed: bool = False,
) -> Row:
    contestants = []
    for contestant in chosen:
        place = places[contestant]
        if isinstance(place, str):
            contestants.append(Contestant(contestant, lambda: None, skipped=place))
        else:
            contestants.append(_contestant(contestant, read, place, anew=cold or packed, packed=packed))
    return Row(name, unit, contestants, reference=chosen[0], cold=cold or packed, goals=goals or [])


def _two_epochs(name: str, unit: Unit, read: Callable[[Path], None], places: Places, picture: Path) -> Row:
    """The first epoch, with nothing in memory, and the second one right behind it."""
    chosen = ["plain files", "castore", "castore, lz4", EROFS, KERNEL, FUSED, TAR]

    def second(root: Path) -> float:
        read(root)
        start = time.perf_counter()
        read(root)
        return time.perf_counter() - start

    contestants: list[Contestant] = []
    for contestant in chosen:
        place = places[contestant]
        for epoch, work in zip(_EPOCHS, (read, second), strict=True):
            label = f"{contestant}, {epoch} epoch"
            if isinstance(place, str):
                contestants.append(Contestant(label, lambda: None, skipped=place))
            else:
                contestants.append(
                    Contestant(
                        label, partial(work, place.root), place.again, ours=label.startswith("castore")
                    )
                )
    return Row(
        name,
        unit,
        contestants,
        reference=f"plain files, {_EPOCHS[0]} epoch",
        cold=True,
        conclude=partial(_draw_epochs, picture, chosen),
    )


def _draw_epochs(picture: Path, chosen: list[str], result: Result) -> Study:
    medians = {timing.name: timing.median for timing in result.timings if not timing.skipped}
    rates: dict[str, tuple[float, float]] = {}
    for name in chosen:
        first, second = (medians.get(f"{name}, {epoch} epoch") for epoch in _EPOCHS)
        if first is not None and second is not None:
            rates[name] = first, second
    plots.two_epochs(picture, result.unit, rates, "castore")
    return Study(
        "The first epoch and the second",
        ["", *(f"{epoch}, {result.unit}" for epoch in _EPOCHS), "second for first"],
        [
            [name, report.figure(first), report.figure(second), f"{second / first:.1f}"]
            for name, (first, second) in rates.items()
        ],
        note="The second epoch reads what the first one has left in the kernel's caches.",
        picture=picture.name,
    )


def _contestant(
    name: str, read: Callable[[Path], None], place: Place, *, anew: bool, packed: bool
) -> Contestant:
    return Contestant(
        name,
        lambda: read(place.root),
        place.again if anew else lambda: None,
        ours=name.startswith("castore"),
        packed=[place.packed] if packed and place.packed is not None else [],
    )


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


def _run_scan(command: list[str], count: int, root: Path) -> None:
    done = subprocess.run(
        [*command, root], stdout=subprocess.PIPE, env=os.environ | {"LC_ALL": "C"}, check=True
    )
    if done.stdout.count(b".json\n") != count:
        raise RuntimeError(f"{command[0]} found other names in {root}")
