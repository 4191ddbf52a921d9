"""Remembers in an entry's metadata the files that it was made from, and checks whether they have changed.

An entry that is a copy of a file names the file under ``source``; the file's digest is the entry's own. An
entry that was computed from files lists them under ``sources``, each with its digest, as `remember` returns
them. Nothing is kept elsewhere, so a rebuilt index has it all.

A check costs one ``stat`` a file while size and mtime are as remembered. Otherwise it may read the file.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import blake3

from castore import Store
from castore.errors import InvalidValueError
from castore.records import Entry, is_file_record

#: A file written less than this ago may be written again within the same tick of the file system's clock.
_CLOCK_TICK_NS = 50_000_000
#: An mtime further ahead than this was set by somebody, and is not that of a write a moment ago.
_CLOCK_AHEAD_NS = 2_000_000_000


def remember(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """The value for ``sources`` in the metadata of an entry that is computed from files.

    Args:
        paths: regular files; each is read once, for its digest.

    Returns:
        For each a JSON-like dict of ``path``, ``size`` in bytes, ``mtime_ns`` and ``digest``.

    Raises:
        OSError: a file cannot be read.
        InvalidValueError: it is not a regular file, changed while it was read, or its path is not UTF-8.

    >>> import tempfile, castore
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "raw.txt").write_text("hello")
    >>> store = castore.Store(folder / "store")
    >>> kept = store.put("upper", b"HELLO", metadata={"sources": remember([folder / "raw.txt"])})
    >>> fresh(store, "upper")
    True
    >>> _ = (folder / "raw.txt").write_text("goodbye")
    >>> fresh(store, "upper")
    False
    """
    return [_remember(os.path.abspath(path)) for path in paths]


def _remember(path: str) -> dict[str, Any]:
    before = os.stat(path)
    source = source_of(path, before)
    if source is None:
        raise InvalidValueError(f"{path!r} is not UTF-8, so it cannot be recorded as a source; rename it")
    if not stat.S_ISREG(before.st_mode):
        raise InvalidValueError(
            f"{path} is not a regular file, so it cannot be recorded as a source; list the files in it"
        )
    digest = digest_of(path)
    after = os.stat(path)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise InvalidValueError(f"{path} changed while it was read; record it when nobody writes to it")
    return source | {"digest": digest}


def source_of(path: str, status: os.stat_result) -> dict[str, Any] | None:
    """The value for ``source`` in the metadata of an entry that copies a file; None if the path is not UTF-8.

    Args:
        path: absolute.
        status: of the file, from before it was read.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        return None
    # None is never equal to an mtime: the next check compares the content.
    age = time.time_ns() - status.st_mtime_ns
    trusted = age > _CLOCK_TICK_NS or age < -_CLOCK_AHEAD_NS
    return {"path": path, "size": status.st_size, "mtime_ns": status.st_mtime_ns if trusted else None}


def digest_of(path: str) -> str:
    """BLAKE3-256 of a file, in hex. Reads pieces: if a mapped file shrinks, SIGBUS ends the process."""
    hasher = blake3.blake3()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()


def changed(entry: Entry) -> list[str]:
    """Why an entry no longer stands for the files it was made from: a sentence each; empty if it does.

    Size is compared first, then mtime, and where that differs the content.
    """
    return [reason for reason in map(_difference, sources_of(entry)) if reason is not None]


def sources_of(entry: Entry) -> list[dict[str, Any]]:
    """All files that an entry remembers, each with its digest."""
    source = entry.metadata.get("source")
    listed = entry.metadata.get("sources")
    found = [source | {"digest": entry.digest}] if is_file_record(source) else []
    return found + [one for one in listed if is_file_record(one)] if isinstance(listed, list) else found


def _difference(source: dict[str, Any]) -> str | None:
    path, digest = source["path"], source.get("digest")
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return f"{path} is not a file any more"
        if found.st_size != source["size"]:
            return f"{path} has {found.st_size:,} bytes, and had {source['size']:,}"
        # A link that stands for the file (`castore watch --replace`) carries its mtime to the nanosecond.
        if source["mtime_ns"] in (found.st_mtime_ns, os.lstat(path).st_mtime_ns):
            return None
        return None if digest_of(path) == digest else f"{path} has other content"
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is gone"
    except OSError as error:
        return f"{path} cannot be checked: {error.strerror}"


def fresh(store: Store, name: str) -> bool:
    """Whether there is an entry of that name and the files it was made from are as they were."""
    entry = store.entry(name)
    return entry is not None and not changed(entry)


class Stale(NamedTuple):
    """An entry that was computed from files which have changed; ``dropped`` unless it is pinned."""

    name: str
    reasons: list[str]
    dropped: bool


def drop_stale(store: Store, concerns: Callable[[str], bool]) -> Iterator[Stale]:
    """Drop entries that were computed from files which have changed. Scans all entries once.

    Args:
        store: has the entries.
        concerns: whether to check a file, by its path.
    """
    for entry in store.entries_with_key("sources"):
        if any(concerns(source["path"]) for source in sources_of(entry)) and (reasons := changed(entry)):
            yield Stale(entry.name, reasons, not entry.pinned and store.delete_unchanged(entry))
