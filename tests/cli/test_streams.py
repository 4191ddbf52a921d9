"""Input from a shell for every command: bytes that are no text, closed or full streams, encodings, signals.

A command does its work or says in one line why not. No input ends in a traceback.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.cli.commands import COMMANDS, command
from tests.cli.conftest import Cli
from tests.helpers import LONG

Start = Callable[..., subprocess.Popen[bytes]]
NO_TEXT = os.fsdecode(b"\xff\xfe")
NAME = "na\u00efve-\u540d.txt"
#: Arguments with which each command works on the store of these tests.
WORKING = {
    "init": ("--max-size", "1GB"),
    "add": ("file",),
    "ls": ("-l",),
    "cat": (NAME, "data/a.txt"),
    "get": (NAME, "-o", "out"),
    "rm": ("data/b.txt",),
    "pin": (NAME,),
    "unpin": (NAME,),
    "stat": (),
    "gc": ("--dry-run",),
    "verify": (),
    "doctor": (),
}
#: Further arguments that a command requires, and their position.
NEEDED = {
    "add": ("file",), "cat": (NAME,), "get": (NAME,), "rm": (NAME,), "pin": (NAME,), "unpin": (NAME,),
    "train-dict": ("data",), "mount": ("mnt",), "umount": ("mnt",), "watch": ("folder",),
}  # fmt: skip
OPTIONS = {"get": ("-o", "out"), "watch": ("--as", "in"), "process": ("--config", "recipe.yaml")}
#: Commands whose purpose is their output.
PRINTING = {"ls", "cat", "stat"}


@pytest.fixture
def shop(store: Store, tmp_path: Path) -> Store:
    """A store with a name that is not ASCII, beside a file and a folder; the tests run in that folder."""
    store.put(NAME, b"text")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    return store


def _hostile() -> Iterator[tuple[str, ...]]:
    """Each argument and each option with a value of every command, given bytes that are no text."""
    group = command()
    for name in COMMANDS:
        for parameter in group.commands[name].params:
            if parameter.param_type_name == "argument":
                required = OPTIONS.get(name, ())
                yield name, NO_TEXT, *required
                yield name, f"data/{NO_TEXT}", *required
            elif not parameter.is_flag and parameter.name != "help":
                is_needed = not {*OPTIONS.get(name, ())}.isdisjoint(parameter.opts)
                others = () if is_needed else OPTIONS.get(name, ())
                yield name, *NEEDED.get(name, ()), parameter.opts[-1], NO_TEXT, *others
    yield "add", "file", "--meta", f"key={NO_TEXT}"
    yield "add", "file", "--meta", f"{NO_TEXT}=value"


@pytest.mark.parametrize("name", COMMANDS)
def test_bytes_that_are_no_text_are_refused_in_one_line(cli: Cli, shop: Store, name: str) -> None:
    for words in (words for words in _hostile() if words[0] == name):
        ran = cli(*words)
        if words[:2] == ("get", NAME):
            assert ran.code == 0  # a file of that name can be written
            assert Path(NO_TEXT).read_bytes() == b"text"
            continue
        assert ran.code in (1, 2), words
        assert re.fullmatch(r"castore: .+\n", ran.err), (words, ran.err)
        assert ran.out == "", words


def test_a_folder_that_is_no_text_gives_its_files(cli: Cli, folder: Path, tmp_path: Path) -> None:
    (tmp_path / NO_TEXT).mkdir()
    (tmp_path / NO_TEXT / "a").write_text("a")
    (tmp_path / NO_TEXT / NO_TEXT).write_text("b")
    ran = cli("add", NO_TEXT, "--as", "data", "--json")
    assert ran.code == 1
    assert (ran.json["files"], ran.json["failed"]) == (1, 1)
    assert cli("ls").out == "data/a\n"


def test_a_store_whose_folder_is_no_text_works(castore: Start, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("a file")
    there = tmp_path / NO_TEXT
    environment = {"PYTHONIOENCODING": "ascii"}
    for words in (
        ["add", "file", "--json"],
        ["stat", "--json"],
        ["stat"],
        ["ls", "--json"],
        ["gc"],
        ["doctor"],
    ):
        process = castore(*words, env=environment, store=there)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, b""), words
        if words[-1] == "--json":
            assert json.loads(out.decode().splitlines()[0] if words[0] == "ls" else out.decode())


def _each(others: list[Any], *, of: set[str]) -> Iterator[object]:
    """Each command with each of some circumstances: with all but the first only those commands, and the rest
    in `make torture`.
    """
    for name, words in WORKING.items():
        for number, other in enumerate(others):
            marks = [pytest.mark.matrix] if number and name not in of else []
            yield pytest.param((name, words), other, marks=marks, id=f"{name}-{other}")


@pytest.mark.parametrize(("words", "encoding"), _each(["ascii", "latin-1"], of={"ls", "add"}))
def test_output_of_any_encoding_takes_every_name(
    castore: Start, shop: Store, words: tuple[str, tuple[str, ...]], encoding: str
) -> None:
    process = castore(words[0], *words[1], env={"PYTHONIOENCODING": encoding})
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, b"")
    if words[0] == "ls":
        assert out.decode().endswith(f"{NAME}\n")


@pytest.mark.parametrize(("words", "closed"), _each([(0, 1, 2), (1,), (2,)], of={"add", "cat", "get"}))
def test_closed_streams_keep_no_command_from_its_work(
    castore: Start, shop: Store, words: tuple[str, tuple[str, ...]], closed: tuple[int, ...]
) -> None:
    process = castore(words[0], *words[1], closed=closed)
    _, err = process.communicate(timeout=300)
    if 1 in closed and words[0] in PRINTING:
        assert process.returncode == 1
        assert err == (
            b"" if 2 in closed else b"castore: standard output is closed, so there is nowhere to print to\n"
        )
    else:
        assert (process.returncode, err) == (0, b"")
    if words[0] == "add":
        assert shop.get("file") == b"a file"
    if words[0] == "get":
        assert Path("out").read_bytes() == b"text"
    assert shop.verify().bad == []


@pytest.mark.parametrize("words", WORKING.items(), ids=lambda words: words[0])
def test_a_full_disk_behind_standard_output_is_said(
    castore: Start, shop: Store, words: tuple[str, tuple[str, ...]]
) -> None:
    prints = words[0] not in ("get", "rm", "pin", "unpin")
    with open("/dev/full", "wb") as full:
        process = castore(words[0], *words[1], stdout=full)
        _, err = process.communicate(timeout=300)
    if prints:
        assert (process.returncode, err) == (1, b"castore: standard output: No space left on device\n")
    else:
        assert (process.returncode, err) == (0, b"")


def test_an_error_that_nobody_can_read_still_has_its_exit_code(castore: Start, shop: Store) -> None:
    with open("/dev/full", "wb") as full:
        for words, code in ((["cat", "nothing"], 1), (["ad"], 2), (["add", "nothing"], 1)):
            process = castore(*words, stderr=full)
            process.communicate(timeout=300)
            assert process.returncode == code, words


def _loading(process: subprocess.Popen[bytes]) -> bytes:
    """Wait until the first module of the library is loaded, which Python reports on standard error.

    Returns what has come behind that report.
    """
    assert process.stderr is not None
    told = b""
    while not (report := re.search(rb"\| +castore\.(?!cli).*\n", told)):
        piece = os.read(process.stderr.fileno(), 1 << 16)
        assert piece, "it ended before"
        told += piece
    return told[report.end() :]


@pytest.fixture
def _signals_are_heeded() -> Iterator[None]:
    """`nohup make test` and a shell's `&` make children ignore signals, which a command would keep doing."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.torture
@pytest.mark.usefixtures("_signals_are_heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_signal_at_any_moment_ends_a_command_without_a_traceback(
    castore: Start, folder: Path, tmp_path: Path, number: int
) -> None:
    slow = tmp_path / "slow.bin"
    slow.write_bytes(os.urandom(1 << 20) * 64)
    Store(folder).close()
    # Python's own first milliseconds are not castore's to change.
    steps = (12, 60) if LONG else (48, 140)
    for delay in range(0, 300, steps[number != signal.SIGINT]):
        process = castore("add", slow, "--codec", "gzip", env={"PYTHONPROFILEIMPORTTIME": "1"})
        begun = _loading(process)
        time.sleep(delay / 1000)
        process.send_signal(number)
        if delay % 24 == 12:  # an impatient user
            process.send_signal(number)
        _, err = process.communicate(timeout=300)
        lines = (begun + err).decode().splitlines()
        told = [line for line in lines if not line.startswith("import time:")]
        assert told in ([], ["castore: interrupted"]), delay
        assert process.returncode in ((130, -number) if number == signal.SIGINT else (-number,)), delay


# On a busy machine a thread's start takes as long as it likes; here it always takes longer than the thread.
_SLOW_START = (
    "import threading\n"
    "start = threading.Thread.start\n"
    "threading.Thread.start = lambda self: [start(self), time.sleep(0.3)][0]\n"
)


@pytest.mark.parametrize("slow", ["", _SLOW_START], ids=["", "slow"])
def test_an_interrupt_that_python_would_forget_is_not(slow: str) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from castore.cli import commands, main\n"
        f"{slow}"
        "class Late:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.01)\n"
        "def work():\n"
        "    late = Late()\n"
        "    del late\n"
        "    time.sleep(200)\n"
        "commands.command = lambda: type('C', (), {'main': lambda self, **_: work()})()\n"
        "main.run()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, b"", b"castore: interrupted\n")


def test_background_jobs_go_on_ignoring_the_interrupt(castore: Start, shop: Store) -> None:
    process = castore("ls", preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, b"")
    assert NAME in out.decode()
