"""`docs/format.md` is true: a store is taken apart with the page's tables alone, and every byte is accounted
for.

Reads the tables from the page, so that a table that is changed without the code, or the code without the
table, fails here. Must not use castore's own parsers: what they agree on among themselves proves nothing.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import lz4.frame
import msgpack
import pytest
import xxhash
import zstandard

from castore import Store
from castore.settings import load
from tests.helpers import mixed, noise, records, text

pytestmark = pytest.mark.usefixtures("forked_processes")

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
FRAME = 262_144
_ROW = re.compile(r"\| (\d+) \| (\d+) \| (u8|u16|u32|u64|bytes) \| (.+?) \| (?:`(.+?)`)? ?\|")


class Field(NamedTuple):
    """One row of a table of the page."""

    offset: int
    size: int
    kind: str
    words: str
    value: str | None

    def of(self, raw: bytes) -> int | bytes:
        part = raw[self.offset : self.offset + self.size]
        return part if self.kind == "bytes" else int.from_bytes(part, "little")


def tables(heading: str) -> list[list[Field]]:
    """The layout tables below a heading of the page, in their order."""
    section = re.split(rf"^#+ {heading}$", PAGE, flags=re.M)[1]
    section = re.split(r"^#", section, flags=re.M)[0]
    found = []
    for table in section.split("| offset | size |")[1:]:
        rows = [_ROW.match(line) for line in table.partition("\n\n")[0].splitlines()[2:]]
        fields = [Field(int(row[1]), int(row[2]), row[3], row[4], row[5]) for row in rows if row]
        assert len(fields) == len(rows), f"a row under {heading!r} is not understood"
        found.append(fields)
    return found


def parse(raw: bytes, fields: list[Field]) -> list[Any]:
    """The fields of ``raw``, whose constants must be what the page says and which they must fill without
    gap.
    """
    assert len(raw) == length(fields)
    values = []
    position = 0
    for field in fields:
        assert field.offset == position, field.words
        assert field.kind == "bytes" or field.kind == f"u{8 * field.size}", field.words
        position += field.size
        value = field.of(raw)
        if field.value is not None:
            wanted = bytes.fromhex(field.value) if field.kind == "bytes" else int(field.value, 16)
            assert value == wanted, field.words
        values.append(value)
    return values


def length(fields: list[Field]) -> int:
    return fields[-1].offset + fields[-1].size


def frames_of(data: bytes) -> list[bytes]:
    return [data[start : start + FRAME] for start in range(0, max(1, len(data)), FRAME)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store", memory=0) as store:
        yield store


def query(store: Store, sql: str, *parameters: object) -> list[Any]:
    with closing(sqlite3.connect(store.path / "index.sqlite")) as db:
        return db.execute(sql, parameters).fetchall()


def loose(store: Store, name: str, suffix: str) -> bytes:
    entry = store.entry(name)
    assert entry is not None
    path = store.path / "objects" / entry.digest[:2] / f"{entry.digest}{suffix}"
    assert path.stat().st_mode & 0o777 == 0o400
    return path.read_bytes()


@pytest.mark.parametrize("size", [60_000, FRAME, FRAME + 1, 3 * FRAME + 17])
def test_a_zstd_object_is_what_the_page_says(disk: Store, size: int) -> None:
    head, row, foot = tables("zstd trailer")
    data = mixed(size)
    disk.put("x", data, codec="zstd")
    raw = loose(disk, "x", ".zst")
    count, _, _ = parse(raw[-length(foot) :], foot)
    rows_at = len(raw) - length(foot) - count * length(row)
    assert parse(raw[rows_at - length(head) : rows_at], head)[1] == len(raw) - rows_at
    assert count == len(frames_of(data))
    at = 0
    for index, frame in enumerate(frames_of(data)):
        stored, plain, check = parse(raw[rows_at + index * length(row) :][: length(row)], row)
        part = raw[at : at + stored]
        assert zstandard.ZstdDecompressor().decompress(part) == frame
        assert zstandard.frame_content_size(part) == plain == len(frame)
        assert check == xxhash.xxh64_intdigest(frame) & 0xFFFFFFFF == int.from_bytes(part[-4:], "little")
        at += stored
    assert at == rows_at - length(head)


def test_an_lz4_object_is_what_the_page_says(disk: Store) -> None:
    head = tables("zstd trailer")[0]
    row, foot = tables("lz4 trailer")
    data = mixed(2 * FRAME + 5)
    disk.put("x", data, codec="lz4")
    raw = loose(disk, "x", ".lz4")
    count = parse(raw[-length(foot) :], foot)[0]
    rows_at = len(raw) - length(foot) - count * length(row)
    assert parse(raw[rows_at - length(head) : rows_at], head)[1] == len(raw) - rows_at
    at = 0
    for index, frame in enumerate(frames_of(data)):
        stored, plain = parse(raw[rows_at + index * length(row) :][: length(row)], row)
        part = raw[at : at + stored]
        assert lz4.frame.decompress(part) == frame
        assert lz4.frame.get_frame_info(part)["content_size"] == plain == len(frame)
        assert int.from_bytes(part[-4:], "little") == xxhash.xxh32_intdigest(frame)
        at += stored
    assert at == rows_at - length(head)


def test_a_gzip_object_is_what_the_page_says(disk: Store) -> None:
    head, end = tables("gzip trailer")
    data = mixed(2 * FRAME + 5)
    disk.put("x", data, codec="gzip")
    raw = loose(disk, "x", ".gz")
    empty = bytes.fromhex("03 00 00 00 00 00 00 00 00 00")
    assert f"`{empty.hex(' ')}`" in PAGE
    end_at = len(raw) - len(empty) - length(end)
    begin, count, size, check = parse(raw[end_at : end_at + length(end)], end)
    assert (count, size) == (len(frames_of(data)), len(data))
    assert raw[end_at - length(head) :][12:14] == b"CE"
    assert zlib.crc32(raw[begin : end_at - length(head)]) == check
    _, _, _, _, extra, _, kind, body = parse(raw[begin : begin + length(head)], head)
    assert (kind, body, extra) == (b"T", 4 * count, 4 * count + 4)
    body_at = begin + length(head)
    assert raw[body_at + body :][: len(empty)] == empty
    assert body_at + body + len(empty) + length(head) == end_at
    at = 0
    for index, frame in enumerate(frames_of(data)):
        stored = int.from_bytes(raw[body_at + 4 * index :][:4], "little")
        assert zlib.decompress(raw[at : at + stored], wbits=31) == frame
        at += stored
    assert at == begin


def test_a_raw_object_is_the_blob_and_its_checksums_are_in_the_index(disk: Store) -> None:
    one, several = noise(FRAME), noise(2 * FRAME + 5)
    disk.put("one", one)
    disk.put("several", several)
    assert loose(disk, "one", "") == one
    assert loose(disk, "several", "") == several
    rows = query(disk, "SELECT digest, frames FROM checksums")
    sums = b"".join(xxhash.xxh3_64_intdigest(frame).to_bytes(8, "little") for frame in frames_of(several))
    assert rows == [(blake3.blake3(several).digest(), sums)]


def test_a_pack_is_what_the_page_says(disk: Store) -> None:
    (head,) = tables("Packs")
    begin = bytes.fromhex(re.search(r"16 bytes `([0-9a-f ]+)`", PAGE)[1])  # type: ignore[index]
    datas = [b"", text(5000), noise(700), text(9000, 2), text(9000, 3)]
    codecs = ["none", "zstd", "none", "lz4", "gzip"]
    for data, codec in zip(datas, codecs, strict=True):
        disk.put(f"n/{len(data)}/{codec}", data, codec=codec)
    raw = (disk.path / "objects" / "packs" / "00000001.pack").read_bytes()
    assert raw.startswith(begin)
    at = len(begin)
    for data, codec in zip(datas, codecs, strict=True):
        _, check, digest, size, stored, kind, payload_check = parse(raw[at : at + length(head)], head)
        payload = raw[at + length(head) :][:stored]
        assert check == xxhash.xxh3_64_intdigest(raw[at + 8 : at + length(head)]) & 0xFFFFFFFF
        assert payload_check == xxhash.xxh3_64_intdigest(payload)
        assert (digest, size) == (blake3.blake3(data).digest(), len(data))
        assert f"{kind} {codec}" in head[5].words
        row = query(disk, "SELECT pack, offset, stored FROM blobs WHERE digest = ?", digest)
        assert row == [(1, at + length(head), stored)]
        at += length(head) + stored
    assert at == len(raw)


def test_the_largest_packed_and_the_smallest_loose_blob_are_where_the_page_says(disk: Store) -> None:
    assert "16,384 bytes or less as stored" in PAGE
    disk.put("packed", noise(16_384))
    disk.put("loose", noise(16_385))
    rows = dict(query(disk, "SELECT stored, pack FROM blobs"))
    assert rows == {16_384: 1, 16_385: 0}


def journal(path: Path) -> Iterator[list[Any]]:
    (head,) = tables("The names journal")
    raw = path.read_bytes()
    at = 0
    while at < len(raw):
        _, _, size, check = parse(raw[at : at + length(head)], head)
        payload = raw[at + length(head) :][:size]
        assert zlib.crc32(payload) == check
        yield msgpack.unpackb(payload)
        at += length(head) + size


def test_the_journal_and_the_beacon_are_what_the_page_says(disk: Store) -> None:
    words = tables("The beacon")[0]
    beacon = disk.path / "locks" / "beacon"
    disk.put("a", b"1", metadata={"k": 1}, ttl=60)
    before = parse(beacon.read_bytes(), words)
    disk.pin("a")
    disk.delete("a")
    first, pinned, gone = journal(disk.path / "objects" / "names" / f"{before[1]:08d}.names")
    assert first[:4] == ["a", blake3.blake3(b"1").digest(), "bytes", '{"k": 1}']
    assert first[5] == pytest.approx(first[4] + 60, abs=1)
    assert (first[6], pinned[6], pinned[:6]) == (0, 1, first[:6])
    assert gone[:2] == ["a", None]
    after = parse(beacon.read_bytes(), words)
    assert after[0] > before[0]
    disk.put("b", b"2")
    disk.index.snapshot_journal()
    number = parse(beacon.read_bytes(), words)[1]
    assert number == before[1] + 1
    folder = disk.path / "objects" / "names"
    fresh, snapshot = (folder / f"{number:08d}{suffix}" for suffix in (".names", ".snapshot"))
    assert sorted(folder.iterdir()) == [fresh, snapshot]
    assert [record[0] for record in journal(snapshot)] == ["b"]
    assert fresh.stat().st_size == 0
    disk.put("c", b"3")
    assert [record[0] for record in journal(fresh)] == ["c"]


def test_replaying_the_journal_as_the_page_says_gives_the_names_there_are(disk: Store) -> None:
    for name in ("a", "b", "c"):
        disk.put(name, name.encode())
    disk.index.snapshot_journal()
    disk.delete("b")
    disk.put("d", b"d")
    folder = disk.path / "objects" / "names"
    newest = max(folder.glob("*.snapshot"))
    segments = sorted(path for path in folder.glob("*.names") if int(path.stem) >= int(newest.stem))
    last = {}
    for path in (newest, *segments):
        last.update({record[0]: record[1] for record in journal(path)})
    names = {name: digest for name, digest in last.items() if digest is not None}
    assert names == dict(query(disk, "SELECT name, digest FROM entries"))
    assert sorted(names) == ["a", "c", "d"]


def test_a_dictionary_is_what_the_page_says(disk: Store) -> None:
    (head,) = tables("Dictionaries")
    disk.train_dictionary("records/json", records(400))
    data = records(1, 2)[0]
    disk.put("records/json/x", data)
    folder = disk.path / "objects" / "dicts"
    chosen = json.loads((folder / "prefixes.json").read_text())
    (name,) = chosen.values()
    assert list(chosen) == ["records/json"]
    raw = (folder / f"{name}.zdict").read_bytes()
    assert raw == (folder / f"{name}.spare").read_bytes()
    _, number = parse(raw[: length(head)], head)
    drawn = int.from_bytes(blake3.blake3(raw[8:]).digest(length=8), "little")
    assert "32,768 plus the remainder" in PAGE
    assert number == int(name, 16) == 32_768 + drawn % 2_147_450_880
    assert 256 <= len(raw) <= 1 << 20
    ((pack, at, stored),) = query(disk, "SELECT pack, offset, stored FROM blobs")
    frame = (disk.path / "objects" / "packs" / f"{pack:08x}.pack").read_bytes()[at : at + stored]
    assert zstandard.get_frame_parameters(frame).dict_id == number
    dictionary = zstandard.ZstdCompressionDict(raw)
    assert zstandard.ZstdDecompressor(dict_data=dictionary).decompress(frame) == data


def columns(db: sqlite3.Connection) -> dict[str, object]:
    """Tables with their columns, defaults and kinds; indexes with their text."""
    shape: dict[str, object] = {}
    for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        if "_sqlite_migrations" in name or name.startswith("sqlite_"):
            continue
        rows = db.execute(f"PRAGMA table_info({name})").fetchall()
        plain = re.sub(r"\s+", " ", re.sub(r"--[^\n]*", "", sql))
        shape[name] = (kind, rows, "WITHOUT ROWID" in plain, plain if kind == "index" else None)
    return shape


def test_the_schema_is_what_the_page_says(disk: Store) -> None:
    block = re.search(r"```sql\n(.*?)```", PAGE, re.S)
    assert block is not None
    with (
        closing(sqlite3.connect(":memory:")) as documented,
        closing(sqlite3.connect(disk.path / "index.sqlite")) as real,
    ):
        documented.executescript(block[1])
        assert columns(documented) == columns(real)
    assert query(disk, "PRAGMA journal_mode") == [("wal",)]
    assert f"pages of {query(disk, 'PRAGMA page_size')[0][0]:,} bytes" in PAGE
    assert f"`PRAGMA user_version` is {query(disk, 'PRAGMA user_version')[0][0]}." in PAGE


def test_the_settings_file_is_what_the_page_says(disk: Store) -> None:
    block = re.search(r"```json\n(.*?)```", PAGE, re.S)
    assert block is not None
    assert json.loads(block[1]) == json.loads((disk.path / "castore.json").read_text())
    assert load(disk.path) is not None


def test_every_file_of_a_store_stands_in_the_page_with_its_mode(disk: Store) -> None:
    disk.put("small", b"1")
    disk.put("large", noise(20_000))
    disk.get_or_compute("computed", lambda: "value")
    disk.index.snapshot_journal()
    disk.train_dictionary("records", records(400))
    disk.add_remote("team", (disk.path.parent / "bucket").as_uri())
    disk.push(to="team")
    rows = re.findall(r"^\| (`.+?`.*?) \| .+? \| (\d{4})? ?\|$", PAGE, re.M)
    modes = {}
    for paths, mode in rows:
        for path in re.findall(r"`(.+?)`", paths):
            modes[path] = mode
    kinds = {
        r"objects/../[0-9a-f]{64}": "objects/ab/abcd….zst",
        r"objects/dicts/[0-9a-f]{8}\.zdict": "objects/dicts/1a2b3c4d.zdict",
        r"objects/dicts/[0-9a-f]{8}\.spare": "objects/dicts/1a2b3c4d.spare",
        r"objects/packs/[0-9a-f]{8}\.pack": "objects/packs/0000002a.pack",
        r"objects/names/\d{8}\.names": "objects/names/00000003.names",
        r"objects/names/\d{8}\.snapshot": "objects/names/00000003.snapshot",
        r"remotes/team/remote\.json": "remotes/R/remote.json",
        r"remotes/team/main@[0-9a-f]{16}": "remotes/R/REF@H",
        r"pages/[0-9a-f]{64}": "pages/abcd…",
    }
    seen = set()
    for path in disk.path.rglob("*"):
        relative = str(path.relative_to(disk.path))
        if path.is_dir():
            assert path.stat().st_mode & 0o7777 == 0o700, relative
            continue
        kind = next((kind for pattern, kind in kinds.items() if re.fullmatch(pattern, relative)), relative)
        assert kind in modes, f"{relative} is not in the page"
        if modes[kind]:
            assert path.stat().st_mode & 0o7777 == int(modes[kind], 8), relative
        seen.add(kind)
    assert len(seen) >= 17


def test_a_temporary_file_is_named_as_the_page_says(disk: Store) -> None:
    fd, path = disk.objects.loose.create()
    os.close(fd)
    namespace, pid, started, rest = path.name.split("-")
    assert int(namespace) == os.stat("/proc/self/ns/pid").st_ino
    assert int(pid) == os.getpid()
    stat = subprocess.run(["cat", f"/proc/{os.getpid()}/stat"], capture_output=True, text=True, check=True)
    assert started == stat.stdout.rpartition(")")[2].split()[19]
    assert re.fullmatch(r"[0-9a-f]{32}\.part", rest)


def remote_columns(heading: str) -> list[str]:
    """The names of the columns of a table of pages, in the page's order."""
    section = PAGE.split(f"Columns of {heading}:")[1].split("|---|---|---|\n")[1].split("\n\n")[0]
    return [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()]


def remote_page(bucket: Path, digest: str) -> tuple[int, dict[str, Any]]:
    """The level and the columns of a page of a tree, taken apart as the page says."""
    found = re.search(r"A page is the 16 bytes `([0-9a-f \n]+)`", PAGE)
    assert found is not None
    begin = bytes.fromhex(found[1])
    raw = (bucket / "trees" / digest).read_bytes()
    assert raw.startswith(begin)
    assert blake3.blake3(raw).hexdigest() == digest
    level, *columns = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(raw[len(begin) :]))
    names = remote_columns("an inner page" if level else "a leaf")
    return level, dict(zip(names, columns, strict=True))


def cut(data: bytes, length: int) -> list[bytes]:
    return [data[start : start + length] for start in range(0, len(data), length)]


def remote_leaves(bucket: Path, digest: str) -> Iterator[dict[str, Any]]:
    """The leaves of a tree in order; each inner page says of the pages below it what is true."""
    level, columns = remote_page(bucket, digest)
    if not level:
        yield columns
        return
    for number, below in enumerate(cut(columns["pages"], 32)):
        leaves = list(remote_leaves(bucket, below.hex()))
        assert columns["firsts"][number] == leaves[0]["names"][0]
        assert columns["entries"][number] == sum(len(leaf["names"]) for leaf in leaves)
        assert columns["logical"][number] == sum(sum(leaf["sizes"]) for leaf in leaves)
        assert columns["stored"][number] == sum(sum(leaf["stored"]) for leaf in leaves)
        yield from leaves


def test_a_remote_is_what_the_page_says(disk: Store, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    contents = {f"many/{number:05}": b"%d" % number for number in range(6_000)}
    contents |= {"raw": noise(2_000_000), "frames": mixed(5 * FRAME + 1), "none": b""}
    disk.put_many(contents.items())
    disk.train_dictionary("records", records(400))
    contents["records/1"] = records(1, 5)[0]
    disk.put("records/1", contents["records/1"], metadata={"k": "v"}, ttl=1000)
    disk.add_remote("team", bucket.as_uri())
    pushed = disk.push(to="team", note="a note")

    assert json.loads((bucket / "castore-remote.json").read_text()) == {"format": 1}
    (ref,) = (path for path in (bucket / "refs").rglob("*00000001"))
    written = json.loads(ref.read_text())
    examples = [json.loads(text) for text in re.findall(r'^(\{"format":.*\})$', PAGE, re.M)]
    assert written.keys() == examples[2].keys()
    raw = (bucket / "commits" / written["commit"]).read_bytes()
    assert blake3.blake3(raw).hexdigest() == written["commit"] == pushed.commit
    commit = json.loads(raw)
    assert (commit.keys(), commit["parent"], commit["note"]) == (examples[1].keys(), None, "a note")
    assert (commit["entries"], commit["size"]) == (len(contents), sum(map(len, contents.values())))

    level, _ = remote_page(bucket, commit["tree"])
    assert level == 1, "several leaves"
    (head,) = tables("Packs")
    seen, read = {}, dict[Path, bytes]()
    for leaf in remote_leaves(bucket, commit["tree"]):
        objects, frames, at = cut(leaf["objects"], 32), cut(leaf["frames"], 20), 0
        for number, name in enumerate(leaf["names"]):
            size, stored, offset = (leaf[column][number] for column in ("sizes", "stored", "offsets"))
            digest = objects[leaf["which"][number]].hex()
            path = bucket / (f"packs/{digest}" if offset else f"objects/{digest[:2]}/{digest}")
            if path not in read:
                read[path] = path.read_bytes()
                assert blake3.blake3(read[path]).hexdigest() == digest
            data = read[path]
            payload = data[offset : offset + stored]
            if offset:
                record = parse(data[offset - length(head) : offset], head)
                assert record[2:5] == [cut(leaf["digests"], 32)[number], size, stored]
            start = 0
            for frame in frames[at : at + max(1, -(-size // FRAME))]:
                end = start + int.from_bytes(frame[:4], "little")
                assert blake3.blake3(payload[start:end]).digest(length=16) == frame[4:]
                start = end
                at += 1
            codec = ("zstd", "lz4", "gzip", "none")[leaf["codecs"][number]]
            assert "0 zstd, 1 lz4, 2 gzip, 3 none" in PAGE
            seen[name] = (cut(leaf["digests"], 32)[number], size, codec)
            assert blake3.blake3(contents[name]).digest() == seen[name][0]
            if codec == "none":
                assert payload == contents[name]
        assert at == len(frames)
    assert list(seen) == sorted(contents)
    assert seen["raw"][2] == "none"
    assert seen["frames"][2] == "zstd"
    assert {
        path for folder in ("objects", "packs") for path in (bucket / folder).rglob("*") if path.is_file()
    } == read.keys()
    (dictionary,) = (disk.path / "objects" / "dicts").glob("*.zdict")
    assert (bucket / "dicts" / dictionary.stem).read_bytes() == dictionary.read_bytes()

    kept = json.loads((disk.path / "remotes" / "team" / "remote.json").read_text())
    assert kept.keys() == examples[3].keys()
    mark = blake3.blake3(b"").hexdigest()[:16]
    base = (disk.path / "remotes" / "team" / f"main@{mark}").read_text()
    assert base == commit["tree"] + "\n"
    assert (disk.path / "pages" / base.strip()).exists()


def test_pages_of_a_remote_are_cut_where_the_page_says(disk: Store, tmp_path: Path) -> None:
    disk.put_many((f"many/{number:05}", b"%d" % number) for number in range(20_000))
    disk.add_remote("team", (tmp_path / "bucket").as_uri())
    commit = json.loads((tmp_path / "bucket" / "commits" / disk.push(to="team").commit).read_text())
    leaves = list(remote_leaves(tmp_path / "bucket", commit["tree"]))
    first = {leaf["names"][0] for leaf in leaves[1:]}
    weight = 60 + len("many/00000") + len("bytes") + 20
    names = [name for leaf in leaves for name in leaf["names"]]
    assert len(first) > 2
    assert first == {
        name for name in names[1:] if xxhash.xxh3_64_intdigest(name.encode()) * 131_072 < 2**64 * weight
    }
    _, root = remote_page(tmp_path / "bucket", commit["tree"])
    assert set(root["starts"][1:]) == {1}
