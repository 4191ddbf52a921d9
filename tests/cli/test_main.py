"""Promises of every command: help, errors of one line, exit codes, quiet endings, a quick start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import castore as library
from castore import Store
from castore.cli.commands import COMMANDS, command
from castore.cli.completion import names
from castore.cli.main import main
from tests.cli.conftest import Cli

Start = Callable[..., subprocess.Popen[bytes]]
NEED_A_STORE = [
    ("ls",), ("cat", "x"), ("get", "x", "-o", "y"), ("rm", "x"), ("pin", "x"), ("unpin", "x"), ("stat",),
    ("gc",),
    ("train-dict", "x"), ("verify",), ("doctor",), ("mount", "m"), ("remote", "ls"), ("remote", "rm", "x"),
    ("remote", "add", "x", "file:///x"), ("push",), ("pull", "main"), ("log", "main"), ("diff", "a", "b"),
]  # fmt: skip


def test_help_lists_every_command_in_whole_sentences(cli: Cli) -> None:
    ran = cli("--help")
    assert ran.code == 0
    listed = re.findall(r"^  ([\w-]+) +(\S.*)$", ran.out.split("Commands:")[1], re.M)
    assert [name for name, _ in listed] == list(COMMANDS)
    assert [words for _, words in listed if "..." in words] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_shows_an_example(cli: Cli, name: str) -> None:
    ran = cli(name, "-h")
    assert ran.code == 0
    assert re.search(rf"^  castore (--store \S+ )?{name}\b", ran.out, re.M)
    assert "<" not in ran.out, "Python's words for types"
    assert cli(name, "--help").out == ran.out


def test_no_words_show_the_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Commands:" in capfd.readouterr().out


def test_version_is_the_library_s(cli: Cli) -> None:
    assert cli("--version").out == f"castore {library.__version__}\n"


@pytest.mark.parametrize("words", NEED_A_STORE, ids=lambda words: words[0])
def test_no_command_but_init_and_add_makes_a_store(cli: Cli, folder: Path, words: tuple[str, ...]) -> None:
    ran = cli(*words)
    assert ran.code == 1
    assert ran.err.startswith(f"castore: there is no store at {folder}; `castore init`")
    assert ran.err.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ad",), "Did you mean 'add'? See `castore --help`"),
        (("get", "x"), "'-o'"),
        (("ls", "--wrong"), "--wrong"),
        (("ls", "--store", "x"), "castore --store DIR ls"),
        (("cat", "/data/a.txt"), "leave out the leading '/'"),
        (("cat", ""), "is empty"),
        (("cat", "data/"), "'data' is a folder of entries; `castore ls data` lists them"),
        (("cat", "data/a.txt/"), "'data/a.txt' is a file; leave out the '/'"),
        (("init", "--max-size", "ten"), "is not a size"),
        (("init", "--level", "x"), "--level"),
        (("verify", "--sample", "none"), "5%"),
        (("cat", "../etc/passwd"), "part 1 is '..'"),
        (("stat", "--prometheus", "--json"), "--prometheus"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    cli: Cli, store: Store, words: tuple[str, ...], says: str
) -> None:
    ran = cli(*words)
    is_not_found = words[-1].startswith("data/")  # a valid name: cat continues with the others
    assert ran.code == (1 if is_not_found else 2)
    assert ran.err.startswith("castore: ")
    assert says in ran.err
    assert ran.err.count("\n") == 1


def test_an_option_without_its_value_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--store"]) == 2
    assert capfd.readouterr().err == "castore: Option '--store' requires an argument\n"


def test_store_is_chosen_as_in_python(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CASTORE_DIR", str(folder))
    assert main(["ls"]) == 0
    assert capfd.readouterr().out == "data/a.txt\ndata/b.txt\nlarge.bin\n"
    monkeypatch.setenv("CASTORE_DIR", "/nowhere")
    assert main(["--store", str(folder), "ls"]) == 0


def test_damaged_index_is_a_sentence_that_names_the_doctor(cli: Cli, folder: Path, store: Store) -> None:
    store.close()
    for file in folder.glob("index.sqlite*"):
        file.write_bytes(b"not a database" * 1000)
    ran = cli("ls")
    assert ran.code == 1
    assert "castore doctor" in ran.err
    assert "Traceback" not in ran.err


def test_closed_pipe_is_silent(castore: Start, store: Store) -> None:
    store.put_many((f"many/{number:06}", b"x") for number in range(20_000))
    process = castore("ls")
    assert process.stdout is not None
    assert process.stdout.readline() == b"data/a.txt\n"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_interrupt_ends_at_once_and_leaves_nothing(castore: Start, folder: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.bin"
    slow.write_bytes(os.urandom(64 << 20))
    process = castore("add", slow, "--codec", "gzip")
    deadline = time.monotonic() + 240
    while not any((folder / "tmp").glob("*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, b"", b"castore: interrupted\n")
    assert not any((folder / "tmp").glob("*"))
    with Store(folder) as store:
        assert list(store.entries()) == []


def test_an_interrupt_just_after_a_file_was_created_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    large.write_bytes(os.urandom(2 << 20))
    program = (
        "import signal, sys\n"
        "from castore.cli.main import run\n"
        "def trace(frame, event, argument):\n"
        "    if frame.f_code.co_name == 'create_temporary':\n"
        "        if event == 'return':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "        return trace\n"
        "sys.settrace(trace)\n"
        "run()\n"
    )
    Store(folder).close()
    ran = subprocess.run(
        [sys.executable, "-c", program, "--store", folder, "add", large],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        timeout=300,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, b"", b"castore: interrupted\n")
    assert not any((folder / "tmp").glob("*"))


def test_commands_import_only_what_they_need(folder: Path, store: Store) -> None:
    program = (
        "import sys; from castore.cli.main import main; main(sys.argv[1:]);heavy = {'rich', "
        "'sqlite_utils', 'numpy', 'torch', 'castore_fuse', 'castore.cli.stat', "
        "'castore.repair.doctor'};print(*sorted(heavy & set(sys.modules)))"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", program, "--store", str(folder), "ls", "large.bin"]
    out = subprocess.check_output(command, env=os.environ | {"PYTHONPATH": path}, text=True)
    assert out == "large.bin\n\n"


def test_shell_completes_names(folder: Path, store: Store) -> None:
    group = command()
    with group.make_context("castore", ["--store", str(folder), "ls"], resilient_parsing=True) as context:
        assert names(context, "da") == ["data/a.txt", "data/b.txt"]
        assert names(context, "x") == []


def test_completion_never_makes_a_store_nor_complains(folder: Path) -> None:
    group = command()
    with group.make_context("castore", ["--store", str(folder), "ls"], resilient_parsing=True) as context:
        assert names(context, "") == []
    assert not folder.exists()


def test_bash_completion_reaches_commands_names_and_codecs(
    castore: Start, folder: Path, store: Store
) -> None:
    def completed(words: str) -> list[bytes]:
        count = len(words.split(" ")) - 1
        asked = {"_CASTORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        return castore(env=asked | {"CASTORE_DIR": str(folder)}).communicate()[0].split()

    assert completed("castore un") == [b"unpin"]
    assert completed("castore cat data/") == [b"data/a.txt", b"data/b.txt"]
    assert completed("castore add --codec z") == [b"zstd"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("--store", ("--store", "", "init")),
        ("--store", ("--store", "", "ls")),
        ("MOUNTPOINT", ("mount", "")),
        ("MOUNTPOINT", ("umount", "")),
        ("DIR", ("watch", "", "--as", "x")),
    ],
)
def test_an_empty_path_never_means_the_working_folder(
    cli: Cli, store: Store, what: str, words: tuple[str, ...]
) -> None:
    ran = cli(*words)
    assert (ran.code, ran.err) == (
        2, f"castore: {what} is empty; give a folder (is a variable unset?)\n"
    )  # fmt: skip
    assert os.listdir() == ["store"]
