"""Which mounts of a store count as alive: one rule, which everybody asks by `Store.mounts`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from castore import Mount, Store
from castore.index import mounts
from castore.system.temporary import OTHER_NAMESPACE_SECONDS

#: A process that puts itself on the list, as a daemon does, says so, and waits to be killed.
_DAEMON = """
import sys, time
from castore import Store
from castore.index import mounts
store = Store(sys.argv[1])
mounts.Registration(store.index, sys.argv[2], "", pinned=True)
print("there", flush=True)
time.sleep(600)
"""


def _daemon(store: Store, mountpoint: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _DAEMON, str(store.path), mountpoint], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def test_live_mounts_are_listed_the_oldest_first_with_what_they_show(store: Store) -> None:
    assert store.mounts() == []
    first = mounts.Registration(store.index, "/mnt/first", "in/deep", pinned=True)
    with _daemon(store, "/mnt/second") as other:
        try:
            found = store.mounts()
        finally:
            other.kill()
    assert [(mount.mountpoint, mount.prefix, mount.pinned) for mount in found] == [
        ("/mnt/first", "in/deep", True),
        ("/mnt/second", "", True),
    ]
    assert found[0].since <= found[1].since
    first.remove()
    assert store.mounts() == []


def test_a_killed_mount_is_alive_to_nobody_from_then_on(store: Store) -> None:
    """Gc has not been here: its row is still on the list."""
    with _daemon(store, "/mnt") as daemon:
        assert store.stat().mounts == ["/mnt"]
        daemon.send_signal(signal.SIGKILL)
    assert store.mounts() == []
    assert store.stat().mounts == []
    assert mounts.remove_dead(store.index) == ["/mnt"]
    assert mounts.remove_dead(store.index) == []


def test_asking_changes_nothing_so_it_works_where_nothing_can_be_written(store: Store) -> None:
    with _daemon(store, "/mnt") as daemon:
        daemon.kill()
    before = (store.path / "index.sqlite").read_bytes()
    log = Path(f"{store.path / 'index.sqlite'}-wal").read_bytes()
    for _ in range(2):
        assert store.mounts() == []
    assert (store.path / "index.sqlite").read_bytes() == before
    assert Path(f"{store.path / 'index.sqlite'}-wal").read_bytes() == log


def test_a_mount_of_another_container_is_alive_for_an_hour_after_its_last_sign_of_life(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = mounts.Registration(store.index, "/mnt", "", pinned=False)
    seen = time.time()
    monkeypatch.setattr(mounts, "pid_namespace", lambda: 1)  # as another container sees it
    for ahead, alive in (
        (OTHER_NAMESPACE_SECONDS - 60, True),
        (OTHER_NAMESPACE_SECONDS + 60, False),
        (-OTHER_NAMESPACE_SECONDS - 60, False),
    ):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: seen + ahead)
        assert bool(store.mounts()) is alive
    monkeypatch.undo()
    assert len(store.mounts()) == 1
    registration.remove()


@pytest.mark.parametrize(
    ("shown", "prefix", "shows"),
    [
        ("", "", True),
        ("", "a/b", True),
        ("a", "a", True),
        ("a", "a/b", True),
        ("a", "ab", False),
        ("a/b", "a", False),
    ],
)
def test_a_mount_of_a_prefix_shows_what_lies_at_or_below_it(shown: str, prefix: str, shows: bool) -> None:
    assert Mount("/mnt", shown, False, 0.0).shows(prefix) is shows


def test_a_name_lies_in_a_mount_below_what_it_shows() -> None:
    assert Mount("/mnt", "", False, 0.0).path("a/b") == "/mnt/a/b"
    assert Mount("/mnt", "a", False, 0.0).path("a/b") == "/mnt/b"
    assert Mount("/", "", False, 0.0).path("a") == "/a"
    assert Mount(os.sep, "a", False, 0.0).path("a/b") == "/b"
