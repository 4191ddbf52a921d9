"""Trains the dictionaries of `castore add --dict`, from a sample of each folder's small files."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator
from typing import Any

from blake3 import blake3

from castore import Store, training
from castore.cli.walk import Source
from castore.errors import DictionaryError, InvalidValueError
from castore.objects.dictionaries import DICTIONARY_LIMIT


def train_dictionaries(
    store: Store, named: dict[str, str], search: Callable[[str, str], Iterator[Source]]
) -> list[dict[str, Any]]:
    """Train a dictionary for each folder whose names have none yet; returns a report on each.

    Args:
        named: the name that each path will get.
        search: finds the files at or below a path, and their names.

    Raises:
        InvalidValueError: there is no folder.
    """
    folders = {path: name for path, name in named.items() if os.path.isdir(path)}
    if not folders:
        raise InvalidValueError("--dict trains on folders of small files, and none of these is a folder")
    reports: list[dict[str, Any]] = []
    for path, name in folders.items():
        if store.has_dictionary(name):
            continue
        try:
            trained = store.train_dictionary(name, _samples(search(path, name)))
        except DictionaryError as error:
            reports.append({"prefix": name, "error": str(error)})
        else:
            reports.append({**trained._asdict(), "saving": round(trained.saving, 4)})
    return reports


def _samples(found: Iterator[Source]) -> Iterator[bytes]:
    """The small files whose names have the lowest digests: from all over the folder, always the same."""

    def hashed(source: Source) -> bytes:
        return blake3(source.name.encode()).digest()

    small = (source for source in found if 0 < source.size <= DICTIONARY_LIMIT)
    for source in heapq.nsmallest(training.SAMPLES, small, key=hashed):
        try:
            with open(source.path, "rb") as file:
                yield file.read(DICTIONARY_LIMIT + 1)
        except OSError:
            continue  # `add` reports it later
