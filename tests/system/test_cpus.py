"""Threads that hash: a forked child has none of its parent's, and hashes all the same."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import castore
from castore.adapters.datasets.operator_keys import operator_fingerprint
from castore.keys.table_digest import table_digest
from castore.objects.encode import hash_file

SIZE = 8_000_000


def _file(folder: Path) -> object:
    path = folder / "large"
    path.write_bytes(bytes(SIZE))
    with open(path, "rb") as file:
        return hash_file(file.fileno())


def _table(folder: Path) -> object:
    return table_digest(pa.table({"n": np.arange(SIZE // 8)}))


def _operator(folder: Path) -> object:
    return operator_fingerprint(functools.partial(max, np.arange(SIZE // 8)))


def test_all_threads_that_hash_are_asked_for_in_one_place() -> None:
    package = Path(castore.__file__).parent
    asking = {path.name for path in package.rglob("*.py") if "blake3.AUTO" in path.read_text()}
    assert asking == {"cpus.py"}


@pytest.mark.parametrize("digest", [_file, _table, _operator])
def test_a_forked_child_hashes_as_its_parent_has_hashed(
    digest: Callable[[Path], object], tmp_path: Path
) -> None:
    # Regression: the child waited for ever, for the threads of its parent's pool.
    expected = digest(tmp_path)

    def compare() -> None:
        os._exit(0 if digest(tmp_path) == expected else 1)

    child = multiprocessing.get_context("fork").Process(target=compare)
    child.start()
    try:
        child.join(120)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
