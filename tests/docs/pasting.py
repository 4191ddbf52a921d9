"""Pages that can be pasted: their blocks run in one shell, in which the named programs are forked from warm
processes.

The programs run in the folder, with the streams and the environment that the shell gives them, and end with
the exit code that the shell sees. Only what they import is there already.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.warm import PYTHON, WarmPython

#: A process, and the words with which a program begins in it; none for Python itself.
Program = tuple[WarmPython, list[str]]

_LARGEST = 200_000  # bytes of a request
_ASK = """\
import json, os, socket, sys
request = {"words": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
    asking.connect(ADDRESS)
    socket.send_fds(asking, [json.dumps(request).encode()], [0, 1, 2])
    code = int(asking.recv(20))
sys.exit(code if code >= 0 else 128 - code)
"""
_FROM_INPUT = 'import sys\nexec(compile(sys.stdin.read(), "<stdin>", "exec"))'


def pasted(page: Path, place: str, folder: Path) -> str:
    """The shell blocks of a page, in order, with a folder of the test for the one that the page names."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return "".join(blocks).replace(place, str(folder))


@contextmanager
def programs(folder: Path, named: Mapping[str, Program]) -> Iterator[dict[str, str]]:
    """Put programs into a folder.

    Yields:
        The variables with which a shell finds them, and they find castore.
    """
    folder.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        address = f"\0castore pasting {uuid.uuid4()}"  # has no file, whose path could be too long
        listening.bind(address)
        listening.listen(16)
        (folder / "ask.py").write_text(_ASK.replace("ADDRESS", repr(address)))
        for name in named:
            (folder / name).write_text(f'#!/bin/sh\nexec "{PYTHON}" -I -S "{folder}/ask.py" {name} "$@"\n')
            (folder / name).chmod(0o755)
        thread = threading.Thread(target=_serve, args=(listening, named), daemon=True)
        thread.start()
        try:
            paths = os.pathsep.join(entry for entry in sys.path if entry)
            yield {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": paths}
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listening: socket.socket, named: Mapping[str, Program]) -> None:
    while True:
        try:
            asking, _ = listening.accept()
        except OSError:  # the end
            return
        threading.Thread(target=_answer, args=(asking, named), daemon=True).start()


def _of_python(words: list[str]) -> list[str]:
    """Words of Python as a warm process knows them: output that does not wait in a buffer makes no
    difference, and a program on standard input is read there.
    """
    words = words[1:] if words[0] == "-u" else words
    return ["-c", _FROM_INPUT, *words[1:]] if words[0] == "-" else words


def _answer(asking: socket.socket, named: Mapping[str, Program]) -> None:
    with asking:
        message, streams, _, _ = socket.recv_fds(asking, _LARGEST, 3)
        try:
            request = json.loads(message)
            name, *words = request["words"]
            warm, first = named[name]
            process = warm.start(
                [*first, *words] if first else _of_python(words),
                env=request["env"], cwd=request["cwd"],
                stdin=streams[0], stdout=streams[1], stderr=streams[2],
            )  # fmt: skip
        finally:
            for stream in streams:
                os.close(stream)
        asking.send(b"%d" % process.wait())
