"""How SQLite finds rows: what is asked all the time reads no table that grows with the store from end to end.

`castore stat` of ten million entries once took seconds for a condition that no index could serve.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from castore import Store
from tests.helpers import statements_of

GROWING = re.compile(r"SCAN (entries|blobs|checksums|places|e|b|p)\b")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store", memory=0) as opened:
        opened.put_many((f"folder {number % 5}/{number}", b"%d" % number) for number in range(200))
        opened.put("expiring", b"soon", ttl=1000)
        opened.put("kept", b"kept")
        opened.pin("kept")
        yield opened


def scans(store: Store, act: Callable[[], object]) -> list[str]:
    """The statements of ``act`` that read a growing table from end to end, after what SQLite says of them."""
    asked = dict.fromkeys(statements_of(store, act))
    statements = [sql for sql in asked if re.match("SELECT|INSERT|UPDATE|DELETE|WITH", sql)]
    assert statements
    db = store.index.connection()
    plans = ((sql, row[3]) for sql in statements for row in db.execute(f"EXPLAIN QUERY PLAN {sql}"))
    return [f"{step}: {sql}" for sql, step in plans if GROWING.match(step)]


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.get("folder 0/0"),
        lambda store: store.get_many(["folder 0/0", "folder 1/1"]),
        lambda store: "folder 0/0" in store,
        lambda store: store.put("another", b"value"),
        lambda store: store.put_many([("a", b"1"), ("b", b"2")]),
        lambda store: store.pin("folder 2/2"),
        lambda store: store.delete("folder 3/3"),
        len,
        lambda store: next(iter(store.entries("folder 4"))),
        lambda store: next(iter(store)),
        lambda store: store.gc(),
    ],
    ids=["get", "get_many", "in", "put", "put_many", "pin", "delete", "len", "entries", "iter", "gc"],
)
def test_no_table_is_read_from_end_to_end(store: Store, act: Callable[[Store], object]) -> None:
    assert scans(store, lambda: act(store)) == []


def test_figures_of_a_large_store_read_no_table(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castore.stats.PREFIX_ENTRIES", 0)
    assert scans(store, store.stat) == []
