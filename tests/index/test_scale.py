"""Promises for stores of any size, tested on small ones: no operation takes longer for unrelated entries.

`make bench ARGS="--suite scale"` measures times in large stores, whose making is tested here.
"""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from castore import Store
from castore.gc import compaction
from castore.index.database import Index
from castore.objects import packs
from castore.repair import doctor
from tests.helpers import noise
from tools.bench.growing import Growing, name_of, probes


def test_a_store_that_was_grown_is_like_one_that_was_filled(tmp_path: Path) -> None:
    growing = Growing(tmp_path / "store")
    growing.grow(1_000)
    growing.grow(3_000)
    growing.add_expired(500)
    assert doctor.examine(growing.path) == []
    with Store(growing.path, memory=0) as store:
        assert store.verify().bad == []
        stat = store.stat()
        assert (stat.entries, stat.blobs, stat.expired) == (3_500, 3_500, 500)
        names = probes(3_000)
        assert sum(len(data or b"") for data in store.get_many(names)) > 1900 * len(names)
        assert store.get(name_of(2_999)) is not None
        assert len(store.gc().expired) == 500
        assert [entry.name for entry in store.entries()] == [name_of(number) for number in range(3_000)]
    assert doctor.examine(growing.path) == []


def test_compaction_of_a_pack_without_life_lets_others_write_in_between(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"old/{number:04}" for number in range(2_500)]
    store.put_many((name, noise(40, number)) for number, name in enumerate(names))
    store.delete_many(names)
    looked: list[int] = []
    scan = packs.scan

    def counted(*arguments: Any, **options: Any) -> Any:
        looked.append(0)
        for found in scan(*arguments, **options):
            looked[-1] += 1
            yield found

    monkeypatch.setattr(compaction, "scan", counted)
    store.gc(grace=0)
    assert sum(looked) == 2_500
    assert max(looked) <= 1_000  # under one hold of the lock


def test_long_gc_leaves_others_a_turn(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_many(((f"old/{number:04}", noise(40, number)) for number in range(1_200)), ttl=0.001)
    time.sleep(0.01)
    clock, turns = itertools.count(), []

    def let_another_write(seconds: float) -> None:
        assert seconds > 0.1  # the longest that SQLite lets a writer sleep before it retries
        with ThreadPoolExecutor() as other, store.index.write(0.0):
            turns.append(other.submit(store.index.totals).result().entries)

    monkeypatch.setattr(
        "castore.index.lock_yield.time", SimpleNamespace(monotonic=clock.__next__, sleep=let_another_write)
    )
    assert len(store.gc().expired) == 1_200
    assert turns[:3] == [700, 200, 0]


def test_gc_asks_only_for_the_rows_of_objects_that_are_files(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_many((f"small/{number}", noise(40, number)) for number in range(3_000))
    store.put("large", noise(100_000, 1))
    left = store.path / "objects" / "ab" / ("ab" * 32)
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"nobody means it")
    asked: list[int] = []
    blobs_of = Index.blobs_of

    def counted(index: Index, digests: list[bytes]) -> Any:
        asked.append(len(digests))
        return blobs_of(index, digests)

    monkeypatch.setattr(Index, "blobs_of", counted)
    monkeypatch.delattr(Index, "blobs")
    assert store.gc().leftovers == [str(left)]
    assert asked == [2]
    assert store.get("large") == noise(100_000, 1)
    assert not left.exists()


def test_readers_of_many_names_at_once_leave_none_over(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        names = [f"many/{number:04}" for number in range(6_000)]
        store.put_many((name, name.encode()) for name in names)
        usage = store._usage
        for start in range(0, 6_000, 500):
            usage.due = 0.0
            assert None not in store.get_many(names[start : start + 500])
            assert len(usage.touched) <= 500
        usage.touched = dict.fromkeys(names, time.time())
        usage.due = 0.0
        store.parts.usage.flush_for(60)
        assert not usage.touched


def test_a_reader_writes_down_what_it_read_a_little_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        names = [f"many/{number:04}" for number in range(1_800)]
        store.put_many((name, name.encode()) for name in names)
        written: list[int] = []
        record_use = Index.record_use

        def counted(index: Index, touched: dict[str, float], *rest: Any) -> None:
            written.append(len(touched))
            record_use(index, touched, *rest)

        monkeypatch.setattr(Index, "record_use", counted)
        later = time.time() + 2
        monkeypatch.setattr(time, "time", lambda: later)
        for name in names:
            store.get(name)
        assert written == []
        store._usage.due = 0.0
        for name in names[:20]:
            store.get(name)
        assert max(written) <= 100
        assert sum(written) >= 1_800
    with Store(tmp_path / "store", memory=0) as store:
        accessed = {entry.accessed for entry in store.entries()}
        assert accessed == {later}
        assert not os.listdir(store.path / "tmp")
