"""A blob's bytes, piece after piece in constant memory, decoded on all cores and checked as a whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import blake3

from castore import Store
from castore.errors import CorruptError, NotFoundError
from castore.objects.decode import BlobReader
from castore.objects.frames import frame_count
from castore.objects.workers import cores, workers
from castore.records import Blob


def copy(store: Store, blob: Blob, write: Callable[[bytes], object]) -> None:
    """Give all bytes of a blob to ``write``, in order.

    Raises:
        NotFoundError: gc or damage has taken the bytes meanwhile.
        CorruptError: the stored bytes are not those that were put; what was written so far may be wrong.
    """
    try:
        reader = store.source.open(blob)
    except FileNotFoundError as error:
        raise NotFoundError(f"the bytes of blob {blob.digest.hex()} are gone") from error
    hasher = blake3.blake3()
    try:
        for frame in _frames(reader):
            hasher.update(frame)
            write(frame)
        if hasher.digest() != blob.digest:
            raise CorruptError(f"blob {blob.digest.hex()} does not have the bytes it was put with")
    except CorruptError as error:
        store.source.quarantine(reader.blob, error)
        raise
    finally:
        reader.close()


def _frames(reader: BlobReader) -> Iterator[bytes]:
    count = frame_count(reader.blob.size)
    if count == 1:
        yield reader.frame(0)
        return
    pool, ahead = workers.pool(), 4 * cores()
    running: deque[Future[bytes]] = deque(
        pool.submit(reader.frame, index) for index in range(min(ahead, count))
    )
    try:
        for index in range(count):
            frame = running.popleft().result()
            if index + ahead < count:
                running.append(pool.submit(reader.frame, index + ahead))
            yield frame
    finally:
        # The reader is closed after us: nobody may still read from its descriptor then.
        for future in running:
            if not future.cancel():
                future.exception()
