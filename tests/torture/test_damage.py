"""Damage to the bytes of objects and packs: noticed by every way of reading and by verify; never served.

A flipped bit is *harmless* if the object still decodes to exactly the bytes that were put: the bit is one
that no decoder reads (a reserved bit or the time in a frame's header, the padding behind a deflate block).
Only scans read the head of a pack record. If a bit in it flips, reads continue and verify reports it.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import castore_fuse
from castore import CorruptError, Store
from castore.objects.codecs import FRAME_SIZE
from castore.objects.frames import read_table
from castore.objects.packs import FILE_HEAD
from castore.records import HEAD_SIZE
from tests.helpers import flip, mixed, noise, overwrite, payload, recount, text
from tests.torture.hurting import CODECS, SEVERAL, Stored, answer, errno_of, fill, ranges, stored

Scale = Callable[[int, int], int]
Figure = Callable[[str], None]
#: Bytes at the start of a frame in which a decoder may ignore a bit: gzip's header, and zstd's descriptor.
_OVERLOOKED = {"gzip": 11, "zstd": 6}


def copy_of(store: Store, name: str) -> Store:
    """The same store again, so that an object that one reader quarantines is still there for the next."""
    target = store.path.with_name(name)
    shutil.copytree(store.path, target, copy_function=shutil.copy2)
    return Store(target, memory=0)


def may_be_overlooked(store: Store, name: str, place: int) -> bool:
    """Whether a byte of an object may be ignored by a decoder: see the top of this file."""
    found = store.index.find(name)
    assert found is not None
    blob, (path, offset, length) = found.blob, payload(store, name)
    if blob.codec not in _OVERLOOKED:
        return False
    raw = path.read_bytes()[offset : offset + length]
    starts = [0, length]
    if blob.pack == 0:
        starts = list(read_table(blob.codec, blob.size, length, lambda at, size: raw[at : at + size]).offsets)
    at = place - offset
    if any(start <= at < start + _OVERLOOKED[blob.codec] for start in starts[:-1]):
        return True
    # The last byte of the deflate blocks, before CRC and length, may end in padding.
    return blob.codec == "gzip" and any(end - 9 == at for end in starts[1:])


def test_one_flipped_bit_in_each_object_is_seen_by_every_reader(
    store: Store, scale: Scale, figure: Figure
) -> None:
    values = fill(store, scale(250, 5_000))
    chance = random.Random(20)
    flipped: dict[str, tuple[Stored, int, int]] = {}
    excused = set()
    for name in values:
        place = stored(store, name)
        at, bit = place.start + chance.randrange(place.length), chance.randrange(8)
        if may_be_overlooked(store, name, at):
            excused.add(name)
        flipped[name] = place, at, bit
    store.close()
    for place, at, bit in flipped.values():
        flip(place.path, at, bit)
    in_head = {
        name
        for name, (place, at, _) in flipped.items()
        if place.path.suffix == ".pack" and at < place.start + HEAD_SIZE
    }

    with copy_of(store, "for verify") as copy:
        reported = {name for finding in copy.verify().bad for name in finding.names}
    with copy_of(store, "for get") as copy:
        got = {name: answer(lambda name=name: copy.get(name)) for name in values}  # type: ignore[misc]
        assert copy.stat().corrupt == sum(data is None for data in got.values())
        recount(copy)
    with copy_of(store, "for ranges") as copy:
        for name, data in values.items():
            for start, piece in ranges(copy, name, len(data)):
                assert piece == data[start : start + len(piece)], f"{name} at {start}: other bytes"
    with copy_of(store, "for the mount") as copy, castore_fuse.mounted(copy) as root:
        mounted: dict[str, bytes] = {}
        for name in values:
            error = errno_of(
                lambda name=name: mounted.update({name: (root / name).read_bytes()})  # type: ignore[misc]
            )
            assert error in (None, errno.EIO)

    missed = {name for name, data in got.items() if data is None}
    assert all(data == values[name] for name, data in got.items() if data is not None), "other bytes"
    assert all(data == values[name] for name, data in mounted.items()), "other bytes by the mount"
    assert missed == set(values) - set(mounted)
    assert missed | in_head <= reported, "verify overlooked what reads or scans see"
    harmless = set(values) - reported
    assert harmless <= excused, "a bit that a decoder should look at was overlooked"
    assert len(harmless) <= len(values) // 50
    kinds = Counter(values and name.partition("/")[0] for name in missed)
    assert len(missed) >= len(values) * 0.8
    assert len(kinds) == len(CODECS), f"not all codecs were hit: {kinds}"
    figure(
        f"one bit flipped in each of {len(values)} objects and pack records: verify reports {len(reported)},"
        f" get and the mount refuse {len(missed)} (the others' bytes are right:"
        f" {len(reported - missed)} hit heads of records that reads do not need, {len(harmless)} bits"
        " that no decoder looks at); 0 served"
    )


@pytest.mark.parametrize("codec", CODECS)
def test_an_object_truncated_at_any_length_is_seen(
    store: Store, codec: str, scale: Scale, figure: Figure
) -> None:
    data = noise(17_000)
    store.put("a", data, codec=codec)
    found = store.index.find("a")
    assert found is not None
    path, _, length = payload(store, "a")
    assert found.blob.pack == 0
    path.chmod(0o600)
    lengths = [*range(0, length - 200, scale(97, 1)), *range(length - 200, length)]
    for cut in sorted(lengths, reverse=True):
        os.truncate(path, cut)
        reader = store.objects.open(found.blob)
        try:
            with pytest.raises(CorruptError):
                reader.read_all()
            with pytest.raises(CorruptError):
                reader.read(0, 100)
        finally:
            reader.close()
    assert len(store.verify().bad) == 1
    assert store.get("a") is None
    figure(f"a {codec} object of {length} bytes cut at {len(lengths)} lengths: seen at each")


def test_a_pack_truncated_at_any_length_keeps_the_records_before_it(store: Store, figure: Figure) -> None:
    values = {f"n/{number}": noise(200 + number, number) for number in range(4)}
    store.put_many(values.items())
    path, _, _ = payload(store, "n/0")
    ends = {name: stored(store, name).end for name in values}
    whole = path.read_bytes()
    blobs = {name: store.index.find(name).blob for name in values}  # type: ignore[union-attr]  # just put
    for cut in range(len(whole) - 1, -1, -1):
        os.truncate(path, cut)
        for name, data in values.items():
            if ends[name] <= cut:
                assert store.objects.read_small(blobs[name]) == data
            else:
                with pytest.raises(CorruptError):
                    store.objects.read_small(blobs[name])
    path.write_bytes(whole[: ends["n/1"]])
    bad = {name for finding in store.verify().bad for name in finding.names}
    assert bad == {name for name in values if ends[name] > ends["n/1"]}
    figure(
        f"a pack of {len(values)} records cut at each of {len(whole)} "
        "lengths: records before the cut are read"
    )


@pytest.mark.parametrize("codec", CODECS)
def test_a_zeroed_page_costs_its_frame_and_is_seen(
    store: Store, codec: str, scale: Scale, figure: Figure
) -> None:
    data = mixed(SEVERAL)
    store.put("a", data, codec=codec)
    found = store.index.find("a")
    assert found is not None
    path, _, length = payload(store, "a")
    checksums = store.index.checksums(found.blob.digest)
    whole = path.read_bytes()
    pages = range(0, length, 4096)[:: scale(4, 1)]
    served = 0
    for page in pages:
        overwrite(path, page, bytes(min(4096, length - page)))
        reader = store.objects.open(found.blob, checksums=checksums)
        try:
            with pytest.raises(CorruptError):
                reader.read_all()
            for start in range(0, len(data), FRAME_SIZE):
                try:
                    piece = reader.read(start, FRAME_SIZE)
                except CorruptError:
                    continue
                assert piece == data[start : start + FRAME_SIZE]
                served += 1
        finally:
            reader.close()
        overwrite(path, page, whole[page : page + 4096])
    # Frames outside the page are read, unless the page hit the seek table.
    assert served >= len(pages) - 2
    overwrite(path, pages[1], bytes(4096))
    assert len(store.verify().bad) == 1
    figure(
        f"{len(pages)} pages of a {codec} object zeroed, one at a time: all "
        f"seen, the other frame read {served} times"
    )


def test_a_pack_with_a_zeroed_page_loses_the_records_that_touch_it(store: Store, figure: Figure) -> None:
    values = {f"n/{number}": text(3_000, number) + noise(500, number) for number in range(100)}
    store.put_many(values.items())
    places = {name: stored(store, name) for name in values}
    path = places["n/0"].path
    assert path.stat().st_size > 10 * 4096
    hit = set()
    for page in (0, 3 * 4096, 4 * 4096, 9 * 4096):
        overwrite(path, page, bytes(4096))
        hit |= {
            name
            for name, place in places.items()
            if place.start < page + 4096 and place.end > page and place.end > len(FILE_HEAD)
        }
    got = dict(zip(values, store.get_many(values), strict=True))
    assert all(data in (None, values[name]) for name, data in got.items())
    lost = {name for name, data in got.items() if data is None}
    assert lost <= hit
    bad = {name for finding in store.verify().bad for name in finding.names}
    assert bad == hit
    figure(f"4 zeroed pages of a pack of {len(values)} records: {len(bad)} records lost, the others are read")


def test_an_object_that_cannot_be_read_is_damage_and_not_an_accident(store: Store, tmp_path: Path) -> None:
    """An unreadable sector is EIO from read(2).

    A folder in an object's place is an error of the same kind.
    """
    store.put("sector", mixed(40_000), codec="zstd")
    store.put("good", mixed(40_001), codec="zstd")
    path, _, _ = payload(store, "sector")
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"x")
    assert store.get("sector") is None
    assert store.get("good") == mixed(40_001)
    report = store.verify()
    assert [name for finding in report.bad for name in finding.names] == ["sector"]
    store.put("sector", mixed(40_000), codec="zstd")
    assert store.get("sector") == mixed(40_000)
    assert store.verify().bad == []
