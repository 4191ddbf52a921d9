"""The metadata of a cached value: hashes of its sources, kept as JSON with its entry.

Assumes nothing of the place where it is kept. Must never hand out a shared object: metadata goes in and comes
out as text, so a caller's later change does not reach the cache.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from typing import Any

from castore.errors import InvalidValueError, SerializationError


@dataclass
class CacheMetadata:
    """The sources of a cached value.

    Args:
        version: of the caller's format.
        source_hash: identifies the source data.
        tokenizer_hash: identifies the tokenizer.
        transform_hash: identifies the transforms.
        num_examples: how many examples the value holds.
        config_hash: identifies the configuration.
        extra: any other JSON values.
        created_at: when it was put, seconds since the epoch. `put` sets it; comparisons ignore it.

    >>> CacheMetadata(config_hash="xyz789", source_hash="abc123").is_valid_for(config_hash="xyz789")
    True
    """

    version: str = "1.0"
    source_hash: str | None = None
    tokenizer_hash: str | None = None
    transform_hash: str | None = None
    num_examples: int | None = None
    config_hash: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    created_at: float = field(default_factory=time.time, compare=False)

    def is_valid_for(
        self,
        *,
        version: str | None = None,
        source_hash: str | None = None,
        tokenizer_hash: str | None = None,
        transform_hash: str | None = None,
        config_hash: str | None = None,
    ) -> bool:
        """Whether all given values are those of this metadata. Arguments that are not given do not count.

        >>> CacheMetadata(source_hash="abc").is_valid_for(source_hash="abc", config_hash="new")
        False
        """
        wanted = (version, source_hash, tokenizer_hash, transform_hash, config_hash)
        present = (self.version, self.source_hash, self.tokenizer_hash, self.transform_hash, self.config_hash)
        return all(want is None or want == have for want, have in zip(wanted, present, strict=True))


_FIELD_NAMES = tuple(entry.name for entry in dataclasses.fields(CacheMetadata))


def to_fields(metadata: CacheMetadata | None) -> dict[str, Any]:
    """The fields to keep of ``metadata`` that is put now, without empty ones.

    Raises:
        InvalidValueError: it is no CacheMetadata.
        SerializationError: a part of it would not come back from JSON as it is.
    """
    if metadata is None:
        metadata = CacheMetadata()
    elif not isinstance(metadata, CacheMetadata):
        raise InvalidValueError(
            f"metadata must be a CacheMetadata, not {type(metadata).__name__}; pass CacheMetadata(extra=...)"
        )
    given = {name: getattr(metadata, name) for name in _FIELD_NAMES}
    fields = {name: value for name, value in given.items() if value is not None and value != {}}
    fields["created_at"] = time.time()
    for name, value in fields.items():
        _check_json(name, value)
    return fields


def _check_json(name: str, value: Any) -> None:
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise SerializationError(f"metadata.{name} cannot be stored as JSON: {error}") from error
    if not same:
        raise SerializationError(
            f"metadata.{name} would come back from JSON changed; use lists, and text as keys: {value!r}"
        )


def to_text(fields: dict[str, Any]) -> str:
    """Fields as one text, the same for equal fields."""
    return json.dumps(fields, sort_keys=True, ensure_ascii=False)


def from_text(text: str) -> CacheMetadata:
    """The metadata of such a text. Fields that CacheMetadata does not have become part of ``extra``.

    An entry that was put without this cache may have such fields.
    """
    fields: dict[str, Any] = json.loads(text)
    known = {name: fields.pop(name) for name in _FIELD_NAMES if name in fields}
    extra: Any = known.pop("extra", {})
    return CacheMetadata(
        **known, extra={**fields, **(extra if isinstance(extra, dict) else {"extra": extra})}
    )
