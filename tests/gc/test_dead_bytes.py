"""The packs that gc rewrites: dead bytes are noted as they die, and counted only if notes may be missing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castore import Store
from castore.gc import collect
from castore.index import pack_rows
from castore.index.database import Index
from castore.index.journal import Journal
from castore.objects.packs import FILE_HEAD
from castore.records import HEAD_SIZE
from castore.repair import doctor, rebuild
from tests.helpers import agrees_with_disk, noise

KB = 1_000


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a gc fail that reads every blob's row."""

    def refuse(index: Index) -> dict[int, int]:
        raise AssertionError("gc counted what lives in packs")

    monkeypatch.setattr(pack_rows, "live_bytes", refuse)


def noted(store: Store) -> dict[int, int]:
    return dict(store.index.file.rows("SELECT id, dead FROM packs"))


def found(store: Store) -> dict[int, int]:
    """Dead bytes of each pack, computed from its size and the rows that point into it."""
    live = Counter[int]()
    for pack, stored in store.index.file.rows("SELECT pack, stored FROM blobs WHERE pack > 0"):
        live[pack] += stored + HEAD_SIZE
    sizes = {pack: store.objects.packs.path(pack).stat().st_size for pack in noted(store)}
    return {pack: size - len(FILE_HEAD) - live[pack] for pack, size in sizes.items()}


def fill(store: Store, count: int = 100) -> None:
    store.put_many((f"n/{number:03}", noise(2 * KB, number)) for number in range(count))


@pytest.mark.usefixtures("uncounted")
def test_a_pack_that_dies_by_and_by_goes_without_counting(store: Store) -> None:
    fill(store)
    (pack,) = noted(store)
    for start in range(0, 50, 10):
        store.delete_many(f"n/{number:03}" for number in range(start, start + 10))
        assert store.gc(grace=0).packs == []
        assert noted(store) == found(store) == {pack: (start + 10) * (2 * KB + HEAD_SIZE)}
    store.delete("n/050")
    assert store.gc(grace=0, dry_run=True).packs == [pack]
    assert store.gc(grace=0).packs == [pack]
    agrees_with_disk(store)
    assert noted(store) == found(store)


@pytest.mark.usefixtures("uncounted")
def test_what_expires_is_evicted_or_lost_is_noted(store: Store) -> None:
    fill(store, 40)
    store.put_many(((f"n/{number:03}", noise(2 * KB, number)) for number in range(10)), ttl=0)
    lost = store.index.find("n/030")
    assert lost is not None
    with store.index.write() as txn:
        txn.mark_lost(lost.blob)
    assert store.gc(grace=0, max_size=44 * KB).packs == []
    (dead,) = noted(store).values()
    assert dead == 40 * (2 * KB + HEAD_SIZE) - store.index.totals().packed
    assert 17 * (2 * KB + HEAD_SIZE) <= dead <= 19 * (2 * KB + HEAD_SIZE)
    assert noted(store) == found(store)


def test_what_a_killed_writer_left_is_counted(store: Store) -> None:
    fill(store)

    def die() -> None:
        with Store(store.path, memory=0) as own:
            own.put("first", b"in a pack that is registered")
            Journal.append = (  # type: ignore[method-assign]
                lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            )
            own.put_many((f"late/{number}", noise(2 * KB, number)) for number in range(200, 300))

    writer = multiprocessing.get_context("fork").Process(target=die)
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert sum(found(store).values()) > 50 * 2 * KB
    assert sum(noted(store).values()) == 0
    agrees_with_disk(store)
    assert noted(store) == found(store)
    assert sum(found(store).values()) == 0


def test_a_rebuilt_index_counts_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    store.delete_many(f"n/{number:03}" for number in range(40))
    store.gc(grace=0)
    dead = noted(store)
    assert list(dead.values()) == [40 * (2 * KB + HEAD_SIZE)]
    with store.index.write() as txn:
        txn.execute("UPDATE packs SET dead = 0")
    assert doctor.examine(store.path) == []  # a wrong estimate is not damage
    times, count = [0], pack_rows.live_bytes

    def counted(index: Index) -> dict[int, int]:
        times[0] += 1
        return count(index)

    monkeypatch.setattr(pack_rows, "live_bytes", counted)
    for _ in range(2):
        assert store.gc(grace=0).packs == []
        assert noted(store) == dead
    assert times == [1]
    rebuild.rebuild(store.index, store.objects)
    agrees_with_disk(store)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put_many", "delete", "expire", "gc"]), st.integers(0, 12), st.integers(0, 4)
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60)  # each makes a store
@given(steps=_STEPS)
def test_notes_agree_with_what_lies_in_packs(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    with Store(tmp_path_factory.mktemp("store"), memory=0) as store:
        for what, number, seed in steps:
            if what == "put":
                store.put(f"n/{number}", noise(100 + number, seed))
            elif what == "put_many":
                store.put_many((f"n/{other}", noise(50, other * seed)) for other in range(number))
            elif what == "delete":
                store.delete_many([f"n/{number}"])
            elif what == "expire":
                store.put(f"n/{number}", noise(90, seed), ttl=0)
            else:
                store.gc(grace=0)
        collect.run(store.parts, None, 0.0)
        assert noted(store) == found(store)
        agrees_with_disk(store)
