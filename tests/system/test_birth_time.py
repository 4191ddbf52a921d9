"""The birth time of a file: as `stat` of coreutils tells it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from castore.system.birth_time import birth_time


def test_it_is_that_of_coreutils_and_outlives_changes(tmp_path: Path) -> None:
    told = subprocess.run(["stat", "-c", "%W", tmp_path], capture_output=True, text=True, check=True).stdout
    born = birth_time(str(tmp_path))
    assert (born or 0) // 10**9 == int(told)
    (tmp_path / "file").write_bytes(b"")
    os.utime(tmp_path, (1, 1))
    assert birth_time(str(tmp_path)) == born


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        birth_time(str(tmp_path / "absent"))
