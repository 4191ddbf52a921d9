"""Folders of uncompressed files: the next gc, or the next process with such a folder, removes the folder of a
dead process.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import Pipeline, cached_filter, cached_map, scratch, step_runner, wait
from castore.errors import CacheWarning
from castore.repair import doctor
from tests.warm import Started, WarmPython

_PROGRAM = """
import sys, time
from castore import Store
from castore.adapters.datasets import scratch as work
file = work.new_file(Store(sys.argv[1]))
file.write_bytes(bytes(1000))
print(file, flush=True)
time.sleep(600)
"""

Start = Callable[[], tuple[Started, Path]]


@pytest.fixture
def start(store: Store, warm_datasets: WarmPython) -> Iterator[Start]:
    """Starts a process that works on a file of 1,000 bytes."""
    running = []

    def started() -> tuple[Started, Path]:
        process = warm_datasets.start(["-c", _PROGRAM, store.path], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield started
    for process in running:
        process.kill()
        process.communicate()


def uncompressed(store: Store) -> int:
    """Bytes of files below `work`."""
    return sum(path.stat().st_size for path in (store.path / "work").rglob("*") if path.is_file())


class Reverses:
    """Needs all rows."""

    def __init__(self) -> None:
        self.calls = 0

    def __castore_key__(self) -> str:
        return "Reverses"

    def __call__(self, samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        self.calls += 1
        return {"text": samples["text"][::-1]}


def test_a_large_result_of_one_piece_is_read_from_the_store_and_leaves_no_uncompressed_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = datasets.Dataset.from_dict({"text": [f"{number} " * 40 for number in range(2000)]})
    whole: dict[str, Any] = {"batched": True, "batch_size": None}
    plain = data.map(Reverses(), **whole, load_from_cache_file=False)
    monkeypatch.setattr(step_runner, "SMALL_FILE_BYTES", 1 << 30)
    function = Reverses()
    small = cached_map(data, function, store=store, **whole)
    wait()
    assert uncompressed(store) > 300_000
    del small
    store.delete_many([entry.name for entry in store.entries()])
    monkeypatch.setattr(step_runner, "SMALL_FILE_BYTES", 100_000)
    before = uncompressed(store)
    large = cached_map(data, function, store=store, **whole)
    assert uncompressed(store) == before
    assert large[:] == plain[:]
    assert (large.features, large.format, large.split) == (plain.features, plain.format, plain.split)
    assert copy.copy(large)[1999] == pickle.loads(pickle.dumps(large))[1999] == plain[1999]
    again = cached_map(data, function, store=store, **whole)
    assert function.calls == 2
    assert again._fingerprint == large._fingerprint
    kept = cached_filter(large, lambda sample: sample["text"][0] != "1", store=store)
    assert kept[:] == plain.filter(lambda sample: sample["text"][0] != "1", load_from_cache_file=False)[:]


def test_a_pipeline_whose_last_step_runs_in_one_piece_leaves_no_large_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_runner, "SMALL_FILE_BYTES", 1000)
    data = datasets.Dataset.from_dict({"text": [f"{number} " * 40 for number in range(500)]})

    def shout(sample: dict[str, str]) -> dict[str, str]:
        return {"text": sample["text"].upper()}

    result = Pipeline([shout, shout], store=store).run(data)
    assert uncompressed(store) == 0
    assert result.dataset[:] == data.map(shout, load_from_cache_file=False)[:]
    assert result.steps[-1].stored > 0


def test_a_large_result_that_the_store_cannot_keep_stays_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_runner, "SMALL_FILE_BYTES", 1000)
    data = datasets.Dataset.from_dict({"text": [f"{number} " * 400 for number in range(500)]})
    with Store(tmp_path / "store", memory=0, max_size=1000) as store:
        found = cached_map(data, Reverses(), store=store, batched=True, batch_size=None)
        assert found["text"][:] == data["text"][::-1]
        with pytest.warns(CacheWarning, match="was not stored"):
            wait()
        assert uncompressed(store) > 100_000


def test_gc_removes_what_a_killed_process_left_and_nothing_else(store: Store, start: Start) -> None:
    (killed, left), (_, used) = start(), start()
    assert str(left.parent.parent) not in store.gc(dry_run=True).leftovers
    killed.kill()
    killed.wait()
    assert store.gc(dry_run=True).leftovers == [str(left.parent.parent)]
    assert left.stat().st_size == 1000
    store.gc()
    assert not left.parent.parent.exists()
    assert used.stat().st_size == 1000
    assert store.gc().leftovers == []


def test_the_next_process_that_works_removes_it_too(store: Store, start: Start) -> None:
    killed, left = start()
    killed.kill()
    killed.wait()
    _, used = start()
    assert not left.parent.parent.exists()
    assert used.exists()


def test_a_link_with_such_a_name_leads_gc_nowhere(store: Store, start: Start, tmp_path: Path) -> None:
    killed, left = start()
    killed.kill()
    killed.wait()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    folder = left.parent.parent
    folder.rename(tmp_path / "away")
    folder.symlink_to(tmp_path / "mine")
    store.gc()
    assert (tmp_path / "mine/file").read_text() == "mine"


def test_files_are_told_from_those_of_others(store: Store, tmp_path: Path) -> None:
    ours, theirs = scratch.new_file(store), tmp_path / "a/b/data.arrow"
    assert scratch.is_ours(ours)
    assert scratch.is_ours(ours.with_name("data_00000_of_00002.arrow"))
    assert not scratch.is_ours(theirs)
    assert not scratch.is_ours(ours.parent.parent)


def test_what_could_not_be_removed_is_not_told_as_removed(store: Store, start: Start) -> None:
    """In a shared store only its owner may remove a folder; here something is mounted on the folder."""
    killed, left = start()
    killed.kill()
    killed.wait()
    program = "import sys; from castore.repair import doctor; print(doctor.examine(sys.argv[1]))"
    mount = f"mount -t tmpfs tmpfs {left.parent.parent}"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", f'{mount} && exec "$0" -c "$1" "$2"']
    command += [sys.executable, program, str(store.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    assert "leftover files of dead processes: 1" in doctor.examine(store.path)[0].what
