"""The files of a source, noted in the store: for what has changed since, and for where rows lie.

The note of a source is the entry `NOTES_FOLDER`/<the source's key>. Must never decide what is read again:
keys do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from castore.adapters.datasets.explain import FileChanges
from castore.recipes.seen_files import SeenFiles
from castore.store import Store

#: The folder of the notes.
NOTES_FOLDER = ".datasets/sources"
# Runs of one name that are searched for the nearest: recipes without a name share one name.
_NEAREST = 20


class NotedFile(NamedTuple):
    """A file of a source.

    Attributes:
        path: the full path.
        digest: BLAKE3 of the file, in hexadecimal digits.
        rows: rows in it; None where they were not counted.
    """

    path: str
    digest: str
    rows: int | None


def note_files(
    store: Store, key: str, paths: Sequence[str], seen: SeenFiles, rows: Sequence[int] | None
) -> None:
    """Note the files of a source.

    Args:
        store, key: the store, and the source's key.
        paths: the files, in order.
        seen: gives their digests.
        rows: the rows of each; None to keep the numbers that are noted.
    """
    noted = find_files(store, key)
    if rows is None and noted is not None and len(noted) == len(paths):
        counts: Sequence[int | None] = [file.rows for file in noted]
    else:
        counts = [None] * len(paths) if rows is None else rows
    files = [
        NotedFile(os.path.abspath(path), seen.digest(path), count)
        for path, count in zip(paths, counts, strict=True)
    ]
    if files != noted:
        store.put(f"{NOTES_FOLDER}/{key}", json.dumps(files).encode(), codec="zstd")


def find_files(store: Store, key: str) -> list[NotedFile] | None:
    """The files of a source as they were last noted; None if they are not."""
    text = store.get(f"{NOTES_FOLDER}/{key}")
    return None if text is None else [NotedFile(*file) for file in json.loads(text)]


def find_nearest(
    store: Store, keys: Sequence[str], paths: Sequence[str], seen: SeenFiles
) -> list[NotedFile] | None:
    """The files of the source that has most in common with some files; None if none has anything.

    Args:
        store: has the notes.
        keys: the keys of sources, the latest first. Only the first of them are searched.
        paths: the files.
        seen: gives their digests.
    """
    now = {part for path in paths for part in (os.path.abspath(path), seen.digest(path))}
    nearest: list[NotedFile] | None = None
    most = 0
    for key in keys[:_NEAREST]:
        files = find_files(store, key) or []
        shared = len(now.intersection(part for file in files for part in (file.path, file.digest)))
        if shared > most:
            nearest, most = files, shared
    return nearest


def compare(before: Sequence[NotedFile], paths: Sequence[str], seen: SeenFiles) -> FileChanges:
    """How files differ from those that were noted."""
    old = {file.path: file.digest for file in before}
    now = {os.path.abspath(path): seen.digest(path) for path in paths}
    gone = {path for path in old if path not in now}
    changes = FileChanges([], [], [], [])
    lost = {old[path] for path in gone}
    for path, digest in now.items():
        if path in old:
            changes.changed.extend([path] * (old[path] != digest))
        else:
            (changes.moved if digest in lost else changes.new).append(path)
    found = set(now.values())
    changes.gone.extend(sorted(path for path in gone if old[path] not in found))
    return changes
