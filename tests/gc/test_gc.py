"""Garbage collection: what is removed and in which order, what never is, and that readers notice nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from castore import Collected, FullError, Plan, Store, TooLargeError
from castore.gc import collect, compaction, leftovers
from castore.gc.collect import select
from castore.index.eviction import Candidate, Orphan
from castore.index.lock_yield import LockYield
from castore.index.transaction import Write
from castore.objects.codecs import FRAME_SIZE
from castore.parts import Parts
from castore.repair import doctor, rebuild
from tests.clocks import pass_time
from tests.helpers import agrees_with_disk, in_processes, mixed, noise, object_files, payload, recount, text
from tests.torture.kills import after, before, pause, paused

KB = 1_000


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.entries()]


# Choosing, without a disk


def candidate(name: str, stored: int, *, digest: str | None = None, refs: int = 1) -> Candidate:
    return Candidate(name, (digest or name).encode(), 0.0, stored, refs, 0)


def test_select_takes_expired_then_orphans_then_the_least_recently_used() -> None:
    chosen = select(
        [candidate("old", 10)],
        [Orphan(b"nameless", 20, 0, since=50.0)],
        [candidate("first", 30), candidate("second", 30), candidate("third", 30)],
        stored=120,
        budget=40,
        orphaned_before=0.0,
    )
    assert [entry.name for entry in chosen.expired] == ["old"]
    assert [entry.name for entry in chosen.evicted] == ["first", "second"]
    assert [blob[0] for blob in chosen.blobs] == [b"old", b"nameless", b"first", b"second"]
    assert chosen.waiting == 0


def test_select_leaves_orphans_their_grace_while_there_is_room() -> None:
    orphans = [Orphan(b"young", 20, 0, since=50.0), Orphan(b"old", 30, 0, since=5.0)]
    chosen = select([], orphans, [candidate("a", 100)], stored=150, budget=150, orphaned_before=10.0)
    assert ([blob[0] for blob in chosen.blobs], chosen.waiting, chosen.evicted) == ([b"old"], 20, [])


def test_select_counts_a_blob_once_its_last_name_goes() -> None:
    shared = [candidate(name, 50, digest="shared", refs=3) for name in "abc"]
    kept = select([], [], [*shared, candidate("d", 10)], stored=60, budget=10, orphaned_before=0.0)
    assert [entry.name for entry in kept.evicted] == ["a", "b", "c"]
    pinned_elsewhere = [candidate("a", 50, digest="shared", refs=2)]
    kept = select([], [], [*pinned_elsewhere, candidate("d", 10)], stored=60, budget=50, orphaned_before=0.0)
    assert [entry.name for entry in kept.evicted] == ["a", "d"]
    assert [blob[0] for blob in kept.blobs] == [b"d"]


# Running


def test_expired_entries_and_their_bytes_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("soon", noise(50 * KB, 1), ttl="1h")
    store.put("pinned", noise(50 * KB, 2), ttl="1h", pin=True)
    store.put("stays", noise(50 * KB, 3), ttl="1d")
    pass_time(monkeypatch, 7200)
    plan = store.gc()
    assert (plan.expired, plan.evicted, plan.blobs, plan.freed) == (["soon"], [], 1, 50 * KB)
    assert len(object_files(store)) == 2
    assert store.stat().entries == 2
    recount(store)


def test_the_least_recently_used_go_until_the_rest_fits(store: Store) -> None:
    for i in range(6):
        store.put(f"n{i}", noise(100 * KB, i))
        time.sleep(0.002)
    store.get("n0")
    store.get("n1")
    plan = store.gc(max_size=350 * KB)
    assert plan.evicted == ["n2", "n3", "n4"]
    assert names(store) == ["n0", "n1", "n5"]
    assert store.stat().stored == plan.remaining == 300 * KB
    assert store.stat().evictions == 3
    assert len(object_files(store)) == 3


def test_deleted_bytes_wait_for_their_grace(store: Store) -> None:
    store.put("a", noise(50 * KB, 1))
    store.put("a", noise(50 * KB, 2))
    store.put("b", noise(50 * KB, 3))
    store.delete("b")
    plan = store.gc()
    assert (plan.blobs, plan.waiting) == (0, 100 * KB)
    assert store.put("c", noise(50 * KB, 3)).stored == 50 * KB
    plan = store.gc(grace=0)
    assert (plan.blobs, plan.waiting) == (1, 0)
    assert store.get_many(["a", "c"]) == [noise(50 * KB, 2), noise(50 * KB, 3)]
    recount(store)


def test_a_dry_run_says_what_a_run_then_does(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_many((f"small/{i}", text(500, i)) for i in range(300))
    for i in range(8):
        store.put(f"large/{i}", noise(100 * KB, i), pin=i == 3)
    store.put("soon", noise(30 * KB, 50), ttl="1h")
    store.delete_many(f"small/{i}" for i in range(250))
    (store.path / "objects/ab").mkdir(exist_ok=True)
    (store.path / "objects/ab" / ("ab" * 32)).write_bytes(b"nobody means this")
    pass_time(monkeypatch, 7200)
    before = (names(store), store.index.totals(), object_files(store))
    told = store.gc(max_size=300 * KB, grace=0, dry_run=True)
    assert isinstance(told, Plan)
    assert (names(store), store.index.totals(), object_files(store)) == before
    done = store.gc(max_size=300 * KB, grace=0)
    assert isinstance(done, Collected)
    assert done == Collected(*told)
    assert done.expired == ["soon"]
    assert done.evicted
    assert done.packs
    assert len(done.leftovers) == 1
    assert store.stat().stored == done.remaining <= 300 * KB
    assert "large/3" in names(store)
    empty = store.gc(max_size=300 * KB, grace=0, dry_run=True)
    assert (empty.expired, empty.evicted, empty.blobs, empty.packs, empty.leftovers) == ([], [], 0, [], [])


def test_pins_are_kept_whatever_the_budget(store: Store) -> None:
    for i in range(4):
        store.put(f"n{i}", noise(50 * KB, i), pin=i < 2)
    store.gc(max_size=0, grace=0)
    assert names(store) == ["n0", "n1"]
    store.unpin("n1")
    store.gc(max_size=0, grace=0)
    assert names(store) == ["n0"]
    assert store.get("n0") == noise(50 * KB, 0)


def test_an_entry_touched_since_it_was_chosen_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        store.put(name, noise(20 * KB, ord(name)), ttl="1h" if name == "c" else None)
    pass_time(monkeypatch, 7200)
    now = time.time()
    chosen = {name: store.index.find(name) for name in "abc"}
    seen = {name: entry.accessed for name in "abc" if (entry := store.index.entry(name))}
    store.get("a")
    store.flush()
    store.pin("b")
    store.put("c", noise(20 * KB, ord("c")), ttl="1h")
    with store.index.write() as txn:
        for name, found in chosen.items():
            assert found is not None
            seen_at = None if name == "c" else seen[name]
            digest = found.blob.digest
            assert txn.evict_entries([(name, digest, seen_at)], now) == []
    assert names(store) == ["a", "b", "c"]


# The budget, while putting


def test_a_put_past_the_budget_makes_room_by_itself(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size=1_000 * KB, memory=0) as store:
        for i in range(50):
            store.put(f"n{i:02}", noise(60 * KB + i, i))
            assert store.index.totals().stored <= 1_000 * KB
            assert store.get(f"n{i:02}") == noise(60 * KB + i, i)
            time.sleep(0.001)
        left = names(store)
        assert left == [f"n{i:02}" for i in range(50 - len(left), 50)], "the oldest go first"
        assert len(left) >= 10, "room is made, the store is not emptied"
        store.gc()
        assert sum(path.stat().st_size for path in object_files(store)) <= 1_000 * KB
        recount(store)


def test_a_batch_larger_than_the_budget_passes_through_it(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size=1_000 * KB, memory=0) as store:
        entries = store.put_many((f"n{i:02}", noise(60 * KB, i)) for i in range(50))
        assert len(entries) == 50
        assert store.index.totals().stored <= 1_000 * KB
        assert store.get("n49") == noise(60 * KB, 49)


def test_a_blob_larger_than_the_whole_budget_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size=300 * KB, memory=0) as store:
        store.put("a", noise(200 * KB, 1))
        with pytest.raises(TooLargeError, match=r"'b' takes 40\d KB.*300 KB.*--max-size"):
            store.put("b", noise(400 * KB, 2))
        with pytest.raises(TooLargeError):
            store.put_many([("d", noise(400 * KB, 2))])
        source = tmp_path / "source"
        source.write_bytes(noise(2_000 * KB, 3))
        with pytest.raises(TooLargeError):
            store.put_file("e", source)
        assert names(store) == ["a"]
        assert len(object_files(store)) == 1
        store.put("f", text(1_000 * KB))  # the stored size counts, not the blob's size


def test_a_budget_full_of_pins_is_an_error_that_says_so(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size=300 * KB, memory=0) as store:
        store.put("a", noise(200 * KB, 1), pin=True)
        with pytest.raises(FullError, match="pinned") as caught:
            store.put("b", noise(150 * KB, 2))
        assert caught.value.errno == 28
        assert names(store) == ["a"]
        store.put("c", noise(90 * KB, 3))
        assert len(object_files(store)) == 2


# Readers


def test_an_open_file_keeps_its_bytes_after_gc(store: Store) -> None:
    large, small = mixed(4 * FRAME_SIZE), text(2 * KB)
    store.put("large", large)
    store.put("small", small)
    with store.open("large") as one, store.open("small") as two, store.open("large") as three:
        assert one.read(10) == large[:10]
        store.gc(max_size=0, grace=0)
        assert object_files(store) == []
        assert store.get("large") is None
        assert one.read() == large[10:]
        assert two.read() == small
        store.put("large", b"other bytes")
        assert three.read() == large


def test_compaction_keeps_data_and_readers(store: Store) -> None:
    values = {f"n/{i}": noise(1_000 + i, i) for i in range(400)}
    store.put_many(values.items())
    pack, _, _ = payload(store, "n/399")
    size = pack.stat().st_size
    readers = {name: store.open(name) for name in ("n/398", "n/399")}
    for i in range(390):
        store.delete(f"n/{i}")
    plan = store.gc(grace=0)
    assert len(plan.packs) == 1
    assert not pack.exists()
    moved, _, _ = payload(store, "n/399")
    assert moved.stat().st_size < size / 10
    for name, reader in readers.items():
        assert reader.read() == values[name]
        reader.close()
    assert {name: store.get(name) for name in names(store)} == {
        f"n/{i}": values[f"n/{i}"] for i in range(390, 400)
    }
    assert store.verify().bad == []
    recount(store)
    store.put("new", b"after compaction")
    assert store.get("new") == b"after compaction"


def test_a_pack_that_a_rebuild_finds_before_it_is_unlinked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild maps the records in packs; of two records of a blob it may choose the one that was to go."""
    with Store(tmp_path / "store", memory=0) as keeper, Store(tmp_path / "store", memory=0) as writer:
        keeper.put("kept", noise(5 * KB))  # the live records move into this pack, which a rebuild reads first
        writer.put_many((f"n/{i}", noise(2 * KB, i)) for i in range(100))
        writer.delete_many(f"n/{i}" for i in range(90))
        rebuilt: list[rebuild.Rebuilt] = []

        class Meanwhile(LockYield):
            def pause_if_due(self) -> None:
                if len(list(writer.index.file.rows("SELECT id FROM packs"))) == 1 and not rebuilt:
                    rebuilt.append(rebuild.rebuild(writer.index, writer.objects))

        monkeypatch.setattr(compaction, "LockYield", Meanwhile)
        assert len(keeper.gc(grace=0).packs) == 1
        assert rebuilt
        for store in (keeper, writer):
            assert [store.get(f"n/{i}") for i in range(90, 100)] == [noise(2 * KB, i) for i in range(90, 100)]
        assert keeper.gc(grace=0).packs
        assert keeper.verify().bad == []
        assert keeper.gc(grace=0).leftovers == []


def test_a_writer_whose_pack_was_compacted_starts_another(tmp_path: Path) -> None:
    writer, keeper = Store(tmp_path / "store", memory=0), Store(tmp_path / "store", memory=0)
    writer.put_many((f"n/{i}", noise(2 * KB, i)) for i in range(100))
    keeper.delete_many(f"n/{i}" for i in range(99))
    assert keeper.gc(grace=0).packs
    for i in range(100, 110):
        writer.put(f"n/{i}", noise(2 * KB, i))
    assert all(keeper.get(f"n/{i}") == noise(2 * KB, i) for i in range(99, 110))
    assert keeper.gc(grace=0).leftovers == []
    assert keeper.verify().bad == []


def test_a_put_leaves_a_pack_that_is_retired_though_its_file_is_still_there(store: Store) -> None:
    store.put_many((f"n/{i}", noise(2 * KB, i)) for i in range(20))
    store.delete_many(f"n/{i}" for i in range(19))
    retired = after(Write, "retire_pack", then=after(Write, "commit", then=pause))
    with paused(lambda: store.gc(grace=0), retired):
        store.put("new", noise(2 * KB, 99))
    with Store(store.path, memory=0) as other:
        assert [other.get(name) for name in ("n/19", "new")] == [noise(2 * KB, 19), noise(2 * KB, 99)]
    agrees_with_disk(store)


def test_packs_of_many_short_lived_writers_are_merged(store: Store) -> None:
    for turn in range(5):
        in_processes(
            4,
            lambda i, turn=turn: store.put(f"n/{turn}/{i}", b"%d %d" % (turn, i)),  # type: ignore[misc]
        )
    assert len(store.objects.packs.ids()) == 20
    store.gc()
    assert len(store.objects.packs.ids()) == 1
    assert [store.get(f"n/{turn}/{i}") for turn in range(5) for i in range(4)] == [
        b"%d %d" % (turn, i) for turn in range(5) for i in range(4)
    ]


# Leftovers of dead writers


def test_leftovers_of_a_killed_writer_go_with_the_next_gc(store: Store) -> None:
    store.put("a", noise(50 * KB))
    code = f"""
import itertools, random
from castore import Store
store = Store({str(store.path)!r}, memory=0)
print("go", flush=True)
for i in itertools.count():
    store.put(f"n/{{i}}", random.Random(i).randbytes(8_000_000), codec="zstd")
"""
    tmp = store.path / "tmp"
    deadline = time.monotonic() + 300
    while not any(tmp.iterdir()):
        assert time.monotonic() < deadline, "no kill hit a writer that was writing"
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        while not any(tmp.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.001)
        living = store.gc(grace=0)
        assert not any("/tmp/" in path for path in _in_tmp(living.leftovers, tmp)), (
            "a living writer's file was taken"
        )
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    assert len(store.gc(grace=0).leftovers) == 1
    assert list(tmp.iterdir()) == []
    assert store.get("a") == noise(50 * KB)
    assert store.verify().bad == []


def _in_tmp(leftovers: list[str], tmp: Path) -> list[str]:
    return [path for path in leftovers if Path(path).parent == tmp]


def test_objects_and_packs_without_a_row_go(store: Store) -> None:
    store.put("a", noise(50 * KB))
    path, _, _ = payload(store, "a")
    stray = path.with_name(path.name + ".gz")
    stray.write_bytes(b"stored with another codec once")
    pack = store.objects.packs.path(99)
    pack.write_bytes(b"a pack that nobody registered")
    (store.path / "objects/README").write_text("not an object: not touched")
    assert sorted(store.gc().leftovers) == sorted([str(stray), str(pack)])
    assert not stray.exists()
    assert not pack.exists()
    assert path.exists()
    assert (store.path / "objects/README").exists()


def test_bytes_that_are_put_again_while_gc_removes_them_stay(store: Store) -> None:
    """The row is gone and the object not yet: a put gives the same bytes a row and a place again."""
    store.put("kept", noise(50 * KB, 1), pin=True)
    store.put("deleted", noise(50 * KB, 2))
    store.put("evicted", noise(50 * KB, 3))
    store.delete("deleted")
    with paused(lambda: store.gc(grace=0), before(collect, "_unlink", then=pause)):
        assert store.stat().blobs == 2
        store.put("again", noise(50 * KB, 2))
    assert store.get("again") == noise(50 * KB, 2)
    with paused(lambda: store.gc(max_size=60 * KB, grace=0), before(collect, "_unlink", then=pause)):
        assert store.stat().blobs == 1
        store.put("evicted", noise(50 * KB, 3))
    assert store.get("evicted") == noise(50 * KB, 3)
    agrees_with_disk(store)


def test_a_leftover_that_a_put_needs_by_now_stays(store: Store) -> None:
    """Between finding a leftover and removing it, a row comes to mean the file of that name."""
    store.put("kept", noise(50 * KB, 1))
    store.put("a", noise(50 * KB, 2))
    path, _, _ = payload(store, "a")
    left = path.read_bytes()
    store.delete("a")
    store.gc(grace=0)
    assert not path.exists()
    path.write_bytes(left)
    assert str(path) in store.gc(dry_run=True).leftovers
    with paused(lambda: store.gc(grace=0), before(leftovers, "remove", then=pause)):
        store.put("a", noise(50 * KB, 2))
    assert store.get("a") == noise(50 * KB, 2)
    agrees_with_disk(store)


def test_packs_that_another_gc_removes_meanwhile_are_no_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"x")
    pack = store.objects.packs.path(99)
    pack.write_bytes(b"a pack that nobody registered")
    measure = leftovers._size

    def measure_and_remove(path: Path) -> int | None:
        size = measure(path)
        path.unlink(missing_ok=True)
        return size

    monkeypatch.setattr(leftovers, "_size", measure_and_remove)
    assert store.gc().leftovers == []
    assert not pack.exists()
    listed = [*store.objects.packs.ids(), 99]  # the listing of a moment ago
    monkeypatch.setattr(store.objects.packs, "ids", lambda: listed)
    assert store.objects.digests() == {bytes.fromhex(store.put("a", b"x").digest)}


def test_a_rotated_journal_keeps_every_name(store: Store) -> None:
    journal = store.index.journal
    for turn in range(400):
        store.put(f"n/{turn % 7}", b"%d" % turn, metadata={"turn": turn, "long": "v" * 12_000})
    store.pin("n/3")
    store.delete("n/4")
    grown = journal.size()
    assert grown > 4 * 1024 * 1024
    store.gc()
    assert journal.size() < grown / 20
    store.put("after", b"x")
    store.delete("n/5")
    before = [entry._replace(accessed=0) for entry in store.entries()]
    assert [entry.name for entry in before] == ["after", "n/0", "n/1", "n/2", "n/3", "n/6"]
    store.close()
    (store.path / "index.sqlite").unlink()
    doctor.rebuild_index(store.path)
    with Store(store.path, memory=0) as again:
        assert [entry._replace(accessed=0) for entry in again.entries()] == before
        assert again.get("n/6") == b"398"


def test_several_gcs_at_once_are_no_error(store: Store) -> None:
    for i in range(150):
        store.put(f"small/{i}", text(300, i))
        store.put(f"large/{i}", noise(20 * KB, i), ttl=0.001 if i % 2 else None)

    def collect(number: int) -> None:
        chance = random.Random(number)
        for turn in range(8):
            store.gc(max_size=(150 - 15 * turn) * 20 * KB, grace=0)
            store.put(f"new/{number}", noise(20 * KB + chance.randrange(9)))
            store.delete_many(f"small/{chance.randrange(150)}" for _ in range(10))

    in_processes(4, collect)
    store.gc(grace=0)
    assert store.verify().bad == []
    assert store.gc(grace=0).leftovers == []
    recount(store)
    assert os.listdir(store.path / "tmp") == []


def test_a_gc_reports_what_it_removed_and_not_what_it_had_chosen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the chosen is read, and one put again, before the entries are removed."""
    for number in range(4):
        store.put(f"n{number}", noise(50 * KB, number))
    planned = store.gc(max_size=0, grace=0, dry_run=True)
    real = collect._remove

    def meanwhile(parts: Parts, chosen: collect.Selection, now: float) -> Any:
        store.pin("n1")
        store.put("n2", noise(50 * KB, 22))
        return real(parts, chosen, now)

    monkeypatch.setattr(collect, "_remove", meanwhile)
    done = store.gc(max_size=0, grace=0)
    assert (sorted(planned.evicted), planned.blobs) == (["n0", "n1", "n2", "n3"], 4)
    assert (sorted(done.evicted), done.blobs) == (["n0", "n3"], 2)
    assert done.freed < planned.freed
    assert names(store) == ["n1", "n2"]
    recount(store)
