"""The processes that fetch for a store: found, asked without a second try, and ended."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from castore import Store
from castore.remote.messages import SOCKET, receive, send
from castore.system.local_sockets import address
from castore.system.temporary import is_running
from tests.mount.conftest import until


def fetchers(store: Store) -> list[int]:
    """The processes that were started to fetch for a store."""
    words = b"castore.remote.fetcher\0" + os.fsencode(store.path) + b"\0"
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and words in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def end_fetcher(store: Store) -> None:
    """Kill them, and wait until they are gone."""
    for pid in fetchers(store):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


def ask_once(store: Path, message: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of the fetcher that listens, or None if it ends without one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        with address(store / SOCKET) as short:
            connection.connect(short)
        with suppress(BrokenPipeError, ConnectionResetError):
            send(connection, message)
            return receive(connection)
    return None
