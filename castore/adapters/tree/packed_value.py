"""A cached value as bytes with its metadata as text: what both levels hold, and what every `get` decodes anew.

That is why nothing that comes out of a cache is a door into it: each caller gets an object of his own. Decoding
was measured at a tenth of `copy.deepcopy` for lists of token ids, at about the same for arrays and small dicts, and bytes have
a size that can be bounded, which objects have not.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from castore.adapters.tree.metadata import CacheMetadata, from_text, to_fields, to_text
from castore.serialize import serializers


class Packed(NamedTuple):
    """A value and its metadata.

    Attributes:
        serializer: how `data` becomes an object.
        data: the value's bytes.
        about: the metadata's fields as JSON text.
    """

    serializer: str
    data: bytes
    about: str


def pack(data: object, metadata: CacheMetadata | None, *, allow_pickle: bool) -> Packed:
    """The value as it is kept.

    Raises:
        SerializationError: no serializer that is allowed takes it; the message has the path to the part.
    """
    about = to_text(to_fields(metadata))
    return Packed(*serializers.dump(data, allow_pickle=allow_pickle), about)


def unpack(packed: Packed, *, allow_pickle: bool) -> tuple[Any, CacheMetadata]:
    """A new object of the value, and its metadata.

    Raises:
        CorruptError: the bytes are not what that serializer writes.
        SerializationError: it is a pickle and those are not allowed.
    """
    value = serializers.load(packed.data, packed.serializer, allow_pickle=allow_pickle)
    return value, from_text(packed.about)


def held(packed: Packed) -> int:
    """Bytes that it occupies in RAM."""
    return sys.getsizeof(packed.data) + sys.getsizeof(packed.about)
