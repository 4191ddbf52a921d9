"""CacheConfig: the options of cached embeddings.

Options and names are those of Quaterion's page on its cache.

Values and names are checked here, so that a slip is an error at once and not an unused cache.
"""

from __future__ import annotations

import difflib
import enum
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from castore.errors import InvalidValueError

_STORABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Names that `fingerprints` may have besides encoders.
FINGERPRINT_NAMES = ("train", "val", "collate", "key_extractors")


class CacheType(str, enum.Enum):
    """Where the embeddings of an encoder are during training; they are on disk in any case."""

    #: The encoder is not cached.
    NONE = "none"
    #: GPU if the encoder is on one and its embeddings fit into half of the free memory there, else CPU.
    AUTO = "auto"
    #: Mapped, and read into RAM ahead of use; all processes of the node share them.
    CPU = "cpu"
    #: A copy on the encoder's device.
    GPU = "gpu"
    #: Mapped, and read when used: for more embeddings than RAM.
    DISK = "disk"


@dataclass(frozen=True)
class CacheConfig:
    """How embeddings are cached.

    Args:
        cache_type: where embeddings are during training, for all encoders.
        mapping: the same for single encoders, by name.
        key_extractors: a function that returns the key of an item from its feature (the encoder's input for
            one sample); one for all encoders, or one each by name. Items of equal keys are one item. Keys are
            what `castore.key` takes: text, numbers, bytes, tuples of these. By default an item is known by
            its index in the dataset.
        batch_size: items that an encoder gets at once while the cache is filled; training is not affected.
        num_workers: processes that read the dataset meanwhile; None is 0.
        save_dir: the folder of the store; None is the default store (see `castore.Store`).
        dtype: keep floating-point embeddings as float16, bfloat16, ...; look-ups return the encoder's own
            dtype.
        labels: also keep all other parts of a batch, so that training reads no raw data. None: if all
            encoders are cached and no feature is left over.
        masks: for encoders whose batches are padded to their longest item, by name: the keyword of the input
            that is true (not 0) where no padding is, as "attention_mask", of shape (B, L). Outputs (B, L, D)
            are kept without padding. Look-ups return them in the shape of the mask that the encoder is called
            with, with zeros where it is false.
        split: for CacheType.GPU, keep a part of the embeddings on each rank's device, not a copy on each.
            Look-ups then are collective: every rank makes the same number of them.
        fingerprints: a text or a config that stands for something whose code or content has no stable hash,
            or should not count. The names are "train", "val" (the datasets), "collate", "key_extractors" and
            those of encoders.

    Raises:
        InvalidValueError: an option has an invalid value.

    >>> CacheConfig(mapping={"text": CacheType.GPU}, batch_size=16).type_of("text")
    <CacheType.GPU: 'gpu'>
    """

    cache_type: CacheType = CacheType.AUTO
    mapping: Mapping[str, CacheType] = field(default_factory=dict)
    key_extractors: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None = None
    batch_size: int = 32
    num_workers: int | None = 0
    save_dir: str | os.PathLike[str] | None = None
    dtype: torch.dtype | None = None
    labels: bool | None = None
    masks: Mapping[str, str] = field(default_factory=dict)
    split: bool = False
    fingerprints: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_type", _parse_cache_type(self.cache_type, "cache_type"))
        mapping = {
            name: _parse_cache_type(kind, f"mapping[{name!r}]")
            for name, kind in _get_dict(self, "mapping").items()
        }
        object.__setattr__(self, "mapping", mapping)
        object.__setattr__(self, "num_workers", self.num_workers or 0)
        for name, least in (("batch_size", 1), ("num_workers", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidValueError(f"{name} is {value!r}; give a whole number, {least} or more")
        extractors = self.key_extractors
        named: Mapping[str, object] = extractors if isinstance(extractors, Mapping) else {"": extractors}
        for name, extractor in named.items():
            if extractor is not None and not callable(extractor):
                where = f"key_extractors[{name!r}]" if name else "key_extractors"
                raise InvalidValueError(
                    f"{where} is a {type(extractor).__name__}; give a function of an item's feature"
                )
        if self.dtype is not None and self.dtype not in _STORABLE_DTYPES:
            raise InvalidValueError(
                f"dtype is {self.dtype!r}; give one of {', '.join(map(str, _STORABLE_DTYPES))}, or None for "
                "the encoder's own"
            )
        folder: object = self.save_dir
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise InvalidValueError(f"save_dir is a {type(folder).__name__}; give the path of a folder")
        _get_dict(self, "fingerprints")
        for name, keyword in _get_dict(self, "masks").items():
            if not isinstance(keyword, str):
                raise InvalidValueError(f"masks[{name!r}] is {keyword!r}; give the name of a keyword, a text")

    def type_of(self, encoder: str) -> CacheType:
        """Where the embeddings of an encoder are."""
        return self.mapping.get(encoder, self.cache_type)

    def extractor_of(self, encoder: str) -> Callable[[Any], Any] | None:
        """The key extractor of an encoder; None if its items are known by index."""
        if isinstance(self.key_extractors, Mapping):
            return self.key_extractors.get(encoder)
        return self.key_extractors

    def check_names(self, encoders: Iterable[str]) -> None:
        """Check that every encoder named in this config exists.

        Raises:
            InvalidValueError: one does not; the message has the nearest name that does.
        """
        known = list(encoders)
        extractors = self.key_extractors if isinstance(self.key_extractors, Mapping) else {}
        for option, names, more in (
            ("mapping", self.mapping, ()),
            ("key_extractors", extractors, ()),
            ("masks", self.masks, ()),
            ("fingerprints", self.fingerprints, FINGERPRINT_NAMES),
        ):
            for name in names:
                check_name_among(name, [*known, *more], f"{option} names {name!r}")


def check_name_among(name: str, known: list[str], message: str) -> None:
    """Check that ``name`` is one of ``known``.

    Raises:
        InvalidValueError: it is not; the message begins with ``message`` and has the nearest known name.
    """
    if name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, known)) or 'none'}"
    raise InvalidValueError(f"{message}, which is not an encoder here; {advice}")


def _parse_cache_type(value: object, where: str) -> CacheType:
    try:
        return CacheType(value)
    except ValueError:
        kinds = ", ".join(kind.name for kind in CacheType)
        raise InvalidValueError(f"{where} is {value!r}; give a CacheType: {kinds}") from None


def _get_dict(config: CacheConfig, name: str) -> dict[str, Any]:
    value = getattr(config, name)
    if not isinstance(value, Mapping):
        raise InvalidValueError(f"{name} is a {type(value).__name__}; give a dict by the names of encoders")
    return dict(value)
