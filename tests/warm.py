"""New processes that do not import `datasets` or torch again: each is forked from a process that has imported
it and done nothing else.

`WarmPython.executable` is a program that stands for `sys.executable`, for processes that castore itself
starts: it has the warm process fork one that takes its place.

Such an import takes a second of a core, and most programs of the tests do little besides. A process from here
runs `-c`, `-m` or a script as `python` does, with streams, folder, environment and end of its own. So it fits
each test that wants another process, or one to kill. A test about what is imported, or about the seed of
hashes, needs a fresh Python.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
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
#: The interpreter, whatever stands for it in a test.
PYTHON = sys.executable
#: Bytes of a request: words and an environment.
_LARGEST = 200_000
# Bytes for the command line of a forked process, which others find it by.
_LONGEST_COMMAND = 2000
# Modules that Python has anyway: the import of `socket` alone would double the time that this takes.
_STAND_IN = """\
#!PYTHON -IS
import _signal, _socket, posix, sys
def is_given(fd):
    try:
        return posix.get_inheritable(fd)
    except OSError:
        return False
given = [fd for fd in map(int, posix.listdir("/proc/self/fd")) if is_given(fd)]
words = [word.encode("utf-8", "surrogateescape") for word in sys.argv[1:]]
parts = [b"own session", b"%d" % len(given), *(b"%d" % fd for fd in given)]
parts += [posix.getcwdb(), b"%d" % len(words), *words]
parts += [sys.argv[0].encode(), *(b"=".join(pair) for pair in posix.environ.items())]
asking = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
asking.connect(ADDRESS)
sent = b"".join(fd.to_bytes(4, sys.byteorder) for fd in given)
asking.sendmsg([b"\\0".join(parts)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, sent)])
for fd in given:
    posix.close(fd)
pid = int(asking.recv(20))
def pass_on(number, frame):
    try:
        posix.kill(pid, number)
    except ProcessLookupError:
        pass
for number in (_signal.SIGINT, _signal.SIGTERM):
    _signal.signal(number, pass_on)
code = int(asking.recv(20))
if code < 0:
    if code != -_signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    posix.kill(posix.getpid(), -code)
posix._exit(code)
"""


class Started:
    """A process, with those members of `subprocess.Popen` that the tests use."""

    returncode: int | None = None

    def __init__(self, words: list[str], status: socket.socket, streams: list[IO[Any] | None]) -> None:
        self.args = words
        self._status = status
        self.pid = int(status.recv(20))
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
            self.returncode = int(self._status.recv(20))
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
    """The process that imports with its first request, and starts the others.

    Args:
        modules: names of the modules that all of them have.
        address: that of such a process, which somebody else has started; by default it is started here.
    """

    _socket: socket.socket | None = None

    def __init__(self, modules: Sequence[str], address: str = "") -> None:
        self.address = address or f"\0castore tests {uuid.uuid4()}"  # no file, whose path could be too long
        if not address:
            self._begin(modules)

    def _begin(self, modules: Sequence[str]) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.address)
            listening.listen(64)
            fds = [other.fileno(), listening.fileno()]
            # A session of its own: Ctrl-C is for the tests, which end it.
            self._process = subprocess.Popen(
                [PYTHON, "-m", "tests.warm", *map(str, fds), *modules, "." * _LONGEST_COMMAND],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                    "OMP_NUM_THREADS": "1",  # torch reads it at its import; many processes share the cores
                },
                start_new_session=True,
            )

    @cached_property
    def executable(self) -> Path:
        """A program that is called as Python is, with `-c`, `-m` or a script.

        It passes its streams, other inherited files and signals on to a forked process, and ends as that one
        ends. If it is killed, that one is.
        """
        folder = tempfile.mkdtemp(prefix="castore-python-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        program = Path(folder) / "python"
        program.write_text(_STAND_IN.replace("PYTHON", PYTHON).replace("ADDRESS", repr(self.address)))
        program.chmod(0o755)
        return program

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
        plain_words = [os.fspath(word) for word in words]
        parts = ["own session" if start_new_session else "", "3", "0", "1", "2", os.fspath(cwd or Path.cwd())]
        parts += [str(len(words)), *plain_words, "", *(f"{name}={value}" for name, value in around.items())]
        status = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status.connect(self.address)
        socket.send_fds(status, [os.fsencode("\0".join(parts))], theirs)
        for fd in opened:
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
        """End it, and the processes that still run, if it was started here."""
        if self._socket is not None:
            self._socket.close()
            self._process.wait(60)


# --- in the process that has imported -----------------------------------------------------------------------


def _serve(lifeline: socket.socket, listening: socket.socket, modules: list[str]) -> dict[str, Any] | None:
    """Fork a child for each request: in a child, what it was asked for; None at the end of the tests."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process id, and where its end is told
    selector = selectors.DefaultSelector()
    selector.register(lifeline, selectors.EVENT_READ)
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if selector.get_map().get(key.fd) is not key:  # has ended since
                continue
            if key.data is not None:  # the program that stands for this process was killed
                selector.unregister(key.fd)
                signal.pidfd_send_signal(key.data, signal.SIGKILL)
            elif key.fd in running:
                _end_of(key.fd, *running.pop(key.fd), selector)
            elif key.fileobj is lifeline:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            elif (received := _request(listening)) is not None:
                request, fds, asking = received
                if modules:
                    _import(modules)
                    modules.clear()
                if not (pid := os.fork()):
                    selector.close()
                    for other in (lifeline, listening, asking, *(asking for _, asking in running.values())):
                        other.close()
                    _close(running)
                    _take(fds, request["given"])
                    return request
                _close(fds)
                running[_watch(pid, asking, selector, is_stand_in=bool(request["executable"]))] = pid, asking


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    sys.path.pop(0)  # the folder of the tests
    gc.collect()
    gc.freeze()


def _request(listening: socket.socket) -> tuple[dict[str, Any], list[int], socket.socket] | None:
    """A request, its descriptors, and where to tell the process's id and its end; None if nobody asks."""
    asking, _ = listening.accept()
    message, fds, _, _ = socket.recv_fds(asking, _LARGEST, 100)
    if not message:
        asking.close()
        return None
    session, count, *parts = (os.fsdecode(part) for part in message.split(b"\0"))
    after = int(count)
    words_end = after + 2 + int(parts[after + 1])
    request = {
        "given": [int(fd) for fd in parts[:after]],
        "cwd": parts[after],
        "words": parts[after + 2 : words_end],
        "executable": parts[words_end],
        "env": dict(entry.split("=", 1) for entry in parts[words_end + 1 :]),
        "own session": bool(session),
    }
    return request, fds, asking


def _watch(pid: int, asking: socket.socket, selector: selectors.BaseSelector, *, is_stand_in: bool) -> int:
    """Tell the id of a child, and wait for its end, and for that of a program that stands for it."""
    pidfd = os.pidfd_open(pid)
    selector.register(pidfd, selectors.EVENT_READ)
    if is_stand_in:
        selector.register(asking, selectors.EVENT_READ, pidfd)
    _tell(asking, pid)
    return pidfd


def _end_of(pidfd: int, pid: int, asking: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(pidfd)
    if asking in selector.get_map():
        selector.unregister(asking)
    _tell(asking, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    asking.close()
    os.close(pidfd)


def _tell(asking: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # nobody wants to know any more
        asking.send(b"%d" % number)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _take(fds: list[int], numbers: list[int]) -> None:
    """Give descriptors these numbers."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in fds]
    _close(fds)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
    _close(above)


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


def _show(command: list[str]) -> None:
    """Have `/proc` show this command line, in the place of the one that this process was started with."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


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


def _end(code: int) -> None:
    """End as Python does, but do not take all modules apart, which takes longer than most programs here."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # an error here has Python end as usual
    os._exit(code)


def main() -> None:
    """Fork a child for each request, which does its work and ends nearly as Python does."""
    lifeline, listening = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    request = _serve(lifeline, listening, sys.argv[3:-1])
    if request is None:
        return
    _become(request["env"], request["cwd"], request["own session"])
    if request["executable"]:
        sys.executable = request["executable"]
        _show([sys.executable, *request["words"]])
    code: Any = None
    try:
        _do(request["words"])
    except SystemExit as ended:
        if not (ended.code is None or isinstance(ended.code, int)):
            raise
        code = ended.code
    _end((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
