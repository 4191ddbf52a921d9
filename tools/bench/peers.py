"""Other programs that a row runs: castore's command line, squashfuse, the stock compressors, data loaders.

Every mount and process made here is a context manager, so that a failing row leaves none behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

# Seconds after which a reader that gives no answer is taken for hung.
_PATIENCE = 600

PROJECT = Path(__file__).resolve().parents[2]
#: The environments that `tools/setup.sh bench` makes below the project, for castore and for its peers.
OURS, PEERS = ".venv-bench", ".venv-bench-peers"


def run(*command: str | os.PathLike[str]) -> None:
    """Run a program to its end; its output is shown only when it fails.

    Raises:
        RuntimeError: It failed; with its output.
    """
    done = subprocess.run([os.fspath(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        line = " ".join(os.fspath(word) for word in command)
        raise RuntimeError(
            f"`{line}` failed ({done.returncode}): {(done.stderr or done.stdout).strip()[-2000:]}"
        )


def castore(*words: str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    """The castore command of the environment that runs this program."""
    return [Path(sys.executable).with_name("castore"), *words]


class Mount(AbstractContextManager["Mount"]):
    """A mount that can be mounted anew, so that a cold run finds no daemon with warm caches."""

    def __init__(
        self, root: Path, up: list[str | os.PathLike[str]], down: list[str | os.PathLike[str]]
    ) -> None:
        self.root, self._up, self._down = root, up, down

    @classmethod
    def of_store(cls, store: Path, root: Path, *flags: str) -> Mount:
        return cls(root, castore("--store", store, "mount", root, *flags), castore("umount", root))

    @classmethod
    def of_ratarmount(cls, archive: Path, root: Path) -> Mount:
        """A tar, compressed or not, mounted by `ratarmount`.

        The first mount makes its index, beside the archive.
        """
        return cls(root, [PROJECT / PEERS / "bin" / "ratarmount", archive, root], ["fusermount3", "-u", root])

    @classmethod
    def of_squashfs(cls, image: Path, root: Path) -> Mount:
        return cls(root, ["squashfuse_ll", image, root], ["fusermount3", "-u", root])

    @classmethod
    def by_the_kernel(cls, kind: str, image: Path, root: Path) -> Mount:
        """An image that the kernel reads by itself: ``squashfs`` or ``erofs``."""
        return cls(root, ["mount", "-t", kind, "-o", "loop,ro", image, root], ["umount", root])

    def __enter__(self) -> Mount:
        self.root.mkdir(parents=True, exist_ok=True)
        self._mount()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unmount()

    def again(self) -> None:
        """Unmount and mount again: everything that the daemon had cached is gone."""
        self._unmount()
        self._mount()

    def _mount(self) -> None:
        run(*self._up)
        deadline = time.monotonic() + 20
        while not os.path.ismount(self.root):  # squashfuse_ll returns a little before its mount answers
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing is mounted on {self.root} 20 s after {os.fspath(self._up[0])}")
            time.sleep(0.01)

    def _unmount(self) -> None:
        run(*self._down)


class HungError(RuntimeError):
    """A reader gave no answer, and was killed."""


class Reader(AbstractContextManager["Reader"]):
    """A process of `tools.bench.epochs`: a warm dataset that reads epochs on request.

    Args:
        contestant: a name in `tools.bench.epochs.CONTESTANTS`.
        samples: number of samples in the dataset.
        workers: number of workers of its `DataLoader`.
        environment: the folder of its virtual environment, below the project.
        folder: for a dataset that lies on a disk; created if it is missing.
        program: a module that takes the same arguments and requests.
        patience: seconds after which an answer has failed.
    """

    def __init__(
        self,
        contestant: str,
        samples: int,
        workers: int,
        folder: Path,
        environment: str = OURS,
        program: str = "tools.bench.epochs",
        patience: float = _PATIENCE,
    ) -> None:
        self._what = contestant
        self._patience = patience
        self._is_hung = False
        python = PROJECT / environment / "bin" / "python"
        if not python.exists():
            raise RuntimeError(f"there is no {python}: make it with tools/setup.sh bench")
        folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [python, "-m", program, contestant, str(samples), str(workers), folder],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._listen()

    @property
    def pid(self) -> int:
        """The process's id; the workers are its children."""
        return self._process.pid

    def read(self, epochs: int) -> float:
        """Have it read some epochs; returns the seconds of one."""
        _stream(self._process.stdin).write(f"{epochs}\n")
        _stream(self._process.stdin).flush()
        return float(self._listen())

    def _listen(self) -> str:
        patience = threading.Timer(self._patience, self._kill)
        patience.start()
        try:
            answer = _stream(self._process.stdout).readline()
        finally:
            patience.cancel()
        if not answer:
            _, errors = self._process.communicate()
            if self._is_hung:
                raise HungError(f"the reader of {self._what} gave no answer for {self._patience:g} s")
            raise RuntimeError(f"the reader of {self._what} failed: {errors.strip()[-2000:]}")
        return answer

    def _kill(self) -> None:
        """Kill the process and its workers: one that waits for ever does not look for its parent."""
        self._is_hung = True
        for process in (*psutil.Process(self.pid).children(recursive=True), self._process):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The process ends when its standard input does, and its workers end with it.
        self._process.communicate()


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def squashfs(source: Path, image: Path, codec: str) -> Path:
    """Pack a folder with mksquashfs at its defaults (128 KiB blocks, the codec's own default level)."""
    if not image.exists():
        binary = shutil.which("mksquashfs") or "/usr/sbin/mksquashfs"
        run(binary, source, image.with_suffix(".part"), "-comp", codec, "-noappend", "-quiet", "-no-progress")
        image.with_suffix(".part").rename(image)
    return image


def erofs(source: Path, image: Path, codec: str) -> Path:
    """Pack a folder with mkfs.erofs at its defaults (physical clusters of 4 KiB)."""
    if not image.exists():
        binary = shutil.which("mkfs.erofs") or "/usr/sbin/mkfs.erofs"
        run(binary, "--quiet", f"-z{codec}", image.with_suffix(".part"), source)
        image.with_suffix(".part").rename(image)
    return image


def tar(source: Path, archive: Path) -> Path:
    """Pack a folder as a tar. A name that ends in `.zst` gives many zstd frames, for random access."""
    if archive.exists():
        return archive
    part = archive.with_suffix(".part")
    if archive.suffix != ".zst":
        run("tar", "-C", source, "-cf", part, ".")
    else:
        with subprocess.Popen(["tar", "-C", source, "-cf", "-", "."], stdout=subprocess.PIPE) as packing:
            subprocess.run(["pzstd", "-q", "-3", "-f", "-o", part], stdin=packing.stdout, check=True)
        if packing.returncode != 0:
            raise RuntimeError(f"tar could not pack {source}")
    return part.rename(archive)


def no_kernel_mount(kind: str) -> str:
    """Why this machine's kernel cannot mount an image, ``squashfs`` or ``erofs``; empty if it can."""
    if os.geteuid() != 0:
        return "mounting an image with the kernel needs root"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices (/dev/loop-control)"
    known = Path("/proc/filesystems")
    if kind not in known.read_text().split() and shutil.which("modprobe"):
        subprocess.run(["modprobe", kind], capture_output=True, check=False)
    return "" if kind in known.read_text().split() else f"this kernel has no {kind} ({known})"


def no_ratarmount() -> str:
    """Why ratarmount cannot run here; empty if it can."""
    program = PROJECT / PEERS / "bin" / "ratarmount"
    return "" if program.exists() else f"there is no {program}: make it with tools/setup.sh bench"
