"""Streams a blob's bytes in constant memory, decoded on all cores and checked as a whole."""

from __future__ import annotations

from collections.abc import Callable

from castore import Store
from castore.records import Blob


def copy(store: Store, blob: Blob, write: Callable[[bytes], object]) -> None:
    """Give all bytes of a blob to ``write``, in order.

    Raises:
        NotFoundError: gc or damage has taken the bytes meanwhile.
        CorruptError: the stored bytes are not those that were put; what was written so far may be wrong.
    """
    with store.open_blob(blob.digest) as opened:
        for piece in opened.pieces():
            write(piece)
