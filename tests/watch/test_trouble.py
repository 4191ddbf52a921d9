"""`castore watch` in trouble: full stores, lost events, limits, lost folders, large files, bad arguments."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from castore import Store
from tests.helpers import LONG
from tests.watch.conftest import Watch, castore, names, run


def test_what_cannot_be_added_is_reported_and_the_rest_is_added(
    store: Store, folder: Path, watch: Watch
) -> None:
    store.put("in/taken", b"a file")
    (folder / "taken").mkdir()
    (folder / "taken" / "x").write_text("x")
    (folder / os.fsdecode(b"\xff")).write_text("not UTF-8")
    os.mkfifo(folder / "pipe")
    (folder / "good").write_text("good")
    watching = watch(settle="0")
    watching.until("added", "in/good")
    failed = {Path(event["path"]).name for event in watching.events if event["event"] == "failed"}
    assert failed == {"x", r"\xff"}
    assert watching.end() == 0


def test_paths_that_can_be_no_names_may_come_and_go(store: Store, folder: Path, watch: Watch) -> None:
    """Regression: the watcher ended when such a file was deleted."""
    watching = watch("--mirror")
    strange = [folder / "new\nline", folder / os.fsdecode(b"\xff"), folder / "good"]
    for path in strange:
        path.write_text("a")
    watching.until("added", "in/good")
    for path in strange:
        path.unlink()
    watching.until("dropped", "in/good")
    (folder / "another").write_text("a")
    watching.until("added", "in/another")
    assert watching.end() == 0


def test_a_full_store_is_reported_and_the_watcher_goes_on(tmp_path: Path, folder: Path, watch: Watch) -> None:
    run(tmp_path / "store", "init", "--max-size", "300KB")
    with Store(tmp_path / "store") as store:
        store.put("pinned", os.urandom(250_000), pin=True)
        watching = watch()
        (folder / "large").write_bytes(os.urandom(100_000))
        assert "pinned" in watching.until("failed")["reason"]
        (folder / "small").write_text("small")
        watching.until("added", "in/small")
        assert watching.end() == 0


def test_dropped_events_lead_to_a_look_at_everything(store: Store, folder: Path, watch: Watch) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 50_000:
        pytest.skip("the kernel's queue is too long to fill quickly")
    watching = watch("--mirror")
    watching.process.send_signal(signal.SIGSTOP)
    path, other = folder / "noise", folder / "noise2"
    for _ in range(limit // 4 + 1000):  # five events each: made, closed, moved from and to, and gone
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        os.rename(path, other)
        os.unlink(other)
    (folder / "late").write_text("late")
    watching.process.send_signal(signal.SIGCONT)
    watching.until("rescan")
    watching.until("added", "in/late")
    assert watching.end() == 0


def test_a_folder_that_goes_ends_the_watcher_and_drops_nothing(
    store: Store, folder: Path, watch: Watch
) -> None:
    (folder / "a").write_text("a")
    watching = watch("--mirror")
    watching.until("added", "in/a")
    folder.rename(folder.with_name("elsewhere"))
    assert watching.process.wait(300) == 1
    assert watching.error() == f"castore: {folder} is gone; nothing was dropped\n"
    assert names(store) == ["in/a"]


def test_a_store_that_is_made_anew_ends_the_watcher_and_one_that_comes_back_does_not(
    store: Store, folder: Path, watch: Watch
) -> None:
    (folder / "a").write_text("a")
    watching = watch()
    watching.until("added", "in/a")
    away = store.path.with_name("away")
    store.path.rename(away)
    (folder / "b").write_text("b")
    watching.until("failed")
    away.rename(store.path)
    (folder / "c").write_text("c")
    watching.until("added", "in/c")
    shutil.rmtree(store.path)
    Store(store.path).close()
    assert watching.process.wait(300) == 1
    assert watching.error().splitlines()[-1] == (
        f"castore: {store.path} is another store than the one that this watcher began with; start"
        " `castore watch` again"
    )


def test_mirror_does_not_take_an_empty_folder_for_the_users_wish(
    store: Store, folder: Path, watch: Watch
) -> None:
    """The folder may be the mountpoint of a disk that is not mounted."""
    (folder / "a").write_text("a")
    watch().end_after("added", "in/a")
    (folder / "a").unlink()
    second = watch("--mirror", ready=False)
    assert second.process.wait(300) == 1
    assert "is its disk mounted?" in second.error()
    assert names(store) == ["in/a"]


def test_the_limit_of_watches_is_an_error_that_names_the_setting(store: Store, folder: Path) -> None:
    """In a user namespace of its own, where the limit can be set without changing the machine's."""
    setting = "/proc/sys/fs/inotify/max_user_watches"
    unshare = ["unshare", "--user", "--map-root-user", "--mount-proc", "--pid", "--fork"]
    for number in range(20):
        (folder / str(number)).mkdir()
    command = " ".join(castore(store.path, "watch", folder, "--as", "in"))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ran = subprocess.run(
        [*unshare, "sh", "-c", f"echo 10 > /proc/sys/user/max_inotify_watches && exec {command}"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "unshare" in ran.stderr or "cannot create" in ran.stderr or "Permission denied" in ran.stderr:
        pytest.skip(f"no user namespaces with limits of their own here: {ran.stderr.strip()}")
    assert ran.returncode == 1
    assert f"sysctl fs.inotify.{Path(setting).name}=" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_two_watchers_of_one_folder_come_to_the_same_end(store: Store, folder: Path, watch: Watch) -> None:
    one, two = watch("--mirror"), watch("--mirror")
    for number in range(50):
        (folder / f"{number:02}").write_text(str(number))
    (folder / "00").unlink()
    (folder / "last").write_text("last")
    deadline = time.monotonic() + 240
    expected = [f"in/{number:02}" for number in range(1, 50)] + ["in/last"]
    while names(store) != expected:
        assert time.monotonic() < deadline, names(store)
        time.sleep(0.1)
    assert (one.end(), two.end()) == (0, 0)
    assert [event for event in one.events + two.events if event["event"] == "failed"] == []


def test_memory_does_not_grow_with_the_number_of_files(store: Store, folder: Path, watch: Watch) -> None:
    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    few, many = (1500, 6000) if LONG else (700, 2700)
    for number in range(few):
        (folder / f"{number:05}").write_text(str(number))
    watching = watch(settle="0")
    before = resident(watching.process.pid)
    for number in range(few, many):
        (folder / f"{number:05}").write_text(str(number))
    watching.until("added", f"in/{many - 1:05}")
    assert resident(watching.process.pid) - before < 15_000_000 * (many - few) / 4500
    assert watching.end() == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["file", "--as", "in"], "file is not a folder"),
        (["nothing", "--as", "in", "--restore"], "nothing is not a folder"),
        (["folder", "--as", "../x"], "prefix '../x'"),
        (["folder", "--as", "in", "--codec", "rar"], "rar"),
        (["folder", "--as", "in", "--settle", "soon"], "'soon' is not a duration"),
        (["folder", "--as", "in", "--restore", "--mirror"], "--restore goes with neither"),
        (["store", "--as", "in"], "lies in the store"),
        (["/", "--as", "in"], "/ is the whole machine"),
        (["folder"], "--as"),
    ],
)
def test_wrong_words_are_refused_with_one_line(
    store: Store,
    folder: Path,
    tmp_path: Path,
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.chdir(tmp_path)
    ran = run(store.path, "watch", *words)
    assert ran.returncode == 2
    assert sentence in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_large_file_does_not_keep_the_watcher_from_ending(store: Store, folder: Path, watch: Watch) -> None:
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)  # takes no room, and minutes to add
    watching = watch(settle="0", ready=False)
    deadline = time.monotonic() + 300
    while not list((store.path / "tmp").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    started = time.monotonic()
    assert watching.end() == 0
    assert time.monotonic() - started < 60
    assert store.entry("in/large") is None
    assert list((store.path / "tmp").iterdir()) == []
