"""Output on a terminal, and none of it without one."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from castore import Store

Start = Callable[..., subprocess.Popen[bytes]]


def read_all(master: int) -> bytes:
    """Read the output on a terminal until no process holds its other end any more."""
    pieces = []
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux reports the end so
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(master)
    return b"".join(pieces)


def drawn(start: Start, *words: str | Path) -> tuple[bytes, bytes]:
    """Run a command whose standard error is a terminal; returns what it drew there, and its output."""
    master, slave = pty.openpty()
    process = start(*words, stderr=slave, env={"TERM": "xterm-256color"})
    os.close(slave)
    seen = read_all(master)
    out, _ = process.communicate()
    assert process.returncode == 0
    return seen, out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["add", "noise", "--as", "again"], b"adding"),
        (["get", "noise", "-o", "copy"], b"noise"),
        (["verify"], b"verifying"),
        (["doctor", "--rebuild-index"], b"reading objects"),
        (["gc"], b"collecting"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_long_work_is_shown_on_a_terminal_only(
    castore: Start, folder: Path, tmp_path: Path, words: list[str], what: bytes
) -> None:
    # Only one who gets a file waits for bytes alone, and sees a bar if they are many.
    size = 33_000_000 if words[0] == "get" else 3_300_000
    (tmp_path / "noise").write_bytes(os.urandom(size))
    with Store(folder) as store:
        store.put_file("noise", tmp_path / "noise")
    seen, _ = drawn(castore, *words)
    assert what in seen
    assert what == b"collecting" or b"/%.1f MB" % (size / 1e6) in seen
    process = castore(*words)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"\x1b" not in out


def test_complaints_are_readable_beside_the_bar(castore: Start, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gone").symlink_to("nowhere")
    master, slave = pty.openpty()
    process = castore("add", "data", stderr=slave, env={"TERM": "xterm-256color", "COLUMNS": "200"})
    os.close(slave)
    seen = read_all(master)
    process.communicate()
    assert process.returncode == 1
    assert seen.count(b"castore: data/gone links to nothing; skipped") == 1


@pytest.mark.parametrize("columns", ["40", "200"])
def test_panel_shows_the_whole_path_of_the_store(
    castore: Start, store: Store, folder: Path, columns: str
) -> None:
    master, slave = pty.openpty()
    process = castore("stat", stdout=slave, env={"TERM": "dumb", "COLUMNS": columns, "LINES": "40"})
    os.close(slave)
    seen = read_all(master).decode()
    process.communicate()
    assert process.returncode == 0
    assert str(folder) in seen
    out, _ = castore("stat", env={"COLUMNS": columns}).communicate()
    assert str(folder) in out.decode()
