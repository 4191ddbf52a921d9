"""Clients of object storage, each a process: `python -m tools.bench.network_clients CLIENT ARGUMENTS...`.

Each prints the seconds that its work took, without the start of the process. obstore's must be a process of
its own: a process that has used it must not fork.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.bench.object_storage import BUCKET
from tools.bench.reads import PIECE, READERS, random_places


def transfer_manager(prefix: str, folder: str, count: str) -> float:
    """boto3's transfer manager with its defaults uploads the first `count` files below `folder`."""
    import boto3
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())[: int(count)]
    client = boto3.client("s3")
    start = time.perf_counter()
    with create_transfer_manager(client, TransferConfig()) as manager:
        keys = [f"{prefix}/{path.relative_to(folder)}" for path in paths]
        uploads = [manager.upload(str(path), BUCKET, key) for path, key in zip(paths, keys, strict=True)]
        for upload in uploads:
            upload.result()
    return time.perf_counter() - start


def ranges(key: str, size: str, pieces: str) -> float:
    """Obstore gets pieces at random places of an object of `size` bytes, a thread for each reader."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET, client_options={"allow_http": True})

    def read(offsets: list[int]) -> None:
        for offset in offsets:
            if len(obstore.get_range(store, key, start=offset, length=PIECE)) != PIECE:
                raise RuntimeError(f"{key} came short at {offset}")

    places = random_places(int(size), int(pieces))
    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        for done in [pool.submit(read, offsets) for offsets in places]:
            done.result()
    return time.perf_counter() - start


CLIENTS: dict[str, Callable[[str, str, str], float]] = {
    "transfer_manager": transfer_manager,
    "ranges": ranges,
}

if __name__ == "__main__":
    print(CLIENTS[sys.argv[1]](*sys.argv[2:]))
