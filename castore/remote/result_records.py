"""The records of shared results: under the key of a computation, which result it has and where the bytes are.

A record is written once, by whoever finishes first, and may be overtaken or lost without harm: a computation
without a record is done again. A small result lies in its record, a large one in an object of its own.
Decoding trusts nothing. Has bytes only: never decides which result is good.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from castore.errors import CorruptError, RemoteError, RemoteMissingError
from castore.remote.bucket import Bucket, Listed
from castore.remote.keys import RESULTS, object_key, result_key
from castore.remote.pages import Row, decode, digest_of, encode_leaf

#: Results of at most this many stored bytes lie in their records.
INLINE_BYTES = 64 << 10
#: Seconds after which a record that is used is written again, byte for byte: so the time of its last write
#: says, to a day, when it was last used.
RENEW_SECONDS = 86_400.0
_MAGIC = b"castore key 1\r\n"
# Length of the page, and whether the result's bytes follow it.
_HEAD = struct.Struct("<I?")
_DIGEST = 32
# Records that are read at once.
_READERS = 16


class Record(NamedTuple):
    """A computation's result.

    Attributes:
        row: its name is the computation's key; the other fields are those of the result's entry.
        payload: the stored bytes of a small result; None if they are an object of their own.
    """

    row: Row
    payload: bytes | None

    @property
    def object_key(self) -> str | None:
        """The object that has the bytes; None if the record has them."""
        place = self.row.place
        return None if self.payload is not None else object_key(place.object, packed=place.is_packed)


def encode_record(record: Record) -> bytes:
    """The bytes of a record."""
    page = encode_leaf([record.row])
    body = _HEAD.pack(len(page), record.payload is not None) + page + (record.payload or b"")
    return _MAGIC + digest_of(body) + body


def decode_record(data: bytes, key: str) -> Record:
    """The record of an object.

    Args:
        data: all bytes of the object.
        key: of the object.

    Raises:
        CorruptError: the bytes are damaged, or no castore wrote them there.
    """
    head = len(_MAGIC) + _DIGEST
    body = data[head:]
    if not data.startswith(_MAGIC) or digest_of(body) != data[len(_MAGIC) : head] or len(body) < _HEAD.size:
        raise CorruptError(f"the record {key} is damaged")
    length, is_inline = _HEAD.unpack_from(body)
    end = _HEAD.size + length
    page, payload = body[_HEAD.size : end], body[end:]
    rows = decode(page, digest_of(page)).rows
    if len(rows) != 1 or result_key(rows[0].name) != key:
        raise CorruptError(f"the record {key} is of another computation")
    place = rows[0].place
    if is_inline and (len(payload) != place.stored or digest_of(payload) != place.object):
        raise CorruptError(f"the record {key} has other bytes than it says")
    return Record(rows[0], payload if is_inline else None)


def read_records(bucket: Bucket) -> Iterator[tuple[Listed, Record | None]]:
    """All records of a bucket; None for one that is damaged.

    Raises:
        RemoteError: the bucket cannot be used.
    """

    def read(listed: Listed) -> tuple[Listed, Record | None] | None:
        try:
            return listed, decode_record(bucket.get(listed.key).data, listed.key)
        except RemoteMissingError:  # gone since it was listed
            return None
        except CorruptError:
            return listed, None

    with ThreadPoolExecutor(_READERS) as pool:
        try:
            yield from filter(None, pool.map(read, bucket.listing(RESULTS)))
        except RemoteError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
