"""The kernel's read-ahead of a mount follows how files are read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore_fuse.kernel_read_ahead import ENOUGH, NEAR, RAISED, KernelReadAhead
from tests.helpers import noise

SIZE = ENOUGH + NEAR


@pytest.fixture
def setting(tmp_path: Path) -> Path:
    """A file in the place of the kernel's."""
    (tmp_path / "read_ahead_kb").write_text("128\n")
    return tmp_path / "read_ahead_kb"


def read_in_order(one: KernelReadAhead, size: int = ENOUGH) -> None:
    for end in range(1 << 20, size + 1, 1 << 20):
        one.note(end - (1 << 20), end - (1 << 20), end)


def test_it_is_raised_by_files_in_order_and_lowered_by_the_first_jump(setting: Path) -> None:
    one = KernelReadAhead(setting)
    read_in_order(one, ENOUGH - 1)
    assert setting.read_text() == "128\n"
    read_in_order(one)
    assert setting.read_text() == str(RAISED)
    one.note(5 << 20, 0, 100)  # the next file begins
    one.note(9 << 20, 3 << 20, 4 << 20)  # requests of one reader, out of order
    assert setting.read_text() == str(RAISED)
    one.note(4 << 20, (4 << 20) + NEAR, (5 << 20) + NEAR)
    assert setting.read_text() == "128"
    read_in_order(one)
    assert setting.read_text() == str(RAISED)


@pytest.mark.parametrize("theirs", ["512", "16384"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_setting_of_somebody_else_stays(setting: Path, theirs: str, when: str) -> None:
    one = KernelReadAhead(setting)
    if when == "meanwhile":
        read_in_order(one)
    setting.write_text(theirs)
    if when == "before" and int(theirs) > RAISED:
        one = KernelReadAhead(setting)
    for _ in range(2):
        read_in_order(one)
        one.note(0, 2 * NEAR, 3 * NEAR)
        assert setting.read_text() == theirs


def test_a_kernel_that_refuses_costs_no_read(tmp_path: Path) -> None:
    one = KernelReadAhead(tmp_path / "none")
    read_in_order(one)
    one.note(0, 2 * NEAR, 3 * NEAR)
    (tmp_path / "read_ahead_kb").mkdir()
    read_in_order(KernelReadAhead(tmp_path / "read_ahead_kb"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set the kernel's read-ahead")
def test_a_mount_follows_its_readers(store: Store, mountpoint: Path) -> None:
    for name in ("first", "second"):
        store.put(name, noise(SIZE, len(name)), codec="none")
    with castore_fuse.mounted(store, mountpoint) as root:
        status = os.stat(root)
        device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
        setting = Path("/sys/class/bdi") / device / "read_ahead_kb"
        before = int(setting.read_text())
        assert before < RAISED
        assert (root / "first").read_bytes() == noise(SIZE, 5)
        assert int(setting.read_text()) == RAISED
        assert (root / "first").read_bytes() == noise(SIZE, 5)  # cached: nothing is asked for
        with (root / "second").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[SIZE - 1] == noise(SIZE, 6)[-1]
        assert int(setting.read_text()) == before
