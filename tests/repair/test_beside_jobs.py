"""No command that repairs touches files in use: jobs of every kind run beside all commands, and end well.

The jobs (jobs.py) are processes of their own and check their results; `castore process`, `castore watch` and
the mount's daemon are the real ones. Afterwards the store is as sound as without a repair.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import castore_fuse
from castore import Store, layout
from castore.errors import CastoreError
from castore.layout import Kind
from castore.repair import doctor
from castore_fuse import mountpoints
from castore_fuse.lifecycle import check_fuse
from tests.helpers import agrees_with_disk, text
from tests.repair.jobs import JOBS, SHELF, wanted
from tests.warm import Started, WarmPython

pytest.importorskip("torch")
pytest.importorskip("datasets")
pytest.importorskip("watchdog")

_ROOT = Path(__file__).resolve().parents[2]
#: Jobs that are killed in the middle of files and folders of their own.
LEAVING = ("pipeline", "fill", "writing")
#: Every command that mends, removes, or makes anew.
COMMANDS = [
    ["doctor"],
    ["doctor", "--rebuild-index"],
    ["verify", "--repair"],
    ["train-dict", "records"],
    ["gc", "--grace", "0", "--max-size", "1MB"],
    ["doctor"],
    ["doctor", "--rebuild-index"],
]
_RECIPE = """\
dataset_path: data.jsonl
export_path: out.jsonl
process:
  - my_ops.held
  - whitespace_normalization_mapper
  - text_length_filter: {min_len: 10}
"""
_OPERATORS = """\
import time
from pathlib import Path
def held(sample):
    if sample["n"] == 7:
        Path("process.begun").touch()
        while not Path("enough").exists():
            time.sleep(0.02)
    return {"text": sample["text"].upper()}
"""


class Running:
    """A store in which everything runs at once, until `end`."""

    def __init__(self, path: Path, warm: Mapping[str, WarmPython]) -> None:
        self.path = path
        self._warm = warm
        self.store = path / "store"
        self.place = path / "place"
        self.watched = path / "watched"
        self.mountpoint = path / "mnt"
        self.processes: dict[str, subprocess.Popen[bytes] | Started] = {}
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)]),
            "HF_DATASETS_CACHE": str(path / "hf"),
        }

    def prepare(self) -> None:
        self.place.mkdir()
        self.watched.mkdir()
        with Store(self.store, memory=0) as store:
            for name in SHELF:
                store.put(f"shelf/{name}", wanted(name))
            store.put_many(
                (f"records/first/{n}", json.dumps({"n": n, "turn": 0}).encode() * 8) for n in range(300)
            )
        rows = [{"n": n, "text": text(400, n).decode()} for n in range(10)]
        (self.place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.place / "recipe.yaml").write_text(_RECIPE)
        (self.place / "my_ops.py").write_text(_OPERATORS)

    def start(self, name: str, *words: str | Path) -> None:
        # A session of its own: a killed job leaves workers behind, which are killed with it in the end.
        command = ["-m", *map(str, words)]
        with self.log(name).open("wb") as log:
            if python := self._warm.get(name.partition(" ")[0]):
                self.processes[name] = python.start(
                    command, env=self._environment, cwd=self.place, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
                return
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command], env=self._environment, cwd=self.place,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def start_jobs(self, names: Collection[str]) -> None:
        for job in names:
            self.start(
                job,
                "tests.repair.jobs",
                job,
                self.mountpoint if job == "reading" else self.store,
                self.place,
            )
        self.start("process", "castore", "--store", self.store, "process", "--config", "recipe.yaml")
        self.start(
            "watch",
            "castore",
            "--store",
            self.store,
            "watch",
            self.watched,
            "--as",
            "in",
            "--replace",
            "--settle",
            "0.1s",
        )
        for job in (*names, "process"):
            self.until(lambda job=job: (self.place / f"{job}.begun").exists(), job)

    def until(self, true: object, job: str) -> None:
        deadline = time.monotonic() + 240
        assert callable(true)
        while not true():
            process = self.processes[job]
            assert process.poll() is None, f"{job} ended: {self.log(job).read_text()}"
            assert time.monotonic() < deadline, f"{job} has not come so far in time"
            time.sleep(0.02)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "castore", "--store", str(self.store), *words]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=300)

    def add_file(self, number: int) -> None:
        """Add a new file for the watcher, and wait for the link that takes its place."""
        path = self.watched / f"file-{number}"
        path.write_bytes(text(50_000, number))
        self.until(path.is_symlink, "watch")
        assert path.read_bytes() == text(50_000, number)

    def ended(self, *names: str) -> dict[str, str]:
        """The output of those that do not end well; all of them have ended, or end now."""
        said = {}
        for name in names:
            if self.processes[name].wait(300):
                said[name] = f"{self.processes[name].returncode}: {self.log(name).read_text()}"
        return said

    def end(self) -> dict[str, str]:
        (self.place / "enough").touch()
        self.processes["watch"].send_signal(signal.SIGTERM)
        return self.ended(*self.processes)

    def kill(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while mountpoints.mount_at(self.mountpoint):
            mountpoints.detach(self.mountpoint, lazy=True)


@pytest.fixture
def warm(warm_datasets: WarmPython, warm_torch: WarmPython) -> dict[str, WarmPython]:
    """Starters of the jobs that import much, by job."""
    return {
        "pipeline": warm_datasets,
        "steps": warm_datasets,
        "process": warm_datasets,
        "fill": warm_torch,
        "training": warm_torch,
    }


@contextmanager
def running(path: Path, warm: Mapping[str, WarmPython], names: Collection[str] = JOBS) -> Iterator[Running]:
    jobs = Running(path, warm)
    jobs.prepare()
    castore_fuse.mount(jobs.store, jobs.mountpoint)
    try:
        jobs.start_jobs(names)
        yield jobs
    finally:
        jobs.kill()


@pytest.fixture(autouse=True)
def _can_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        check_fuse()
    except CastoreError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def unlisted(store: Path) -> list[str]:
    """Files in a store that are not in the list of its contents, or are of another kind than listed."""
    found = []
    for folder, folders, files in os.walk(store):
        for name in [*folders, *files]:
            path = Path(folder, name)
            place = layout.place_of(str(path.relative_to(store)))
            if place is None or (place.kind in (Kind.FOLDER, Kind.TREE)) != (name in folders):
                found.append(str(path.relative_to(store)))
            elif place.kind is Kind.TREE:
                folders.remove(name)
    return found


def test_jobs_of_every_kind_end_well_whatever_repairs_the_store_meanwhile(
    tmp_path: Path, warm: dict[str, WarmPython]
) -> None:
    with running(tmp_path, warm) as jobs:
        for number, words in enumerate(COMMANDS):
            jobs.add_file(number)
            assert unlisted(jobs.store) == []
            done = jobs.command(*words)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            assert "quarantine" not in done.stdout, (words, done.stdout)
            assert "noted" not in done.stdout, (words, done.stdout)
        in_work = [path.name for path in (jobs.store / layout.WORK).iterdir()]
        assert len(in_work) >= 2, "the pipelines work in the store all the time"
        assert jobs.end() == {}
        with open(jobs.place / "out.jsonl") as lines:
            rows = [json.loads(line) for line in lines]
        assert [row["text"] for row in rows] == [
            " ".join(text(400, n).decode().upper().split()) for n in range(10)
        ]
        castore_fuse.umount(jobs.mountpoint)
        restored = jobs.command("watch", str(jobs.watched), "--as", "in", "--restore")
        assert restored.returncode == 0, restored.stderr
        assert list((jobs.store / "quarantine").iterdir()) == []
        assert list((jobs.store / layout.WORK).iterdir()) == []
        assert doctor.examine(jobs.store) == []
        assert unlisted(jobs.store) == []
        with Store(jobs.store, memory=0) as store:
            for name in SHELF:
                assert store.get(f"shelf/{name}") in (None, wanted(name))
            agrees_with_disk(store)


def test_what_killed_jobs_left_is_removed_reported_and_not_missed(
    tmp_path: Path, warm: dict[str, WarmPython]
) -> None:
    with running(tmp_path, warm, LEAVING) as jobs:
        for process in jobs.processes.values():
            process.kill()
            process.wait()
        assert unlisted(jobs.store) == []
        assert list((jobs.store / layout.WORK).iterdir())
        first = jobs.command("doctor")
        assert first.returncode == 0, first.stdout
        assert "leftover files of dead processes" in first.stdout
        assert "quarantine" not in first.stdout
        assert list((jobs.store / layout.WORK).iterdir()) == []
        assert list((jobs.store / "tmp").iterdir()) == []
        assert jobs.command("doctor").stdout == f"{jobs.store}: all in order\n"
        (jobs.place / "enough").touch()
        jobs.start("pipeline again", "tests.repair.jobs", "pipeline", jobs.store, jobs.place)
        jobs.start("fill again", "tests.repair.jobs", "fill", jobs.store, jobs.place)
        assert jobs.ended("pipeline again", "fill again") == {}
