"""The network between the bench's clients and servers delays, bounds and counts, and changes no byte."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tools.bench.link import Link

DELAY = 0.05


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    """A server that gives back what it gets. The port."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(1 << 18):
                connection.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def link(echo: int) -> Iterator[Link]:
    with Link(echo) as made:
        yield made


def send(link: Link, data: bytes) -> tuple[float, float]:
    """Send bytes over a new connection, and check the echo; seconds to its first and its last byte."""
    start = time.monotonic()  # the link counts from the connection, which is made inside the next line
    with socket.create_connection(("127.0.0.1", link.port)) as connection:
        sending = threading.Thread(target=connection.sendall, args=(data,))
        sending.start()
        back, first = bytearray(), 0.0
        while len(back) < len(data):
            back += connection.recv(1 << 18)
            first = first or time.monotonic() - start
        sending.join()
        assert back == data
        return first, time.monotonic() - start


def test_each_request_takes_the_delay_and_a_new_connection_takes_it_twice(link: Link) -> None:
    link.shape(DELAY)
    took = []
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", link.port)) as connection:
        for _ in range(3):
            connection.sendall(b"ping")
            assert connection.recv(4) == b"ping"
            took.append(time.monotonic() - start)
            start = time.monotonic()
    assert took[0] >= 2 * DELAY * 0.99
    assert min(took[1:]) >= DELAY * 0.99


def test_a_delay_does_not_slow_a_stream(link: Link) -> None:
    link.shape(DELAY)
    data = random.Random(1).randbytes(32 << 20)
    first, last = send(link, data)
    assert first >= 2 * DELAY * 0.99
    assert last - first < len(data) / (1 << 18) * DELAY / 2, "pieces do not wait for one another"


def test_all_connections_share_one_bandwidth(link: Link) -> None:
    link.shape(0, 20e6)
    data = random.Random(2).randbytes(2 << 20)
    start = time.monotonic()

    def end(number: int) -> float:
        send(link, data)
        return time.monotonic() - start

    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(end, range(4)))
    assert time.monotonic() - start >= 4 * len(data) / 20e6 * 0.95
    assert min(ends) > max(ends) / 2, "connections take turns"


def test_bytes_of_both_directions_are_counted(link: Link) -> None:
    before = link.carried()
    send(link, bytes(100_000))
    send(link, bytes(1))
    assert before == (0, 0)
    assert link.carried() == (100_001, 100_001)


def test_an_end_reaches_the_other_side_and_bytes_before_it_are_not_lost(link: Link) -> None:
    link.shape(DELAY)
    with socket.create_connection(("127.0.0.1", link.port)) as connection:
        connection.sendall(b"last")
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            assert file.read() == b"last"


def test_the_relay_ends_with_its_owner(echo: int) -> None:
    with Link(echo) as link:
        port = link.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
