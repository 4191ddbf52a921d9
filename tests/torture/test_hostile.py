"""Objects, records, tables, settings and an index that lie: clear errors, bounded memory, nothing outside.

Hostile things in the place of files are in test_plants.py.
"""

from __future__ import annotations

import gzip
import random
import sqlite3
import struct
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import blake3
import msgpack
import pytest
import xxhash
import zstandard

from castore import Store, StoreError
from castore.index.journal import pack_record
from castore.objects.codecs import FRAME_SIZE
from castore.objects.frames import build_trailer
from castore.records import entry_check
from tests.helpers import LONG, noise
from tests.torture.victims import BOUND, exercise

Figure = Callable[[str], None]


SETTINGS = [
    b"", b"null", b"[]", b"7", b'"x"', b"[" * 100_000, b'{"a":' * 60_000, b"\xff\xfe", b"{}",
    b'{"format": 2}',
    b'{"format": 1, "codec": "evil"}', b'{"format": 1, "codec": 7}', b'{"format": 1, "level": 1e999}',
    b'{"format": 1, "max_size": -1}', b'{"format": 1, "max_size": "x"}', b'{"format": 1, "max_size": {}}',
    b'{"format": 1, "ttl": NaN}', b'{"format": 1, "ttl": "forever"}', b'{"format": 1, "shared": ["root"]}',
    b'{"format": 1, "shared": "no such group"}', b'{"format": true}', b" " * 5_000_000 + b'{"format": 1}',
    b'{"format": 1, "max_size": ' + b"9" * 60_000 + b"}",
]  # fmt: skip


def test_settings_of_any_content_are_an_error_or_settings(victim: Path) -> None:
    for number, content in enumerate(SETTINGS):
        (victim / "castore.json").write_bytes(content)
        if LONG or number % 8 == 2:
            exercise(victim)
        with suppress(StoreError), Store(victim, memory=0) as store:
            assert store.get("large/one") == noise(30_000)


# Objects and records that lie


def claim(
    victim: Path, digest: bytes, size: int, stored: int, codec: str, pack: int = 0, offset: int = 0
) -> None:
    """Make the index map an entry ``lie`` to those bytes."""
    with closing(sqlite3.connect(victim / "index.sqlite")) as db:
        db.execute(
            "INSERT INTO blobs VALUES (?, ?, ?, ?, ?, ?, 1, NULL)",
            (digest, size, stored, codec, pack, offset),
        )
        db.execute(
            "INSERT INTO entries VALUES ('lie', ?, ?, 'bytes', NULL, 1.0, NULL, 1.0, 0, ?)",
            (digest, size, entry_check("lie", digest)),
        )
        db.commit()


def _claiming(bomb: bytes, size: int) -> bytes:
    """A zstd frame whose header claims another size."""
    frame = bytearray(bomb)
    assert frame[4] & 0xC0 in (0x80, 0xC0)
    width = 4 if frame[4] & 0xC0 == 0x80 else 8
    at = 5 + (0 if frame[4] & 0x20 else 1)
    frame[at : at + width] = size.to_bytes(width, "little")
    return bytes(frame)


BOMB = 300_000_000


@pytest.mark.parametrize(
    ("codec", "frames"),
    [("zstd", 1), ("zstd", 5), ("gzip", 1), pytest.param("gzip", 5, marks=pytest.mark.matrix)],
)
def test_an_object_that_unfolds_is_damage_in_bounded_memory(victim: Path, codec: str, frames: int) -> None:
    if codec == "zstd":
        frame = _claiming(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(BOMB)), FRAME_SIZE)
    else:
        frame = gzip.compress(bytes(BOMB))
    size = frames * FRAME_SIZE
    raw = frame * frames + build_trailer(codec, size, [len(frame)] * frames, [frame[-4:]] * frames)
    digest = blake3.blake3(raw).digest()
    target = victim / "objects" / digest.hex()[:2] / (digest.hex() + {"zstd": ".zst", "gzip": ".gz"}[codec])
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(raw)
    claim(victim, digest, size, len(raw), codec)
    ended = exercise(victim)
    assert ended["read"] == 24
    assert ended["read again"] >= 24


def test_a_seek_table_that_lies_is_damage_in_bounded_memory(victim: Path, figure: Figure) -> None:
    """Seek tables with arbitrary numbers and right checks, over right frames."""
    chance = random.Random(3)
    lies = 0
    frame = zstandard.ZstdCompressor(write_content_size=True, write_checksum=True).compress(bytes(FRAME_SIZE))
    for turn in range(60):
        codec = ("zstd", "lz4", "gzip")[turn % 3]
        count = chance.choice([1, 2, 5, 1_000])
        lengths = [chance.choice([0, 1, len(frame), 2**31, 2**32 - 1]) for _ in range(count)]
        size = chance.choice([count * FRAME_SIZE, 1, 2**40, 2**61])
        trailer = build_trailer(codec, count * FRAME_SIZE, lengths, [frame[-4:]] * count)
        raw = frame * min(count, 5) + trailer
        digest = blake3.blake3(b"%d" % turn + raw).digest()
        suffix = {"zstd": ".zst", "lz4": ".lz4", "gzip": ".gz"}[codec]
        target = victim / "objects" / digest.hex()[:2] / (digest.hex() + suffix)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(raw)
        with closing(sqlite3.connect(victim / "index.sqlite")) as db:
            stored = chance.choice([len(raw), len(raw), 2**40, 0])
            db.execute("INSERT INTO blobs VALUES (?, ?, ?, ?, 0, 0, 1, NULL)", (digest, size, stored, codec))
            row = (f"lie/{turn}", digest, size, entry_check(f"lie/{turn}", digest))
            db.execute("INSERT INTO entries VALUES (?, ?, ?, 'bytes', NULL, 1.0, NULL, 1.0, 0, ?)", row)
            db.commit()
        lies += 1
    ended = exercise(victim)
    assert ended["read"] == 24, "one of the lies was taken for bytes"
    figure(f"{lies} seek tables that lie: none was believed, memory within {BOUND} MB")


def test_records_that_lie_cost_themselves_only(victim: Path, figure: Figure) -> None:
    """Heads with arbitrary numbers and right checks: in a rebuild's scan, and under the index's rows."""
    chance = random.Random(4)
    bomb = _claiming(
        zstandard.ZstdCompressor(write_content_size=True).compress(bytes(100_000_000)), FRAME_SIZE
    )
    pack = victim / "objects" / "packs" / "00000001.pack"
    lies = 0
    with pack.open("ab") as file:
        for turn in range(200):
            body = bomb[:16_000] if turn % 4 == 0 else chance.randbytes(chance.randrange(200))
            size = chance.choice([0, 1, FRAME_SIZE, 2**63, 2**64 - 1, len(body)])
            stored = chance.choice([len(body), len(body), 2**32 - 1, 0, 16_385])
            checked = struct.pack(
                "<32sQIIQ",
                chance.randbytes(32),
                size,
                stored,
                chance.randrange(5),
                xxhash.xxh3_64_intdigest(body),
            )
            file.write(
                b"\xc5~rB"
                + (xxhash.xxh3_64_intdigest(checked) & 0xFFFFFFFF).to_bytes(4, "little")
                + checked
                + body
            )
            lies += 1
    claim(victim, noise(32), FRAME_SIZE, 16_000, "zstd", 1, pack.stat().st_size - 16_000)
    ended = exercise(victim)
    assert ended["read"] == 24
    assert ended["read again"] >= 24
    figure(f"{lies} pack records that lie: none was believed, memory within {BOUND} MB")


# The journal


def journal_record(fields: object) -> bytes:
    body: bytes = msgpack.packb(fields)
    return struct.pack("<2sHII", b"\xc5N", 0, len(body), zlib.crc32(body)) + body


def test_journal_records_that_lie_name_nothing(victim: Path, figure: Figure) -> None:
    with Store(victim, memory=0) as store:
        found = store.index.find("large/one")
        assert found is not None
        digest = found.blob.digest
    good = ["x", digest, "bytes", None, 1.0, None, 0]
    wrong: dict[int, list[Any]] = {
        0: [
            "../up",
            "/etc/passwd",
            "a/../../b",
            "",
            "a//b",
            "n\0ul",
            "x" * 5_000,
            7,
            None,
            b"bytes",
            ["list"],
            ".castore/x",
        ],
        1: [b"", b"short", digest + b"x", "text", 7, [], True],
        2: [7, None, b"bytes", []],
        3: ["{", "[]", "7", 7, b"{}", "[" * 100_000],
        4: ["now", None, float("nan"), float("inf"), "x", []],
        5: ["later", float("nan"), float("-inf"), []],
        6: [2, -1, "yes", None, []],
    }
    lies = [[*good[:at], value, *good[at + 1 :]] for at, values in wrong.items() for value in values]
    bodies = [journal_record(lie) for lie in lies]
    shapes: list[object] = [[], {}, 7, None, good[:-1], [*good, 0], [good]]
    bodies += [journal_record(lie) for lie in shapes]
    deep: bytes = b"\x91" * 1_000_000 + b"\xc0"
    long = b"\xdd\xff\xff\xff\xff" + bytes(1_000)
    for body in (deep, long, b"\xc1", b""):
        bodies.append(struct.pack("<2sHII", b"\xc5N", 0, len(body), zlib.crc32(body)) + body)
    segment = victim / "objects" / "names" / "00000001.names"
    with segment.open("ab") as file:
        for body in bodies:
            file.write(body)
        file.write(pack_record(("good after all", digest, "bytes", None, 1.0, None, 0)))
    (victim / "index.sqlite").unlink()
    ended = exercise(victim)
    assert ended["rebuild"] == 25, ended
    with Store(victim, memory=0) as store:
        assert store.get("good after all") == noise(30_000)
    figure(f"{len(bodies)} journal records that lie: none named anything, the good one behind them did")


def test_a_beacon_of_any_content_only_costs_work(victim: Path) -> None:
    chance = random.Random(6)
    for content in (
        b"",
        b"\xff" * 32,
        bytes(24),
        chance.randbytes(32),
        chance.randbytes(5_000),
        struct.pack("<QQQ", 1, 10**9, 5),
    ):
        (victim / "locks" / "beacon").write_bytes(content)
        with Store(victim, memory="1MB") as store:
            store.put("after", content + b"x")
            assert store.get("after") == content + b"x"
    (victim / "index.sqlite").unlink()
    assert exercise(victim)["rebuild"] >= 25, "names were written where no rebuild looks"


# The index as a program


def test_an_index_that_brings_its_own_program_is_refused(victim: Path) -> None:
    for sql in (
        "CREATE TRIGGER evil AFTER INSERT ON entries BEGIN DELETE FROM blobs; END",
        "CREATE VIEW evil AS SELECT 1",
        "CREATE TABLE evil (x)",
        "CREATE UNIQUE INDEX evil ON entries (digest)",
    ):
        with closing(sqlite3.connect(victim / "index.sqlite")) as db:
            db.execute(sql)
            db.commit()
        ended = exercise(victim)
        assert "'evil' in it was not made by castore" in ended["open"]
        assert ended["rebuild"] == 24
        assert ended["read again"] == 24
        with Store(victim, memory=0) as store:
            store.delete_many(["new/small", "new/large", "new/computed"])


def test_an_index_whose_table_never_ends_is_refused(victim: Path) -> None:
    endless = (
        "CREATE VIEW entries AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL "
        "SELECT x FROM n) SELECT x AS name FROM n"
    )
    with closing(sqlite3.connect(victim / "index.sqlite")) as db:
        db.executescript(f"DROP TABLE entries; {endless};")
        db.commit()
    ended = exercise(victim)
    assert "cannot be used" in ended["open"]
    assert ended["read again"] == 24
