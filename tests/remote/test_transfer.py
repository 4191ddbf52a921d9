"""`Store.push` and `Store.pull` in programs: in a process of their own, beside forks, kills and others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

import castore
from castore import Store
from castore.errors import (
    ConflictError,
    CorruptError,
    FullError,
    InvalidNameError,
    InvalidValueError,
    NotFoundError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
)
from castore.remote.folder_bucket import FolderBucket
from castore.system.single_flight import ComputeLocks
from tests.helpers import agrees_with_disk, in_processes, noise
from tests.mount.conftest import until
from tests.remote.nodes import know

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
#: Bytes a second, so that a transfer is still under way when a busy machine comes to interrupt it.
SLOW = 10_000_000


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    return (tmp_path / "bucket").as_uri()


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store(tmp_path / "other", memory=0)


def test_a_store_pushes_and_another_pulls_by_the_name_of_the_remote(
    store: Store, other: Store, url: str
) -> None:
    store.put("a", b"1")
    store.put("b/c", noise(2_000_000))
    seen: list[tuple[int, int]] = []
    store.add_remote("team", url)
    pushed = store.push(to="team", note="first", progress=lambda *bytes_: seen.append(bytes_))
    assert isinstance(pushed, castore.Pushed)
    assert seen[-1][0] == seen[-1][1] > 2_000_000
    remote = other.add_remote("origin", url)
    assert (remote.name, remote.url, repr(remote)) == ("origin", url, f"Remote('origin', {url!r})")
    pulled = other.pull(remote="origin")
    assert (pulled.commit, pulled.added) == (pushed.commit, 2)
    assert other.get("a") == b"1"
    assert (other.get("b/c"), other.remotes(), remote.refs()) == (noise(2_000_000), ["origin"], ["main"])
    store.put("a", b"22")
    store.delete("b/c")
    store.push(to="team", note="second", delete=True)
    log = remote.log()
    assert [(one.note, one.entries, one.size) for one in log] == [("second", 1, 2), ("first", 2, 2_000_001)]
    assert abs(log[0].time - time.time()) < 600
    assert remote.diff(("main", log[1].commit[:8]), ("main", None)) == [("a", 1, 2), ("b/c", 2_000_000, None)]
    assert remote.log(limit=1) == log[:1]


def test_a_program_that_pushed_may_fork_and_its_children_pull_and_read(
    store: Store, tmp_path: Path, url: str
) -> None:
    store.put("a", noise(300_000))
    know(store, "team", url).push()

    def work(number: int) -> bytes | None:
        store.put(f"of {number}", b"%d" % number)
        store.push(f"of {number}", to="team")
        with Store(tmp_path / f"of {number}", memory=0) as mine:
            know(mine, "team", url).pull()
            return mine.get("a")

    assert in_processes(3, work, timeout=300) == [noise(300_000)] * 3
    assert store.remote("team").log()[0].entries == 4


def test_the_process_ends_with_its_caller_and_the_next_push_goes_on(store: Store, url: str) -> None:
    bulk = noise(3_000_000)
    for number in range(40):
        store.put(f"large/{number}", b"%2d" % number + bulk[2:], codec="none")
    know(store, "team", url, rate=SLOW)
    program = (
        "import sys; from castore import Store\n"
        "def tell(done, total):\n"
        "    print(done, total, flush=True)\n"
        f"Store({str(store.path)!r}).push(to='team', progress=tell)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline()  # something has travelled
    [child] = children_of(process.pid)
    process.kill()
    process.communicate()
    while os.path.exists(f"/proc/{child}/exe"):  # a zombie has none
        time.sleep(0.02)
    with pytest.raises(RemoteMissingError, match="no ref 'main'"):
        store.remote("team").log()
    there = {listed.key for listed in FolderBucket(Path(url.removeprefix("file://"))).listing("objects/")}
    assert there
    store.remove_remote("team")
    know(store, "team", url)
    pushed = store.push(to="team")
    assert pushed.objects <= 40 - len(there) + 4
    assert pushed.added == 40


def test_the_process_ends_with_a_caller_whose_forked_workers_live_on(store: Store, url: str) -> None:
    """Regression: workers of a killed program held its pipes, and what it had begun went on."""
    store.put("a", noise(50_000_000), codec="none")
    know(store, "team", url, rate=SLOW)
    program = (
        "import os, time; from castore import Store\n"
        "workers = []\n"
        "def tell(done, total):\n"
        "    if not workers:\n"
        "        workers.append(os.fork())\n"
        "        if not workers[0]:\n"
        "            time.sleep(600)\n"
        "        print(workers[0], flush=True)\n"
        f"Store({str(store.path)!r}).push(to='team', progress=tell)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        [child] = children_of(process.pid)
        process.kill()
        process.wait()
        while os.path.exists(f"/proc/{child}/exe"):
            time.sleep(0.02)
        assert os.path.exists(f"/proc/{worker}/exe"), "it holds the pipes still"
    finally:
        os.kill(worker, signal.SIGKILL)
        process.communicate()


def test_the_process_ends_with_a_caller_that_is_killed_at_once(store: Store, url: str) -> None:
    """Regression: it looked for its caller once it had started Python, and took whoever had inherited it."""
    store.put("a", noise(50_000_000), codec="none")
    know(store, "team", url, rate=SLOW)
    program = (
        "import os, threading, time; from castore import Store\n"
        "def end(thread):\n"
        "    while not (child := open(f'/proc/self/task/{thread}/children').read()):\n"
        "        pass\n"
        "    worker = os.fork()\n"
        "    if not worker:\n"
        "        time.sleep(600)\n"
        "    print(child, worker, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        f"store = Store({str(store.path)!r})\n"
        "pushing = threading.Thread(target=store.push, kwargs={'to': 'team'})\n"
        "pushing.start()\n"
        "end(pushing.native_id)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child, worker = map(int, process.stdout.readline().split())
    try:
        process.wait()
        while os.path.exists(f"/proc/{child}/exe"):
            time.sleep(0.02)
        assert os.path.exists(f"/proc/{worker}/exe"), "it holds the pipes still"
    finally:
        os.kill(worker, signal.SIGKILL)
        process.communicate()
    with pytest.raises(RemoteMissingError, match="no ref 'main'"):
        store.remote("team").log()


def test_ctrl_c_ends_a_push_though_a_forked_worker_holds_its_pipes(store: Store, url: str) -> None:
    """Regression: the process saw no end of its input, and the push landed all the same."""
    store.put("a", noise(50_000_000), codec="none")
    know(store, "team", url, rate=SLOW)
    workers: list[int] = []

    def interrupt(done: int, total: int) -> None:
        workers.append(os.fork())
        if not workers[-1]:
            time.sleep(600)
            os._exit(1)
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            store.push(to="team", progress=interrupt)
        with pytest.raises(RemoteMissingError, match="no ref 'main'"):
            store.remote("team").log()
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


def children_of(pid: int) -> list[int]:
    """Those that move bytes; servers of other tests are children too."""
    found = []
    for one in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(OSError):  # it has ended
            if b"castore.remote.transfer" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
    return found


def test_ctrl_c_ends_the_process_too(store: Store, url: str) -> None:
    store.put("a", noise(50_000_000), codec="none")
    know(store, "team", url, rate=SLOW)
    others, started = set(children_of(os.getpid())), set[int]()

    def interrupt(done: int, total: int) -> None:
        started.update(children_of(os.getpid()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.push(to="team", progress=interrupt)
    assert len(started - others) == 1
    assert not (started - others) & set(children_of(os.getpid()))
    store.remove_remote("team")
    know(store, "team", url)
    assert store.push(to="team").added == 1


def test_a_killed_process_is_an_error_that_says_what_to_do(store: Store, url: str) -> None:
    bulk = noise(3_000_000)
    for number in range(40):
        store.put(f"large/{number}", b"%2d" % number + bulk[2:], codec="none")
    remote = know(store, "team", url, rate=SLOW)
    others = set(children_of(os.getpid()))

    def kill(done: int, total: int) -> None:
        for child in set(children_of(os.getpid())) - others:
            os.kill(child, signal.SIGKILL)

    with pytest.raises(RemoteError, match="do the same again"):
        remote.push(progress=kill)
    store.remove_remote("team")
    remote = know(store, "team", url)
    remote.push()
    assert remote.log()[0].entries == 40


def test_a_push_that_waits_for_another_call_says_so(
    store: Store, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("a", b"1")
    remote = know(store, "team", url)
    release = ComputeLocks(store.path / "locks" / "remotes", store.settings.file_mode).claim("team main")
    assert release is not None
    with ThreadPoolExecutor(1) as pool:
        push = pool.submit(remote.push)
        until(lambda: f"waiting for another push or pull of ref 'main' in {store.path}" in caplog.text)
        assert not push.done()
        release()
        assert push.result().added == 1
    caplog.clear()
    assert remote.push().added == 0
    assert caplog.text == ""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGUSR1])
def test_a_large_object_whose_pull_is_ended_goes_on_where_it_was(
    store: Store, other: Store, url: str, end: signal.Signals
) -> None:
    data = noise(60_000_000)
    store.put("a", data, codec="none")
    know(store, "team", url).push()
    know(other, "team", url, rate=SLOW)
    others = set(children_of(os.getpid()))

    def so_far() -> int:
        sizes = [0]
        for path in (other.path / "tmp").iterdir():
            with suppress(FileNotFoundError):  # of a page, which has got its name
                sizes.append(path.stat().st_size)
        return max(sizes)

    def end_halfway() -> None:
        until(lambda: so_far() > 20_000_000)
        [child] = set(children_of(os.getpid())) - others
        os.kill(child, end)

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end_halfway)
        with pytest.raises(RemoteError, match=r"do the same again|interrupted"):
            other.pull(remote="team")
        ending.result()
    there = so_far()
    assert len(list((other.path / "tmp").iterdir())) == 1
    other.remove_remote("team")
    know(other, "team", url)
    pulled = other.pull(remote="team")
    assert len(data) - there <= pulled.fetched < len(data) - there + 1_000_000
    assert other.get("a") == data
    assert list((other.path / "tmp").iterdir()) == []
    agrees_with_disk(other)


def test_what_goes_wrong_in_the_process_is_the_same_error_here(
    store: Store, other: Store, tmp_path: Path, url: str
) -> None:
    store.put("a", b"1")
    know(store, "team", url).push()
    know(other, "team", url)
    other.put("a", b"2")
    with pytest.raises(ConflictError, match=r"'a' changed both here and in ref 'main'") as caught:
        other.pull(remote="team")
    assert caught.value.names == ("a",)
    with pytest.raises(NotFoundError, match="no entry at or below 'nothing'"):
        store.push("nothing", to="team")
    with pytest.raises(RemoteMissingError, match="no ref 'other'; its refs: main"):
        store.pull("other", remote="team")
    store.put("large", noise(4_000_000))
    store.push(to="team")
    with Store(tmp_path / "small", max_size="1MB", memory=0) as small:
        know(small, "team", url)
        with pytest.raises(FullError, match="the budget of"):
            small.pull(remote="team")
        assert small.get("large") is None
    [path] = [path for path in (tmp_path / "bucket" / "objects").rglob("*") if path.is_file()]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptError, match=r"'large' in file://.* are damaged"):
        other.pull(remote="team", replace=True)


def test_remotes_are_kept_by_the_store_and_hold_no_more_than_was_given(
    store: Store, url: str, tmp_path: Path
) -> None:
    store.add_remote("b", url)
    store.add_remote("a", url, read_only=True)
    assert store.remotes() == ["a", "b"]
    assert store.remote("a").settings == castore.RemoteSettings("a", url, read_only=True)
    store.put("x", b"x")
    with pytest.raises(RemoteDeniedError, match="--read-only"):
        store.push(to="a")
    with pytest.raises(InvalidValueError, match="remove it first"):
        store.add_remote("a", (tmp_path / "elsewhere").as_uri())
    assert not (tmp_path / "elsewhere").exists()
    store.push(to="b")
    assert store.pull(remote="a").unchanged == 1
    store.remove_remote("b")
    assert store.remotes() == ["a"]
    for call in (store.remote, store.remove_remote):
        with pytest.raises(NotFoundError, match=r"knows no remote 'b' \(it knows: a\)"):
            call("b")
    for name in ("", "../x", "a/b", ".x", "ä", "x" * 101):
        with pytest.raises(InvalidNameError, match="cannot be a remote"):
            store.add_remote(name, url)
    agrees_with_disk(store)
    assert castore.Store(store.path).verify().bad == []


@pytest.mark.parametrize("folder", ["packs", "objects/ab", "trees/deep/er"])
def test_a_remote_in_a_folder_of_another_is_refused(store: Store, url: str, folder: str) -> None:
    """Regression: the collector of the outer remote condemned all that was in it."""
    store.put("a", b"1")
    store.add_remote("outer", url).push()
    with pytest.raises(InvalidValueError, match=f"{folder} lies in a folder of the remote {url},"):
        store.add_remote("inner", f"{url}/{folder}")
    assert store.remotes() == ["outer"]
    store.add_remote("beside", f"{url}/castore")


def test_arguments_of_other_peoples_types_are_taken_or_refused_in_a_sentence(store: Store, url: str) -> None:
    store.put("a", b"1")
    remote = know(store, "team", url)
    commit = remote.push().commit
    assert [one.commit for one in remote.log(limit=np.int64(2))] == [commit]
    remote.gc(keep_commits=np.int64(2), dry_run=True)
    assert remote.pull(below="copy/", prefix="a/").added == 1
    for below in (PurePosixPath("x"), b"x", None):
        with pytest.raises(InvalidNameError, match="a folder is a str, not "):
            remote.pull(below=below)  # type: ignore[arg-type]
    with pytest.raises(InvalidNameError, match=f"take as commit='{commit[:8]}'"):
        store.pull(f"main@{commit[:8]}", remote="team")
    for wrong in ("12345", "xyz123", "", 7):
        with pytest.raises(InvalidValueError, match="is no commit: give at least 6 of its hex digits"):
            remote.log(commit=wrong)  # type: ignore[arg-type]
    for wrong_limit in (0, 1.5, "2", True):
        with pytest.raises(InvalidValueError, match="limit must be a whole number"):
            remote.log(limit=wrong_limit)  # type: ignore[arg-type]


def test_a_place_that_is_no_remote_is_not_written_to_by_a_reader(
    store: Store, tmp_path: Path, url: str
) -> None:
    with pytest.raises(RemoteMissingError, match=r"is no remote: it has no castore-remote\.json"):
        store.add_remote("team", url, read_only=True)
    assert not (tmp_path / "bucket").exists()
    assert store.remotes() == []
    store.add_remote("team", url)
    (tmp_path / "bucket" / "castore-remote.json").write_text('{"format": 2}')
    with pytest.raises(RemoteError, match="has format 2, and this castore knows format 1; upgrade castore"):
        store.add_remote("again", url)
