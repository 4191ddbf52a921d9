"""A network on one machine: `python -m tools.bench.link PORT` passes connections on to a port of loopback.

Bytes to the server take a delay, which stands for a round trip. A new connection takes one more, for its
handshake. All connections share a bandwidth, which each direction has for itself; they take turns, a
piece each. Nothing is lost or reordered, and no connection starts slowly, so the link is kinder than a real
one. The relay is a process of its own and does little, because clients and server need the processors.

A line `DELAY BANDWIDTH` on standard input (seconds, and bytes a second, 0 for no bound) shapes the link, and
an empty line changes nothing. The answer to each line is the number of bytes that have gone to the server,
and that have come from it. The process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from tools.bench.peers import PROJECT

# Most bytes that pass without another connection's turn, and pieces of a connection that are on their way.
_PIECE, _PIECES = 1 << 18, 64
_BACKLOG = 256
# Seconds of bandwidth that may be made up for after a pause: timers are late by a millisecond.
_BURST = 0.005
# Seconds for which nobody sleeps, because timers are no finer.
_SHORT = 0.001

#: Pieces on their way to the server, and when each of them is there.
_Late: TypeAlias = "asyncio.Queue[tuple[float, bytes]]"


class Link(AbstractContextManager["Link"]):
    """A relay that runs.

    Args:
        upstream: port of the server, on loopback.

    Attributes:
        port: of loopback, where clients connect.
    """

    def __init__(self, upstream: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.link", str(upstream)],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._listen())

    def shape(self, delay: float, bandwidth: float = 0) -> None:
        """Set the delay in seconds and the bandwidth in bytes a second; 0 is no bound."""
        self._ask(f"{delay} {bandwidth}")

    def carried(self) -> tuple[int, int]:
        """The bytes that have gone to the server, and that have come from it, since the link began."""
        up, down = self._ask("").split()
        return int(up), int(down)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._listen()

    def _listen(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the link has ended ({self._process.wait()}); why stands above")
        return answer

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its standard input


@dataclass
class _Direction:
    """One direction of the link, which all connections share."""

    bandwidth: float = 0.0
    carried: int = 0
    _free: float = 0.0

    async def carry(self, size: int) -> None:
        """Take the link for some bytes, and wait until they are through."""
        self.carried += size
        if self.bandwidth:
            now = time.monotonic()
            self._free = max(self._free, now - _BURST) + size / self.bandwidth
            if self._free - now > _SHORT:
                await asyncio.sleep(self._free - now)


@dataclass
class _Relay:
    upstream: int
    delay: float = 0.0
    up: _Direction = field(default_factory=_Direction)
    down: _Direction = field(default_factory=_Direction)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            task = loop.create_task(self._connect(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: socket.socket) -> None:
        ready = time.monotonic() + self.delay
        with client, socket.socket() as server, suppress(OSError):
            for end in (client, server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(server, ("127.0.0.1", self.upstream))
            late: _Late = asyncio.Queue(_PIECES)
            ways = [self._delay(client, late, ready), _go_up(late, server), self._come_down(server, client)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.gather(*tasks)
            finally:  # a connection that has broken on one side is closed on both
                for task in tasks:
                    task.cancel()

    async def _delay(self, client: socket.socket, late: _Late, ready: float) -> None:
        """Note when each piece of the requests is to reach the server: never before the handshake is done."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(client, _PIECE):
            await self.up.carry(len(data))
            await late.put((max(time.monotonic(), ready) + self.delay, data))
        await late.put((time.monotonic() + self.delay, b""))

    async def _come_down(self, server: socket.socket, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(server, _PIECE):
            await self.down.carry(len(data))
            await loop.sock_sendall(client, data)
        client.shutdown(socket.SHUT_WR)


async def _go_up(late: _Late, server: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due, data = await late.get()
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        if not data:
            break
        await loop.sock_sendall(server, data)
    server.shutdown(socket.SHUT_WR)


async def _serve(upstream: int) -> None:
    loop, relay = asyncio.get_running_loop(), _Relay(upstream)
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        listener.setblocking(False)
        accepting = loop.create_task(relay.accept(listener))
        print(listener.getsockname()[1], flush=True)
        while line := await orders.readline():
            if words := line.split():
                delay, bandwidth = map(float, words)
                relay.delay, relay.up.bandwidth, relay.down.bandwidth = delay, bandwidth, bandwidth
            print(relay.up.carried, relay.down.carried, flush=True)
        accepting.cancel()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
