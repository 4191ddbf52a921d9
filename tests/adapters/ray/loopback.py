"""Brings up the loopback device of a new network, as `python -m tests.adapters.ray.loopback`."""

from __future__ import annotations

import fcntl
import socket
import struct

_SET_FLAGS, _UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP


def bring_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh", b"lo", _UP))


if __name__ == "__main__":
    bring_up()
