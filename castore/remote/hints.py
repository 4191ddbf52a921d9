"""The pages of a small tree in one object beside its ref, so that a first pull has them as soon as the ref.

A push writes the object before it moves the ref, and another push may write its own in between. So the pages
are a hint: a reader takes those that have the digests it looks for, and does without the others. Must never:
be the only place of a page.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgpack

from castore.remote.pages import digest_of

#: Bytes of all pages that a hint has at most: of some 8,000 names.
LARGEST = 512 << 10


def encode_hint(pages: Iterable[bytes | None]) -> bytes:
    """The bytes of a hint. It has no page if there are too many bytes, or if one page is missing (None).

    >>> encode_hint([b"page", b"another"])
    b'\\x92\\xc4\\x04page\\xc4\\x07another'
    >>> encode_hint([b"page", None])
    b'\\x90'
    """
    found: list[bytes] = []
    room = LARGEST
    for page in pages:
        room -= LARGEST + 1 if page is None else len(page)
        if room < 0:
            return bytes(msgpack.packb([]))
        assert page is not None
        found.append(page)
    return bytes(msgpack.packb(found))


def parse_hint(data: bytes) -> dict[bytes, bytes]:
    """The pages of a hint by their digests; none of bytes that are no hint.

    >>> [*parse_hint(encode_hint([b"page"])).values()], parse_hint(b"nothing")
    ([b'page'], {})
    """
    try:
        pages = msgpack.unpackb(data) if len(data) <= 2 * LARGEST else []
    except ValueError:
        return {}
    return {digest_of(page): page for page in pages if type(page) is bytes} if type(pages) is list else {}
