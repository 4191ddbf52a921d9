"""The space that the levels may take, and the outcome where there is less: clear errors at the start, one
warning later.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from castore.adapters.torch.level_sizes import disk_bytes, is_off, memory_bytes
from castore.adapters.torch.tiers import TwoLevels
from castore.errors import InvalidValueError, StoreError
from castore.shm.free_space import shm_free
from tests.adapters.torch.records import open_levels, visit
from tests.helpers import noise
from tests.warm import WarmPython


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "levels"


def test_a_record_larger_than_both_levels_is_told_once_and_not_kept(folder: Path) -> None:
    levels = open_levels(1, 2000, folder)
    with pytest.warns(RuntimeWarning, match="sample 7 takes 3 KB.* 2 KB in all.*raise memory_cache_size"):
        levels.put(7, noise(3000, 7))
    levels.put(8, noise(3000, 8))  # a second warning would be an error here
    assert (7 in levels, 8 in levels) == (False, False)
    assert visit(levels, [1, 2, 1, 2]) == 2, "what fits is kept"
    levels.close()


#: Gives a program of a warm process a ``/dev/shm`` of its own, of the size that is its argument.
SMALL_SHM = """
import ctypes, os, subprocess, sys
assert ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0  # CLONE_NEWNS
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[1]}", "tmpfs", "/dev/shm"], check=True)
"""


SMALL_DISK = """
import sys, warnings
from castore.adapters.torch.tiers import TwoLevels
from castore.errors import FullError
from tests.helpers import noise
options = dict(name=None, key="data", write_through=False, keep=True, codec="auto")
import os
with open(sys.argv[1] + "/hog", "wb") as hog:
    left = os.statvfs(sys.argv[1])
    os.posix_fallocate(hog.fileno(), 0, (left.f_bavail - 2) * left.f_frsize)
try:
    TwoLevels(100, 0, "1GB", sys.argv[1] + "/a", **options)
except FullError as error:
    print(error)
os.unlink(sys.argv[1] + "/hog")
levels = TwoLevels(4000, 0, "6MB", sys.argv[1] + "/b", **options)
with open(sys.argv[1] + "/hog", "wb", buffering=0) as hog:  # somebody else takes the space that was free
    hog.truncate(0)
    left = os.statvfs(sys.argv[1])
    os.posix_fallocate(hog.fileno(), 0, left.f_bavail * left.f_frsize - (1 << 20))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for epoch in range(2):
        for index in range(4000):
            found = levels.get(index)
            if found is None:
                levels.put(index, noise(1000, index))
            else:
                assert found == noise(1000, index)
print(len(caught), caught[0].message)
print(levels.disk.hits.value)
os.unlink(sys.argv[1] + "/hog")
for index in range(4000):
    if levels.get(index) is None:
        levels.put(index, noise(1000, index))
print(levels.disk.stats().samples)
"""


def test_a_full_disk_is_an_error_at_the_start_and_a_warning_later(
    tmp_path: Path, warm_torch: WarmPython
) -> None:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24M", "tmpfs", place], check=True)
    try:
        out = warm_torch.output(["-c", SMALL_DISK, place])
    finally:
        subprocess.run(["umount", place], check=True)
    refused, warned, hits, samples = out.splitlines()
    assert refused.startswith("the disk of ")
    assert refused.endswith("free: make room")
    assert warned.startswith("1 no more samples are cached for now: "), "one warning, not thousands"
    assert "full" in warned
    assert int(hits) > 50
    assert int(samples) > 3000, "it goes on once there is space again"


def test_a_read_only_folder_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "fixed"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", place], check=True)
    try:
        with pytest.raises(StoreError, match=r"[Rr]ead-only"):
            open_levels(0, "1MB", place / "store")
    finally:
        subprocess.run(["umount", place], check=True)


def test_sizes_are_bytes_texts_or_fractions_of_what_is_free(tmp_path: Path) -> None:
    assert memory_bytes(10_000, "m") == 10_000
    assert memory_bytes("1 MiB", "m") == 1 << 20
    assert 0 < memory_bytes(0.01, "m") <= 0.011 * shm_free()
    free = shutil.disk_usage(tmp_path).free
    assert abs(disk_bytes(0.5, "d", tmp_path / "not" / "yet") - free / 2) < free / 20
    assert disk_bytes(1.0, "d", tmp_path, held=1000) > free * 0.9
    assert is_off(0, "m")
    assert is_off("0", "m")
    assert is_off(0.0, "m")
    assert not is_off(0.5, "m")


@pytest.mark.parametrize("bad", [-1, 1.5, -0.5, "many", float("nan"), True])
def test_sizes_that_make_no_sense_say_which_argument(bad: Any) -> None:
    with pytest.raises(InvalidValueError, match="memory_cache_size"):
        memory_bytes(bad, "memory_cache_size")


def test_limits_beyond_what_there_is_are_cut_with_a_word(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = shm_free()
    levels = TwoLevels(
        10, "900TB", "900PB", folder, name=None, key="k", write_through=False, keep=True, codec="auto"
    )
    assert levels.memory is not None
    assert levels.disk is not None
    assert levels.memory.stats().limit <= max(before, shm_free())
    assert levels.disk.stats().limit <= shutil.disk_usage(folder).free * 1.1
    assert len(caplog.records) == 2
    assert "memory_cache_size='900TB' is more than /dev/shm (or the machine's memory) has free" in caplog.text
    assert "disk_cache_size='900PB' is more than the disk of" in caplog.text
    assert visit(levels, list(range(10))) == 10
    assert visit(levels, list(range(10))) == 0
    levels.close()


def test_memory_that_cannot_grow_warns_once_and_goes_on(warm_torch: WarmPython) -> None:
    script = """
import warnings
from castore.adapters.torch.tiers import TwoLevels
levels = TwoLevels(1000, "60MB", 0, None, name=None, key="", write_through=False, keep=True, codec="auto")
import os
hog = os.open("/dev/shm/hog", os.O_RDWR | os.O_CREAT)
left = os.statvfs("/dev/shm"); os.posix_fallocate(hog, 0, left.f_bavail * left.f_frsize - (1 << 20))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for index in range(1000):
        assert levels.get(index) is None
        levels.put(index, bytes(60_000))
print(len(caught), caught[0].message)
"""
    out = warm_torch.output(["-c", SMALL_SHM + script, "66M"])
    assert out.startswith("1 no more samples are cached for now: /dev/shm has ")


def test_who_comes_when_the_levels_have_taken_all_memory_joins_them(warm_torch: WarmPython) -> None:
    script = """
import os
from castore.adapters.torch.tiers import TwoLevels
def join():
    return TwoLevels(10, 0.5, 0, None, name="all", key="", write_through=False, keep=True, codec="auto")
first = join()
first.put(3, bytes(1000))
hog = os.open("/dev/shm/hog", os.O_RDWR | os.O_CREAT)
left = os.statvfs("/dev/shm"); os.posix_fallocate(hog, 0, (left.f_bavail - 1) * left.f_frsize)
second = join()
print(second.memory.limit == first.memory.limit, second.get(3) == bytes(1000))
"""
    assert warm_torch.output(["-c", SMALL_SHM + script, "8M"]) == "True True\n"
