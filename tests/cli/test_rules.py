"""Rules of all commands: exit codes, JSON that every parser takes, messages that name their subject."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from castore import Store
from castore.cli.commands import COMMANDS
from tests.cli.conftest import Cli
from tests.helpers import flip, payload

#: Every command that takes a name or a folder of names, with the position of that argument.
NAMING = {
    "add": ("add", "file", "--as", "{}"),
    "ls": ("ls", "{}"),
    "cat": ("cat", "{}"),
    "get": ("get", "{}", "-o", "out"),
    "rm": ("rm", "{}"),
    "rm -r": ("rm", "-r", "{}"),
    "pin": ("pin", "{}"),
    "unpin": ("unpin", "{}"),
    "pin -r": ("pin", "-r", "{}"),
    "train-dict": ("train-dict", "{}"),
    "stat": ("stat", "{}"),
    "mount": ("mount", "mnt", "--prefix", "{}"),
    "watch": ("watch", ".", "--as", "{}"),
    "push": ("push", "{}"),
    "pull --prefix": ("pull", "main", "--prefix", "{}"),
    "pull --as": ("pull", "main", "--as", "{}"),
    "warm": ("warm", "{}"),
    "diff": ("diff", "main", "main", "--prefix", "{}"),
}
#: Commands for which a name need not be there; and commands of remotes, see test_remote.py.
MAKING, REMOTE = {"add", "watch", "mount"}, {"push", "pull --prefix", "pull --as", "warm", "diff"}
#: The other commands take no names.
OTHERS = {"init", "gc", "verify", "doctor", "umount", "process", "remote", "log"}


def test_every_command_is_held_to_the_rule() -> None:
    assert {words.split()[0] for words in NAMING} | OTHERS == set(COMMANDS)


@pytest.mark.parametrize("command", NAMING)
def test_what_can_be_no_name_is_a_mistake_in_usage(cli: Cli, store: Store, command: str) -> None:
    before = list(store.entries())
    Path("file").write_bytes(b"x")
    for name in ("../x", "/abs", "a//b", "a/./b", "a\nb", "n" * 256, os.fsdecode(b"\xff")):
        ran = cli(*(word.format(name) for word in NAMING[command]))
        assert ran.code == 2, (name, ran.err)
        assert ran.err.startswith(("castore: name ", "castore: prefix ")), (name, ran.err)
        assert ran.err.count("\n") == 1, name
        assert list(store.entries()) == before, name


@pytest.mark.parametrize(
    "words",
    [("cat", "kept", "../x"), ("rm", "kept", "../x"), ("pin", "kept", "../x"), ("unpin", "kept", "../x")],
)
def test_a_mistake_in_usage_is_seen_before_anything_is_done(
    cli: Cli, store: Store, words: tuple[str, ...]
) -> None:
    store.put("kept", b"kept")
    before = store.entry("kept")
    ran = cli(*words)
    assert (ran.code, ran.out) == (2, "")
    assert store.entry("kept") == before


@pytest.mark.parametrize("command", sorted(NAMING.keys() - MAKING - REMOTE))
@pytest.mark.parametrize("name", ["nothing", "nothing/"])
def test_what_is_not_there_is_a_failure(cli: Cli, store: Store, command: str, name: str) -> None:
    ran = cli(*(word.format(name) for word in NAMING[command]))
    assert ran.code == 1
    assert ran.err.startswith("castore: there ")


def test_a_name_with_a_slash_at_its_end_gets_an_error_that_names_the_problem(cli: Cli, store: Store) -> None:
    store.put("a/b", b"1")
    for command in ("pin", "unpin", "rm", "cat"):
        assert cli(command, "a/b/").err == "castore: 'a/b' is a file; leave out the '/' at its end\n"
        assert "'a' is a folder of entries" in cli(command, "a/").err


def test_pin_and_rm_report_in_json(cli: Cli, store: Store) -> None:
    store.put_many((name, b"1") for name in ("a/b", "a/c", "d"))
    told = f"there is no entry 'x' in {store.path}; `castore ls` lists what there is"
    assert cli("pin", "a/b", "x", "--json").json == {"pinned": 1, "problems": [told]}
    assert cli("unpin", "a/b", "--json").json == {"unpinned": 1, "problems": []}
    ran = cli("rm", "d", "x", "--json")
    assert (ran.code, ran.json) == (1, {"removed": 1, "links": [], "problems": [told]})
    assert cli("rm", "-r", "a", "--json").json == {"removed": 2, "links": [], "problems": []}


def test_json_of_paths_that_are_no_text_is_taken_by_every_reader(cli: Cli, store: Store) -> None:
    (Path("data")).mkdir()
    Path("data", "good").write_bytes(b"1")
    Path("data", os.fsdecode(b"caf\xe9")).write_bytes(b"2")
    ran = cli("add", "data", "--json")
    assert ran.code == 1
    assert ran.json["failed"] == 1
    (problem,) = ran.json["problems"]
    assert "caf" in problem
    problem.encode()  # no lone surrogates, which JSON may not have
    ran.raw.decode()


def test_add_names_in_json_what_it_left_out(cli: Cli, store: Store) -> None:
    Path("good").write_bytes(b"1")
    ran = cli("add", "good", "missing", "--json")
    assert ran.json["problems"] == ["missing: No such file or directory; skipped"]
    assert ran.json["files"] == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add", ""), "a PATH is empty; give a file or a folder (is a variable unset?)"),
        (("add", "file", "--as", ""), "--as is empty, and file is no folder; give it a name"),
        (("get", "kept", "-o", ""), "-o is empty; give a file (is a variable unset?)"),
    ],
)
def test_what_is_empty_is_named(cli: Cli, store: Store, words: tuple[str, ...], told: str) -> None:
    store.put("kept", b"kept")
    Path("file").write_bytes(b"x")
    ran = cli(*words)
    assert (ran.code, ran.err) == (2, f"castore: {told}\n")


def test_a_file_in_the_place_of_a_store_is_named(cli: Cli, folder: Path) -> None:
    folder.write_bytes(b"")
    Path("file").write_bytes(b"x")
    for words in (("add", "file"), ("init",)):
        ran = cli(*words)
        assert ran.code == 1
        assert (
            ran.err == f"castore: {folder} is a file, and a store is a folder; choose another for the store\n"
        )


def test_a_lost_blob_is_nowhere(cli: Cli, store: Store) -> None:
    path, offset, length = payload(store, "data/a.txt")
    flip(path, offset + length // 2)
    assert cli("verify").code == 1
    again = cli("verify", "--json")
    assert [finding["where"] for finding in again.json["bad"]] == ["nowhere"]


def test_a_missing_index_is_not_called_damaged(cli: Cli, folder: Path) -> None:
    with Store(folder, memory=0) as store:
        store.put("a", b"1")
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    ran = cli("doctor")
    assert ran.out.startswith(f"to do: the index is missing: there is no {folder}/index.sqlite\n")
    assert cli("doctor", "--rebuild-index").out.startswith("mended: the index was missing\n")


def test_stat_never_says_that_something_is_zero_times_smaller(cli: Cli, store: Store) -> None:
    assert cli("rm", "-r", "data").code == cli("rm", "large.bin").code == 0
    told = cli("stat").out
    assert "0.00x" not in told
    assert "what no name points to any more" in told


@pytest.mark.parametrize("name", ["my data", "-x", "it's; ls"])
def test_what_is_advised_can_be_typed(cli: Cli, store: Store, name: str) -> None:
    store.put(f"{name}/a", b"1")
    advised = []
    for command in ("cat", "pin", "rm"):
        told = cli(command, "--", name).err
        advised.append(shlex.split(told.split("`")[1]))
    assert [words[:2] for words in advised] == [["castore", "ls"], ["castore", "pin"], ["castore", "rm"]]
    assert cli(*advised[0][1:]).out == f"{name}/a\n"
    assert cli(*advised[1][1:]).code == 0
    assert [entry.pinned for entry in store.entries(name)] == [True]
    assert cli(*advised[2][1:]).code == 0
    assert list(store.entries(name)) == []


def test_get_names_the_file_that_it_was_asked_for(cli: Cli, store: Store) -> None:
    long = "n" * 255  # the name of the temporary file beside it is shorter
    Path("folder").mkdir()
    ran = cli("get", "data/a.txt", "-o", f"folder/{long}x")
    assert (ran.code, ran.err) == (1, f"castore: folder/{long}x: File name too long\n")
    assert os.listdir("folder") == []


def test_stat_counts_in_good_english(cli: Cli, folder: Path) -> None:
    Path("one").write_bytes(b"x")
    cli("add", "one")
    assert " 1 entry of 1 blob " in cli("stat").out
