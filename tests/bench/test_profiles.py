"""The tools that count the costs in `make bench`: observed operations, and the parsing of strace's output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from castore import Store
from castore.errors import MissingDependencyError
from castore_fuse.lifecycle import check_fuse
from tools.bench import suite_operations, tracing
from tools.bench.operations import OPERATIONS, run_calls
from tools.bench.peers import Mount

_TRACE = r"""
17 read(7, "\x38\x00\x00\x00\x01\x00\x00\x00\x02\x00"..., 135168) = 56
18 read(7,  <unfinished ...>
17 read(7, 0x7f0011, 135168) = -1 EAGAIN (Resource temporarily unavailable)
18 <... read resumed>"\x30\x00\x00\x00\x0e\x00\x00\x00"..., 135168) = 48
17 readv(7, [{iov_base="\x50\x00\x00\x00\x0f\x00\x00\x00\x09"..., iov_len=80}], 1) = 80
17 +++ exited with 0 +++
"""


@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=[pytest.mark.matrix] * (number % 2)) for number, name in enumerate(OPERATIONS)],
)
def test_an_operation_can_be_called_any_number_of_times(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_operations, "TEXT", 300_000)
    if any(word in operation for word in ("SharedCache", "CachedDataset", "EmbeddingCache")):
        pytest.importorskip("torch")
    what = OPERATIONS[operation]
    calls = what.calls(200)
    run_calls(what.prepare(tmp_path, calls), calls)


def test_requests_are_read_from_a_trace_of_many_threads() -> None:
    assert list(tracing._parse(_TRACE)) == ["LOOKUP", "OPEN", "READ"]


def test_what_a_longer_run_makes_more_is_what_a_call_costs(tmp_path: Path) -> None:
    if why := tracing.no_strace():
        pytest.skip(why)
    found = tracing.calls_each("castore get", tmp_path, 100)
    assert found["pread64"] == pytest.approx(1, abs=0.1)  # the record; the set-up is not counted


def test_time_counts_for_a_stage_with_all_it_calls() -> None:
    stack = ["main (a.py)", "load (b.py)", "open (c.py)"]
    assert tracing._spent_in(stack, ()) == "open (c.py)"
    assert tracing._spent_in(stack, ("open (c.py)", "load (b.py)")) == "load (b.py)"
    assert tracing._spent_in(stack, ("close (c.py)",)) == tracing.BESIDE


def test_functions_that_take_the_time_are_told(tmp_path: Path) -> None:
    if why := tracing.no_profiler():
        pytest.skip(why)
    found = dict(tracing.parts("castore get, RAM hit", tmp_path / "work", 500_000))
    assert sum(found.values()) == pytest.approx(1)
    name = "BlobSource.get" if sys.version_info >= (3, 11) else "get"  # older Pythons do not tell the class
    assert found[f"{name} (castore/read/source.py)"] > 0.3


def test_requests_of_a_mount_are_counted(store: Store, tmp_path: Path) -> None:
    try:
        check_fuse()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    if why := tracing.no_strace():
        pytest.skip(why)
    for number in range(5):
        store.put(f"files/{number}", b"%d" % number)
    readings = []
    with Mount.of_store(store.path, tmp_path / "mnt", "--pin") as mount:
        for reading in range(6):
            with tracing.requests(mount.root, tmp_path / str(reading)) as found:
                for number in range(5):
                    assert (mount.root / "files" / str(number)).read_bytes() == b"%d" % number
            readings.append([found[name] for name in ("LOOKUP", "OPEN", "READ")])
    first, *again = readings
    assert first[0] >= 5
    # In a pinned mount, a second read of a file sends the daemon no request, unless a test of another process
    # has dropped the kernel's caches meanwhile.
    assert [0, 0, 0] in again


READERS = ["castore-levels", "files"]
# Each contestant is a process of its own, forked from one that has imported torch once for all.
_EACH_IN_A_PROCESS = """
import os, sys
from tools.bench import epochs
for contestant in sys.argv[2:]:
    if not os.fork():
        folder = os.path.join(sys.argv[1], contestant)
        os.mkdir(folder)
        os.dup2(os.open(f"{folder}.in", os.O_RDONLY), 0)
        os.dup2(os.open(f"{folder}.out", os.O_WRONLY | os.O_CREAT), 1)
        sys.argv[1:] = [contestant, "100", "0", folder]
        epochs.main()
        sys.exit()
sys.exit(any([os.wait()[1] for _ in sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the answers of each reader, asked for one epoch and for two."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("readers")
    for contestant in READERS:
        (folder / f"{contestant}.in").write_text("1\n2\n")
    done = subprocess.run(
        [sys.executable, "-c", _EACH_IN_A_PROCESS, folder, *READERS],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("contestant", READERS)
def test_a_reader_of_epochs_answers_with_seconds(contestant: str, answers: Path) -> None:
    ready, *seconds = (answers / f"{contestant}.out").read_text().split()
    assert ready == "ready"
    assert all(0 < float(each) < 60 for each in seconds)
    assert len(seconds) == 2
