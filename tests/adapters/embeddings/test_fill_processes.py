"""The embedding cache with several processes: a shared fill, kills during a fill, and readers of mapped
files.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from castore import Store
from castore.adapters.embeddings import table_fill
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.errors import StoreError
from tests.adapters.embeddings.test_table import Encoder, vectors
from tests.helpers import in_processes, payload, recount

_FORK = multiprocessing.get_context("fork")


def until(path: Path, lines: int) -> None:
    """Wait until a log has so many lines."""
    deadline = time.monotonic() + 240
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{path} has no {lines} lines"
        time.sleep(0.005)


class Logged:
    """A slow encoder that logs each item in a file that all processes share."""

    def __init__(self, log: Path, seconds: float = 0.002) -> None:
        self.log = log
        self.seconds = seconds

    def __call__(self, items: list[int]) -> torch.Tensor:
        with self.log.open("a") as file:
            file.write("".join(f"{item}\n" for item in items))
        time.sleep(self.seconds)
        return vectors(items, 16)

    def seen(self) -> list[int]:
        return [int(line) for line in self.log.read_text().splitlines()]


class Stuck(Logged):
    """An encoder that never gets beyond about 300 items."""

    def __call__(self, items: list[int]) -> torch.Tensor:
        outputs = super().__call__(items)
        if items[0] >= 300:
            time.sleep(100)
        return outputs


@pytest.mark.parametrize("order", ["same", "opposite", "rotated"])
def test_processes_that_fill_at_once_encode_each_key_once(store: Store, tmp_path: Path, order: str) -> None:
    encode = Logged(tmp_path / "log")

    def encode_beside_another(items: list[int]) -> torch.Tensor:
        outputs = encode(items)
        until(encode.log, 8)  # one process encodes the first four, and cannot continue alone
        return outputs

    def task(number: int) -> int:
        torch.set_num_threads(1)
        keys = list(range(400))
        if order == "opposite" and number:
            keys.reverse()
        if order == "rotated":
            keys = keys[100 * number :] + keys[: 100 * number]
        cache = EmbeddingCache("demo", store)
        count = cache.fill(keys, keys, encode_beside_another, batch_size=4)
        assert torch.equal(cache.get(range(400)), vectors(list(range(400)), 16))
        return count

    counts = in_processes(4, task)
    assert sum(counts) == 400
    assert sorted(encode.seen()) == list(range(400))
    assert sum(count > 0 for count in counts) > 1, "one did it all"
    assert not list((store.path / "tmp").iterdir())
    recount(store)


def test_threads_that_fill_at_once_encode_each_key_once(store: Store, tmp_path: Path) -> None:
    encode, cache, counts = Logged(tmp_path / "log"), EmbeddingCache("demo", store), []

    def task() -> None:
        counts.append(cache.fill(range(200), range(200), encode, batch_size=4))

    threads = [threading.Thread(target=task) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 200
    assert sorted(encode.seen()) == list(range(200))
    assert torch.equal(cache.get(range(200)), vectors(list(range(200)), 16))


def _fill(store: Store, encode: Logged) -> None:
    torch.set_num_threads(1)
    table_fill.PUT_SECONDS = 0.05
    EmbeddingCache("demo", store).fill(range(500), range(500), encode, batch_size=5)


def test_a_killed_fill_keeps_what_it_put_and_the_next_encodes_the_rest(store: Store, tmp_path: Path) -> None:
    encode = Stuck(tmp_path / "log", 0.01)
    child = _FORK.Process(target=_fill, args=(store, encode))
    child.start()
    until(tmp_path / "log", 200)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    cache = EmbeddingCache("demo", store)
    kept = [key for key in range(500) if key in cache]
    assert 50 < len(kept) < 500
    assert torch.equal(cache.get(kept), vectors(kept, 16))
    assert cache.fill(range(500), range(500), Encoder(16)) == 500 - len(kept)
    assert torch.equal(EmbeddingCache("demo", store).get(range(500)), vectors(list(range(500)), 16))
    store.gc(grace=0)
    assert not list((store.path / "tmp").iterdir())
    recount(store)


def test_what_a_killed_process_had_claimed_is_encoded_by_who_waits_for_it(
    store: Store, tmp_path: Path
) -> None:
    slow, quick = Logged(tmp_path / "slow", 100), Logged(tmp_path / "quick", 0)
    child = _FORK.Process(target=_fill, args=(store, slow))
    child.start()
    until(tmp_path / "slow", 1)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        child.kill()

    threading.Timer(0.5, kill).start()
    cache = EmbeddingCache("demo", store)
    assert cache.fill(range(500), range(500), quick, batch_size=5) == 500
    ended = time.monotonic()
    assert killed, "it did not wait for the living"
    assert ended - killed[0] < 80
    child.join()
    assert torch.equal(cache.get(range(500)), vectors(list(range(500)), 16))


def test_kills_at_any_moment_leave_right_vectors(store: Store, tmp_path: Path) -> None:
    encode = Logged(tmp_path / "log", 0.001)
    for number in range(12):
        child = _FORK.Process(target=_fill, args=(store, encode))
        child.start()
        time.sleep(0.05 + 0.013 * number)
        child.kill()
        child.join()
        cache = EmbeddingCache("demo", store)
        kept = [key for key in range(500) if key in cache]
        if kept:
            assert torch.equal(cache.get(kept), vectors(kept, 16))
    cache.fill(range(500), range(500), encode)
    assert torch.equal(cache.get(range(500)), vectors(list(range(500)), 16))
    recount(store)


# --- readers ------------------------------------------------------------------------------------------------


def _answer(cache: EmbeddingCache, rows: torch.Tensor, answers: Any) -> None:
    torch.set_num_threads(1)
    answers.put((cache.take(rows).tolist(), cache.get([3]).tolist(), len(cache)))


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_children_read_by_the_rows_of_their_parent(store: Store, method: str) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill(range(300), range(300), Encoder(16))
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=_answer, args=(cache, cache.rows([299, 0, 7]), answers))
    child.start()
    taken, got, count = answers.get(timeout=60)
    child.join()
    assert taken == vectors([299, 0, 7], 16).tolist()
    assert got == vectors([3], 16).tolist()
    assert count == 300


def test_a_cache_that_was_made_anew_is_not_taken_for_the_pickled_one(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill(range(10), range(10), vectors)
    data = pickle.dumps(cache)
    assert torch.equal(pickle.loads(data).get([3]), vectors([3]))
    store.delete_many([entry.name for entry in store.entries("embeddings/demo")])
    EmbeddingCache("demo", store).fill(range(10), range(10), vectors)
    with pytest.raises(StoreError, match="created again"):
        pickle.loads(data)


def test_a_forked_child_that_fills_does_not_disturb_its_parent(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill(range(100), range(100), vectors)
    rows = cache.rows(range(100))

    def task(number: int) -> int:
        torch.set_num_threads(1)
        keys = range(100, 200 + 50 * number)
        cache.fill(keys, keys, vectors)
        return len(cache.find(keys))

    assert in_processes(2, task) == [100, 150]
    assert torch.equal(cache.take(rows), vectors(list(range(100))))
    assert cache.refresh() == 250
    assert torch.equal(cache.get(range(250)), vectors(list(range(250))))


def test_rows_are_in_memory_once_for_all_processes(store: Store) -> None:
    keys = range(20_000)
    EmbeddingCache("demo", store).fill(keys, keys, vectors, batch_size=512)
    size = 20_000 * 384 * 4

    def task(number: int) -> tuple[int, int]:
        torch.set_num_threads(1)
        cache = EmbeddingCache("demo", store)
        cache.take(cache.rows(range(1000)))
        before = psutil.Process().memory_info()
        rows = cache.rows(keys)
        for batch in torch.split(rows[torch.randperm(len(rows))], 256):
            cache.take(batch)
        after = psutil.Process().memory_info()
        # Mapped pages of files count as shared, even while no other process maps them.
        return (after.rss - after.shared) - (before.rss - before.shared), after.rss - before.rss

    for own, all_of_it in in_processes(3, task):
        assert own < 8e6
        assert all_of_it > 0.9 * size


def test_gc_beside_fills_and_reads_gives_right_vectors_or_misses(tmp_path: Path) -> None:
    filling = _FORK.Value("i", 3)

    def fill_and_read(store: Store, keys: list[int]) -> None:
        for _ in range(30):
            try:
                cache = EmbeddingCache("demo", store)
                cache.fill(keys, keys, vectors)
                known = [key for key in keys if key in cache]
                assert torch.equal(cache.get(known), vectors(known))
            except StoreError as error:
                # gc removed the manifest, and another process was faster
                if "created again" not in str(error):
                    raise

    with Store(tmp_path / "store", memory=0) as store:

        def task(number: int) -> None:
            torch.set_num_threads(1)
            if number:
                try:
                    fill_and_read(store, list(range(40 * number, 40 * number + 120)))
                finally:
                    with filling.get_lock():
                        filling.value -= 1
            while filling.value and not number:
                store.gc(max_size="300KB", grace=0)
                time.sleep(0.01)

        in_processes(4, task)
        recount(store)


def test_a_put_that_the_budget_refuses_leaves_no_claims(store: Store) -> None:
    with pytest.raises(ZeroDivisionError):
        EmbeddingCache("demo", store).fill(range(10), range(10), lambda _: 1 // 0)
    assert not list((store.path / "tmp").iterdir())


def test_the_files_of_one_table_are_seen_together(store: Store) -> None:
    """A reader that runs while a writer appends finds every shard whole."""
    stop = _FORK.Event()

    def write() -> None:
        torch.set_num_threads(1)
        cache = EmbeddingCache("demo", store)
        number = 0
        while not stop.is_set():
            cache.fill([number], [number], vectors)
            number += 1

    child = _FORK.Process(target=write)
    child.start()
    try:
        reader, begun, count = EmbeddingCache("demo", store), time.monotonic(), 0
        while count < 100:
            assert time.monotonic() < begun + 60, f"only {count} rows came"
            count = reader.refresh()
            fresh = EmbeddingCache("demo", store)
            assert len(fresh) >= count
            assert torch.equal(
                reader.get(range(count)) if count else vectors([]), vectors(list(range(count)))
            )
        assert all(key in fresh for key in range(count))
    finally:
        stop.set()
        child.join()
    assert payload(store, "embeddings/demo/table.json")[2] > 0
