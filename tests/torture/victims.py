"""A store in which hostile things are planted, and a process with little memory that runs every operation.

That process (exercise.py) must end in time and without an error that is not castore's. The folder beside the
store must stay as it was.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from castore import Store
from castore.objects.codecs import FRAME_SIZE
from tests.helpers import mixed, noise, payload, text
from tests.torture.hurting import files_below

EXERCISE = Path(__file__).with_name("exercise.py")
#: MB by which a process that works on hostile bytes may grow: buffers, threads' stacks, SQLite's cache.
BOUND = 64
SECRET = b"a file beside the store, which is nobody's business\n" * 5_000


def make_victim(tmp_path: Path) -> Path:
    """A store with blobs of all kinds, closed, and beside it a folder of the user's own."""
    with Store(tmp_path / "store", memory=0) as store:
        store.put_many((f"small/{n}", text(2_000, n)) for n in range(20))
        store.put("large/zstd", mixed(3 * FRAME_SIZE), codec="zstd")
        store.put("large/gzip", mixed(FRAME_SIZE - 7, 1), codec="gzip")
        store.put("large/raw", noise(2 * FRAME_SIZE + 5), codec="none")
        store.put("large/one", noise(30_000), codec="none")
    outside = tmp_path / "outside"
    (outside / "ab").mkdir(parents=True)
    (outside / "secret").write_bytes(SECRET)
    (outside / "ab" / ("ab" * 32)).write_bytes(SECRET)
    os.utime(outside / "secret", (1e9, 1e9))
    return tmp_path / "store"


@functools.cache
def exerciser() -> subprocess.Popen[str]:
    """The process that forks those that work on stores. The session's end ends it (conftest.py)."""
    return subprocess.Popen(
        [sys.executable, EXERCISE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def exercise(path: Path) -> dict[str, Any]:
    """The outcomes of all operations on the store.

    Fails on a hang, on an error that is not castore's, on too much memory, and on a change outside.
    """
    outside = path.parent / "outside"
    before = files_below(outside)
    server = exerciser()
    assert server.stdin is not None
    assert server.stdout is not None
    print(path, file=server.stdin, flush=True)
    assert select.select([server.stdout], [], [], 300)[0], "it hangs"
    said: dict[str, Any] = json.loads(server.stdout.readline())
    assert "failed" not in said, said["failed"]
    assert files_below(outside) == before, "something outside of the store was touched"
    assert said["grew"] < BOUND, f"it took {said['grew']} MB more: {said['ended']}"
    assert not any("secret" in str(end) for end in said["ended"].values())
    ended: dict[str, Any] = said["ended"]
    return ended


def place_of(path: Path, name: str) -> Path:
    with Store(path, memory=0) as store:
        return payload(store, name)[0]
