"""`castore mount` and `umount`, as a shell uses them; the mount's own promises are tested in tests/mount."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from castore import Store
from tests.cli.conftest import Ran

Start = Callable[..., subprocess.Popen[bytes]]
Shell = Callable[..., Ran]


@pytest.fixture
def shell(castore: Start) -> Shell:
    """Run a command in a process of its own, so that each daemon is an orphan as in real use."""

    def run(*words: str | Path) -> Ran:
        process = castore(*words)
        out, err = process.communicate(timeout=300)
        return Ran(process.returncode, out, err.decode())

    return run


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A mountpoint that is free again at the end, whatever happened."""
    yield tmp_path / "mnt"
    if os.path.ismount(tmp_path / "mnt"):
        subprocess.run(["fusermount3", "-uz", str(tmp_path / "mnt")], check=True)


def test_mount_returns_when_files_can_be_read(shell: Shell, store: Store, folder: Path, place: Path) -> None:
    ran = shell("mount", place)
    assert (ran.code, ran.out) == (0, f"{folder} is mounted at {place}\n")
    assert (place / "data" / "a.txt").read_bytes() == b"alpha"
    assert str(place) in shell("stat").out
    assert shell("umount", place) == (0, b"", "")
    assert list(place.iterdir()) == []


def test_umount_goes_on_behind_a_place_where_nothing_is_mounted(
    shell: Shell, store: Store, place: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    assert shell("mount", place).code == shell("mount", other, "--prefix", "data").code == 0
    ran = shell("umount", place, tmp_path, other)
    assert (ran.code, ran.out) == (1, "")
    assert str(tmp_path) in ran.err
    assert not os.path.ismount(place)
    assert not os.path.ismount(other)


def test_umount_in_the_mount_names_the_shell_and_not_itself(
    shell: Shell, castore: Start, store: Store, place: Path
) -> None:
    assert shell("mount", place).code == 0
    for mountpoint in (place, "../mnt", "."):
        with subprocess.Popen(["cat"], cwd=place, stdin=subprocess.PIPE) as user:
            umount = castore("umount", mountpoint, cwd=place)
            _, err = umount.communicate(timeout=300)
            user.communicate()
        assert umount.returncode == 1
        assert f"cat (pid {user.pid}, {place})" in err.decode()
        assert str(umount.pid) not in err.decode()
    umount = castore("umount", ".", cwd=place)
    assert umount.communicate(timeout=300) == (b"", b"")
    assert umount.returncode == 0


def test_doctor_says_what_to_do_about_a_mountpoint_whose_daemon_was_killed(
    shell: Shell, castore: Start, store: Store, place: Path
) -> None:
    daemon = castore("mount", place, "--foreground")
    deadline = time.monotonic() + 240
    while not (place / "data" / "a.txt").exists():
        assert daemon.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    daemon.kill()
    daemon.communicate(timeout=300)
    ran = shell("doctor")
    assert f"the daemon of the mount at {place} has died; its record has been removed." in ran.out
    assert f"`castore umount {place}` clears it" in ran.out
    assert shell("umount", place) == (0, b"", "")
    assert list(place.iterdir()) == []


def test_options_reach_the_mount(shell: Shell, store: Store, place: Path) -> None:
    assert (
        shell("mount", place, "--prefix", "data", "--pin", "--cache-size", "8MB", "--threads", "2").code == 0
    )
    assert sorted(path.name for path in place.iterdir()) == ["a.txt", "b.txt"]
    shell("gc", "--max-size", "0", "--grace", "0")
    assert shell("ls").out == "data/a.txt\ndata/b.txt\n"
    assert shell("umount", place).code == 0


def test_foreground_serves_until_it_is_asked_to_end(castore: Start, store: Store, place: Path) -> None:
    process = castore("mount", place, "--foreground")
    deadline = time.monotonic() + 240
    while not (place / "data" / "a.txt").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert not os.path.ismount(place)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("mount", "store/inside"), 1, "must lie apart"),
        (("mount", "mnt", "--threads", "0"), 2, "threads"),
        (("mount", "mnt", "--prefix", "../x"), 2, "part 1 is '..'"),
        (("mount", "mnt", "--cache-size", "big"), 2, "is not a size"),
        (("umount", "mnt"), 1, "nothing is mounted"),
    ],
)
def test_what_cannot_be_mounted_is_a_line(
    shell: Shell, store: Store, words: tuple[str, ...], code: int, says: str
) -> None:
    ran = shell(*words)
    assert (ran.code, ran.err.count("\n")) == (code, 1)
    assert says in ran.err


def test_a_prefix_with_nothing_below_it_is_said(shell: Shell, store: Store, place: Path) -> None:
    for prefix, says in (("typo", "no name is below 'typo' yet"), ("data/a.txt", "'data/a.txt' is a file")):
        ran = shell("mount", place, "--prefix", prefix)
        assert ran.code == 0
        assert says in ran.err
        assert ran.err.count("\n") == 1
        assert shell("umount", place).code == 0
    assert shell("mount", place, "--prefix", "data").err == ""
    assert shell("umount", place).code == 0


def test_adding_a_folder_leaves_the_mount_in_it_out(
    shell: Shell, store: Store, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text("own")
    shell("mount", place)
    for words in (["add", tmp_path, "--as", "all"], ["add", tmp_path, "--as", "all", "--cross-mounts"]):
        ran = shell(*words)
        assert ran.code == 1
        assert f"castore: {place} is a mount of the store itself; skipped\n" in ran.err
    assert [entry.name for entry in store.entries("all")] == ["all/own"]
    assert shell("umount", place).code == 0
