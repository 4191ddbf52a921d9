"""The steps of the demo: see the package. Leaves its files in `.demo`, and nothing mounted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.demo import rates, sources
from tools.demo.loaders import HAS_TORCH, LOADERS

FOLDER = Path(__file__).resolve().parent.parent.parent / ".demo"
CASTORE = Path(sys.executable).with_name("castore")
PREFIX = "stdlib"

console = Console(highlight=False)


def castore(*words: str, quiet: bool = False) -> None:
    """Print a castore command and run it as a user would, from the demo's folder."""
    if not quiet:
        console.print(f"[bold green]$[/] [bold]castore {' '.join(words)}[/]")
    _call([str(CASTORE), *words], quiet=quiet)


def shell(*words: str) -> None:
    console.print(f"[bold green]$[/] [bold]{' '.join(words)}[/]")
    _call(list(words), quiet=False)


def _call(command: list[str], *, quiet: bool) -> None:
    environment = {**os.environ, "CASTORE_DIR": str(FOLDER / "store")}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=quiet, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"demo: `{' '.join(command)}` failed with exit code {done.returncode}. {done.stderr or ''}")


def step(number: int, title: str) -> None:
    console.print()
    console.rule(f"[bold cyan]{number}  {title}", align="left", style="cyan")


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def make_data(data: Path) -> None:
    step(1, "Real files: Python's standard library, as training reads it")
    texts = sources.standard_library()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for place, words, make in sources.MAKERS:
        with console.status(f"making {words}"):
            make(data, texts)
        files = len(sources.files_below(data / place))
        count = f"{files:,} file{'s' if files > 1 else ''}"
        table.add_row(f"data/{place}", words, count, megabytes(sources.size_of(data / place)))
    console.print(table)


def add(data: Path) -> None:
    step(2, "Store them: once, compressed, every byte verified")
    console.print("[dim]cd .demo; export CASTORE_DIR=$PWD/store[/]")
    castore("init")
    castore("add", "data", "--as", PREFIX)
    console.print("[dim]The same bytes under another name, say for a second experiment, cost nothing:[/]")
    castore("add", "data/tokens.npy", "--as", "experiment-2")
    logical, stored = sources.size_of(data), sources.size_of(FOLDER / "store")
    console.print(
        f"[bold]{megabytes(logical)} of files take {megabytes(stored)} in the store: "
        f"{1 - stored / logical:.0%} of the space saved.[/]"
    )


@contextmanager
def mounted(place: Path) -> Iterator[None]:
    """Mount for the length of a block; unmounts however the block ends."""
    step(3, "Mount it: names are plain files now")
    castore("mount", "mnt")
    try:
        shell("ls", "-l", f"mnt/{PREFIX}")
        yield
    except BaseException:
        if os.path.ismount(place):
            castore("umount", "mnt", quiet=True)
        raise
    step(7, "Unmount")
    castore("umount", "mnt")


def read(data: Path, mount: Path) -> None:
    step(4, "Read all of it through the mount, with unmodified loaders")
    differing = []
    for name, items, load in LOADERS:
        with console.status(f"{name}: the plain files"):
            wanted = load(data)
        with console.status(f"{name}: through the mount"):
            start = time.perf_counter()
            got = load(mount)
            elapsed = time.perf_counter() - start
        verdict = "[green]✔ same bytes[/]" if got == wanted else "[bold red]✘ differs[/]"
        console.print(f"  {name:<35} {got[0]:>6,} {items:<8} {elapsed:6.2f} s   {verdict}")
        if got != wanted:
            differing.append(name)
    if not HAS_TORCH:
        console.print(
            "  [dim]torch's DataLoader is left out: torch is not installed here. With it: make demo "
            "TORCH=any[/]"
        )
    if differing:
        sys.exit(f"demo: the mount gave other bytes than the plain files to: {', '.join(differing)}")


def compare_speed(data: Path, mount: Path) -> None:
    step(5, "How fast, beside the plain files on this disk")
    table = Table(box=None, padding=(0, 2))
    for header in ("", "plain files", "mount", "mount / plain"):
        table.add_column(header, justify="right" if header else "left")
    jobs: list[tuple[str, Callable[[Path], Callable[[], float]], str]] = [
        ("large files", rates.large_files, "{:.2f} GB/s"),
        ("small files", rates.small_files, "{:,.0f} files/s"),
    ]
    for cold in (True, False):
        for name, job, form in jobs:
            if cold and not rates.can_drop_caches():
                table.add_row(f"{name}, cold", "needs root", "", "")
                continue
            with console.status(f"reading {name}, {'cold' if cold else 'warm'}, three rounds"):
                plain, ours = rates.rates([(job(data), _nothing), (job(mount), _mount_again)], cold=cold)
            label = f"{name}, {'cold' if cold else 'warm'}"
            table.add_row(label, form.format(plain), form.format(ours), f"{ours / plain:.2f}")
    console.print(table)
    console.print(
        "[dim]Cold: the kernel's caches dropped, and a new mount. Medians of three rounds. "
        "Before 3.14, Python's open() asks the daemon whether each file is a terminal: "
        "see docs/benchmarks/mount.md.[/]"
    )


def _nothing() -> None:
    return


def _mount_again() -> None:
    castore("umount", "mnt", quiet=True)
    castore("mount", "mnt", quiet=True)


def maintain(data: Path) -> None:
    step(6, "Keep the disk in hand")
    castore("stat")
    half = f"{sources.size_of(data) // 8 // 10**6}MB"
    console.print(f"[dim]What would go if the store had to fit into {half}:[/]")
    castore("gc", "--max-size", half, "--dry-run")


def second_node(data: Path) -> None:
    step(8, "A second node: mounted before it is there")
    bucket = (FOLDER / "bucket").as_uri()
    console.print("[dim]A folder stands for a bucket or a shared file system. This node pushes:[/]")
    castore("remote", "add", "team", bucket, quiet=True)
    castore("push", PREFIX, "--to", "team")
    console.print("[dim]Another node, with a store of its own, mounts the ref without a pull:[/]")
    castore("--store", "node2", "init", quiet=True)
    castore("--store", "node2", "remote", "add", "team", bucket, quiet=True)
    castore("--store", "node2", "mount", "mnt2", "--remote", "team")
    mount = FOLDER / "mnt2"
    try:
        name, _, load = LOADERS[-1]
        before = sources.size_of(FOLDER / "node2" / "objects")
        start = time.perf_counter()
        if load(mount / PREFIX) != load(data):
            sys.exit(f"demo: the remote's mount gave other bytes than the plain files to {name}")
        elapsed = time.perf_counter() - start
        fetched = sources.size_of(FOLDER / "node2" / "objects") - before
        console.print(
            f"  {name} read its files in {elapsed:.2f} s, [green]✔ same bytes[/]: the node has fetched"
            f" {megabytes(fetched)} of {megabytes(sources.size_of(FOLDER / 'bucket'))}."
        )
    finally:
        castore("umount", "mnt2", quiet=True)


def main() -> None:
    start = time.monotonic()
    mount = FOLDER / "mnt"
    mounts = Path("/proc/self/mounts").read_text()
    for left in ("mnt", "mnt2"):  # by an interrupted demo
        if f" {FOLDER / left} " in mounts:
            castore("umount", left, quiet=True)
    data = sources.fresh_folder(FOLDER) / "data"
    data.mkdir()
    mount.mkdir()
    console.print("[bold]castore[/]: training data kept once, compressed and verified, read as plain files")
    make_data(data)
    add(data)
    with mounted(mount):
        read(data, mount / PREFIX)
        compare_speed(data, mount / PREFIX)
        maintain(data)
    second_node(data)
    console.print(
        f"\n[bold green]Done[/] in {time.monotonic() - start:.0f} s. The files are in .demo "
        "(`make clean` removes them). Next: docs/tutorial.md."
    )


if __name__ == "__main__":
    main()
