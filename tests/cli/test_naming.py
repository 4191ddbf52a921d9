"""`castore rm`, `pin` and `unpin`."""

from __future__ import annotations

from castore import Store
from tests.cli.conftest import Cli
from tests.mount.conftest import until


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.entries()]


def test_rm_removes_names_and_goes_on_after_a_missing_one(cli: Cli, store: Store) -> None:
    ran = cli("rm", "data/a.txt", "nosuch", "large.bin")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "no entry 'nosuch'" in ran.err
    assert names(store) == ["data/b.txt"]


def test_rm_takes_folders_only_with_recursive(cli: Cli, store: Store) -> None:
    ran = cli("rm", "data")
    assert ran.code == 1
    assert "`castore rm -r data`" in ran.err
    assert len(names(store)) == 3
    assert cli("rm", "-r", "data", "large.bin").code == 0
    assert names(store) == []


def test_rm_of_a_folder_takes_whole_parts_only(cli: Cli, store: Store) -> None:
    store.put_many([("data2/x", b"x"), ("data.txt", b"y")])
    cli("rm", "-r", "data/")
    assert names(store) == ["data.txt", "data2/x", "large.bin"]


def test_rm_refuses_an_empty_name_before_it_removes_any(cli: Cli, store: Store) -> None:
    for words in (("-r", ""), ("",), ("-r", "large.bin", "")):
        ran = cli("rm", *words)
        assert (ran.code, ran.err) == (
            2, "castore: a NAME is empty; give the names (is a variable unset?)\n"
        )  # fmt: skip
    assert len(names(store)) == 3


def test_rm_of_many_thousands(cli: Cli, store: Store) -> None:
    store.put_many((f"many/{number}", b"x") for number in range(5000))
    assert cli("rm", "-r", "many").code == 0
    assert len(names(store)) == 3


def test_a_folder_is_pinned_and_unpinned_whole(cli: Cli, store: Store) -> None:
    store.put_many((f"data-2/{number}", b"x") for number in range(1200))
    assert cli("pin", "-r", "data", "data-2/7", "--json").json == {"pinned": 3, "problems": []}
    pinned = [entry.name for entry in store.entries() if entry.pinned]
    assert pinned == ["data-2/7", "data/a.txt", "data/b.txt"]
    assert cli("pin", "-r", "data-2/").code == 0
    assert cli("unpin", "-r", "data", "--json").json == {"unpinned": 2, "problems": []}
    assert sum(entry.pinned for entry in store.entries()) == 1200
    store.put("data/late", b"x", ttl=0.01, pin=True)
    until(lambda: "data/late" not in store)
    assert cli("unpin", "-r", "data", "--json").json == {"unpinned": 3, "problems": []}
    assert [one.pinned for one in store.entries("data", expired=True)] == [False] * 3
    for command in ("pin", "unpin"):
        ran = cli(command, "-r", "nosuch", "data")
        assert (ran.code, ran.err.count("\n")) == (1, 1)
        assert "there is no entry 'nosuch'" in ran.err
        assert cli(command, "-r", "").code == 2


def test_pin_and_unpin_and_their_complaints(cli: Cli, store: Store) -> None:
    ran = cli("pin", "nosuch", "data", "data/a.txt")
    assert ran.code == 1
    assert "no entry 'nosuch'" in ran.err
    assert "'data' is a folder of entries; `castore pin -r data` takes all of them" in ran.err
    assert [entry.name for entry in store.entries() if entry.pinned] == ["data/a.txt"]
    cli("gc", "--max-size", "1", "--grace", "0")
    assert names(store) == ["data/a.txt"]
    assert cli("unpin", "data/a.txt").code == 0
    cli("gc", "--max-size", "1", "--grace", "0")
    assert names(store) == []
