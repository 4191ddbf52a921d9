"""Trains a dictionary for a prefix from samples, measures its gain, and has the store use it.

A part of the samples is held out for the measurement: a dictionary that saves too little on those is an
error, and is not kept. Blobs that are in the store already stay as they are, until `recompress` rewrites
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import zstandard

from castore.errors import CorruptError, DictionaryError, InvalidValueError
from castore.index.name_ranges import sized_pages, small_digests
from castore.names import check_prefix, require_several
from castore.objects.codecs import AUTO_CODEC, CODECS, check_codec
from castore.objects.dictionaries import DICTIONARY_LIMIT, LARGEST, SMALLEST, Dictionary, with_number
from castore.objects.encode import AUTO_SAVING, encode_small
from castore.records import Blob, Buffer
from castore.units import format_size, parse_count, parse_size
from castore.write.open_pack import Vanished

if TYPE_CHECKING:
    from castore.parts import Parts

#: Largest number of samples, and of their bytes: more than a hundred times the usual dictionary adds nothing.
SAMPLES = 10_000
_SAMPLE_BYTES = 16 << 20
#: Largest size of a dictionary in bytes: the default of zstd's own trainer.
SIZE = 112_000
# Least number of samples: fewer predict nothing about later blobs.
_LEAST = 100
# One sample of so many is held out.
_HELD_OUT = 5
# A dictionary takes at most one such part of the samples' bytes: a larger one would be overfitted.
_PART = 20
# Names that are read at a time, and at most as many records that are then written.
_BATCH = 200


class Trained(NamedTuple):
    """A dictionary that was made, and its gain on held-out samples.

    Attributes:
        prefix: new blobs below it are compressed with the dictionary.
        id: its number, 8 hexadecimal digits.
        size: its bytes.
        samples, held_out: the number of samples it was made from, and of those it was measured on.
        plain, before, after: bytes of the held-out samples uncompressed, as stored without it, and with it.
    """

    prefix: str
    id: str
    size: int
    samples: int
    held_out: int
    plain: int
    before: int
    after: int

    @property
    def saving(self) -> float:
        """Part of the stored bytes that it saves."""
        return 1 - self.after / self.before


class Rewritten(NamedTuple):
    """The outcome of `recompress`.

    Attributes:
        looked_at, blobs: the number of small blobs that it read, and of those that it rewrote.
        before, after: stored bytes of the rewritten blobs.
    """

    looked_at: int
    blobs: int
    before: int
    after: int


def train(
    parts: Parts, prefix: str, data: Iterable[bytes] | None, samples: int, size: int | str, level: int | None
) -> Trained:
    """Make a dictionary and use it from now on. See `Store.train_dictionary`."""
    prefix = check_prefix(prefix)
    most = parse_size(size)
    if not SMALLEST <= most <= LARGEST:
        raise InvalidValueError(
            f"a dictionary has {format_size(SMALLEST)} to {format_size(LARGEST)}, not {format_size(most)}"
        )
    samples = parse_count(samples, "samples")
    level = _level(parts, level)
    taken = _take(_stored(parts, prefix, samples) if data is None else data, samples)
    trained, dictionary = _make(prefix, taken, most, level)
    with parts.index.write():
        parts.objects.dictionaries.add(dictionary)
        parts.prefixes.set(prefix, int(trained.id, 16))
    return trained


def _level(parts: Parts, level: int | None) -> int:
    """The given level, or the level of new blobs.

    Raises:
        InvalidValueError: there is no such level, or new blobs are not compressed with zstd.
    """
    codec, usual = parts.settings.codec, parts.settings.level
    if codec not in ("auto", AUTO_CODEC):
        raise InvalidValueError(
            f"dictionaries are for zstd, and the codec of {parts.path} is {codec}:"
            " `castore init --codec auto`"
        )
    check_codec(AUTO_CODEC, level)
    given = usual if level is None else level
    return CODECS[AUTO_CODEC].level if given is None else given


def _take(data: Iterable[bytes], samples: int) -> list[bytes]:
    """The samples of ``data`` to train from: small ones, each once, until there are enough."""
    taken: dict[bytes, None] = {}
    size = 0
    for sample in require_several(data, "train_dictionary", "samples"):
        if not isinstance(sample, bytes | bytearray | memoryview):
            raise InvalidValueError(
                f"samples of a dictionary are a list of bytes; one is {type(sample).__name__}"
            )
        if 0 < len(sample) <= DICTIONARY_LIMIT and sample not in taken:
            taken[bytes(sample)] = None
            size += len(sample)
        if len(taken) >= samples or size >= _SAMPLE_BYTES:
            break
    return list(taken)


def _stored(parts: Parts, prefix: str, samples: int) -> Iterator[bytes]:
    """Small blobs below a prefix, by digest: digests are random, so the first ones are a fair sample."""
    # Query twice as many digests, since several names may have one blob, and some blobs may be lost.
    found = small_digests(parts.index, prefix, DICTIONARY_LIMIT, 2 * samples)
    for digest in dict.fromkeys(found):
        blob = parts.index.blob(digest)
        data = None if blob is None else parts.source.fetch(blob)
        if data is not None:
            yield data


def _make(prefix: str, samples: list[bytes], most: int, level: int) -> tuple[Trained, bytes]:
    where = f"below {prefix!r}" if prefix else "in the store"
    if len(samples) < _LEAST:
        raise DictionaryError(
            f"there are too few samples {where} for a dictionary: it takes at least {_LEAST} different ones"
            f" of at most {format_size(DICTIONARY_LIMIT)}, and castore found {len(samples)}; put more first"
        )
    held_out = samples[::_HELD_OUT]
    seen: list[Buffer] = [sample for place, sample in enumerate(samples) if place % _HELD_OUT]
    size = max(SMALLEST, min(most, sum(map(len, seen)) // _PART))
    try:
        data = with_number(zstandard.train_dictionary(size, seen, level=level).as_bytes())
        dictionary = Dictionary(data)
    except (zstandard.ZstdError, CorruptError) as error:
        raise DictionaryError(
            f"no dictionary can be made of the {len(seen)} samples {where}: {error}"
        ) from error
    before, after = (
        sum(len(encode_small(sample, "auto", level, used)[1]) for sample in held_out)
        for used in (None, dictionary)
    )
    plain = sum(map(len, held_out))
    if after > before * (1 - AUTO_SAVING):
        raise DictionaryError(
            f"a dictionary does not pay {where}:"
            f" {len(held_out)} samples that it has not seen take {format_size(after)}"
            f" with it and {format_size(before)} without; nothing was changed"
        )
    number = f"{dictionary.number:08x}"
    return Trained(prefix, number, len(data), len(seen), len(held_out), plain, before, after), data


def recompress(parts: Parts, prefix: str, progress: Callable[[int], object] | None) -> Rewritten:
    """Rewrite small blobs with their prefix's dictionary. See `Store.recompress`."""
    prefix = check_prefix(prefix)
    done = Rewritten(0, 0, 0, 0)
    for page in sized_pages(parts.index, prefix, _BATCH):
        ready: dict[Blob, bytes] = {}
        used: dict[int, Dictionary] = {}
        for name, digest, _ in page:
            blob, dictionary = parts.index.blob(digest), parts.prefixes.dictionary(name)
            if blob is None or dictionary is None or not _may_be_rewritten(blob):
                continue
            payload = _shorter(parts, blob, dictionary)
            done = done._replace(looked_at=done.looked_at + 1)
            if payload is not None:
                ready[blob] = payload
                used[dictionary.number] = dictionary
        done = _rewrite(parts, ready, used, done)
        if progress is not None:
            progress(sum(size for _, _, size in page))
    return done


def _may_be_rewritten(blob: Blob) -> bool:
    return blob.pack > 0 and 0 < blob.size <= DICTIONARY_LIMIT and blob.codec in ("none", AUTO_CODEC)


def _shorter(parts: Parts, blob: Blob, dictionary: Dictionary) -> bytes | None:
    """The blob's frame with a dictionary, or None if that saves too little."""
    data = parts.source.fetch(blob)
    if data is None:
        return None
    payload = dictionary.compress(data, _level(parts, None))
    return payload if len(payload) <= blob.stored * (1 - AUTO_SAVING) else None


def _rewrite(
    parts: Parts, ready: dict[Blob, bytes], used: dict[int, Dictionary], done: Rewritten
) -> Rewritten:
    if not ready:
        return done
    _, blobs, before, after = done
    try:
        with parts.index.write() as txn:
            for dictionary in used.values():
                parts.writer.pack.require_dictionary(dictionary)
            for blob, payload in ready.items():
                if txn.blob(blob.digest) == blob:  # else gc or a put has changed it meanwhile
                    parts.writer.pack.rewrite(
                        txn, blob._replace(codec=AUTO_CODEC, stored=len(payload)), payload
                    )
                    blobs, before, after = blobs + 1, before + blob.stored, after + len(payload)
    except Vanished:
        return done  # the dictionary was removed: these blobs stay as they are
    return Rewritten(done.looked_at, blobs, before, after)
