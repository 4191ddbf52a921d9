"""Messages between readers and the fetcher: a length of four bytes, and a map as msgpack."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

#: Where the fetcher listens, and the file that it locks while it lives, below the store.
SOCKET, LOCK = "locks/fetcher.sock", "locks/fetcher"
#: Bytes of the largest message: a thousand rows with their frames are a few megabytes.
LARGEST = 64 << 20
_LENGTH = struct.Struct("<I")


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message."""
    data = msgpack.packb(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message, or None if the other side has closed the connection, or sends what is none."""
    head = _receive_bytes(connection, _LENGTH.size)
    if head is None or (length := _LENGTH.unpack(head)[0]) > LARGEST:
        return None
    data = _receive_bytes(connection, length)
    try:
        message = None if data is None else msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return None
    return message if isinstance(message, dict) else None


def _receive_bytes(connection: socket.socket, length: int) -> bytes | None:
    received = bytearray()
    while len(received) < length:
        piece = connection.recv(min(length - len(received), 1 << 20))
        if not piece:
            return None
        received += piece
    return bytes(received)
