"""Asks a store's fetcher, and starts one if there is none. Safe to use before and after a fork.

Each request is a connection of its own: it costs far less than what it asks for, and nothing is left open
that a fork could share. If a fetcher ends or is killed in the middle of a request, the next one is asked the
same: every request may be repeated.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from castore.errors import RemoteError, RemoteUnreachableError
from castore.remote.error_values import rebuild
from castore.remote.messages import SOCKET, receive, send
from castore.system.forks import block_forks
from castore.system.local_sockets import address
from castore.units import parse_duration

#: Seconds after which a reader gets an error if the storage does not answer, and what sets them.
TIMEOUT_SECONDS, TIMEOUT_VARIABLE = 30.0, "CASTORE_REMOTE_TIMEOUT"
# Seconds for a fetcher to start, and times that it may end before it answers.
_START_SECONDS = 60.0
_ATTEMPTS = 5
# Seconds between two polls whether it has started.
_POLL_SECONDS = 0.005


def storage_timeout() -> float:
    """Seconds after which a reader gets an error if the storage does not answer.

    Raises:
        InvalidValueError: the variable that sets them makes no sense.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    return parse_duration(text) if text else TIMEOUT_SECONDS


class FetcherClient:
    """The way to a store's fetcher. Threads may share it.

    Args:
        store: the store's folder.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._open_now: set[socket.socket] = set()
        self._is_over = False

    def call(self, do: str, *, timeout: float | None = None, **fields: Any) -> Any:
        """Do a request, and return its result.

        Args:
            do: the request, a method of `castore.remote.fetcher.Fetcher`.
            timeout: seconds within which the fetcher answers, or None for its own patience with the storage.
            fields: of the request.

        Raises:
            RemoteUnreachableError: there is no answer in time.
            RemoteError: the remote cannot be used otherwise, or no fetcher can be started.
            CorruptError: the remote's bytes are damaged.
        """
        result, connection = self.open_call(do, timeout=timeout, **fields)
        connection.close()
        return result

    def open_call(self, do: str, *, timeout: float | None = None, **fields: Any) -> tuple[Any, socket.socket]:
        """`call`, with the connection, for a request that the fetcher goes on with until it is closed."""
        for _ in range(_ATTEMPTS):
            connection = self._connect()
            try:
                answer = self._ask(connection, timeout, {"do": do, **fields})
                if answer is not None:
                    return answer["result"], connection
            except (BrokenPipeError, ConnectionResetError):
                pass
            except BaseException:
                connection.close()
                raise
            connection.close()
        raise RemoteError(
            f"the process that fetches for {self._store} ended {_ATTEMPTS} times before it answered"
        )

    def go_on(
        self, connection: socket.socket, do: str, *, timeout: float | None = None, **fields: Any
    ) -> Any:
        """A further request on the connection of `open_call`; None if the fetcher has ended meanwhile.

        Raises:
            RemoteError, CorruptError: as for `call`.
        """
        with suppress(BrokenPipeError, ConnectionResetError):
            answer = self._ask(connection, timeout, {"do": do, **fields})
            return None if answer is None else answer["result"]
        return None

    def _ask(
        self, connection: socket.socket, timeout: float | None, request: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Send a request and wait for its result; None if the fetcher has ended."""
        self._open_now.add(connection)
        try:
            self._raise_if_over()  # `abandon` sees a connection that was added before this check
            connection.settimeout(timeout)
            send(connection, request)
            answer = receive(connection)
        except TimeoutError as error:
            raise RemoteUnreachableError(f"there was no answer within {timeout:g} s") from error
        finally:
            self._open_now.discard(connection)
        if answer is not None and "error" in answer:
            raise rebuild(answer["error"])
        return answer

    def prepare(self, remote: str) -> None:
        """Have the fetcher started, and connected to a remote.

        Raises:
            RemoteError: as for `call`.
        """
        self.call("connect", remote=remote)

    def abandon(self) -> None:
        """End all requests under way, in any thread, with an error. For an interrupt."""
        self._is_over = True
        for connection in list(self._open_now):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _raise_if_over(self) -> None:
        if self._is_over:
            raise RemoteError("the request was interrupted")

    def call_running(self, do: str, *, timeout: float | None = None, **fields: Any) -> Any:
        """`call`, if the store has a fetcher; None if none runs.

        Raises:
            RemoteError, CorruptError: as for `call`.
        """
        with suppress(FileNotFoundError, ConnectionRefusedError), self._open() as connection:
            return self.go_on(connection, do, timeout=timeout, **fields)
        return None

    def done(self) -> None:
        """Send the fetcher, if there is one, the request that ends this reader's use."""
        with suppress(OSError), self._open() as connection:
            send(connection, {"do": "done"})

    def _open(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with address(self._store / SOCKET) as short:
                connection.connect(short)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> socket.socket:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            return self._open()
        deadline, started = time.monotonic() + _START_SECONDS, 0.0
        while time.monotonic() < deadline:
            self._raise_if_over()
            # Another one may have been about to end: it held the lock, so the one that was started gave up.
            if time.monotonic() > started + 2.0:
                self._start()
                started = time.monotonic()
            with suppress(FileNotFoundError, ConnectionRefusedError):
                return self._open()
            time.sleep(_POLL_SECONDS)
        raise RemoteError(f"no process that fetches for {self._store} starts; is the store in order?")

    def _start(self) -> None:
        # A child of another thread's fork would hold a pipe open that `Popen` reads to its end.
        with block_forks():
            process = subprocess.Popen(
                [sys.executable, "-m", "castore.remote.fetcher", os.fspath(self._store)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            )
        # The process forks at once and ends, so no child of this one is left.
        process.wait()
