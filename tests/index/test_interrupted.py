"""A change of a store that interrupts another one of its thread: a signal handler's, or a finaliser's.

It is refused, and the one that it interrupts goes on as if nothing had happened.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from castore import Store, StoreError
from tests.helpers import recount

INTERRUPTS = "interrupts another one of the same thread"


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.put("inner", b"x"),
        lambda store: store.put_many([("inner", b"x")]),
        lambda store: store.put("inner", bytes(range(256)) * 9000),
        lambda store: store.delete("known"),
        lambda store: store.pin("known"),
        lambda store: store.gc(grace=0),
    ],
    ids=["put", "put_many", "large", "delete", "pin", "gc"],
)
@pytest.mark.parametrize("other", [False, True], ids=["same object", "another object"])
def test_a_change_inside_another_one_is_refused(
    tmp_path: Path, change: Callable[[Store], object], other: bool
) -> None:
    with Store(tmp_path / "store") as store, Store(tmp_path / "store") as second:
        store.put("known", b"known")

        def interrupt() -> bytes:
            with pytest.raises(StoreError, match=INTERRUPTS):
                change(second if other else store)
            assert store.get("known") == b"known"
            return b"outer"

        with store.parts.index.write() as txn:
            txn.count({"outer": 1})
            interrupt()
        assert store.counters()["outer"] == 1
        assert store.entry("inner") is None
        change(second if other else store)
        recount(store)


def test_a_store_of_another_folder_may_be_changed_meanwhile(tmp_path: Path) -> None:
    with Store(tmp_path / "a") as store, Store(tmp_path / "b") as other:
        with store.parts.index.write():
            other.put("x", b"x")
            with pytest.raises(StoreError, match=INTERRUPTS), other.parts.index.write():
                other.put("y", b"y")
            with pytest.raises(StoreError, match=INTERRUPTS):
                store.put("x", b"x")
        assert (other.get("x"), other.entry("y"), store.entry("x")) == (b"x", None, None)
        store.put("x", b"x")


# A put here and there is interrupted by a signal whose handler puts, at any instruction.
INTERRUPTED = """
import signal, sys
from castore import Store, StoreError

store = Store(sys.argv[1])
kept, refused, handled = {}, 0, 0

def handler(*_):
    global refused, handled
    number = handled = handled + 1  # the handler may itself be interrupted
    try:
        store.put(f"handler/{number}", b"%d" % number)
        kept[f"handler/{number}"] = b"%d" % number
    except StoreError as error:
        assert "interrupts another one" in str(error), error
        refused += 1

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0013)
number = 0
while refused < 150 or handled < 200:
    number += 1
    if number % 3:
        store.put(f"main/{number}", b"main %d" % number)
    else:
        store.put_many([(f"main/{number}", b"main %d" % number), ("again", b"%d" % number)])
    kept[f"main/{number}"] = b"main %d" % number
signal.setitimer(signal.ITIMER_REAL, 0)
assert {name: store.get(name) for name in kept} == kept
assert {entry.name for entry in store.entries()} == {*kept, "again"}
assert not store.verify().bad
"""


def test_puts_of_a_signal_handler_leave_the_store_in_order(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(tmp_path / "store")], check=True, timeout=140)
    with Store(tmp_path / "store") as store:
        recount(store)
    doctor = [sys.executable, "-m", "castore", "--store", str(tmp_path / "store"), "doctor"]
    assert b"all in order" in subprocess.run(doctor, check=True, capture_output=True).stdout
