"""A store whose folder was removed, made anew or moved while it was open."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from castore import Store, StoreError
from castore.adapters.tree import TreeCacheManager
from castore.repair import doctor
from tests.helpers import noise
from tests.mount.conftest import until


def _create(store: Store) -> None:
    with store.create("new") as file:
        file.write(noise(100_000))


def _in_batch(store: Store) -> None:
    with store.batch() as batch:
        batch.put("new", b"1")


#: Calls that need files of the store, or say that there is no other name.
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
    "get no name": lambda store: store.get("none"),
    "get_many no name": lambda store: store.get_many(["none", "neither"]),
    "in no name": lambda store: "none" in store,
    "entry no name": lambda store: store.entry("none"),
    "names": list,
    "entries": lambda store: list(store.entries()),
    "len": len,
    "stat": lambda store: store.stat(),
    "totals": lambda store: store.totals(),
}
#: Calls that an index that was removed would answer, for as long as it is open.
_READS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a"),
    "get_many": lambda store: store.get_many(["a", "b"]),
    "load": lambda store: store.load("a"),
    "open": lambda store: store.open("a"),
    "in": lambda store: "a" in store,
    "entry": lambda store: store.entry("a"),
    "delete": lambda store: store.delete("a"),
    "pin": lambda store: store.pin("a"),
}


@pytest.mark.parametrize(
    ("call", "closed"),
    [pytest.param(call, False, id=f"{name}, open") for name, call in (_CALLS | _READS).items()]
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


@pytest.mark.parametrize(
    ("call", "closed", "how"),
    [
        pytest.param(
            call,
            closed,
            how,
            id=f"{name}, {'closed' if closed else 'open'}, {how}",
            marks=[pytest.mark.matrix] * (closed and how == "moved"),
        )
        for how in ("removed", "moved")
        for closed in (False, True)
        for name, call in (_CALLS | _READS).items()
    ],
)
def test_a_store_that_took_the_folders_place_is_left_alone(
    tmp_path: Path, call: Callable[[Store], object], closed: bool, how: str
) -> None:
    with Store(tmp_path / "store", memory=0) as old:
        old.put("a", b"1")
        old.put("large", noise(200_000))
    if not closed:
        old.put("b", b"2")
    shutil.rmtree(old.path) if how == "removed" else old.path.rename(tmp_path / "moved")
    kept = {f"new/{number}": noise(10 ** (number % 7), number) for number in range(14)}
    with Store(old.path, memory=0) as new:
        new.put_many(kept.items())
        with pytest.raises(
            StoreError, match=r"the folder of the store .* is another one .* open the store anew"
        ):
            call(old)
        assert {name: new.get(name) for name in new} == kept
    old.close()
    assert doctor.examine(old.path) == []
    if how == "moved":
        with Store(tmp_path / "moved", memory=0) as moved:
            assert moved.get("a") == b"1"
            assert moved.verify().bad == []


def _is_error(call: Callable[[], object]) -> bool:
    try:
        call()
    except StoreError as error:
        return "is another one" in str(error)
    return False


def test_what_is_in_ram_answers_for_seconds_at_most(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store, TreeCacheManager(tmp_path / "tree") as tree:
        store.put("x", b"1")
        tree.put("t", "first")
        made = store.cached(_slowly)
        for _ in range(2):
            assert (store.get("x"), tree.contains("t"), made(1)) == (b"1", True, 2)
            assert tree.get_or_compute("t", lambda: "other") == "first"
        for folder in (store.path, tmp_path / "tree"):
            shutil.rmtree(folder)
            Store(folder).close()
        for call in (
            lambda: store.get("x"),
            lambda: store.load("x"),
            lambda: "x" in store,
            lambda: made(1),
            lambda: tree.get("t"),
            lambda: tree.contains("t"),
            lambda: tree.get_or_compute("t", lambda: "other"),
        ):
            until(partial(_is_error, call))


def _slowly(x: int) -> int:
    return x + 1


def test_reading_a_store_that_was_moved_damages_no_name(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        store.put("small", b"1")
        store.put("large", noise(2_000_000))
    assert store.entry("small") is not None  # a connection to the index is open again, and no file of objects
    store.path.rename(tmp_path / "moved")
    for name in ("large", "small"):
        with pytest.raises(StoreError, match="is gone"):
            store.get(name)
    with Store(tmp_path / "moved", memory=0) as moved:
        assert moved.get("large") == noise(2_000_000)
        assert moved.get("small") == b"1"
    (tmp_path / "moved").rename(store.path)
    assert store.get("large") == noise(2_000_000)
    store.close()


def test_a_missing_file_of_the_user_is_no_missing_store(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store, pytest.raises(FileNotFoundError, match="no-such-file"):
        store.put_file("a", tmp_path / "no-such-file")


def test_bytes_in_memory_are_given_out_for_some_seconds_and_no_longer(tmp_path: Path) -> None:
    """Regression: they were given out for good, beside errors of all other calls."""

    def is_noticed() -> bool:
        try:
            assert store.get("a") == b"1"
        except StoreError:
            return True
        return False

    with Store(tmp_path / "store") as store:
        store.put("a", b"1")
        assert not is_noticed()
        store.path.rename(tmp_path / "moved")
        until(is_noticed)
        (tmp_path / "moved").rename(store.path)
        assert store.get("a") == b"1"
