"""New processes that do not import `datasets` or torch again: each is forked from a process that has imported
it and done nothing else.

Such an import takes a second of a core, and most programs of the tests do little besides. A process from here
runs `-c`, `-m` or a script as `python` does, with streams, folder, environment and end of its own. So it fits
each test that wants another process, or one to kill. A test about what is imported, or about the seed of
hashes, needs a fresh Python.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
#: Modules that programs over `datasets` use.
DATASETS = (
    "datasets",
    "pandas",
    "multiprocess.pool",
    "castore.adapters.datasets",
    "castore.recipes",
    "castore.cli.process",
    "castore.cli.commands",
)
#: Those that programs over torch use. They import castore themselves: some import an edited module with it.
TORCH = ("torch.utils.data",)
#: Bytes of a request: words and an environment.
_LARGEST = 200_000


class Started:
    """A process, with those members of `subprocess.Popen` that the tests use."""

    returncode: int | None = None

    def __init__(self, words: list[str], status: int, streams: list[IO[Any] | None]) -> None:
        self.args = words
        self._status = open(status, encoding="ascii")  # noqa: SIM115
        self.pid = int(self._status.readline())
        self.stdin, self.stdout, self.stderr = streams

    def poll(self) -> int | None:
        """The exit code, or less than 0 for a signal; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def communicate(self, sent: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Write to its input, read its output and messages, and wait for its end."""
        found: dict[int, Any] = {}

        def read(number: int, stream: IO[Any]) -> None:
            with stream:
                found[number] = stream.read()

        readers = [
            threading.Thread(target=read, args=(number, stream), daemon=True)
            for number, stream in enumerate((self.stdout, self.stderr))
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None and not self.stdin.closed:
            with self.stdin:
                if sent:
                    self.stdin.write(sent)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        return found.get(0), found.get(1)

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """The process that has imported, which starts the others.

    Args:
        modules: names of the modules that all of them have.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            # A session of its own: Ctrl-C is for the tests, which end it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(other.fileno()), *modules],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                    "OMP_NUM_THREADS": "1",  # torch reads it at its import; many processes share the cores
                },
                start_new_session=True,
            )

    def start(
        self,
        words: list[Any],
        *,
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        text: bool = False,
        stdin: int = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
    ) -> Started:
        """Start a process as `subprocess.Popen` does; ``words`` are those behind ``python``."""
        around = dict(os.environ) if env is None else env
        assert around.get("PYTHONHASHSEED") == os.environ.get("PYTHONHASHSEED"), "needs a fresh Python"
        ours: list[IO[Any] | None] = []
        theirs: list[int] = []
        opened: list[int] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            ours.append(None)
            if stream == subprocess.PIPE:
                reading, writing = os.pipe()
                kept, given = (writing, reading) if number == 0 else (reading, writing)
                ours[-1] = os.fdopen(kept, ("w" if number == 0 else "r") + "b" * (not text))
                theirs.append(given)
                opened.append(given)
            elif stream == subprocess.DEVNULL:
                opened.append(os.open(os.devnull, os.O_RDWR))
                theirs.append(opened[-1])
            elif stream is None:
                theirs.append(number)
            else:
                theirs.append(stream if isinstance(stream, int) else stream.fileno())
        status, told = os.pipe()
        plain_words = [os.fspath(word) for word in words]
        request = {
            "words": plain_words,
            "env": around,
            "cwd": os.fspath(cwd or Path.cwd()),
            "own session": start_new_session,
        }
        message = json.dumps(request).encode()
        assert len(message) < _LARGEST
        socket.send_fds(self._socket, [message], [*theirs, told])
        for fd in (*opened, told):
            os.close(fd)
        return Started(plain_words, status, ours)

    def run(
        self, words: list[Any], *, sent: Any = None, timeout: float = 300, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a process to its end, and keep its output and messages, as `subprocess.run` does."""
        streams = {"stdin": subprocess.PIPE if sent else subprocess.DEVNULL, "stdout": subprocess.PIPE}
        process = self.start(words, **{"stderr": subprocess.PIPE, **streams, **options})
        out, err = process.communicate(sent, timeout)
        assert process.returncode is not None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def output(self, words: list[Any], **options: Any) -> str:
        """Run a process that must end well; returns its output, as `subprocess.check_output` does."""
        done = self.run(words, text=True, **options)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def close(self) -> None:
        """End it, and the processes that still run."""
        self._socket.close()
        self._process.wait(60)


# --- in the process that has imported -----------------------------------------------------------------------


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request: in a child, what it was asked for; None at the end of the requests."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: process id, and where its end is told
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                pid, told = running.pop(key.fd)
                selector.unregister(key.fd)
                _tell(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(told)
                os.close(key.fd)
                continue
            message, fds, _, _ = socket.recv_fds(requests, _LARGEST, 4)
            if not message:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            *streams, told = fds
            if pid := os.fork():
                _tell(told, pid)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid, told
                selector.register(pidfd, selectors.EVENT_READ)
                for fd in streams:
                    os.close(fd)
                continue
            selector.close()
            requests.close()
            for number, fd in enumerate(streams):
                os.dup2(fd, number)
            for fd in (*fds, *running, *(told for _, told in running.values())):
                os.close(fd)
            return dict(json.loads(message))


def _tell(fd: int, number: int) -> None:
    os.write(fd, b"%d\n" % number)


def _become(env: dict[str, str], cwd: str, own_session: bool) -> None:
    """Look like a new Python: with streams, a folder and an environment of its own."""
    if own_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if "datasets" in sys.modules and "HF_DATASETS_CACHE" in env:  # which `datasets` reads at its import
        importlib.import_module("datasets").config.HF_DATASETS_CACHE = Path(env["HF_DATASETS_CACHE"])
    more = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in more if path not in sys.path]


def _do(words: list[str]) -> None:
    """Run what the words say as `python` does."""
    kind, *rest = words
    if kind == "-c":
        code, sys.argv = rest[0], ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


def _end() -> None:
    """End as Python does, but do not take all modules apart, which takes longer than most programs here."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # an error here has Python end as usual
    os._exit(0)


def main() -> None:
    """Import, then fork a child for each request, which does its work and ends nearly as Python does."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    sys.path.pop(0)  # the folder of the tests
    gc.collect()
    gc.freeze()
    request = _serve(requests)
    if request is not None:
        _become(request["env"], request["cwd"], request["own session"])
        _do(request["words"])
        _end()


if __name__ == "__main__":
    main()
