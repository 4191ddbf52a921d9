"""A file system that grants every lock to every process: only SQLite's own locks are relied on.

Lustre, GPFS and some NFS treat ``flock`` so. Shared memory (castore/shm) uses ``flock`` too, but lies on the
machine's own tmpfs.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from castore import Store
from castore.shm.segments import Segment, clear_dead
from tests.helpers import LONG, agrees_with_disk, in_processes, text
from tests.torture import test_readers, test_windows
from tests.torture.crowd import crowd
from tests.torture.granted.sitecustomize import is_shared_memory
from tests.torture.random_kills import kill_at_random
from tests.torture.windows import WINDOWS, Window
from tests.warm import WarmPython

HERE = Path(__file__).parent
#: The module that every Python started by a test imports first.
GRANTED = HERE / "granted"
#: Cases that the other tests here do not repeat: damage, disks, input, mounts and power cuts. The quick form
#: has the first.
OTHERS = (
    "torture/test_isolation.py",
    "torture/test_damage.py",
    "torture/test_power_cut.py",
    "torture/test_full_disk.py",
    "torture/test_index_rot.py",
    "torture/test_hostile.py",
    "torture/test_repair.py",
    "mount/test_session_life.py",
    "mount/test_mounting.py",
)


@pytest.fixture
def daemons(tmp_path: Path) -> Path:
    """The file in which each program that was started under broken locks reports itself."""
    return tmp_path / "granted"


@pytest.fixture(autouse=True)
def granted(monkeypatch: pytest.MonkeyPatch, daemons: Path) -> list[int]:
    """Every ``flock`` and open-file-description lock succeeds and locks nothing, in forks and daemons too."""
    monkeypatch.syspath_prepend(GRANTED)
    monkeypatch.setenv("CASTORE_TEST_GRANTED", os.fspath(daemons))
    granted: list[int] = []
    real, real_flock = fcntl.fcntl, fcntl.flock

    def grant(fd: int, command: int, argument: int | bytes = 0) -> int | bytes:
        if command not in (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW) or is_shared_memory(fd):
            return real(fd, command, argument)
        granted.append(command)
        return argument

    def grant_flock(fd: int, operation: int) -> None:
        if is_shared_memory(fd):
            real_flock(fd, operation)
        else:
            granted.append(operation)

    monkeypatch.setattr(fcntl, "flock", grant_flock)
    monkeypatch.setattr(fcntl, "fcntl", grant)
    return granted


def test_without_locks_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, scale: Callable[[int, int], int], figure: Callable[[str], None]
) -> None:
    count = scale(8, 300)
    kill_at_random(tmp_path / "store", count)
    figure(f"{count} kills without locks: nothing lost")


def test_without_locks_sixteen_processes_do_everything_at_once(
    store: Store, scale: Callable[[float, float], float], figure: Callable[[str], None]
) -> None:
    seconds = scale(0.5, 30.0)
    figure(
        f"16 processes did {crowd(store, seconds):,} operations in {seconds:.0f} s without locks; no error"
    )


@pytest.mark.usefixtures("mountpoint")
@pytest.mark.parametrize(
    "window", WINDOWS if LONG else WINDOWS[::8], ids=lambda window: f"{window.section}: {window.killed}"
)
def test_without_locks_killed_in_a_window_the_store_is_as_the_page_says(
    tmp_path: Path, window: Window
) -> None:
    test_windows.dies_as_the_page_says(tmp_path / "store", window)


@pytest.mark.matrix  # test_readers.py, without locks
def test_without_locks_files_maps_and_a_data_loader_read_on_while_gc_removes_everything(
    store: Store,
    tmp_path: Path,
    daemons: Path,
    warm_torch: WarmPython,
    scale: Callable[[float, float], float],
    figure: Callable[[str], None],
) -> None:
    test_readers.reads_on_while_gc_removes_everything(store, tmp_path, warm_torch, scale(1.0, 30.0), figure)
    assert daemons.exists(), "the daemon's locks were not broken"


def test_without_locks_several_may_compute_and_all_get_the_same_whole_answer(
    store: Store, granted: list[int], figure: Callable[[str], None]
) -> None:
    """A lock only saves the work of a second computation."""

    def ask(process: int) -> tuple[object, int]:
        computed = []

        def compute() -> str:
            computed.append(process)
            time.sleep(0.01)
            return text(50_000).decode()

        return [store.get_or_compute(f"key/{turn}", compute) for turn in range(20)], len(computed)

    answers = in_processes(8, ask)
    assert all(values == [text(50_000).decode()] * 20 for values, _ in answers)
    computed = sum(count for _, count in answers)
    store.get_or_compute("one more", lambda: 1)
    assert granted, "no lock was asked for: nothing was tested"
    assert computed > 20, "nobody computed twice: the locks were not broken"
    figure(f"8 processes asked for 20 keys: {computed} computations instead of 20, all answers right")
    agrees_with_disk(store)


@pytest.mark.matrix
@pytest.mark.timeout(900)  # each of them may take ten minutes
@pytest.mark.parametrize("others", OTHERS)
def test_without_locks_all_else_holds_too(others: str, daemons: Path, figure: Callable[[str], None]) -> None:
    """The tests of another file, in their quick form, in a process whose locks are broken from the start."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE.parent / others)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(GRANTED), *filter(None, sys.path)))}
    for name in ("CASTORE_TORTURE", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    run = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert daemons.exists(), "the locks were not broken"
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout
    figure(f"{others}: {passed[1]} tests passed without locks")


def test_segments_of_other_processes_stay(daemons: Path) -> None:
    """Regression of these tests: their processes removed the segments of tests that ran beside them."""
    script = "import sys; from castore.shm.segments import clear_dead as c; print(sys.argv[1] in c())"
    with closing(Segment(None, 4096, {})) as segment:
        assert segment.name not in clear_dead()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", script, segment.name]
        assert subprocess.check_output(command, env=environment) == b"False\n"
    assert daemons.read_text()
