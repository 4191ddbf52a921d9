"""Fixtures of the mount's tests: a mountpoint that is free again afterwards, waiting, another user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.errors import CastoreError
from castore_fuse import mountpoints
from castore_fuse.lifecycle import check_fuse
from tests.mount import shelf
from tests.warm import Started, WarmPython

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def _can_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Skip where mounting is impossible, and keep the daemons' logs out of the user's home."""
    try:
        check_fuse()
    except CastoreError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", os.fspath(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that is free again after the test, whatever the test did to it."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    while mountpoints.mount_at(path):
        mountpoints.detach(path, lazy=True)


def until(true: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


@pytest.fixture
def anybody() -> Iterator[tuple[Path, str]]:
    """A folder of the user nobody, and that name.

    /dev/fuse has the mode that distributions set, and keeps it: another test may need it.
    """
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    folder = Path(tempfile.mkdtemp(prefix="castore-nobody-"))
    user = pwd.getpwnam("nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    os.chmod("/dev/fuse", 0o666)
    yield folder, user.pw_name
    if mountpoints.mount_at(folder / "mnt"):
        mountpoints.detach(folder / "mnt", lazy=True)
    shutil.rmtree(folder)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaders") / "plain"
    shelf.fill(folder)
    return folder


@pytest.fixture(scope="session")
def filled(plain: Path) -> Store:
    """A store that holds every file of the folder under its path."""
    with Store(plain.with_name("store")) as store:
        for path in files(plain):
            store.put_file(path.relative_to(plain).as_posix(), path)
    return store


ROOTS = ["default", "pinned", "remote"]


@pytest.fixture(scope="session")
def roots(filled: Store) -> Iterator[dict[str, Path]]:
    """The store's names in mounts: of the store itself, and of a remote that another store reads."""
    url = filled.path.with_name("bucket").as_uri()
    filled.add_remote("team", url).push()
    with Store(filled.path.with_name("other")) as other:
        other.add_remote("team", url)
    with (
        castore_fuse.mounted(filled.path) as default,
        castore_fuse.mounted(filled.path, pin=True) as pinned,
        castore_fuse.mounted(other.path, remote="team") as remote,
    ):
        yield dict(zip(ROOTS, (default, pinned, remote), strict=True))


@pytest.fixture(scope="session", params=ROOTS)
def root(request: pytest.FixtureRequest, roots: dict[str, Path]) -> Path:
    """One of these mounts."""
    return roots[request.param]


def forget_pages(path: Path | int) -> None:
    """Make the next read of a file, or of an open one, ask the daemon."""
    descriptor = path if isinstance(path, int) else os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        if not isinstance(path, int):
            os.close(descriptor)


@pytest.fixture(params=["default", "pinned"])
def live(request: pytest.FixtureRequest, store: Store) -> Iterator[Path]:
    """The store of this test, mounted in both modes: what the test puts appears."""
    with castore_fuse.mounted(store, pin=request.param == "pinned") as root:
        yield root


def each_with_a_mount(values: dict[str, object]) -> list[object]:
    """Pairs of a mode of `live` and a value: all values in the first mode, the first one in the other, and
    the rest of the matrix in `make torture`.
    """
    return [
        pytest.param(
            mode, value, id=f"{mode}-{name}",
            marks=[pytest.mark.matrix] if mode == "pinned" and name != next(iter(values)) else [],
        )
        for mode in ("default", "pinned") for name, value in values.items()
    ]  # fmt: skip


@contextlib.contextmanager
def program(warm: WarmPython, *words: str | Path) -> Iterator[Started]:
    """A Python program of the tests that prints `ready`, and continues on a line on its standard input."""
    process = warm.start(
        ["-m", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": os.fspath(_ROOT)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: Started, say: str) -> str:
    out, _ = process.communicate(say, timeout=300)
    assert process.returncode == 0
    return str(out)
