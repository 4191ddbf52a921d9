"""Frames, seek tables and packs by themselves: round trips, damage, lies, and other people's tools."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
from pathlib import Path

import blake3
import lz4.frame
import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from castore import CorruptError, Store
from castore.objects.codecs import CODECS, FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.encode import encode, slices
from castore.objects.frames import build_trailer, frame_count, frame_length, read_table
from castore.objects.packs import (
    FILE_HEAD,
    Damage,
    PackFolder,
    PackRecord,
    build_record,
    read_record,
    scan,
)
from castore.records import HEAD_SIZE, LOOSE, Blob
from tests.helpers import flip, mixed, noise, payload, text

COMPRESSED = ["zstd", "lz4", "gzip"]


def stored_object(data: bytes, codec: str) -> tuple[bytes, Blob, bytes | None]:
    """A loose object's bytes, its blob and its checksums."""
    out = io.BytesIO()
    encoded = encode(slices(data), len(data), codec, None, out.write)
    digest = blake3.blake3(data).digest()
    return out.getvalue(), Blob(digest, len(data), encoded.stored, codec, LOOSE, 0), encoded.checksums


def read_back(raw: bytes, blob: Blob, checksums: bytes | None, folder: Path) -> bytes:
    """Read an object whole and by frames; both ways have to agree, or fail."""
    path = folder / "object"
    path.write_bytes(raw)
    answers = []
    for whole in (True, False):
        reader = BlobReader(blob, os.open(path, os.O_RDONLY), checksums=checksums, where=str(path))
        try:
            answers.append(reader.read_all() if whole else reader.read(0, blob.size))
        finally:
            reader.close()
    assert answers[0] == answers[1]
    return answers[0]


# Seek tables


@given(st.sampled_from(COMPRESSED), st.lists(st.integers(1, 300_000), min_size=1, max_size=40), st.data())
def test_a_seek_table_reads_back_as_it_was_built(codec: str, lengths: list[int], data: st.DataObject) -> None:
    last = data.draw(st.integers(1, FRAME_SIZE))
    size = (len(lengths) - 1) * FRAME_SIZE + last
    tails = [os.urandom(4) for _ in lengths]
    trailer = build_trailer(codec, size, lengths, tails)
    stored = sum(lengths) + len(trailer)

    def read_at(offset: int, length: int) -> bytes:
        assert offset >= sum(lengths)
        return trailer[offset - sum(lengths) :][:length]

    table = read_table(codec, size, stored, read_at)
    assert [b - a for a, b in zip(table.offsets, table.offsets[1:], strict=False)] == lengths
    if codec == "zstd":
        assert table.checksums is not None
        assert [check.to_bytes(4, "little") for check in table.checksums] == tails


@given(st.sampled_from([*COMPRESSED, "none"]), st.integers(0, 1 << 50), st.binary(max_size=400))
def test_a_hostile_seek_table_is_corrupt_or_adds_up(codec: str, size: int, raw: bytes) -> None:
    if codec == "none":
        size = min(size, 1 << 20)
    try:
        table = read_table(codec, size, len(raw), lambda offset, length: raw[offset : offset + length])
    except CorruptError:
        return
    assert len(table.offsets) == frame_count(size) + 1
    assert table.offsets[-1] <= len(raw)


@pytest.mark.parametrize("codec", [*COMPRESSED, "none"])
@pytest.mark.parametrize("size", [0, 1, 2_000, FRAME_SIZE, 3 * FRAME_SIZE + 7])
def test_objects_round_trip(codec: str, size: int, tmp_path: Path) -> None:
    data = mixed(size)
    raw, blob, checksums = stored_object(data, codec)
    assert len(raw) == blob.stored
    assert read_back(raw, blob, checksums, tmp_path) == data


@pytest.mark.parametrize("codec", [*COMPRESSED, "none"])
def test_an_object_cut_short_anywhere_is_corrupt(codec: str, tmp_path: Path) -> None:
    raw, blob, checksums = stored_object(text(90), codec)
    for length in range(len(raw)):
        with pytest.raises(CorruptError):
            read_back(raw[:length], blob, checksums, tmp_path)
        with pytest.raises(CorruptError):  # an index that trusts the file's length changes nothing
            read_back(raw[:length], blob._replace(stored=length), checksums, tmp_path)


@pytest.mark.parametrize("codec", [*COMPRESSED, "none"])
def test_no_flipped_bit_gives_other_bytes(codec: str, tmp_path: Path) -> None:
    data = noise(60)
    raw, blob, checksums = stored_object(data, codec)
    harmless = []
    for place in range(len(raw) * 8):
        bad = bytearray(raw)
        bad[place // 8] ^= 1 << place % 8
        try:
            assert read_back(bytes(bad), blob, checksums, tmp_path) == data
            harmless.append(place)
        except CorruptError:
            pass
    # Only bits that no decoder reads may change, all in the first frame's header: a reserved bit of zstd's,
    # the time and the system in gzip's, the padding of a deflate block.
    assert all(place < 11 * 8 for place in harmless)
    assert bool(harmless) == (codec in {"zstd", "gzip"})


@pytest.mark.parametrize("codec", COMPRESSED)
def test_every_flipped_bit_of_a_seek_table_is_seen(codec: str, tmp_path: Path) -> None:
    data = text(2 * FRAME_SIZE + 50)
    raw, blob, checksums = stored_object(data, codec)
    trailer = build_trailer(codec, len(data), [1, 1, 1], [bytes(4)] * 3)
    for place in range((len(raw) - len(trailer)) * 8, len(raw) * 8):
        bad = bytearray(raw)
        bad[place // 8] ^= 1 << place % 8
        with pytest.raises(CorruptError):
            read_back(bytes(bad), blob, checksums, tmp_path)


# Other people's tools


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("size", [20_000, FRAME_SIZE, 3 * FRAME_SIZE + 99])
def test_stock_tools_decode_loose_objects(store: Store, codec: str, size: int) -> None:
    data = noise(size)
    store.put("a", data, codec=codec)
    path, _, _ = payload(store, "a")
    tool = {"zstd": "zstd", "lz4": "lz4", "gzip": "gzip"}[codec]
    done = subprocess.run([tool, "-d", "-c", path], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == data
    assert subprocess.run([tool, "-t", "-q", path], capture_output=True, timeout=300).returncode == 0


def test_another_reader_of_the_seekable_format_reads_ranges(store: Store) -> None:
    pyzstd = pytest.importorskip("pyzstd")
    data = mixed(5 * FRAME_SIZE + 321)
    store.put("a", data, codec="zstd")
    path, _, _ = payload(store, "a")
    with pyzstd.SeekableZstdFile(path) as file:
        assert file.seek(0, 2) == len(data)
        for start in (0, FRAME_SIZE - 1, 3 * FRAME_SIZE + 17, len(data) - 5):
            file.seek(start)
            assert file.read(1_000) == data[start : start + 1_000]


def test_a_whole_read_refuses_zstd_frames_that_range_reads_would(tmp_path: Path) -> None:
    data = text(2 * FRAME_SIZE)
    digest = blake3.blake3(data).digest()
    for checked in (True, False):
        compressor = zstandard.ZstdCompressor(write_checksum=checked, write_content_size=True)
        frames = [compressor.compress(frame) for frame in slices(data)]
        tails = [frame[-4:] for frame in frames]
        for wrong in (False, True):
            raw = b"".join(frames) + build_trailer("zstd", len(data), [*map(len, frames)], tails)
            blob = Blob(digest, len(data), len(raw), "zstd", LOOSE, 0)
            if checked and not wrong:
                assert read_back(raw, blob, None, tmp_path) == data
            else:
                with pytest.raises(CorruptError):
                    read_back(raw, blob, None, tmp_path)
            tails[1] = bytes(4)


# Lies and bombs


def _lz4_that_claims(data: bytes, size: int) -> bytes:
    frame = bytearray(lz4.frame.compress(data, store_size=True))
    frame[6:14] = struct.pack("<Q", size)
    frame[14] = (xxhash.xxh32_intdigest(bytes(frame[4:14])) >> 8) & 0xFF
    return bytes(frame)


def _zstd_that_claims(data: bytes, size: int) -> bytes:
    honest = zstandard.ZstdCompressor(write_content_size=True).compress(data)
    frame = bytearray(honest)
    place = frame.index(struct.pack("<I", len(data)), 5)
    frame[place : place + 4] = struct.pack("<I", size)
    return bytes(frame)


BOMB = 100_000_000


@pytest.mark.parametrize(
    ("codec", "frame"),
    [
        ("gzip", lambda: gzip.compress(bytes(BOMB))),
        ("lz4", lambda: _lz4_that_claims(bytes(BOMB), FRAME_SIZE)),
        ("lz4", lambda: lz4.frame.compress(bytes(BOMB), store_size=False)),
        ("zstd", lambda: _zstd_that_claims(bytes(BOMB), FRAME_SIZE)),
        ("zstd", lambda: zstandard.ZstdCompressor().compress(bytes(BOMB))),
    ],
    ids=["gzip", "lz4 that lies", "lz4 that is silent", "zstd that lies", "zstd"],
)
def test_a_bomb_is_corrupt_in_bounded_memory(codec: str, frame: object, tmp_path: Path) -> None:
    body = frame()  # type: ignore[operator]  # one of the lambdas above
    trailer = build_trailer(codec, FRAME_SIZE, [len(body)], [body[-4:]])
    (tmp_path / "bomb").write_bytes(body + trailer)
    code = f"""
import os
from castore import CorruptError
from castore.objects.decode import BlobReader
from castore.objects.codec_threads import codec_threads
from castore.records import Blob

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) // 1024

blob = Blob(bytes(32), {FRAME_SIZE}, {len(body) + len(trailer)}, {codec!r}, 0, 0)
codec_threads.pool().submit(int).result()
before = peak()
for read in (BlobReader.read_all, lambda reader: reader.read(0, 100)):
    reader = BlobReader(blob, os.open({str(tmp_path / "bomb")!r}, os.O_RDONLY))
    try:
        read(reader)
    except CorruptError as error:
        assert "damaged" in str(error)
    else:
        raise SystemExit("the bomb was taken for bytes")
assert peak() - before < 16, f"it took {{peak() - before}} MB to see the bomb"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("codec", [*COMPRESSED, "none"])
def test_a_size_that_nothing_backs_is_corrupt_before_memory_is_asked_for(codec: str, tmp_path: Path) -> None:
    raw, blob, checksums = stored_object(text(1_000), codec)
    for size in (FRAME_SIZE + 1, 1 << 40, 1 << 60):
        with pytest.raises(CorruptError):
            read_back(raw, blob._replace(size=size), checksums, tmp_path)


# Packs


def write_pack(path: Path, payloads: list[bytes]) -> list[Blob]:
    """A pack of raw records."""
    blobs, position = [], len(FILE_HEAD)
    with path.open("wb") as file:
        file.write(FILE_HEAD)
        for data in payloads:
            digest = blake3.blake3(data).digest()
            file.write(build_record(digest, len(data), "none", data))
            blobs.append(Blob(digest, len(data), len(data), "none", 7, position + HEAD_SIZE))
            position += HEAD_SIZE + len(data)
    return blobs


def intact(path: Path) -> list[Blob]:
    return [found.blob for found in scan(path, 7) if isinstance(found, PackRecord) and found.intact]


@given(st.lists(st.binary(max_size=300), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_scan_finds_every_record(tmp_path: Path, payloads: list[bytes]) -> None:
    path = tmp_path / "pack"
    blobs = write_pack(path, payloads)
    assert list(scan(path, 7)) == [PackRecord(blob, True) for blob in blobs]
    for start in range(len(blobs)):
        begin = blobs[start].offset - HEAD_SIZE
        assert list(scan(path, 7, start=begin)) == [PackRecord(blob, True) for blob in blobs[start:]]


def test_damage_anywhere_costs_one_record(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    blobs = write_pack(path, [noise(30, seed) for seed in range(5)])
    second = blobs[2]
    for place in range(second.offset - HEAD_SIZE, second.offset + second.stored):
        flip(path, place, place % 8)
        assert intact(path) == [blob for blob in blobs if blob is not second], place
        flip(path, place, place % 8)
    assert intact(path) == blobs


def test_a_torn_end_costs_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    blobs = write_pack(path, [noise(30, seed) for seed in range(3)])
    whole = path.read_bytes()
    for length in range(blobs[1].offset + blobs[1].stored, len(whole)):
        path.write_bytes(whole[:length])
        assert intact(path) == blobs[:2]


def test_a_scan_steps_over_garbage_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    first = write_pack(path, [noise(10)])
    start = path.stat().st_size
    for garbage in (b"x", build_record(bytes(32), 5, "none", b"12345")[: HEAD_SIZE - 3], noise(1_100_000)):
        with path.open("ab") as file:
            file.write(garbage + build_record(blake3.blake3(b"after").digest(), 5, "none", b"after"))
        found = list(scan(path, 7, start=start))
        assert isinstance(found[0], Damage)
        assert isinstance(found[-1], PackRecord)
        assert found[-1].intact
        assert found[-1].blob.offset + 5 == path.stat().st_size
        start = path.stat().st_size
    assert intact(path)[0] == first[0]


def test_a_record_is_read_only_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    first, second = write_pack(path, [b"first", b"other"])
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_record(fd, second) == b"other"
        for wrong in (
            first._replace(offset=second.offset),
            second._replace(stored=4),
            second._replace(offset=9**9),
        ):
            with pytest.raises(CorruptError):
                read_record(fd, wrong)
    finally:
        os.close(fd)


def test_frames_cover_a_blob_without_gap() -> None:
    for size in (0, 1, FRAME_SIZE, FRAME_SIZE + 1, 10 * FRAME_SIZE):
        assert sum(frame_length(size, i) for i in range(frame_count(size))) == size
    assert {codec.name for codec in CODECS.values()} == {"zstd", "lz4", "gzip", "none"}


def test_an_open_pack_is_readable_for_as_long_as_somebody_holds_it(tmp_path: Path) -> None:
    folder = PackFolder(tmp_path, keep_open=1)
    for pack in (1, 2):
        folder.path(pack).write_bytes(b"pack %d" % pack)
    held = folder.open(1)
    assert folder.open(1) is held
    folder.path(1).unlink()
    folder.open(2)  # the folder closes the first one
    folder.close()
    assert os.pread(held.fd, 100, 0) == b"pack 1"
    fd = held.fd
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(FileNotFoundError):
        folder.open(1)
