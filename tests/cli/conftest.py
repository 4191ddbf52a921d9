"""Fixtures of the command line's tests: `cli` runs a command in this process, `castore` in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from castore import Store
from castore.cli.main import main
from tests.warm import PYTHON, Started, WarmPython


class Ran(NamedTuple):
    """The outcome of a command."""

    code: int
    raw: bytes
    err: str

    @property
    def out(self) -> str:
        return self.raw.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


Cli = Callable[..., Ran]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a test's store, which does not exist yet; the tests run beside it."""
    monkeypatch.delenv("CASTORE_DIR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    # with both, rich looks at nothing else, not even at the kind of terminal
    monkeypatch.setenv("LINES", "40")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store"


@pytest.fixture
def cli(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Cli:
    """Run a command on the store at `folder`, and return its outcome."""

    def run(*words: str | Path) -> Ran:
        capfdbinary.readouterr()
        code = main(["--store", str(folder), *map(str, words)])
        out, err = capfdbinary.readouterr()
        return Ran(code, out, err.decode())

    return run


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """The store at `folder`, with two small entries and a large one."""
    with Store(folder) as store:
        store.put_many([("data/a.txt", b"alpha"), ("data/b.txt", b"beta")])
        store.put("large.bin", bytes(range(256)) * 4096 * 3)
        yield store


@pytest.fixture
def castore(folder: Path, warm_castore: WarmPython) -> Iterator[Callable[..., Any]]:
    """Start a command in a process of its own, as a shell does.

    Most are forked from one that has imported castore. With ``fresh``, and where a test changes how Python
    starts, it is a new Python.
    """
    started: list[subprocess.Popen[bytes] | Started] = []

    def start(
        *words: str | Path, env: dict[str, str] | None = None, store: Path = folder,
        closed: Sequence[int] = (), fresh: bool = False, **options: Any
    ) -> subprocess.Popen[bytes] | Started:  # fmt: skip
        command = ["-m", "castore", "--store", str(store), *map(str, words)]
        # The tests run outside of the checkout, which need not be installed.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        around = os.environ | {"PYTHONPATH": path} | (env or {})
        if fresh or closed or "preexec_fn" in options or any(name.startswith("PYTHON") for name in env or ()):
            # The shell closes streams: a function for that would have all of this process forked.
            redirections = "".join(f" {fd}>&-" for fd in closed)
            shell = ["sh", "-c", f'exec "$@"{redirections}', "sh"] if closed else []
            new: Any = subprocess.Popen([*shell, PYTHON, *command], env=around, **options)
            started.append(new)
        else:
            started.append(warm_castore.start(command, env=around, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:  # its test has failed, and later ones are not to fail with it
            process.kill()
            process.communicate()
