"""The other programs that a row needs running: castore's own command line, squashfuse, the stock compressors.

Every mount made here is a context manager, so that a failing row leaves none behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType


def run(*command: str | os.PathLike[str]) -> None:
    """Runs a program to its end; its output is shown only when it fails.

    Raises:
        RuntimeError: It failed; with what it said.
    """
    done = subprocess.run([os.fspath(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        line = " ".join(os.fspath(word) for word in command)
        raise RuntimeError(
            f"`{line}` failed ({done.returncode}): {(done.stderr or done.stdout).strip()[-2000:]}"
        )


def castore(*words: str | os.PathLike[str]) -> list[str | os.PathLike[str]]:
    """The castore command of the environment that this program runs in."""
    return [Path(sys.executable).with_name("castore"), *words]


class Mount(AbstractContextManager["Mount"]):
    """A mount that can be taken down and put up again, so that a cold run finds no daemon with warm caches."""

    def __init__(
        self, root: Path, up: list[str | os.PathLike[str]], down: list[str | os.PathLike[str]]
    ) -> None:
        self.root, self._up, self._down = root, up, down

    @classmethod
    def of_store(cls, store: Path, root: Path, *flags: str) -> Mount:
        return cls(root, castore("--store", store, "mount", root, *flags), castore("umount", root))

    @classmethod
    def of_squashfs(cls, image: Path, root: Path) -> Mount:
        return cls(root, ["squashfuse_ll", image, root], ["fusermount3", "-u", root])

    def __enter__(self) -> Mount:
        self.root.mkdir(parents=True, exist_ok=True)
        self._mount()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unmount()

    def again(self) -> None:
        """Unmounts and mounts: whatever the daemon had cached is gone."""
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


def squashfs(source: Path, image: Path, codec: str) -> Path:
    """Packs a folder with mksquashfs at its defaults (128 KiB blocks, the codec's own default level)."""
    if not image.exists():
        binary = shutil.which("mksquashfs") or "/usr/sbin/mksquashfs"
        run(binary, source, image.with_suffix(".part"), "-comp", codec, "-noappend", "-quiet", "-no-progress")
        image.with_suffix(".part").rename(image)
    return image
