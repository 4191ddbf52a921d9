"""mount(8), /etc/fstab and systemd mount a store through the files in fuse/."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from castore import Store
from castore.system.mount_table import mounts
from castore_fuse import mountpoints
from tests.mount.conftest import until

FUSE = Path(__file__).resolve().parents[2] / "fuse"
#: mount(8) looks for its helper here, whatever PATH is.
HELPER, COMMAND = Path("/sbin/mount.fuse.castore"), Path("/usr/local/bin/castore")


@pytest.fixture
def installed() -> Iterator[None]:
    """Install the helper and the command where mount(8) looks for them."""
    if os.geteuid() != 0:
        pytest.skip("installing there is for root")
    folder = os.open(HELPER.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # one such test at a time, of all workers and runs
        if HELPER.exists() or COMMAND.exists():
            pytest.skip(f"{HELPER} or {COMMAND} is installed already")
        path = os.pathsep.join(filter(None, sys.path))
        try:
            shutil.copy(FUSE / "mount.fuse.castore", HELPER)
            COMMAND.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" -m castore "$@"\n')
            COMMAND.chmod(0o755)
            yield
        finally:
            HELPER.unlink()
            COMMAND.unlink(missing_ok=True)
    finally:
        os.close(folder)


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program. Its output is read to the end, which exposes a daemon that keeps it open."""
    return subprocess.run(
        words,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def gone(mountpoint: Path, store: Store) -> bool:
    return mountpoints.mount_at(mountpoint) is None and store.stat().mounts == []


def test_mount_command_mounts_with_options(installed: None, store: Store, mountpoint: Path) -> None:
    store.put_many([("data/x", b"x"), ("other", b"y")])
    options = "pin,prefix=data,allow_other,cache_size=8MB,threads=2,noatime"
    ran = run("mount", "-t", "fuse.castore", store.path, mountpoint, "-o", options)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert os.listdir(mountpoint) == ["x"]
    found = mountpoints.mount_at(mountpoint)
    assert found is not None
    assert (found.source, found.fstype) == (f"castore:{store.path}", "fuse.castore")
    assert store.gc(max_size=0, grace=0).evicted == ["other"]
    assert run("umount", mountpoint).returncode == 0
    until(lambda: gone(mountpoint, store))


def test_fstab_line_is_mounted_once(installed: None, store: Store, mountpoint: Path, tmp_path: Path) -> None:
    store.put("x", b"x")
    fstab = tmp_path / "fstab"
    fstab.write_text(f"castore:{store.path} {mountpoint} fuse.castore pin,nofail,x-systemd.automount 0 0\n")
    for _ in range(2):
        ran = run("mount", "--fstab", fstab, "-a")
        assert (ran.returncode, ran.stderr) == (0, "")
        assert (mountpoint / "x").read_bytes() == b"x"
    assert len([mount for mount in mounts() if mount.mountpoint == mountpoint]) == 1
    assert run("umount", mountpoint).returncode == 0
    until(lambda: gone(mountpoint, store))


def test_mount_command_says_what_is_wrong(
    installed: None, store: Store, mountpoint: Path, tmp_path: Path
) -> None:
    mount = ("mount", "-t", "fuse.castore")
    ran = run(*mount, store.path, mountpoint, "-o", "pinn")
    assert "unknown option 'pinn'" in ran.stderr
    assert ran.returncode == 1
    ran = run(*mount, tmp_path / "nothing", mountpoint)
    assert f"there is no store at {tmp_path / 'nothing'}" in ran.stderr
    assert ran.returncode == 32
    assert run(*mount, store.path, mountpoint, "-s", "-o", "pinn").returncode == 0
    assert run("umount", mountpoint).returncode == 0
    COMMAND.unlink()
    assert "there is no castore on the PATH" in run(*mount, store.path, mountpoint).stderr


def test_helper_is_plain_posix_shell() -> None:
    assert run("sh", "-n", FUSE / "mount.fuse.castore").returncode == 0
    assert os.access(FUSE / "mount.fuse.castore", os.X_OK)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = (FUSE / "systemd" / "castore-mount@.service").read_text()
    # It looks for the program as well, which need not be installed here.
    place = tmp_path / "castore-mount@mnt-data.service"
    place.write_text(unit.replace("/usr/local/bin/castore", "/bin/true"))
    ran = run("systemd-analyze", "verify", "--man=no", place)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_unit_waits_until_files_can_be_read_and_notices_a_daemon_that_ended(mountpoint: Path) -> None:
    """The command of ExecStartPost, as systemd runs it after it has halved the dollars."""
    unit = (FUSE / "systemd" / "castore-mount@.service").read_text()
    line = next(line for line in unit.splitlines() if line.startswith("ExecStartPost="))
    script = line.split("'")[1].replace("$$", "$")
    with subprocess.Popen(["sleep", "60"]) as lives:
        assert run("sh", "-c", script, "sh", "/proc", MAINPID=str(lives.pid)).returncode == 0
        lives.kill()
    assert run("sh", "-c", script, "sh", mountpoint, MAINPID=str(lives.pid)).returncode == 1
