"""The cache of plain Hugging Face datasets shrinks under `castore watch --replace`, and still works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from castore import Store
from castore.watch.folder import is_temporary
from tests.warm import Started, WarmPython
from tests.watch.conftest import ENVIRONMENT, Watch, real_bytes

pytest.importorskip("datasets")

JOB = Path(__file__).with_name("datasets_job.py")


class Job:
    """Runs the job, with a home of its own, on real text.

    Its marks lie beside the home, not in it. They are written in place, again and again. A job that pauses
    for longer than files take to settle would find a link to the read-only mount in the place of its mark.

    Each run is a process of its own. One that has imported the library, and nothing of castore, forks them:
    an import takes longer than the job.
    """

    def __init__(self, home: Path, data: Path, warm: WarmPython) -> None:
        self.marks = home.with_name(f"{home.name}-marks")
        self.marks.mkdir(parents=True)
        self.home = home
        self.data = data
        self._warm = warm
        self.environment = ENVIRONMENT | {
            "HF_DATASETS_CACHE": str(home / "datasets"), "MARKS": str(self.marks),
        }  # fmt: skip

    def start(self, *words: str | Path) -> Started:
        """Start the job, or another program with its environment."""
        return self._warm.start(
            [*(words or [JOB, self.data])],
            env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(self, *words: str | Path) -> str:
        """The output of the job, or of another program."""
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        if process.returncode:
            dangling = [str(path) for path in self.home.rglob("*") if path.is_symlink() and not path.exists()]
            raise AssertionError(f"exit code {process.returncode}\n{err}\nlinks to nothing: {dangling}")
        return str(out)

    def calls(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.marks.iterdir()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of the standard library's sources."""
    path = tmp_path_factory.mktemp("data") / "sources.txt"
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-b]*.py"))
    text = "\n".join(source.read_text(errors="replace") for source in sources)
    path.write_text(re.sub(r"\n\s*\n+", "\n", text))
    return path


@pytest.fixture(scope="module")
def make_job(data: Path) -> Iterator[Callable[[Path], Job]]:
    """Makes a job with a home."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_HOME", str(data.with_name("home")))
        warm = WarmPython(["datasets"])
    yield lambda home: Job(home, data, warm)
    warm.close()


def arrows(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.arrow") if not is_temporary(path.name))


def until_replaced(folder: Path, expected: int) -> None:
    deadline = time.monotonic() + 240
    while len(found := arrows(folder)) < expected or not all(path.is_symlink() for path in found):
        assert time.monotonic() < deadline, [path for path in found if not path.is_symlink()]
        time.sleep(0.2)


def test_reruns_hit_and_are_equal_while_the_cache_shrinks_in_place(
    store: Store,
    tmp_path: Path,
    mountpoint: Path,
    folder: Path,
    watch: Watch,
    make_job: Callable[[Path], Job],
) -> None:
    plain = make_job(tmp_path / "plain")
    expected = plain.run()
    rows = int(expected.split()[0])
    assert rows > 5000
    size = real_bytes(tmp_path / "plain" / "datasets")

    job = make_job(folder)
    watching = watch("--replace", settle="500ms")
    assert job.run() == expected
    computed = job.calls()
    assert computed == {"map": rows, "filter": rows}
    # Killed in the middle of its work, most likely. Started again, it continues.
    watching.end(signal.SIGKILL)
    assert job.run() == expected
    watching = watch("--replace", settle="500ms")
    until_replaced(folder, 3)

    assert job.run() == expected
    assert job.run() == expected
    assert job.calls() == computed, "a rerun computed what was in the cache"
    watching.end()
    assert real_bytes(folder / "datasets") <= size / 2
    assert [event for event in watching.events if event["event"] == "failed"] == []

    # The same without a watcher, and after a gc that removes everything it may.
    store.gc(max_size=0, grace=0)
    assert job.run() == expected
    assert job.calls() == computed


def test_a_job_that_has_its_cache_mapped_reads_on_while_it_is_replaced(
    store: Store, mountpoint: Path, folder: Path, watch: Watch, data: Path, make_job: Callable[[Path], Job]
) -> None:
    process = make_job(folder).start(JOB, data, "--wait")
    assert process.stdout is not None
    before = process.stdout.readline()
    watching = watch("--replace", settle="0")
    until_replaced(folder, 3)
    after, _ = process.communicate("go on\n", timeout=300)
    assert after == before
    assert watching.end() == 0


def test_a_changed_function_is_computed_into_the_replaced_cache(
    store: Store, mountpoint: Path, folder: Path, watch: Watch, data: Path, make_job: Callable[[Path], Job]
) -> None:
    """New results are written beside the links, and the library's own clean-up removes the links."""
    job = make_job(folder)
    job.run()
    watching = watch("--replace", "--mirror", settle="0")
    until_replaced(folder, 3)
    script = (
        "import sys, datasets\n"
        "datasets.disable_progress_bars()\n"
        "d = datasets.load_dataset('text', data_files=sys.argv[1], split='train')\n"
        "print(d.map(lambda row: {'first': row['text'][:1]})[7]['first'], d.cleanup_cache_files())\n"
    )
    lines = data.read_text().split("\n")
    assert job.run("-c", script, data) == f"{lines[7][:1]} 3\n"
    deadline = time.monotonic() + 240
    while len([entry for entry in store.entries("in") if entry.name.endswith(".arrow")]) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert len(arrows(folder)) == 1
    assert os.path.islink(arrows(folder)[0])
    assert watching.end() == 0
