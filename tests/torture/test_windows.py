"""A process that dies in a crash window leaves what docs/format.md states; gc and doctor mend it."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import castore_fuse
from castore import Store, StoreError
from castore.repair import doctor
from tests.helpers import agrees_with_disk
from tests.torture import dictionary_windows, windows
from tests.torture.kills import killed
from tests.torture.windows import BASE, Window, mounted, mountpoint

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
WINDOWS = windows.WINDOWS + dictionary_windows.WINDOWS


def test_every_window_of_the_page_is_in_the_table_and_none_else() -> None:
    protocol = PAGE.read_text().partition("# The write protocol")[2]
    named = set()
    for section in protocol.split("\n### ")[1:]:
        heading, _, rest = section.partition("\n")
        rows = re.findall(r"^\| (.*?) \| .* \| .* \|$", rest, re.M)
        named |= {(heading, killed) for killed in rows if killed != "killed"}
    assert {(window.section, window.killed) for window in WINDOWS} == named


def holds(store: Store, names: dict[str, bytes]) -> None:
    """Assert that the store has exactly these names, each with its bytes."""
    there = [entry.name for entry in store.entries()]
    assert {
        name: data for name, data in zip(there, store.get_many(there), strict=True) if data is not None
    } == names


def mounts_again(store: Store) -> None:
    """Assert that the dead daemon holds nothing, and that mounting in its place needs no preparation."""
    where = mountpoint(store.path)
    castore_fuse.mount(store, where)
    try:
        assert mounted(1)(store)
        assert {name: (where / name).read_bytes() for name in BASE} == BASE
    finally:
        castore_fuse.umount(where)
    assert mounted(0)(store)


def dies_as_the_page_says(path: Path, window: Window) -> None:
    """Kill a process in a window of a new store.

    Assert the page's statements, and that everything is mended.
    """
    task = window.task
    with Store(path, memory=0) as store:
        store.put_many(BASE.items())
    task.ready(path)
    killed(lambda: task.act(path), window.stop)
    if window.refused:
        with pytest.raises(StoreError, match="rebuild"):
            Store(path, memory=0)
        doctor.rebuild_index(path)
    changed: dict[str, bytes | None] = {**task.kept, **window.changed}
    with Store(path, memory=0) as store:
        assert window.there(store)
        holds(store, {name: data for name, data in changed.items() if data is not None})
        if window.section == "Mount":
            mounts_again(store)
        if window.section == "Setting aside":
            store.put("old/large", BASE["old/large"])  # the same bytes again: they heal
        agrees_with_disk(store)
    assert all(finding.mended for finding in doctor.examine(path))
    assert doctor.examine(path) == []


def dies_in_window(path: Path, number: int) -> None:
    """`dies_as_the_page_says`, for a process of its own, which cannot be sent a window."""
    dies_as_the_page_says(path, WINDOWS[number])


@pytest.mark.usefixtures("mountpoint")
@pytest.mark.parametrize(
    "number", range(len(WINDOWS)), ids=[f"{window.section}: {window.killed}" for window in WINDOWS]
)
def test_killed_in_a_window_the_store_is_as_the_page_says(
    tmp_path: Path, small_process: ProcessPoolExecutor, number: int
) -> None:
    small_process.submit(dies_in_window, tmp_path / "store", number).result()
