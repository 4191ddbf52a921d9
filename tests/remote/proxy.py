"""An HTTP proxy in front of a storage, which is slow, loses, cuts and doubles what it is told to.

It stands for the network between a node and a real bucket, which loopback hides. A request is read whole
before it goes on, so a test knows whether the storage acted.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

_PIECE = 1 << 16
# The codes of S3's errors.
_CODES = {
    400: "ExpiredToken",
    401: "RequestTimeTooSkewed",
    403: "ExpiredToken",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    501: "NotImplemented",
    503: "SlowDown",
}


class Fault(NamedTuple):
    """The fate of one request.

    Attributes:
        reaches: how often the storage gets it.
        status: what is answered instead of the storage's answer; 0 for that one.
        bytes: how much of the answer's body is sent; None for all.
        answers: False to close the connection without a word.
        stalls: after the bytes nothing comes any more, until the proxy ends. Otherwise the connection is
            closed.
        delay: seconds before all that, besides those of the proxy.
    """

    reaches: int = 1
    status: int = 0
    bytes: int | None = None
    answers: bool = True
    stalls: bool = False
    delay: float = 0.0


LOST_REQUEST = Fault(reaches=0, answers=False)
LOST_ANSWER = Fault(answers=False)
TWICE = Fault(reaches=2)


def answer(status: int, *, acted: bool = False) -> Fault:
    """The storage's place is taken by an error, before or after it acted."""
    return Fault(reaches=int(acted), status=status)


def cut(after: int) -> Fault:
    """The connection breaks after so many bytes of the answer."""
    return Fault(bytes=after)


def stall(after: int) -> Fault:
    """Nothing comes after so many bytes of the answer."""
    return Fault(bytes=after, stalls=True)


class Request(NamedTuple):
    """A request that came in."""

    method: str
    path: str


class Proxy:
    """A proxy that runs.

    Attributes:
        port: of loopback.
        delay: seconds from a request to its way on; stands for a round trip.
        bandwidth: bytes a second of all connections and both directions together; None for no bound.
        seen: requests in the order in which they came.
    """

    def __init__(self, upstream: int) -> None:
        self.delay = 0.0
        self.bandwidth: float | None = None
        self.seen: list[Request] = []
        self.ended = threading.Event()
        self._upstream = upstream
        self._lock = threading.Lock()
        self._faults: list[tuple[Fault, str, str]] = []
        self._free = 0.0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="proxy")

    def inject(self, fault: Fault, times: int = 1, *, method: str = "", path: str = "") -> None:
        """The next requests of this method, with this in their path, suffer from a fault."""
        with self._lock:
            self._faults += [(fault, method, path)] * times

    def heal(self) -> None:
        """No more faults."""
        with self._lock:
            self._faults.clear()

    def take(self, request: Request) -> Fault:
        """The fate of a request."""
        with self._lock:
            self.seen.append(request)
            for number, (fault, method, path) in enumerate(self._faults):
                if method in ("", request.method) and path in request.path:
                    del self._faults[number]
                    return fault
        return Fault()

    def pass_on(self, count: int) -> None:
        """Wait until the link has had time for so many bytes."""
        if self.bandwidth is None:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count / self.bandwidth
            wait = self._free - time.monotonic()
        time.sleep(max(wait, 0))

    def upstream(self) -> http.client.HTTPConnection:
        """A connection to the storage."""
        return http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End all connections."""
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def proxy(upstream: int) -> Iterator[Proxy]:
    """A proxy of a storage on loopback."""
    made = Proxy(upstream)
    made.start()
    try:
        yield made
    finally:
        made.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    proxy: Proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._up: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self._up is not None:
            self._up.close()
        with suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        """Keep the output of the tests clean."""

    def do_GET(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.take(Request(self.command, self.path))
        proxy.pass_on(len(body))
        if delay := proxy.delay + fault.delay:
            time.sleep(delay)
        if not fault.reaches and not fault.answers:
            self.close_connection = True
            return
        response = None
        for number in range(fault.reaches):
            if number:
                assert response is not None
                response.read()
            response = self._ask(body)
        if not fault.answers:
            self.close_connection = True
        elif fault.status or response is None:
            self._refuse(fault.status)
            if response is not None:
                response.read()
        else:
            self._answer(response, fault)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def _ask(self, body: bytes) -> http.client.HTTPResponse:
        """Send the request on, with the host that its signature covers."""
        if self._up is None:
            self._up = self.server.proxy.upstream()
        self._up.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            self._up.putheader(name, value)
        self._up.endheaders(body or None)
        return self._up.getresponse()

    def _refuse(self, status: int) -> None:
        code = _CODES.get(status, "InternalError")
        text = f"<Error><Code>{code}</Code></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _answer(self, response: http.client.HTTPResponse, fault: Fault) -> None:
        self.send_response_only(response.status, response.reason)
        chunked = response.headers.get("Transfer-Encoding", "") == "chunked"
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            response.read()
            return
        left = fault.bytes
        while piece := response.read1(_PIECE):
            whole = left is None or left > len(piece)
            sent = piece if whole else piece[:left]
            self.server.proxy.pass_on(len(sent))
            self.wfile.write(b"%x\r\n%s\r\n" % (len(sent), sent) if chunked and sent else sent)
            if not whole:
                break
            left = None if left is None else left - len(sent)
        if fault.bytes is not None:
            if fault.stalls:
                self.wfile.flush()
                self.server.proxy.ended.wait()
            self.close_connection = True
            self._close_up()
            return
        response.read()  # `read1` does not notice the end
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _close_up(self) -> None:
        if self._up is not None:
            self._up.close()
            self._up = None
