"""One rule for what is missing, whoever asks: no entry, an expired one, or one whose bytes are damaged or
gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from castore import CorruptError, InvalidNameError, NotFoundError, Store
from castore.objects.codecs import FRAME_SIZE
from tests.clocks import pass_time
from tests.helpers import flip, mixed, payload

SIZES = {"pack": 3_000, "one frame": 200_000, "many frames": 3 * FRAME_SIZE + 12_345}


def _no_entry(store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("other", data)


def _deleted(store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", data)
    store.delete("a")


def _expired(store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", data, ttl=60)
    pass_time(monkeypatch, 120)


def _damaged(store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", data)
    path, offset, length = payload(store, "a")
    flip(path, offset + length // 2)
    assert store.verify().bad != []


def _gone(store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", data)
    path, _, _ = payload(store, "a")
    path.unlink()
    assert store.verify().bad != []


REASONS = {
    "no entry": _no_entry,
    "deleted": _deleted,
    "expired": _expired,
    "damaged": _damaged,
    "gone": _gone,
}


def _opened(store: Store) -> bytes:
    with store.open("a") as file:
        return file.read()


ASKS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get("a"),
    "get with a default": lambda store: store.get("a", b"default"),
    "get_many": lambda store: store.get_many(["a"]),
    "get_many with a default": lambda store: store.get_many(["a", "a"], b"default"),
    "load": lambda store: store.load("a"),
    "open": _opened,
    "in": lambda store: "a" in store,
    "iteration": lambda store: "a" in list(store),
    "get_or_compute": lambda store: store.get_or_compute("a", lambda: b"computed"),
}
ANSWERS: dict[str, Any] = {
    "get": None,
    "get with a default": b"default",
    "get_many": [None],
    "get_many with a default": [b"default", b"default"],
    "load": NotFoundError,
    "open": NotFoundError,
    "in": False,
    "iteration": False,
    "get_or_compute": b"computed",
}


def _questions() -> Iterator[object]:
    """Each question after each reason, with sizes by turns; in `make torture` with all sizes."""
    for (row, reason), (column, ask) in itertools.product(enumerate(REASONS), enumerate(ASKS)):
        for number, (placement, size) in enumerate(SIZES.items()):
            left_out = (row + column + number) % len(SIZES) != 0
            yield pytest.param(
                size, reason, ask, marks=[pytest.mark.matrix] * left_out, id=f"{placement}-{reason}-{ask}"
            )


@pytest.mark.parametrize(("size", "reason", "ask"), _questions())
def test_what_is_missing_is_missing_for_all_who_ask(
    store: Store, size: int, reason: str, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    REASONS[reason](store, mixed(size), monkeypatch)
    if ANSWERS[ask] is NotFoundError:
        told = "bytes of 'a' .* were found damaged" if reason in ("damaged", "gone") else "no entry 'a'"
        with pytest.raises(NotFoundError, match=told):
            ASKS[ask](store)
        with pytest.raises(KeyError):
            ASKS[ask](store)
    else:
        assert ASKS[ask](store) == ANSWERS[ask]


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_is_put_again_is_there_for_all_who_ask(
    store: Store, size: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = mixed(size)
    REASONS[reason](store, data, monkeypatch)
    store.put("a", data)
    assert store.get("a", b"default") == store.load("a") == _opened(store) == data
    assert store.get_many(["a"], b"default") == [data]
    assert "a" in store
    assert "a" in list(store)


@pytest.mark.parametrize("ask", ["get", "get with a default", "get_many", "load"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_damage_that_nobody_has_seen_is_missing_for_whoever_reads_all_bytes_first(
    store: Store, size: int, ask: str
) -> None:
    store.put("a", mixed(size))
    path, offset, length = payload(store, "a")
    flip(path, offset + length // 2)
    assert "a" in store
    if ANSWERS[ask] is NotFoundError:
        with pytest.raises(NotFoundError):
            ASKS[ask](store)
    else:
        assert ASKS[ask](store) == ANSWERS[ask]
    assert "a" not in store


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_damage_that_a_file_meets_is_an_error_and_missing_from_then_on(store: Store, size: int) -> None:
    store.put("a", mixed(size))
    path, offset, length = payload(store, "a")
    flip(path, offset + length // 2)
    with store.open("a") as file, pytest.raises(CorruptError):
        file.read()
    assert "a" not in store
    with pytest.raises(NotFoundError):
        store.open("a")


@pytest.mark.parametrize("ask", [lambda store, name: name in store, lambda store, name: store.get(name)])
@pytest.mark.parametrize("name", ["../a", "a//b", "", 7])
def test_what_can_be_no_name_is_an_error_and_not_missing(
    store: Store, name: Any, ask: Callable[[Store, Any], Any]
) -> None:
    with pytest.raises(InvalidNameError):
        ask(store, name)


def test_a_store_counts_and_lists_the_names_that_have_not_expired(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number % 7}/{number}" for number in range(5_000)]
    store.put_many((name, name.encode()) for name in names)
    store.put("soon", b"over", ttl=60)
    assert len(store) == 5_001
    pass_time(monkeypatch, 120)
    assert len(store) == 5_000
    assert list(store) == sorted(names, key=str.encode)


def test_an_empty_store_is_true_and_has_no_names(store: Store) -> None:
    assert (len(store), list(store), bool(store)) == (0, [], True)


def test_asking_whether_a_name_is_there_is_no_use_of_it(store: Store) -> None:
    store.put("a", b"x")
    before = store.entry("a")
    assert "a" in store
    store.flush()
    assert store.entry("a") == before
    assert store.stat().disk_hits == 0
