"""A store whose folder was removed while it was open."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from castore import Store, StoreError
from tests.helpers import noise


def _create(store: Store) -> None:
    with store.create("new") as file:
        file.write(noise(100_000))


def _in_batch(store: Store) -> None:
    with store.batch() as batch:
        batch.put("new", b"1")


#: Calls that need files of the store, even with what an open one holds.
_CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("new", b"1"),
    "put large": lambda store: store.put("new", noise(1_000_000, 1)),
    "put_many": lambda store: store.put_many([("new", b"1")]),
    "put_if": lambda store: store.put_if(("new", None), [("new", b"1")]),
    "save": lambda store: store.save("new", {"a": 1}),
    "create": _create,
    "batch": _in_batch,
    "get_or_compute": lambda store: store.get_or_compute("new", lambda: 1),
    "gc": lambda store: store.gc(),
    "gc dry": lambda store: store.gc(dry_run=True),
    "verify": lambda store: store.verify(),
}
#: Calls that need them once the store's connections are closed.
_READS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a"),
    "get_many": lambda store: store.get_many(["a", "b"]),
    "load": lambda store: store.load("a"),
    "open": lambda store: store.open("a"),
    "in": lambda store: "a" in store,
    "len": len,
    "entry": lambda store: store.entry("a"),
    "stat": lambda store: store.stat(),
    "totals": lambda store: store.totals(),
    "delete": lambda store: store.delete("a"),
    "pin": lambda store: store.pin("a"),
}


@pytest.mark.parametrize(
    ("call", "closed"),
    [pytest.param(call, False, id=f"{name}, open") for name, call in _CALLS.items()]
    + [pytest.param(call, True, id=f"{name}, closed") for name, call in (_CALLS | _READS).items()],
)
def test_a_call_says_that_the_folder_of_its_store_is_gone(
    tmp_path: Path, call: Callable[[Store], object], closed: bool
) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        store.put("a", b"1")
    if not closed:
        store.put("b", b"2")
    shutil.rmtree(store.path)
    with pytest.raises(StoreError, match=r"the folder of the store .* is gone; open the store anew"):
        call(store)
    with Store(store.path) as anew:
        assert anew.put("a", b"1").size == 1
    store.close()


def test_a_missing_file_of_the_user_is_no_missing_store(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store, pytest.raises(FileNotFoundError, match="no-such-file"):
        store.put_file("a", tmp_path / "no-such-file")
