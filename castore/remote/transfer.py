"""The process that talks to a bucket: `main`, started for one call, with a descriptor and the caller's pid as
its arguments.

Clients of object storage do not survive a fork, and a data loader forks. So no process that uses castore ever
opens a connection. A caller starts this process by exec, and writes the call to its standard input as a line
of JSON. The caller then reads lines of JSON from the pipe: progress, that the call waits for another one, and
in the end the result or the error. The process stops at anything that comes behind the call, at the end of
standard input, and once the caller is gone: workers that the caller has forked may hold standard input open
for longer.

The first requests go out before the modules of the call (calls.py) are imported: both take a tenth of a
second. So this module imports what those requests need, and no more.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from castore.errors import CastoreError
from castore.remote.error_values import describe
from castore.remote.keys import SETTINGS, hint_key, ref_key
from castore.remote.metered_bucket import MeteredBucket, open_metered
from castore.remote.retries import ENDED
from castore.system.single_flight import ComputeLocks

# Requests before the call's own ones, at once.
_CONNECTIONS = 8
# Seconds between two reports of progress.
_REPORT_SECONDS = 0.1
# Seconds that an interrupted call has for its clean-up.
_PATIENCE = 10.0


class _Progress:
    """Reports bytes from time to time, and in any case the last of them. Ends the uploads of an interrupted
    call.
    """

    #: Whether the call was interrupted.
    is_over = False

    def __init__(self) -> None:
        self._next = 0.0
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        if self.is_over:
            raise KeyboardInterrupt
        now = time.monotonic()
        with self._lock:
            if now < self._next and done < total:
                return
            self._next = now + _REPORT_SECONDS
            _send({"progress": [done, total]})


def _send(message: dict[str, Any]) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[os.write(int(sys.argv[1]), line) :]


def _watch(caller: int) -> select.poll:
    """Watches standard input, and the end of the caller where the kernel can (Linux 5.3 and later).

    Raises:
        KeyboardInterrupt: the caller is gone.
    """
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    try:
        poll.register(os.pidfd_open(caller), select.POLLIN)
    except ProcessLookupError:
        raise KeyboardInterrupt from None
    except OSError:  # an older kernel, or a sandbox that forbids it: standard input alone tells
        pass
    return poll


def _read_call(poll: select.poll) -> bytes | None:
    """The call; None if the caller is gone, or wants it to stop, before it begins."""
    line = b""
    while b"\n" not in line:
        if any(fd != sys.stdin.fileno() for fd, _ in poll.poll()):
            return None
        piece = os.read(sys.stdin.fileno(), 65_536)
        if not piece:
            return None
        line += piece
    call, _, stop = line.partition(b"\n")
    return None if stop else call


def _end_with_caller(poll: select.poll) -> None:
    """Interrupt the call once anything has come behind it; end for good if that takes long."""
    poll.poll()
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(_PATIENCE)
    os._exit(1)


def _interrupt(*_: object) -> None:
    _Progress.is_over = True
    ENDED.set()
    raise KeyboardInterrupt


def main() -> int:
    """Read a call, do it, and write what comes of it."""
    try:
        return _serve()
    except (KeyboardInterrupt, BrokenPipeError):
        return 1


def _serve() -> int:
    # Ctrl-C reaches this process too: it is the caller who decides what is to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _interrupt)
    poll = _watch(int(sys.argv[2]))
    call = _read_call(poll)
    if call is None:
        return 1
    request = json.loads(call)
    threading.Thread(target=_end_with_caller, args=(poll,), daemon=True).start()
    try:
        _send({"result": _do(request)})
    except BrokenPipeError:
        raise
    except CastoreError as error:
        _send({"error": describe(error)})
    except OSError as error:
        from castore.system.ballast import full_disk_error

        _send({"error": describe(full_disk_error(Path(request["store"]), error) or error)})
    return 0


@contextmanager
def _alone(request: dict[str, Any]) -> Iterator[None]:
    """One push or pull of a ref at a time: each begins with a base, and ends with the next one."""
    locks = ComputeLocks(Path(request["store"]) / "locks" / "remotes", request["file_mode"])
    key = f"{request['arguments']['remote']} {request['arguments']['ref']}"
    if (release := locks.claim(key)) is not None:
        try:
            yield
        finally:
            release()
        return
    _send({"waits": True})
    with locks.hold(key):
        yield


def _do(request: dict[str, Any]) -> Any:
    call, arguments = request["call"], request["arguments"]
    bucket = open_metered(request["url"], requests=request["requests"], rate=request["rate"])
    with _alone(request) if call in ("push", "pull") else nullcontext():
        _ask_ahead(bucket, call, arguments)
        from castore.remote import calls, process  # while the storage answers

        process.look_less_for_cycles()
        return calls.do(call, arguments, Path(request["store"]), request["options"], bucket, _Progress())


def _ask_ahead(bucket: MeteredBucket, call: str, arguments: dict[str, Any]) -> None:
    """Ask for what the call reads first.

    A pull then goes on with several requests at once, and a connection takes as long to open as a request, or
    longer. So its connections are opened meanwhile.
    """
    # A push reads the ref in its own order with other objects.
    keys = [SETTINGS, ref_key(arguments["ref"])] if call in ("pull", "log") else [SETTINGS]
    if arguments.get("is_first"):
        keys.append(hint_key(arguments["ref"]))
    bucket.ask_ahead(keys)
    if call == "pull":
        bucket.connect(_CONNECTIONS - len(keys), SETTINGS)
