"""Entries that gc has removed and their blobs still count: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castore import Store
from castore.gc import collect
from castore.gc.collect import Selection
from castore.index import deferred_refs
from castore.repair import doctor
from tests.helpers import agrees_with_disk, in_processes, noise, object_files, recount

KB = 1_000


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.entries()]


def test_what_a_killed_gc_has_not_taken_off_the_next_one_does(store: Store) -> None:
    shared, alone = noise(30 * KB, 1), noise(30 * KB, 2)
    store.put_many([("a", shared), ("b", shared), ("c", alone), ("d", noise(30 * KB, 3))])
    store.delete_many(["a"])
    _stop_before_blobs(store, ["b", "c"])
    assert names(store) == ["d"]
    assert store.index.totals().blobs == 3
    recount(store)
    assert doctor.examine(store.path) == []
    assert store.gc(dry_run=True, grace=0).blobs == 0
    assert deferred_refs.exist(store.index)
    store.put("again", alone)
    plan = store.gc(grace=3600)
    assert (plan.blobs, plan.expired, plan.evicted) == (1, [], [])
    assert store.get("again") == alone
    assert len(object_files(store)) == 2
    agrees_with_disk(store)


def test_a_put_past_the_budget_takes_what_a_killed_gc_has_left_before_anything_else(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size=100 * KB, memory=0) as store:
        store.put("kept", noise(30 * KB, 1))
        store.put("gone", noise(60 * KB, 2))
        _stop_before_blobs(store, ["gone"])
        store.put("new", noise(50 * KB, 3))
        assert names(store) == ["kept", "new"]
        agrees_with_disk(store)


def test_a_put_past_the_budget_counts_on_what_another_gc_is_about_to_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "store", max_size=100 * KB, memory=0) as store:
        store.put("kept", noise(30 * KB, 1), pin=True)
        store.put("gone", noise(60 * KB, 2))
        choose, calls = collect._choose, [0]

        def beside_another(*arguments: Any) -> Selection:
            calls[0] += 1
            if calls[0] == 1:
                with Store(store.path, memory=0) as other:
                    _stop_before_blobs(other, ["gone"])
            return choose(*arguments)

        monkeypatch.setattr(collect, "_choose", beside_another)
        store.put("new", noise(50 * KB, 3))
        assert calls[0] > 1
        assert names(store) == ["kept", "new"]
        agrees_with_disk(store)


def _stop_before_blobs(store: Store, leaving: list[str]) -> None:
    """Remove entries as a gc does that is killed before it comes to their blobs."""
    for name in leaving:
        found, entry = store.index.find(name), store.index.entry(name)
        assert found is not None
        assert entry is not None
        with store.index.write() as txn:
            digests = [
                digest
                for _, digest in txn.evict_entries([(name, found.blob.digest, entry.accessed)], time.time())
            ]
            assert digests == [found.blob.digest]
            deferred_refs.add(txn, digests)


@settings(deadline=None, max_examples=40)  # each makes a store
@given(rows=st.lists(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=700), max_size=6))
def test_released_digests_come_out_in_order_and_as_often_as_they_were_noted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[bytes]]
) -> None:
    with Store(tmp_path_factory.mktemp("store"), memory=0) as store:
        for row in rows:
            with store.index.write() as txn:
                deferred_refs.add(txn, row)
        deferred_refs.sort(store.index)
        out = []
        while deferred_refs.exist(store.index):
            with store.index.write() as txn:
                out.append(deferred_refs.pop_first(txn))
    noted = [digest for row in rows for digest in row]
    assert [digest for row in out for digest in row] == (sorted(noted) if len(rows) > 1 else noted)
    assert len(rows) < 2 or all(len(row) == 500 for row in out[:-1])


def test_two_that_take_names_off_share_the_work(store: Store) -> None:
    count = 3_000
    store.put_many((f"n/{number:04}", b"%d" % number) for number in range(count))
    found = store.index.find_many([f"n/{number:04}" for number in range(count)])

    def collect(part: int) -> int:
        with Store(store.path, memory=0) as own:
            return len(own.gc(max_size=0, grace=0).evicted)

    assert len(found) == count
    assert max(in_processes(3, collect)) > 0
    assert store.index.totals().entries == 0
    assert not deferred_refs.exist(store.index)
    agrees_with_disk(store)
    assert store.index.totals().blobs == 0
