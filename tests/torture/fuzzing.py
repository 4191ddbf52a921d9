"""Castore's parsers as functions of bytes, for fuzzers: each returns or raises an error of castore's.

Anything else is a defect. Where a parser checks its input, its promise is asserted: an object that is read
has the requested digest. `SEEDS` are valid inputs of each target, to start from.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import blake3

from castore import CastoreError, settings
from castore.index.journal import pack_record, records
from castore.names import check_name, check_prefix
from castore.objects.decode import BlobReader
from castore.objects.encode import encode, encode_one, encode_small, slices
from castore.objects.frames import build_trailer, frame_count, probe_size, read_table
from castore.objects.packs import FILE_HEAD, Damage, build_record, scan
from castore.records import HEAD_SIZE, Blob
from castore.serialize.serializers import dump, load

_FOLDER = Path(tempfile.mkdtemp(prefix="castore-fuzz-"))
atexit.register(shutil.rmtree, _FOLDER)
_FILE = _FOLDER / "castore.json"
_TEXT = b"what a fuzzer starts from " * 40
_DIGEST = blake3.blake3(_TEXT).digest()


def _written(data: bytes) -> int:
    fd = os.open(_FILE, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(fd, data)
    return fd


def _object(codec: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        reader = BlobReader(Blob(_DIGEST, len(_TEXT), len(data), codec, 0, 0), _written(data))
        try:
            assert reader.read_all() == _TEXT
        finally:
            reader.close()

    return run


def _seek_table(codec: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        size = probe_size(codec, len(data), lambda at, length: data[at : at + length])
        table = read_table(codec, size, len(data), lambda at, length: data[at : at + length])
        assert len(table.offsets) == frame_count(size) + 1
        assert table.offsets[-1] <= len(data)

    return run


def pack_records(data: bytes) -> None:
    os.close(_written(data))
    covered = 0
    for found in scan(_FILE, 1):
        covered += found.length if isinstance(found, Damage) else HEAD_SIZE + found.blob.stored
    assert covered in (len(data), len(data) - len(FILE_HEAD))


def journal(data: bytes) -> None:
    fd = _written(data)
    try:
        for found in records(fd):
            if found is not None:
                assert check_name(found.name) == found.name
    finally:
        os.close(fd)


def names(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape" if len(data) % 2 else "replace")
    good = check_name(text) if len(data) % 3 else check_prefix(text)
    assert ".." not in good.split("/")
    assert "\0" not in good
    assert not good.startswith("/")


def store_settings(data: bytes) -> None:
    os.close(_written(data))
    settings.load(_FOLDER)


def recipe(data: bytes) -> None:
    from castore.recipes.recipe import parse

    parse(data.decode(errors="replace"))


def _value(serializer: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        load(data, serializer)

    return run


def _encoded(codec: str) -> bytes:
    pieces: list[bytes] = []
    encode_one(encode_small(_TEXT, codec, None)[1], len(_TEXT), codec, pieces.append)
    return b"".join(pieces)


def _several(codec: str) -> bytes:
    pieces: list[bytes] = []
    data = bytes(600_000)
    encode(slices(data), len(data), codec, None, pieces.append)
    return b"".join(pieces)


def _values() -> dict[str, bytes]:
    import numpy as np

    return {
        "msgpack": dump(
            [1, (2, "x"), {"a": 2**80, "b": b"y"}, 1.5, None, np.arange(3), {3}, Path("z"), np.ma.masked]
        )[1],
        "npy": dump(np.arange(12, dtype="<f4").reshape(3, 4))[1],
        "safetensors": dump({"a": np.ones(3, "f4"), "b": np.arange(2)})[1],
        "text": b"text",
    }


_COMPRESSED = ("zstd", "lz4", "gzip")
TARGETS: dict[str, Callable[[bytes], None]] = (
    {f"object {codec}": _object(codec) for codec in (*_COMPRESSED, "none")}
    | {f"seek table {codec}": _seek_table(codec) for codec in _COMPRESSED}
    | {f"value {serializer}": _value(serializer) for serializer in ("msgpack", "npy", "safetensors", "text")}
    | {"pack": pack_records, "journal": journal, "names": names, "settings": store_settings, "recipe": recipe}
)


def seeds() -> dict[str, bytes]:
    """A valid input for each target."""
    entry = ("a/b", _DIGEST, "bytes", '{"x": 1}', 1.0, None, 0)
    return (
        {f"object {codec}": _encoded(codec) for codec in (*_COMPRESSED, "none")}
        | {f"seek table {codec}": _several(codec) for codec in _COMPRESSED}
        | {f"value {serializer}": data for serializer, data in _values().items()}
        | {
            "pack": FILE_HEAD
            + build_record(_DIGEST, 5, "none", b"12345") * 3
            + build_trailer("gzip", 5, [5], [b""]),
            "journal": pack_record(entry) * 3,
            "names": "folder/ünï/file.txt".encode(),
            "settings": (
                b'{"format": 1, "codec": "auto", "level": null, "max_size": 7, "ttl": 5.0, "shared": null}'
            ),
            "recipe": (
                b"dataset_path: x.jsonl\nexport_path: y\nprocess:\n  - "
                b"text_length_filter:\n      min_len: 10\n"
            ),
        }
    )


def feed(target: Callable[[bytes], None], data: bytes) -> bool:
    """Whether the target accepted the bytes; False if it refused them with an error of castore's."""
    try:
        target(data)
    except CastoreError:
        return False
    return True
