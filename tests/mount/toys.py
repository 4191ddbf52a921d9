"""Mount the toy file system of toyfs.py in a test, and give it orders."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from castore_fuse.lifecycle import mounted
from tests.mount.conftest import until

TOYFS = Path(__file__).with_name("toyfs.py")
#: The content of the toy's file `pattern`.
PATTERN = b"".join(b"%015d\n" % n for n in range(1_000_003 // 16 + 1))[:1_000_003]


def command(*arguments: str) -> list[str]:
    """The command line of the toy's daemon."""
    return [sys.executable, os.fspath(TOYFS), *arguments]


class Toy:
    """A mounted toy file system that takes orders."""

    def __init__(self, root: Path, orders: Path) -> None:
        self.root = root
        self._orders = orders
        self._given = 0

    def order(self, line: str) -> None:
        self._given += 1
        self._orders.write_text(line + "\n")
        done = self._orders.with_suffix(".done")
        until(lambda: done.exists() and done.read_text() == str(self._given))

    def count(self, what: str) -> int:
        return int(os.getxattr(self.root, f"user.castore.{what}"))


@contextlib.contextmanager
def toy_at(mountpoint: Path, *arguments: str) -> Iterator[Toy]:
    orders = mountpoint.with_name("orders")
    os.mkfifo(orders)
    with mounted(command("--orders", os.fspath(orders), *arguments), mountpoint) as root:
        yield Toy(root, orders)
