"""How much of a pack comes with a miss: more with each, and little once the budget is full."""

from __future__ import annotations

from pathlib import Path

from castore import Store
from castore.remote.pack_window import PackWindow

KIB, MIB = 1 << 10, 1 << 20
PACK = bytes(32)


def test_each_miss_brings_twice_as_much_as_the_one_before(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        window = PackWindow(store.parts)
        sizes = [end - start for start, end in (window.around(PACK, 5 * MIB) for _ in range(8))]
        assert sizes == [256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 8 * MIB, 8 * MIB]
        assert window.around(bytes([1]) * 32, 5 * MIB) == (5 * MIB, 5 * MIB + 256 * KIB), "another pack"


def test_a_full_budget_leaves_little_room_for_what_nobody_has_asked_for(tmp_path: Path) -> None:
    """Regression: with a budget a little below the set, each miss brought 8 MiB that pushed out as much, and
    a random epoch fetched the set ten times.
    """
    with Store(tmp_path / "store", memory=0, max_size="20MB") as store:
        window = PackWindow(store.parts)
        for _ in range(8):
            window.around(PACK, MIB)
        assert window.around(PACK, MIB) == (0, 8 * MIB), "there is room"
        store.put("filler", bytes(range(256)) * 60_000, codec="none")
        for offset in (9 * MIB, 3 * MIB, 12 * MIB, 3 * MIB):
            assert window.around(PACK, offset) == (offset, offset + 256 * KIB)
        offset, sizes = 3 * MIB + 256 * KIB, list[int]()
        for _ in range(7):  # in order, a little behind the end each time
            start, end = window.around(PACK, offset + 1000)
            sizes.append(end - start)
            offset = end
        assert sizes == [512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 8 * MIB, 8 * MIB]
        assert window.around(PACK, 0) == (0, 256 * KIB)
