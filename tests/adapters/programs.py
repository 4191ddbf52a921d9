"""Programs in processes of their own that need not import torch: the server that forks them has done so.

To import it takes a second of each new process. A program shares nothing else with another one or with the tests:
the server has imported neither castore nor a module of the tests that knows castore.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import types
from pathlib import Path

PRELOADED = ["torch.utils.data"]
_SERVER = multiprocessing.get_context("forkserver")


class Program:
    """``python -c source *arguments``, started in a folder and with an environment.

    Its output goes into files in ``notes``.
    """

    def __init__(
        self, source: str, *arguments: object, notes: Path, folder: Path, environment: dict[str, str]
    ) -> None:
        number = len(list(notes.glob("*.out")))
        self._files = [notes / f"program-{number}.{name}" for name in ("out", "err")]
        for file in self._files:
            file.touch()
        words = [str(word) for word in arguments]
        self.process = _SERVER.Process(
            target=_main, args=(source, words, str(folder), environment, [*map(str, self._files)])
        )
        self.process.start()

    def end(self, timeout: float = 200) -> tuple[int | None, str, str]:
        """Wait for its end: the exit code, and what it wrote to stdout and to stderr."""
        self.process.join(timeout)
        self.process.kill()  # which tells of itself in the exit code, where the program was still at work
        self.process.join()
        out, err = (file.read_text() for file in self._files)
        return self.process.exitcode, out, err


def run(source: str, *arguments: object, notes: Path, folder: Path, **environment: str) -> str:
    """Run a program that must end well; what it printed."""
    program = Program(
        source, *arguments, notes=notes, folder=folder, environment={**os.environ, **environment}
    )
    code, out, err = program.end()
    assert code == 0, err[-3000:]
    return out


def _main(
    source: str, arguments: list[str], folder: str, environment: dict[str, str], files: list[str]
) -> None:
    import torch

    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    # A new program starts processes as Python does by itself, not as this one was started.
    multiprocessing.set_start_method(None, force=True)
    sys.argv = ["-c", *arguments]
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), vars(main))
