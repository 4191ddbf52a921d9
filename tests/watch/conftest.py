"""Fixtures of the tests of watching: a folder, a store beside it, watchers as processes, and a mount."""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import castore_fuse
from castore import Store
from castore.cli.main import main
from castore.errors import CastoreError
from castore_fuse import mountpoints
from castore_fuse.lifecycle import check_fuse
from tests.warm import Started, WarmPython

pytest.importorskip("watchdog")

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


class Watching:
    """A running `castore watch`, and its events so far."""

    def __init__(self, process: subprocess.Popen[str] | Started) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self._taken: set[int] = set()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _next(self, seconds: float) -> dict[str, Any] | None:
        line = self._lines.get(timeout=seconds)
        if line is None:
            return None
        self.events.append(json.loads(line))
        return self.events[-1]

    def until(self, event: str, name: str = "", seconds: float = 180.0) -> dict[str, Any]:
        """Wait for an event of that name, past or coming, and return it; each event is returned once."""
        while True:
            for told in self.events:
                if (
                    told["event"] == event
                    and (not name or told["name"] == name)
                    and id(told) not in self._taken
                ):
                    self._taken.add(id(told))
                    return told
            assert self._next(seconds) is not None, f"it ended: {self.error()}"

    def error(self) -> str:
        """Its standard error; it has ended, or ends now."""
        self.process.wait(300)
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it with a signal, read the rest of its events, and return its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(300)
        while self._next(180) is not None:
            pass
        return code

    def end_after(self, event: str, name: str = "") -> int:
        """End it after that event of that name."""
        self.until(event, name)
        return self.end()

    def told(self, event: str) -> list[str]:
        """The names in its events of that kind."""
        return [told["name"] for told in self.events if told["event"] == event]


Watch = Callable[..., Watching]


def castore(store: Path, *words: str | Path) -> list[str]:
    return [sys.executable, "-m", "castore", "--store", str(store), *map(str, words)]


def run(store: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in this process. A watcher that runs on needs one of its own."""
    command = castore(store, *words)
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        code = main(command[3:])
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    return subprocess.CompletedProcess(command, code, out, err)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def warm_watch() -> Iterator[WarmPython]:
    """Starts processes that have imported what `castore watch` needs."""
    warm = WarmPython(("castore.cli.commands", "castore.cli.watch", "castore.watch.watcher"))
    yield warm
    warm.close()


@pytest.fixture
def watch(folder: Path, store: Store, warm_watch: WarmPython) -> Iterator[Watch]:
    """Start `castore watch FOLDER --as in` and wait until it has caught up."""
    started: list[Watching] = []

    def start(
        *words: str, settle: str = "200ms", ready: bool = True, period: str = "", root: Path = folder,
        prefix: str = "in", store: Store = store,
    ) -> Watching:  # fmt: skip
        """`period`: a statement that shortens one of the watcher's periods, so that no test sits it out."""
        command = castore(store.path, "watch", root, "--as", prefix, "--json", "--settle", settle, *words)
        if period:
            command[1:3] = ["-c", f"{period}; from castore.cli.main import run; run()"]
        process = warm_watch.start(
            command[1:], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        watching = Watching(process)
        started.append(watching)
        if ready:
            watching.until("ready")
        return watching

    yield start
    for watching in started:
        watching.process.kill()
        watching.process.wait()
        assert watching.process.stderr is not None
        watching.process.stderr.close()
        watching.reader.join()


@pytest.fixture
def mountpoint(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A mount of the store in default mode."""
    try:
        check_fuse()
    except CastoreError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = castore_fuse.mount(store, tmp_path / "mnt")
    yield path
    while mountpoints.mount_at(path):
        mountpoints.detach(path, lazy=True)


def replace_files(watch: Watch, *names: str) -> None:
    """Have files replaced by links, by a watcher that ends behind them."""
    watching = watch("--replace")
    for name in names:
        watching.until("replaced", name)
    assert watching.end() == 0


def age(path: Path, seconds: float = 60.0) -> None:
    """Set a file's mtime into the past, so that the watcher takes the file for settled."""
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.entries()]


def real_bytes(folder: Path) -> int:
    """Bytes that the regular files of a folder take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink())


def make_file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path
