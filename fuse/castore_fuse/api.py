"""Mount a store: the functions behind `castore mount`, `castore umount` and Python code.

Each mount is served by its own daemon (``python -m castore_fuse``). Only `foreground` serves in this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

from castore import Store
from castore.errors import InvalidValueError
from castore.names import check_prefix
from castore.remote.outcomes import Prefetch
from castore.settings import is_read_only, load, no_store_message
from castore.units import parse_size
from castore_fuse import lifecycle, mountpoints
from castore_fuse.errors import MountError

#: Bound, in bytes, on the decoded frames that a mount keeps in RAM. The kernel caches what was read; these
#: frames only bridge requests.
CACHE_SIZE = 64 * 1024 * 1024


def mount(
    store: Store | str | os.PathLike[str],
    mountpoint: str | os.PathLike[str],
    *,
    prefix: str = "",
    pin: bool = False,
    allow_other: bool = False,
    cache_size: int | str = CACHE_SIZE,
    threads: int | None = None,
    remote: str = "",
    ref: str | None = None,
    follow: bool = False,
    prefetch: Prefetch = "none",
) -> Path:
    """Mount a store in the background and return once the mount answers.

    Args:
        store: a `Store` or its folder.
        mountpoint: an empty folder, created if it is missing. A dead castore mount found there is cleared.
        prefix: show only the names below this prefix, without the prefix.
        pin: while it is mounted, gc removes nothing under the prefix.
        allow_other: let other users in (root may, and others with ``user_allow_other`` in
            ``/etc/fuse.conf``).
        cache_size: bound on decoded frames kept in RAM, in bytes or as ``"256MB"``.
        threads: number of requests handled at once; by default a few more than there are cores, and 32
            if the store knows remotes, since bytes may have to come over a network.
        remote: name of a remote of the store. The names of its ref are shown instead of the store's, without
            a pull: bytes come when they are read, and stay in the store as far as its budget lets them.
        ref: a ref of the remote (default ``"main"``), or ``REF@COMMIT`` with at least six of a commit's hex
            digits.
        follow: show the ref's new commits as they come.
        prefetch: what comes before it is read: ``"none"``, ``"open"`` (the rest of a file that
            somebody reads), or ``"all"``.

    Returns:
        The mountpoint's real path.

    Raises:
        MountError: the mount failed; the message gives the reason.
        MissingDependencyError: libfuse 3 or fusermount3 is missing.
    """
    folder = _folder(store)
    lifecycle.check_fuse()
    path = _prepare(mountpoint, folder)
    options = _Options(prefix, pin, allow_other, cache_size, threads, remote, ref, follow, prefetch)
    command = _command(folder, options)
    command += _record(folder, path)
    lifecycle.mount_background(command, path, log_path=lifecycle.default_log_path(path))
    return path


@contextlib.contextmanager
def mounted(
    store: Store | str | os.PathLike[str],
    mountpoint: str | os.PathLike[str] | None = None,
    *,
    prefix: str = "",
    pin: bool = False,
    allow_other: bool = False,
    cache_size: int | str = CACHE_SIZE,
    threads: int | None = None,
    remote: str = "",
    ref: str | None = None,
    follow: bool = False,
    prefetch: Prefetch = "none",
) -> Iterator[Path]:
    """A mount for the length of a ``with`` block; the arguments are those of `mount`.

    Args:
        mountpoint: a temporary folder by default.

    Yields:
        The mountpoint.
    """
    folder = _folder(store)
    lifecycle.check_fuse()
    path = None if mountpoint is None else _prepare(mountpoint, folder)
    options = _Options(prefix, pin, allow_other, cache_size, threads, remote, ref, follow, prefetch)
    command = _command(folder, options)
    with lifecycle.mounted(command, path) as root:
        yield root


def umount(mountpoint: str | os.PathLike[str]) -> None:
    """End a mount, live or dead, and wait until its daemon is gone.

    Raises:
        BusyError: processes use files in it; the message names them.
        MountError: there is no castore mount.
    """
    path = mountpoints.real_path(mountpoint)
    found = mountpoints.mount_at(path)
    record = None
    if found is not None and found.source.startswith("castore:"):
        record = _record_path(Path(found.source.removeprefix("castore:")), path)
    lifecycle.umount(path, record_path=record)


def foreground(
    store: Store | str | os.PathLike[str],
    mountpoint: str | os.PathLike[str],
    *,
    prefix: str = "",
    pin: bool = False,
    allow_other: bool = False,
    cache_size: int | str = CACHE_SIZE,
    threads: int | None = None,
    remote: str = "",
    ref: str | None = None,
    follow: bool = False,
    prefetch: Prefetch = "none",
) -> int:
    """Serve a mount in this process until it is unmounted, and return the exit code. For service managers."""
    from castore_fuse.__main__ import main

    folder = _folder(store)
    lifecycle.check_fuse()
    path = _prepare(mountpoint, folder)
    options = _Options(prefix, pin, allow_other, cache_size, threads, remote, ref, follow, prefetch)
    command = _command(folder, options)[3:]
    return main([*command, *_record(folder, path), os.fspath(path)])


def _prepare(mountpoint: str | os.PathLike[str], folder: Path) -> Path:
    record_path = _record_path(folder, mountpoints.real_path(mountpoint))
    return lifecycle.prepare_mountpoint(mountpoint, folder, record_path=record_path)


def _folder(store: Store | str | os.PathLike[str]) -> Path:
    folder = store.path if isinstance(store, Store) else Path(os.path.abspath(store))
    if load(folder) is None:
        raise MountError(no_store_message(folder))
    return folder


class _Options(NamedTuple):
    """The options of `mount` that its daemon needs."""

    prefix: str
    pin: bool
    allow_other: bool
    cache_size: int | str
    threads: int | None
    remote: str
    ref: str | None
    follow: bool
    prefetch: Prefetch


def _command(folder: Path, given: _Options) -> list[str]:
    if given.threads is not None and not 1 <= given.threads <= 256:
        raise InvalidValueError(f"threads must be from 1 to 256, not {given.threads}")
    if given.prefetch not in get_args(Prefetch):
        raise InvalidValueError(f"prefetch is {' or '.join(get_args(Prefetch))}, not {given.prefetch!r}")
    if given.remote and given.pin:
        raise InvalidValueError("a mount of a remote cannot pin: what gc takes is fetched again")
    if not given.remote and (given.follow or given.ref is not None or given.prefetch != "none"):
        raise InvalidValueError("ref, follow and prefetch are for a mount of a remote: say which remote")
    command = [sys.executable, "-m", "castore_fuse", "--store", os.fspath(folder)]
    command += ["--prefix", check_prefix(given.prefix), "--cache-size", str(parse_size(given.cache_size))]
    command += ["--pin"] if given.pin else []
    command += ["--allow-other"] if given.allow_other else []
    command += ["--threads", str(given.threads)] if given.threads is not None else []
    if given.remote:
        command += ["--remote", given.remote, "--ref", given.ref or "main", "--prefetch", given.prefetch]
        command += ["--follow"] if given.follow else []
    return command


def _record(folder: Path, mountpoint: Path) -> list[str]:
    """The arguments that make the daemon write its record; none for a read-only store."""
    return [] if is_read_only(folder) else ["--record", os.fspath(_record_path(folder, mountpoint))]


def _record_path(folder: Path, mountpoint: Path) -> Path:
    name = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]
    return folder / "locks" / f"mount-{name}.json"
