"""Never other bytes: damage on disk, and names that try to lead elsewhere."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from castore import CorruptError, InvalidNameError, NotFoundError, Store, StoreError
from castore.objects.codecs import FRAME_SIZE
from castore.records import HEAD_SIZE
from tests.helpers import flip, in_processes, mixed, overwrite, payload, recount, text

CODECS = ["zstd", "lz4", "gzip", "none"]
SIZES = {"pack": 3_000, "one frame": 200_000, "many frames": 3 * FRAME_SIZE + 77}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SIZES)
def data(request: pytest.FixtureRequest) -> bytes:
    return mixed(SIZES[request.param])


def corrupt_count(store: Store) -> int:
    return store.stat().corrupt


# Damage


def test_a_flipped_bit_is_a_miss_then_counted_and_healed_by_a_put(
    store: Store, codec: str, data: bytes
) -> None:
    chance = random.Random(f"{codec} {len(data)}")
    store.put("other", text(3_000, 9), codec=codec)
    found = 0
    for turn in range(6):
        store.put("a", data, codec=codec)
        store.put("same bytes", data, codec=codec)
        path, offset, length = payload(store, "a")
        place = [0, length - 1, length // 2][turn] if turn < 3 else chance.randrange(length)
        bit = chance.randrange(8)
        flip(path, offset + place, bit)
        answer = store.get("a")
        assert answer in (None, data), "other bytes were served"
        if answer is not None:  # a bit that no decoder reads
            flip(path, offset + place, bit)
            continue
        found += 1
        assert corrupt_count(store) == found
        assert store.get("same bytes") is None
        with pytest.raises(NotFoundError):
            store.open("a")
        assert len(list((store.path / "quarantine").iterdir())) == 1
        recount(store)
    assert found >= 4
    store.put("a", data, codec=codec)
    assert store.get_many(["a", "same bytes", "other"]) == [data, data, text(3_000, 9)]
    assert store.verify().bad == []


def test_a_reader_that_loses_its_descriptor_does_not_cost_the_object_its_place(
    store: Store, codec: str
) -> None:
    data = mixed(200_000)
    store.put("a", data, codec=codec)
    found = store.index.find("a")
    assert found is not None
    reader = store.source.open_here(found.blob)
    os.close(reader._fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.read(0, 100)
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != reader._fd:
        os.dup2(nothing, reader._fd)
        os.close(nothing)
    reader.close()
    assert store.get("a") == data
    assert corrupt_count(store) == 0


def test_a_range_of_damaged_bytes_is_an_error(store: Store, codec: str, data: bytes) -> None:
    store.put("a", data, codec=codec)
    path, offset, length = payload(store, "a")
    place = min(length // 2, length - 200)
    with store.open("a") as opened:
        flip(path, offset + place)
        with pytest.raises(CorruptError, match=r"blob [0-9a-f]{64} is damaged in .*objects") as caught:
            opened.read()
        assert caught.value.digest == store.entry("a").digest  # type: ignore[union-attr]  # it is there
        assert caught.value.where is not None
        served = bytearray()
        for start in range(0, len(data), 50_000):
            opened.seek(start)
            try:
                piece = opened.read(50_000)
            except CorruptError:
                continue
            assert piece == data[start : start + 50_000]
            served += piece
        assert len(served) < len(data)
    assert store.get("a") is None
    assert corrupt_count(store) == 1


@pytest.mark.parametrize("how", ["cut", "zeros", "empty", "missing", "longer start"])
def test_a_broken_object_is_never_served(store: Store, codec: str, data: bytes, how: str) -> None:
    store.put("a", data, codec=codec)
    path, offset, length = payload(store, "a")
    if how == "zeros":  # as a power cut leaves it
        overwrite(path, offset, bytes(length))
    elif how == "missing":
        path.unlink()
    else:
        path.chmod(0o600)
        whole = path.read_bytes()
        kept = {"cut": whole[: offset + length - 1], "empty": b"", "longer start": b"x" + whole}[how]
        path.write_bytes(kept)
    store.objects.packs.close()
    assert store.get("a") is None
    assert corrupt_count(store) == 1
    with pytest.raises(NotFoundError):
        store.load("a")
    store.put("a", data, codec=codec)
    assert store.get("a") == data
    assert store.verify().bad == []
    recount(store)


def test_verify_finds_what_is_bad_and_repair_drops_it(store: Store, codec: str, data: bytes) -> None:
    store.put_many([("bad", data), ("bad too", data), ("good", data[:-1])], codec=codec)
    path, offset, length = payload(store, "bad")
    flip(path, offset + min(length // 2, length - 200), 3)
    seen: list[int] = []
    report = store.verify(progress=seen.append)
    (found,) = report.bad
    assert found.digest == store.entry("bad").digest  # type: ignore[union-attr]  # it is there
    assert str(path) in found.where
    assert found.names == ["bad", "bad too"]
    assert (report.checked, len(seen), report.dropped) == (2, 2, [])
    assert len(list((store.path / "quarantine").iterdir())) == 1
    again = store.verify(repair=True)
    assert len(again.bad) == 1
    assert sorted(again.dropped) == ["bad", "bad too"]
    assert store.verify().bad == []
    assert [entry.name for entry in store.entries()] == ["good"]
    assert store.get("good") == data[:-1]
    recount(store)


def test_verify_sees_what_reading_does_not_need(store: Store) -> None:
    store.put("small", text(2_000))
    store.put("large", mixed(50_000), codec="none")
    path, offset, _ = payload(store, "small")
    flip(path, offset - HEAD_SIZE + 10)
    large, _, length = payload(store, "large")
    overwrite(large, length, b"appended")
    report = store.verify()
    assert sorted(name for found in report.bad for name in found.names) == ["large", "small"]


def test_a_sample_reads_a_part(store: Store) -> None:
    store.put_many((f"n/{i}", b"%d" % i) for i in range(400))
    state = random.getstate()
    assert 20 < store.verify(sample=0.25).checked < 220
    assert random.getstate() == state  # the program's own draws go on as without castore
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="sample"):
            store.verify(sample=wrong)


def test_swapped_objects_are_not_taken_for_each_other(store: Store, codec: str, data: bytes) -> None:
    other = data[::-1]
    store.put_many([("a", data), ("b", other)], codec=codec)
    one, offset, length = payload(store, "a")
    two, other_offset, other_length = payload(store, "b")
    first = one.read_bytes()[offset : offset + length]
    second = two.read_bytes()[other_offset : other_offset + other_length]
    overwrite(one, offset, second[:length])
    overwrite(two, other_offset, first[:other_length])
    assert store.get_many(["a", "b"]) == [None, None]


def test_the_memory_tier_serves_only_what_it_checked(tmp_path: Path, codec: str, data: bytes) -> None:
    with Store(tmp_path / "store", memory="64MB") as store:
        store.put("a", data, codec=codec)
        path, offset, length = payload(store, "a")
        flip(path, offset + min(length // 2, length - 200))
        assert store.get("a") is None
        store.put("a", data, codec=codec)
        assert store.get("a") == data
        path, offset, length = payload(store, "a")
        flip(path, offset + min(length // 2, length - 200))
        assert store.get("a") == data


def test_a_damaged_pack_loses_the_blob_whose_bytes_are_hit_when_it_is_compacted(store: Store) -> None:
    values = {f"n/{i}": text(2_000, i) for i in range(60)}
    store.put_many(values.items())
    path, offset, _ = payload(store, "n/55")
    flip(path, offset - HEAD_SIZE)  # only the head is hit: the bytes are right
    path, offset, length = payload(store, "n/57")
    flip(path, offset + length // 2)
    store.delete_many(f"n/{i}" for i in range(50))
    assert len(store.gc(grace=0).packs) == 1
    for i in range(50, 60):
        expected = None if i == 57 else values[f"n/{i}"]
        assert store.get(f"n/{i}") == expected
    recount(store)


# Names


@pytest.mark.parametrize(
    "name", ["../out", "a/../../out", "/etc/passwd", "a/./b", "..", "~/../x", "a\x00b", "a\\..\\b/../c"]
)
def test_hostile_names_touch_nothing_outside(store: Store, name: str) -> None:
    before = {path for path in store.path.parent.rglob("*") if store.path not in path.parents}
    with pytest.raises(InvalidNameError):
        store.put(name, b"x")
    with pytest.raises(InvalidNameError):
        store.get_or_compute(name, lambda: b"x")
    assert {path for path in store.path.parent.rglob("*") if store.path not in path.parents} == before


def test_names_are_never_paths_of_the_store(store: Store) -> None:
    for name in ("castore.json", "index.sqlite", "objects/packs/00000001.pack", "tmp/x", "locks/beacon"):
        store.put(name, b"mine")
        assert store.get(name) == b"mine"
    assert Store(store.path, memory=0).get("castore.json") == b"mine"


def test_only_the_owner_can_look_into_a_store(store: Store) -> None:
    store.put("a", mixed(50_000))
    path, _, _ = payload(store, "a")
    assert store.path.stat().st_mode & 0o077 == 0
    for file in (path, store.path / "index.sqlite", store.path / "castore.json"):
        assert file.stat().st_mode & 0o077 == 0
    assert path.stat().st_mode & 0o777 == 0o400


def test_a_reader_that_races_a_gc_gets_the_bytes_or_a_miss(store: Store) -> None:
    values = [mixed(20_000 + i, i) for i in range(4)]
    hit = multiprocessing.get_context("fork").Event()

    def act(number: int) -> None:
        begun = time.monotonic()
        while time.monotonic() < begun + 1.0 or not hit.is_set():
            assert time.monotonic() < begun + 60, "no reader got anything"
            for i, data in enumerate(values):
                if number == 0:
                    store.put(f"n/{i}", data)
                elif number == 1:
                    store.gc(max_size=0, grace=0)
                else:
                    answer = store.get(f"n/{i}")
                    assert answer is None or answer == data
                    if answer is not None:
                        hit.set()

    in_processes(4, act)
    assert corrupt_count(store) == 0


def test_a_put_whose_pack_was_closed_under_it_does_not_commit(tmp_path: Path) -> None:
    """Another thread may close the store between a put's append and its commit."""
    with Store(tmp_path / "closing", memory=0) as store:
        before = store.index.totals()

        def put_while_closing() -> None:
            with store.index.write() as txn:
                store.writer.pack.append(txn, b"a record")
                store.writer.close()

        with pytest.raises(StoreError, match="another thread closed the store"):
            put_while_closing()
        assert store.index.totals() == before
        store.put("next", b"works")
        assert store.get("next") == b"works"
