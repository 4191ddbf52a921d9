"""The arguments of puts, checked and brought into one form. Knows no store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from castore.errors import InvalidValueError, SerializationError
from castore.names import check_name
from castore.records import DIGEST_SIZE, Buffer

#: Levels of dicts and lists that metadata may have.
DEEPEST = 100


def parse_expected(expected: Any) -> tuple[str, bytes | None]:
    """Name and digest that a `Store.put_if` depends on.

    Raises:
        InvalidNameError: nothing can have that name.
        InvalidValueError: it is no pair of a name and a digest in hex.
    """
    shape = "expected is (name, digest), with the 64 hex digits of `Entry.digest`, or with None for no entry"
    if not isinstance(expected, tuple | list) or len(expected) != 2:
        raise InvalidValueError(f"{shape}, not {expected!r:.100}")
    name, digest = expected
    if digest is None:
        return check_name(name), None
    try:
        raw = bytes.fromhex(digest)
    except (TypeError, ValueError):
        raw = b""
    if len(raw) != DIGEST_SIZE:
        raise InvalidValueError(f"{shape}, not {digest!r:.100}")
    return check_name(name), raw


def parse_items(items: Any) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
    """The items of `Store.put_many` or `Store.put_if`, taken apart as they come.

    Raises:
        InvalidValueError: there is nothing to iterate; (while iterating) see `parse_item`.
    """
    try:
        iterator = iter(items)
    except TypeError:
        raise InvalidValueError(
            f"items are several (name, data) or (name, data, metadata), not {type(items).__name__}"
        ) from None
    return map(parse_item, iterator)


def parse_item(item: Any) -> tuple[str, Any, dict[str, Any] | None]:
    """Name, data and metadata of an item of `Store.put_many` or `Store.put_if`.

    Raises:
        InvalidValueError: it has another shape.
    """
    try:
        size = len(item)
    except TypeError:
        size = 0
    if isinstance(item, str) or size not in (2, 3):
        raise InvalidValueError(
            f"an item is (name, data) or (name, data, metadata), not {type(item).__name__} of length {size}"
        )
    name, data, *metadata = item
    return name, data, metadata[0] if metadata else None


def copy_if_writable(data: Buffer) -> bytes:
    """``data``, or a copy of it if it is writable, since callers may reuse one buffer for each item.

    Raises:
        SerializationError: it is no run of bytes.
    """
    return bytes(as_bytes(data))


def as_bytes(data: Buffer) -> Buffer:
    """``data`` as a run of bytes, whose length is its size.

    Raises:
        SerializationError: it is no buffer of bytes.
    """
    if isinstance(data, memoryview):
        return data.cast("B") if data.c_contiguous and data.nbytes else data.tobytes()
    if not isinstance(data, (bytes, bytearray)):
        raise SerializationError(
            f"put takes bytes, not {type(data).__name__}; `save` keeps objects, `put_file` files"
        )
    return data


def is_deep(value: Any, text: str) -> bool:
    """Whether a value has more than `DEEPEST` levels of dicts and lists, so that readers may not follow it.

    Args:
        value: JSON-like.
        text: the value as JSON. Most texts have so few brackets that nobody needs to look at the value.
    """
    if text.count("{") + text.count("[") <= DEEPEST:
        return False
    level = [value]
    for _ in range(DEEPEST):
        inner = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
        level = [part for part in inner if isinstance(part, dict | list | tuple)]
    return bool(level)


def dump_metadata(metadata: dict[str, Any] | None) -> str | None:
    """``metadata`` as JSON text, or None if there is none.

    Raises:
        SerializationError: it is not JSON-like.
    """
    if metadata is not None and not isinstance(metadata, dict):
        raise SerializationError(f"metadata is a dict of JSON-like values, not {type(metadata).__name__}")
    if not metadata:
        return None
    try:
        if any(not isinstance(key, str) for key in metadata):
            raise TypeError("its keys must be text")
        text = json.dumps(metadata, sort_keys=True, ensure_ascii=False, allow_nan=False)
        text.encode()  # the index takes UTF-8 only
        if is_deep(metadata, text):
            raise ValueError(f"it has more than {DEEPEST} levels of dicts and lists")
    except UnicodeEncodeError as error:
        raise SerializationError(
            f"metadata must be JSON-like: {error.object[error.start]!r} cannot be written as UTF-8"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise SerializationError(f"metadata must be JSON-like: {error}") from error
    return text
