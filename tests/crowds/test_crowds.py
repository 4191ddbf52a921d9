"""Many processes and threads, one store: right answers, no error, and an index that agrees with the disk."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from castore import Store
from castore.index.beacon import Beacon
from castore.objects.codecs import FRAME_SIZE
from castore.system.file_locks import lock_byte
from tests.helpers import LONG, agrees_with_disk, in_processes, mixed, noise, text, wait_for_call
from tests.torture.kills import after, before, pause, paused

METHODS = ["fork", "forkserver", "spawn"]


@pytest.fixture(params=[0, "64MB"], ids=["disk", "memory"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store", memory=request.param) as opened:
        yield opened


# The same Store object in children


@pytest.mark.parametrize("method", METHODS)
def test_children_use_the_parents_store(shared: Store, method: str) -> None:
    values = {"small": text(2_000), "large": mixed(2 * FRAME_SIZE + 5)}
    shared.put_many(values.items())
    assert (
        shared.get("large") == values["large"]
    )  # the codec threads and the connection exist before the fork
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        for name, data in values.items():
            assert pool.submit(shared.get, name).result(60) == data
        assert pool.submit(shared.get_many, ["large", "nothing"]).result(60) == [values["large"], None]
        made = [pool.submit(shared.put, f"child/{i}", noise(3_000, i)) for i in range(10)]
        entries = [future.result(60) for future in made]
        assert pool.submit(shared.save, "object", {"a": (1, 2)}).result(60).serializer == "msgpack"
    assert entries == list(shared.entries("child"))
    assert [shared.get(f"child/{i}") for i in range(10)] == [noise(3_000, i) for i in range(10)]
    assert shared.load("object") == {"a": (1, 2)}
    agrees_with_disk(shared)


def test_a_store_pickles_as_its_path_and_options(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory="1MB", codec="lz4", ttl="1h", allow_pickle=True) as store:
        store.put("a", text(5_000))
        again = pickle.loads(pickle.dumps(store))
        with again:
            assert again.path == store.path
            assert again.settings == store.settings
            assert again.stat().memory_max == 1_000_000
            assert again.allow_pickle
            assert again.get("a") == text(5_000)
        assert len(pickle.dumps(store)) < 1_000


def test_parent_and_forked_child_write_to_packs_of_their_own(store: Store) -> None:
    store.put("before", b"0")

    all_are_there = multiprocessing.get_context("fork").Event()

    def child(number: int) -> None:
        all_are_there.set()
        for i in range(50):
            store.put(f"child/{number}/{i}", noise(500, number * 100 + i))

    def parent() -> None:
        assert all_are_there.wait(120)
        for i in range(200):
            store.put(f"parent/{i}", noise(400, i))

    writer = threading.Thread(target=parent)
    writer.start()
    in_processes(3, child)
    writer.join()
    assert len(store.objects.packs.ids()) == 4
    assert all(store.get(f"parent/{i}") == noise(400, i) for i in range(200))
    assert all(store.get(f"child/{n}/{i}") == noise(500, n * 100 + i) for n in range(3) for i in range(50))
    agrees_with_disk(store)


def test_a_file_opened_before_a_fork_reads_on_in_both(store: Store) -> None:
    data = mixed(3 * FRAME_SIZE)
    store.put("a", data)
    with store.open("a") as file:
        assert file.read(100) == data[:100]

        def child(number: int) -> None:
            file.seek(number * 1_000)
            assert file.read() == data[number * 1_000 :]
            file.close()

        in_processes(2, child)
        assert file.read() == data[100:]


# Everything at once


def test_threads_share_one_store(shared: Store) -> None:
    def act(thread: int) -> None:
        for i in range(40):
            shared.put(f"t/{thread}/{i}", noise(1_000 + 900 * i, i))
            assert shared.get(f"t/{(thread + 1) % 8}/{i}") in (None, noise(1_000 + 900 * i, i))
            if i % 10 == 9:
                shared.gc()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(act, range(8)))
    assert shared.stat().entries == 320
    assert shared.stat().blobs == 40
    agrees_with_disk(shared)


def test_writers_of_the_same_bytes_keep_them_once(store: Store) -> None:
    data = mixed(2 * FRAME_SIZE)

    def put(process: int) -> None:
        for i in range(5):
            store.put(f"p/{process}/{i}", data)
            store.put(f"s/{process}/{i}", data[:3_000])

    in_processes(8, put)
    assert (store.stat().entries, store.stat().blobs) == (80, 2)
    agrees_with_disk(store)


# Computing once


def test_compute_runs_once_over_processes_and_threads(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    def compute() -> dict[str, int]:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return {"answer": 42}

    def ask(_: int) -> list[object]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda _: store.get_or_compute("key", compute, ttl="1h"), range(4)))

    answers = in_processes(8, ask)
    assert answers == [[{"answer": 42}] * 4] * 8
    assert len(log.read_text().splitlines()) == 1


def test_keys_are_computed_side_by_side(store: Store) -> None:
    all_computing = multiprocessing.get_context("fork").Barrier(6)

    def ask(process: int) -> object:
        return store.get_or_compute(f"key/{process}", lambda: all_computing.wait(120) >= 0)

    assert in_processes(6, ask) == [True] * 6


def test_a_failed_compute_is_nobody_elses_failure(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    def ask(process: int) -> str:
        def compute() -> str:
            with log.open("a") as file:
                file.write("tried\n")
            time.sleep(0.05)
            if log.read_text().count("tried") < 3:
                raise RuntimeError("not yet")
            return "done"

        try:
            return str(store.get_or_compute("key", compute))
        except RuntimeError as error:
            return str(error)

    assert sorted(in_processes(6, ask)) == ["done"] * 4 + ["not yet"] * 2
    assert log.read_text().count("tried") == 3


def test_a_killed_compute_leaves_nobody_waiting(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    began = context.Event()

    def compute() -> int:
        began.set()
        time.sleep(600)
        return 1

    victim = context.Process(target=store.get_or_compute, args=("key", compute))
    victim.start()
    assert began.wait(60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get_or_compute, "key", lambda: 2)
        wait_for_call(lock_byte)
        assert not waiting.done()
        victim.kill()
        victim.join()
        assert waiting.result(60) == 2


def test_a_killed_compute_whose_children_live_on_leaves_nobody_waiting(store: Store, tmp_path: Path) -> None:
    """Workers of a pool outlive a killed parent, and have inherited all its open files."""
    program = (
        "import os, sys, time\nfrom castore import Store\n"
        "def compute():\n"
        "    if os.fork() == 0:\n"
        "        print(os.getpid(), flush=True)\n        time.sleep(300)\n        os._exit(0)\n"
        "    time.sleep(300)\n"
        "Store(sys.argv[1]).get_or_compute('key', compute)\n"
    )
    linked = tmp_path / "linked"
    linked.symlink_to(store.path)
    for path in (store.path, linked):
        with (
            subprocess.Popen(
                [sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True
            ) as victim,
            ThreadPoolExecutor(1) as pool,
        ):
            assert victim.stdout is not None
            orphan = int(victim.stdout.readline())
            try:
                waiting = pool.submit(store.get_or_compute, "key", lambda: 2)
                wait_for_call(lock_byte)
                assert not waiting.done()
                victim.kill()
                victim.wait()
                assert waiting.result(60) == 2
            finally:
                os.kill(orphan, signal.SIGKILL)
        store.delete("key")


def test_a_child_that_leaves_a_computation_it_was_forked_in_leaves_the_lock_to_its_parent(
    store: Store,
) -> None:
    program = (
        "import os, sys, blake3\nfrom castore import Store\nfrom castore.system.file_locks import is_locked\n"
        "store = Store(sys.argv[1])\n"
        "place = int.from_bytes(blake3.blake3(b'key').digest(8), 'little') >> 2\n"
        "def compute():\n"
        "    child = os.fork()\n"
        "    if not child:\n        raise SystemExit\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    assert is_locked(os.open(store.path / 'locks/compute', os.O_RDWR), place)\n"
        "    return 1\n"
        "assert store.get_or_compute('key', compute) == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, store.path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_what_does_not_validate_is_computed_again_once(store: Store) -> None:
    store.save("key", 1)
    runs = []

    def compute() -> int:
        runs.append(1)
        time.sleep(0.1)
        return 2

    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(store.get_or_compute, "key", compute, validate=lambda value: value == 2)
            for _ in range(4)
        ]
        assert [future.result(60) for future in asked] == [2] * 4
    assert len(runs) == 1


# Noticing the changes of other processes


@pytest.mark.torture
def test_a_name_repointed_elsewhere_is_seen_by_who_has_it_in_memory(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory="64MB") as reader:
        for version in range(20 if LONG else 8):
            in_processes(
                1,
                lambda _, version=version: reader.put("a", b"version %d" % version),  # type: ignore[misc]
            )
            assert reader.get("a") == b"version %d" % version
            assert reader.get("a") == b"version %d" % version
        in_processes(1, lambda _: reader.delete("a"))
        assert reader.get("a") is None
        reader.put("a", b"again")
        assert reader.get("a") == b"again"
        in_processes(1, lambda _: reader.gc(max_size=0, grace=0))
        assert reader.get("a") is None


@pytest.mark.parametrize("end", ["commits", "is killed before it can say so"])
def test_who_reads_in_the_middle_of_a_change_sees_it_as_soon_as_it_is_made(shared: Store, end: str) -> None:
    shared.put("a", b"old")
    assert [shared.get("a") for _ in range(3)] == [b"old"] * 3

    def stop() -> None:
        after(Beacon, "announce", then=pause)()
        if end != "commits":
            before(Beacon, "settle", then=lambda: os._exit(0))()

    with paused(lambda: shared.put("a", b"new"), stop):
        assert [shared.get("a") for _ in range(3)] == [b"old"] * 3
        assert shared.get_many(["a", "a"]) == [b"old"] * 2
    assert shared.get("a") == b"new"
    assert shared.get_many(["a", "b", "a"]) == [b"new", None, b"new"]
    beacon = shared.index.beacon
    assert (beacon.settled() >= 0) == (end == "commits")
    shared.flush()
    assert beacon.settled() >= 0, "nobody would remember anything until a name changes"
    assert shared.get("a") == b"new"


def test_a_change_that_was_announced_and_comes_to_nothing_is_over(
    shared: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.put("a", b"old")
    announce = Beacon.announce

    def interrupted(beacon: Beacon) -> int:
        announce(beacon)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Beacon, "announce", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared.delete("a")
    assert shared.index.beacon.settled() >= 0
    assert shared.get("a") == b"old"


def test_an_objects_serializer_belongs_to_its_bytes(store: Store) -> None:
    # Regression: `load` read the serializer and the bytes one after the other, and a put came in between.
    values = ["text", {"a": 1}, b"bytes"]
    store.save("a", values[0])

    def act(process: int) -> None:
        end = time.monotonic() + 1.0
        turn = process
        while time.monotonic() < end:
            turn += 1
            if process < 2:
                store.save("a", values[turn % 3])
            else:
                assert store.load("a") in values

    in_processes(4, act)
