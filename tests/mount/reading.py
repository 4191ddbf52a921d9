"""A program that reads files over and over: `python -m tests.mount.reading LIST`, until its input ends.

Each line of LIST is a path and the SHA-256 of the file's content. The program prints `ready` after the first
round, and at the end the number of files that it read. Other bytes, or any error, end it at once.
"""

from __future__ import annotations

import hashlib
import os
import select
import sys
from pathlib import Path


def main() -> None:
    files = [line.rsplit(" ", 1) for line in Path(sys.argv[1]).read_text().splitlines()]
    count = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for path, digest in files:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            data = os.read(fd, 1 << 20)
            os.close(fd)
            assert hashlib.sha256(data).hexdigest() == digest, path
            count += 1
        if count == len(files):
            print("ready", flush=True)
    print(count, flush=True)


if __name__ == "__main__":
    main()
