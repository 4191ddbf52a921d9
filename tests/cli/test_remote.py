"""`castore remote`, `push`, `pull`, `log` and `diff`, over a bucket in a folder."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from castore import Store
from castore.cli.commands import command
from castore.cli.completion import refs, remotes
from castore.remote.commits import Commit, encode_commit, move_ref, read_commit, read_ref
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import commit_key
from castore.remote.pages import digest_of
from tests.cli.conftest import Cli
from tests.cli.test_terminal import drawn, read_all
from tests.helpers import LONG, noise
from tests.mount.conftest import until
from tests.remote.nodes import end_fetcher, know

pytestmark = pytest.mark.usefixtures("forked_processes")

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "the bucket").as_uri()


@pytest.fixture
def team(store: Store, url: str) -> str:
    """The name of the only remote of the store at `folder`."""
    know(store, "team", url)
    return "team"


@pytest.fixture
def other(tmp_path: Path, url: str) -> Store:
    """A store of another node, which knows the same remote."""
    store = Store(tmp_path / "other", memory=0)
    know(store, "theirs", url)
    return store


def commit_of(cli: Cli, ref: str = "main", place: int = 0) -> str:
    """A commit of a ref, the newest by default."""
    found: str = cli("log", ref, "--json").json[place]["commit"]
    return found


# remote


def test_a_remote_is_kept_listed_and_forgotten(cli: Cli, store: Store, url: str, tmp_path: Path) -> None:
    ran = cli("remote", "add", "team", url)
    assert (ran.code, ran.out, ran.err) == (0, f"team is {url} from now on\n", "")
    assert cli("remote", "add", "mine", url, "--read-only", "--single-writer", "--json").json == {
        "name": "mine", "url": url, "read_only": True, "single_writer": True, "requests": None, "rate": None,
    }  # fmt: skip
    assert cli("remote", "ls").out == f"mine\t{url}\tread-only, single writer\nteam\t{url}\t\n"
    assert [one["name"] for one in cli("remote", "ls", "--json").json] == ["mine", "team"]
    assert cli("remote", "rm", "mine", "--json").json == {"removed": "mine"}
    assert cli("remote", "rm", "team") == (0, b"", "")
    assert cli("remote", "ls") == (0, b"", "")
    assert (tmp_path / "the bucket" / "castore-remote.json").is_file()


def test_a_name_that_is_added_again_gets_other_options_but_no_other_url(
    cli: Cli, team: str, url: str
) -> None:
    assert cli("remote", "add", team, url, "--read-only").code == 0
    assert cli("remote", "ls").out == f"team\t{url}\tread-only\n"
    ran = cli("remote", "add", team, url + "2")
    assert ran.code == 2
    assert ran.err == (
        f"castore: remote 'team' is {url} already; remove it first (castore remote rm team), or, if the"
        " bucket has moved, add its new URL under another name and `castore pull --lazy` from that name\n"
    )


def test_names_follow_a_bucket_that_has_moved(
    cli: Cli, store: Store, team: str, other: Store, tmp_path: Path
) -> None:
    other.put_many([("set/one", noise(1000, 1)), ("set/large", noise(6 << 20))])
    other.push(to="theirs")
    assert cli("pull", "main", "--lazy").code == 0
    moved = (tmp_path / "the bucket").rename(tmp_path / "moved")
    for refused in (("add", team, moved.as_uri()), ("rm", team)):
        assert "if the bucket has moved, add its new URL under another name" in cli("remote", *refused).err
    assert cli("remote", "add", "moved", moved.as_uri()).code == 0
    assert cli("pull", "main", "--from", "moved", "--lazy").code == 0
    assert cli("remote", "rm", team).code == 0
    assert cli("cat", "set/one").raw == noise(1000, 1)
    assert cli("cat", "set/large").raw == noise(6 << 20)
    end_fetcher(store)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-x", "n" * 101, "ü", "a."])
def test_what_can_be_no_remote_s_name_is_a_mistake_in_usage(
    cli: Cli, store: Store, url: str, name: str
) -> None:
    for words in (("remote", "add", "--", name, url), ("remote", "rm", "--", name)):
        ran = cli(*words)
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert ran.err.startswith(f"castore: {name!r} cannot be a remote: use up to 100 letters")


@pytest.mark.parametrize("url", ["", "bucket", "/mnt/nfs", "file:", "nonsense://x/y", "file:///\udcff"])
def test_what_is_no_url_of_a_remote_is_a_mistake_in_usage(cli: Cli, store: Store, url: str) -> None:
    ran = cli("remote", "add", "team", url)
    assert ran.code == 2
    assert ran.err.startswith("castore: ")
    assert store.remotes() == []


def test_a_place_that_cannot_be_used_is_not_kept(cli: Cli, store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "castore-remote.json").write_text('{"format": 99}')
    for name, options, told in (
        ("file", (), "castore-remote.json"),
        ("strange", (), "has format 99, and this castore knows format 1"),
        ("nothing", ("--read-only",), "is no remote: it has no castore-remote.json"),
    ):
        ran = cli("remote", "add", "team", (tmp_path / name).as_uri(), *options)
        assert (ran.code, ran.err.count("\n")) == (1, 1), ran.err
        assert told in ran.err
    assert store.remotes() == []
    assert not (tmp_path / "nothing").exists()


def test_a_store_without_remotes_says_how_to_add_one(cli: Cli, store: Store) -> None:
    for words in (("push",), ("pull", "main"), ("log", "main"), ("diff", "main", "main")):
        ran = cli(*words)
        assert (ran.code, ran.err) == (
            1, f"castore: there is no remote in {store.path}; add one with `castore remote add NAME URL`\n",
        )  # fmt: skip


def test_the_only_remote_need_not_be_named_and_one_of_several_must(
    cli: Cli, store: Store, team: str, url: str
) -> None:
    assert cli("push").code == 0
    for words in (("pull", "main"), ("log", "main"), ("diff", "main", "main")):
        assert cli(*words).code == 0
    know(store, "second", url)
    for option, call in (
        ("--to", ("push",)),
        ("--from", ("pull", "main")),
        ("--from", ("log", "main")),
        ("--from", ("diff", "main", "main")),
    ):
        ran = cli(*call)
        assert (ran.code, ran.err) == (
            2, f"castore: the store knows several remotes; give one with {option}: second, team\n",
        )  # fmt: skip
        assert cli(*call, option, team).code == 0
        ran = cli(*call, option, "third")
        assert ran.code == 1
        assert ran.err.startswith("castore: the store knows no remote 'third' (it knows: second, team)")


# push


def test_push_says_what_it_did_in_one_sentence(cli: Cli, store: Store, team: str) -> None:
    store.put("noise", noise(2_000_000))
    ran = cli("push", "--to", team)
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"pushed 4 new to main@[0-9a-f]{8}: 2(\.\d)? MB in 4 objects\n", ran.out)
    store.put("data/a.txt", b"another alpha")
    store.put("data/c.txt", b"gamma")
    store.delete("noise")
    out = cli("push", "--delete").out
    assert re.fullmatch(
        r"pushed 1 new, 1 changed, 1 removed to main@[0-9a-f]{8}: [\d.]+ (B|KB) in 3 objects\n", out
    )
    assert cli("push").out == f"nothing to push: main@{commit_of(cli)[:8]} has all that changed here\n"


def test_push_tells_all_of_it_in_json(cli: Cli, store: Store, team: str) -> None:
    done = cli("push", "data", "--ref", "part", "--json").json
    assert {key: done[key] for key in ("remote", "ref", "added", "changed", "removed")} == {
        "remote": "team", "ref": "part", "added": 2, "changed": 0, "removed": 0,
    }  # fmt: skip
    assert done["commit"] == commit_of(cli, "part")
    assert done["sent"] > 0
    assert done["objects"] == 3


def test_push_deletes_only_when_it_is_told_to(cli: Cli, store: Store, team: str, other: Store) -> None:
    cli("push")
    store.delete("data/a.txt")
    store.delete("large.bin")
    assert cli("push").out.startswith("nothing to push")
    assert cli("push", "data", "--delete", "--json").json["removed"] == 1
    other.pull(remote="theirs")
    assert [entry.name for entry in other.entries()] == ["data/b.txt", "large.bin"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("nothing",), 1, "has no entry at or below 'nothing'; `castore ls` lists all"),
        (("nothing/",), 1, "has no entry at or below 'nothing'; `castore ls` lists all"),
        (("--ref", "a/b"), 2, "'a/b' cannot be a ref: use up to 100 letters"),
        (("--ref", ""), 2, "'' cannot be a ref: use up to 100 letters"),
        (("--ref", "main@1a2b3c4d"), 2, "'main@1a2b3c4d' cannot be a ref"),
        (("--note", os.fsdecode(b"\xff")), 2, "is not UTF-8"),
    ],
)
def test_what_cannot_be_pushed_is_one_sentence(
    cli: Cli, team: str, words: tuple[str, ...], code: int, told: str
) -> None:
    ran = cli("push", *words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1), ran.err
    assert told in ran.err


def test_nothing_is_pushed_to_a_remote_that_is_read_only(cli: Cli, team: str, url: str, other: Store) -> None:
    cli("remote", "add", team, url, "--read-only")
    ran = cli("push")
    assert ran.code == 1
    assert ran.err.startswith("castore: remote 'team' was added with --read-only, so nothing is pushed to it")
    other.put("x", b"x")
    other.push(to="theirs")
    assert cli("pull", "main").code == 0


def test_a_pickle_is_not_pushed(cli: Cli, folder: Path, team: str) -> None:
    with Store(folder, allow_pickle=True) as store:
        store.save("set", {1, "a", frozenset()}, serializer="pickle")
    ran = cli("push")
    assert ran.code == 2
    assert ran.err.startswith("castore: 'set' would have to be unpickled")


# pull


def test_pull_says_what_it_did_in_one_sentence(cli: Cli, store: Store, team: str, other: Store) -> None:
    other.put_many([("data/a.txt", b"alpha"), ("new", b"new"), ("noise", noise(300_000))])
    commit = other.push(to="theirs").commit
    ran = cli("pull", "main", "--from", team)
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(rf"pulled 2 new from main@{commit[:8]}: 300(\.\d)? KB fetched\n", ran.out)
    assert cli("pull", "main").out == f"nothing to pull: main@{commit[:8]} has nothing that the store lacks\n"
    assert store.get("noise") == noise(300_000)
    other.put("new", b"newer")
    other.push(to="theirs")
    done = cli("pull", "main", "--json").json
    assert done == {
        "remote": "team", "ref": "main", "commit": commit_of(cli), "added": 0, "changed": 1, "unchanged": 2,
        "fetched": done["fetched"], "expired": 0, "removed": 0,
    }  # fmt: skip
    assert store.get("new") == b"newer"
    other.delete("new")
    other.put("new/x", b"inside")
    other.push(to="theirs", delete=True)
    assert cli("pull", "main").out.endswith(
        "\nremoved: 1 name whose place a file or folder of the ref takes\n"
    )


def test_names_that_have_expired_or_were_removed_are_told(cli: Cli, team: str, other: Store) -> None:
    other.put_many([("a", b"1"), ("b", b"2")])
    other.push(to="theirs")
    for ttl in (1, 10, 100):
        other.put("short", b"1", ttl=ttl)
        if other.push(to="theirs").added:  # else it has expired before: the machine is busy
            break
    until(lambda: "short" not in other)
    assert cli("pull", "main").out.endswith("not pulled: 1 expired name\n")
    for name in ("a", "b"):
        other.delete(name)
    other.put("c", b"3")
    other.push(to="theirs", delete=True)
    assert "not pushed: 2 names that others have removed; --restore puts them back" in cli("push").out
    assert cli("push", "--restore").out.startswith("pushed 2 new to main@")


def test_an_older_commit_and_a_part_of_it_come_into_a_folder(
    cli: Cli, store: Store, team: str, other: Store
) -> None:
    other.put_many([("set/a", b"1"), ("set/b", b"2"), ("rest", b"3")])
    first = other.push(to="theirs").commit
    other.put("set/a", b"new")
    other.push(to="theirs")
    ran = cli("pull", f"main@{first[:8]}", "--prefix", "set/", "--as", "old/")
    assert ran.code == 0
    assert {entry.name: store.get(entry.name) for entry in store.entries("old")} == {
        "old/set/a": b"1", "old/set/b": b"2",
    }  # fmt: skip


def test_what_cannot_be_pulled_is_one_sentence(cli: Cli, team: str) -> None:
    cli("push")
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("other",), 1, "has no ref 'other'; its refs: main"),
        (("main@",), 2, "'' is no commit: give at least 6 of its hex digits"),
        (("main@12345",), 2, "'12345' is no commit"),
        (("main@" + 64 * "0",), 1, "has no commit 0000"),
        (("main", "--prefix", "nothing"), 1, "ref 'main' has no name at or below 'nothing'"),
        (("a/b",), 2, "'a/b' cannot be a ref"),
        (("@1a2b3c4d",), 2, "'' cannot be a ref"),
        ((), 2, "Missing argument"),
    ]
    for words, code, told in cases:
        ran = cli("pull", *words)
        assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1), ran.err
        assert told in ran.err


def test_a_conflict_names_the_first_names_and_what_to_do(
    cli: Cli, store: Store, team: str, other: Store
) -> None:
    cli("push", "data")
    other.pull(remote="theirs")
    names = [f"data/{number}" for number in range(7)]
    other.put_many((name, b"theirs") for name in names)
    other.push(to="theirs")
    store.put_many((name, b"ours") for name in names)
    first = ", ".join(map(repr, names[:5])) + " and 2 more changed both here and in ref 'main'; "
    ran = cli("push", "data")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        f"castore: {first}`castore pull main --replace` takes the ref's bytes, and --ref OTHER pushes to"
        " another ref\n"
    )
    ran = cli("pull", "main")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        f"castore: {first}--replace takes the ref's bytes, and --as FOLDER brings its names in beside yours\n"
    )
    for words in (("push",), ("pull", "main")):
        ran = cli(*words, "--json")
        assert (ran.code, ran.json) == (1, {"conflicts": names})
    assert store.get("data/0") == b"ours"
    assert cli("pull", "main", "--as", "theirs").code == 0
    assert store.get("theirs/data/0") == b"theirs"
    assert cli("pull", "main", "--replace").out.startswith("pulled 7 changed from main@")
    assert store.get("data/0") == b"theirs"


# log and diff


def test_log_lists_the_newest_commits_first(cli: Cli, store: Store, team: str) -> None:
    cli("push", "data", "--note", "the first")
    cli("push")
    found = cli("log", "main", "--json").json
    assert [(one["entries"], one["note"]) for one in found] == [(3, ""), (2, "the first")]
    lines = [line.split("\t") for line in cli("log", "main", "--from", team).out.splitlines()]
    assert [(line[0], *line[3:]) for line in lines] == [
        (found[0]["commit"][:12], "3", "3.1 MB", ""),
        (found[1]["commit"][:12], "2", "9 B", "the first"),
    ]
    assert cli("log", "main", "--limit", "1", "--json").json == found[:1]
    assert cli("log", f"main@{found[1]['commit'][:6]}", "--json").json == found[1:]
    assert cli("log", "main", "--limit", "0").code == 2
    assert cli("log", "other").code == 1


def test_a_note_of_another_machine_cannot_draw_on_the_terminal(
    cli: Cli, castore: Start, team: str, tmp_path: Path
) -> None:
    cli("push")
    bucket = FolderBucket(tmp_path / "the bucket")
    seen = read_ref(bucket, "main")
    assert seen is not None
    head = read_commit(bucket, seen.commit)
    data = encode_commit(
        Commit(head.tree, None, 1e300, "me\x1b[2J", "[red]a\n\x1b]0;title\x07\u202eb\tc", 1, 1)
    )
    bucket.put(commit_key(digest_of(data)), data)
    assert move_ref(bucket, "main", seen, digest_of(data), 0)
    [line] = cli("log", "main").out.splitlines()
    cells = line.split("\t")
    assert (cells[1], cells[2], cells[5]) == ("?", "me[2J", "[red]a ]0;titleb c")
    master, slave = pty.openpty()
    process = castore("log", "main", stdout=slave, env={"TERM": "dumb", "COLUMNS": "100", "LINES": "40"})
    os.close(slave)
    drawn = read_all(master)
    process.communicate()
    assert b"[red]a ]0;titleb c" in drawn
    assert b"NOTE" in drawn
    assert b"\x1b]0" not in drawn
    assert b"\x1b[2J" not in drawn


def test_diff_prints_a_line_a_name(cli: Cli, store: Store, team: str) -> None:
    cli("push")
    first = commit_of(cli)
    store.put("data/a.txt", b"another alpha")
    store.put("new", b"new")
    store.delete("large.bin")
    cli("push", "--delete")
    old = f"main@{first[:8]}"
    ran = cli("diff", old, "main", "--from", team)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "~       5 B      13 B  data/a.txt\n"
        "-    3.1 MB            large.bin\n"
        "+                 3 B  new\n"
    )  # fmt: skip
    assert cli("diff", old, "main", "--prefix", "data", "--json").json == {
        "name": "data/a.txt", "old": 5, "new": 13,
    }  # fmt: skip
    assert len(cli("diff", old, "main", "--json").out.splitlines()) == 3
    assert cli("diff", "main", "main") == (0, b"", "")
    assert cli("diff", "main", "other").code == 1
    store.put("new", b"new")  # again, at another time
    store.pin("new")
    cli("push", "--ref", "again")
    assert cli("diff", "main", "again") == (0, b"", "")


# Terminals, shells, signals


def test_bars_are_drawn_on_a_terminal_only(castore: Start, cli: Cli, store: Store, team: str) -> None:
    store.put("noise", noise(3_000_000))
    for words, what in (
        (("push", "noise"), b"pushing"),
        (("pull", "main", "--as", "again"), b"pulling"),
    ):
        seen, out = drawn(castore, *words)
        assert what in seen
        assert b"left" in seen
        assert b"\x1b" not in out
    store.delete("noise")
    store.gc(grace=0)
    process = castore("pull", "main")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"\x1b" not in out


def test_the_shell_completes_remotes_and_the_refs_that_were_used(
    cli: Cli, store: Store, folder: Path, team: str, url: str
) -> None:
    know(store, "other", url)
    cli("push", "--to", team, "--ref", "nightly")
    cli("push", "--to", "other")
    group = command()
    with group.make_context("castore", ["--store", str(folder), "ls"], resilient_parsing=True) as context:
        assert remotes(context, "") == ["other", "team"]
        assert remotes(context, "t") == ["team"]
        assert refs(context, "") == ["main", "nightly"]
        assert refs(context, "n") == ["nightly"]


def test_the_shell_completes_words_of_sub_commands(castore: Start, folder: Path, team: str) -> None:
    def completed(words: str) -> list[bytes]:
        count = len(words.split(" ")) - 1
        asked = {"_CASTORE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        return castore(env=asked | {"CASTORE_DIR": str(folder)}).communicate()[0].split()

    assert sorted(completed("castore remote r")) == [b"results", b"rm"]
    assert completed("castore remote rm ") == [b"team"]
    assert completed("castore push --to t") == [b"team"]


def test_completion_of_remotes_makes_no_store(folder: Path) -> None:
    group = command()
    with group.make_context("castore", ["--store", str(folder), "ls"], resilient_parsing=True) as context:
        assert (remotes(context, ""), refs(context, "")) == ([], [])
    assert not folder.exists()


def interrupt(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> bytes:
    """Send a Ctrl-C to a command and the processes that it started, as a terminal does; returns its words."""
    while not ready():
        assert process.poll() is None, "it ended before"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert process.returncode == 130
    return err


def test_an_interrupted_push_leaves_nothing_behind_and_goes_on(
    castore: Start, cli: Cli, store: Store, team: str, tmp_path: Path
) -> None:
    bulk = noise(2_000_000)
    for number in range(100):
        store.put(f"n/{number:03}", b"%7d" % number + bulk[7:], codec="none")
    objects = tmp_path / "the bucket" / "objects"
    process = castore("push", "n", start_new_session=True)
    assert interrupt(process, objects.exists) == b"castore: interrupted\n"
    sent = sum(path.is_file() for path in objects.rglob("*"))
    assert sent < 100
    assert os.listdir(tmp_path / "the bucket" / "tmp") == []
    assert os.listdir(store.path / "tmp") == []
    assert cli("log", "main").code == 1  # no ref names what was sent
    done = cli("push", "n", "--json").json
    assert done["added"] == 100
    assert done["sent"] < (100 - sent + 1) * 2_000_000


def _has_text(path: Path) -> bool:
    return bool(path.read_text())


@pytest.mark.torture
def test_an_interrupt_while_the_other_process_starts_ends_both(castore: Start, team: str) -> None:
    for _ in range(5 if LONG else 2):
        process = castore("push", start_new_session=True)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert interrupt(process, partial(_has_text, children)).endswith(b"castore: interrupted\n")


def test_an_interrupted_pull_goes_on_and_gc_removes_what_it_left(
    castore: Start, cli: Cli, store: Store, team: str, other: Store
) -> None:
    bulk = noise(2_000_000)
    for number in range(100):
        other.put(f"n/{number:03}", b"%7d" % number + bulk[7:], codec="none")
    other.push(to="theirs")
    process = castore("pull", "main", start_new_session=True)
    assert interrupt(process, lambda: bool(os.listdir(store.path / "tmp"))) == b"castore: interrupted\n"
    assert cli("gc").code == 0
    assert os.listdir(store.path / "tmp") == []
    assert cli("doctor").code == 0
    assert cli("pull", "main").code == 0
    assert len(list(store.entries("n"))) == 100


def test_commands_of_remotes_need_no_standard_output_but_to_print(castore: Start, team: str) -> None:
    process = castore("push", closed=(1,))
    assert process.communicate()[1] == b""
    assert process.returncode == 0
    for words in (("remote", "ls"), ("log", "main"), ("diff", "main", "main")):
        process = castore(*words, closed=(1,))
        assert b"standard output is closed" in process.communicate()[1]
        assert process.returncode == 1


def test_check_tells_what_is_lost_and_repair_brings_it_back(cli: Cli, store: Store, tmp_path: Path) -> None:
    store.put("own/a", b"bytes")
    bucket = tmp_path / "bucket"
    know(store, "team", bucket.as_uri())
    cli("push", "own")
    ran = cli("remote", "check", "team", "--deep")
    assert (ran.code, ran.out) == (0, "1 ref, 3 objects, 0 problems\n")
    [pack] = (bucket / "packs").iterdir()
    pack.unlink()
    ran = cli("remote", "check", "team")
    assert (ran.code, ran.out.splitlines()) == (
        1, [f"main: packs/{pack.name}: it is missing, needed by own/a", "1 ref, 2 objects, 1 problem"],
    )  # fmt: skip
    found = json.loads(cli("remote", "check", "team", "--json").out)
    assert found["problems"] == [
        {"ref": "main", "key": f"packs/{pack.name}", "why": "it is missing", "names": ["own/a"]}
    ]
    ran = cli("remote", "check", "team", "--repair")
    # It is the same object, so the commit need not change.
    assert (ran.code, ran.out.splitlines()) == (
        0, [f"packs/{pack.name}: repaired", "1 ref, 3 objects, 0 problems"],
    )  # fmt: skip
    pack.unlink()
    found = json.loads(cli("remote", "check", "team", "--repair", "--json").out)
    assert (found["repaired"], found["problems"]) == ([f"packs/{pack.name}"], [])
    assert cli("remote", "check", "nobody").code == 1


def test_one_repair_brings_back_all_commits_of_a_history(cli: Cli, store: Store, tmp_path: Path) -> None:
    """Regression: an older commit is found through the newer one, so each run brought back one."""
    bucket = tmp_path / "bucket"
    know(store, "team", bucket.as_uri())
    for number in range(4):
        store.put("a", noise(3000, number))
        cli("push")
    before = {path.name for path in (bucket / "commits").iterdir()}
    shutil.rmtree(bucket / "commits")
    ran = cli("remote", "check", "team", "--repair")
    assert (ran.code, ran.out.splitlines()) == (
        0, [*(f"commits/{name}: repaired" for name in sorted(before)), "1 ref, 12 objects, 0 problems"],
    )  # fmt: skip
    assert {path.name for path in (bucket / "commits").iterdir()} >= before


def test_check_warns_of_what_the_storage_cannot_do(
    cli: Cli, store: Store, team: str, tmp_path: Path, url: str
) -> None:
    store.put("a", b"bytes")
    cli("push")
    assert cli("remote", "check", team).err == ""
    probe = tmp_path / "the bucket" / "probe"
    probe.rmdir()  # which is empty
    probe.write_bytes(b"no folder, so nothing can be tried below it")
    ran = cli("remote", "check", team)
    assert (ran.code, ran.out) == (0, "1 ref, 3 objects, 0 problems\n")
    assert ran.err.startswith("castore: remote 'team': ")
    assert ran.err.count("\n") == 1
    assert "a file lies in the way" in ran.err
    found = cli("remote", "check", team, "--json")
    assert (found.code, found.json["problems"]) == (0, [])
    assert ["a file lies in the way" in sentence for sentence in found.json["warnings"]] == [True]
    know(store, "readable", url, read_only=True)
    assert cli("remote", "check", "readable").err == "", "a trial that only reads"


def test_a_remote_in_the_stores_own_folder_is_refused(cli: Cli, store: Store) -> None:
    for place in (store.path, store.path / "objects" / "x"):
        ran = cli("remote", "add", "team", place.as_uri())
        assert (ran.code, ran.out) == (2, "")
        assert "lies in the store's own folder" in ran.err


# gc


def test_gc_says_what_is_garbage_and_what_it_did(cli: Cli, store: Store, team: str) -> None:
    store.put("name", b"1")
    assert cli("push").code == 0
    ran = cli("remote", "gc", team, "--dry-run")
    assert (ran.code, ran.out) == (0, "there is no garbage that is older than 1d\n")
    assert cli("remote", "gc", team, "--json").json == {
        "deleted": 0, "freed": 0, "condemned": 0, "size": 0, "until": None,
    }  # fmt: skip
    for options, message in {
        ("--grace", "5m"): "too short",
        ("--grace", "soon"): "soon",
        ("--keep-commits", "0"): "keep the newest one",
    }.items():
        wrong = cli("remote", "gc", team, *options)
        assert wrong.code == 2
        assert message in wrong.err


def test_what_is_in_a_remote_is_counted_and_results_are_listed(
    cli: Cli, store: Store, team: str, tmp_path: Path
) -> None:
    store.put("name", b"1")
    assert cli("push").code == 0
    with Store(store.path, remote=team) as shared:
        shared.get_or_compute("features/a", lambda: "text")
        shared.get_or_compute("other", lambda: 1, ttl="1h")
    end_fetcher(store)
    found = cli("remote", "stat", team, "--json").json
    assert (found["refs"], found["objects"], found["results"]) == (1, 1, 2)
    assert found["size"] == found["objects_size"] + found["trees_size"] + found["results_size"]
    # The push has written down its requests; the fetcher was killed, perhaps before it did.
    assert found["node"]["requests"] >= 5
    assert 0 < found["node"]["dollars"] < 0.01
    assert {"found", "offered", "left_alone"} < set(found["node"])
    lines = cli("remote", "stat", team).out.splitlines()
    assert [line.split("\t")[:2] for line in lines][3] == ["shared results", "2"]
    assert [line.split("\t")[0] for line in lines][-3:] == [
        "results that it found",
        "results that it offered",
        "remotes that it left",
    ]
    listed = cli("remote", "results", team, "--json").json
    assert [one["key"] for one in listed] == ["features/a", "other"]
    assert [one["expires"] is None for one in listed] == [True, False]
    [line] = cli("remote", "results", team, "features").out.splitlines()
    assert line.startswith("features/a\t")
    assert line.endswith("\tnever")
    assert cli("remote", "results", team, "nothing").out == ""
    wrong = cli("remote", "gc", team, "--unused", "1d")
    assert (wrong.code, "at least 2 days" in wrong.err) == (2, True)


def test_gc_condemns_what_an_interrupted_push_has_left(
    cli: Cli, store: Store, team: str, tmp_path: Path
) -> None:
    store.put("name", b"1")
    assert cli("push").code == 0
    left = tmp_path / "the bucket" / "packs" / ("0" * 64)
    left.write_bytes(bytes(1000))
    os.utime(left, (left.stat().st_mtime - 200_000,) * 2)
    assert cli("remote", "gc", team, "--dry-run").out == "garbage: 1 object of no use: 1 KB\n"
    assert left.exists()
    ran = cli("remote", "gc", team)
    assert re.fullmatch(
        r"condemned 1 object of no use: 1 KB; a run after \d{4}-\d\d-\d\d \d\d:\d\d:\d\d deletes them\n",
        ran.out,
    )
    assert left.exists()


def test_nodes_that_warm_a_part_each_have_about_as_much_and_all_of_it(
    cli: Cli, store: Store, team: str, other: Store
) -> None:
    for number in range(40):
        other.put(f"set/{number:02}", noise(500 * (number + 1), number))
    other.put("set/again", noise(500, 0))  # the same bytes as the first
    other.push(to="theirs")
    parts = [cli("warm", "set", "--shard", f"{part}/3", "--json").json for part in range(3)]
    whole = cli("warm", "set", "--json").json
    assert sum(part["names"] for part in parts) == whole["names"] == 41
    assert sum(part["stored"] for part in parts) == whole["stored"]
    assert max(part["stored"] for part in parts) - min(part["stored"] for part in parts) < 2 * 20_000


def test_results_are_offered_to_a_remote_that_lacks_them(cli: Cli, store: Store, team: str) -> None:
    store.get_or_compute("features/a", lambda: [1])  # before anybody shares
    store.get_or_compute("features/b", lambda: [2])
    assert cli("remote", "results", team, "--json").json == []
    assert cli("remote", "offer", team, "features").out == f"in {team} now: 2 results at and below features\n"
    assert cli("remote", "offer", team, "--json").json == {"offered": 0}
    assert [one["key"] for one in cli("remote", "results", team, "--json").json] == [
        "features/a",
        "features/b",
    ]
    end_fetcher(store)
    wrong = cli("remote", "offer", "nobody")
    assert (wrong.code, "castore remote add nobody" in wrong.err) == (1, True)


def test_warm_says_what_is_here(
    cli: Cli, store: Store, team: str, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.put("set/name", b"1")
    other.push(to="theirs")
    assert re.fullmatch(r"here now: 1 name of main@\w{8}, \d+ B\n", cli("warm", "set").out)
    assert cli("warm", "--json").json["names"] == 1
    alone = cli("warm", "--shard", "job")
    assert (alone.code, "neither RANK and WORLD_SIZE nor variables of Slurm" in alone.err) == (2, True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert cli("warm", "--shard", "job", "--json").json["names"] == 1
    monkeypatch.setenv("RANK", "9")
    alone = cli("warm", "--shard", "job")
    assert (alone.code, "RANK=9 and WORLD_SIZE=1 tell no rank" in alone.err) == (2, True)
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert cli("warm", "--shard", "job", "--json").json == cli("warm", "--shard", "3/4", "--json").json
    for words, message in {
        ("--shard", "2/2"): "no shard 2 of 2",
        ("--shard", "x"): "such as 0/8",
        ("--ref", "none"): "no ref 'none'",
        ("nothing",): "at or below 'nothing'",
        ("nothing", "--shard", "1/4"): "at or below 'nothing'",
    }.items():
        wrong = cli("warm", *words)
        assert wrong.code in (1, 2)
        assert message in wrong.err


def test_a_lazy_pull_is_told_and_shown(cli: Cli, store: Store, team: str, other: Store) -> None:
    other.put_many([("set/one", noise(1000, 1)), ("set/same", noise(1000, 1)), ("set/two", noise(1000, 2))])
    other.push(to="theirs")
    told = r"pulled 3 new from main@\w{8}: bytes that are not here come when they are read\n"
    assert re.fullmatch(told, cli("pull", "main", "--lazy").out)
    assert [line.split()[2] for line in cli("ls", "-l", "set").out.splitlines()] == ["CODEC", *3 * ["away"]]
    assert cli("stat", "--json").json["away"] == {"blobs": 2, "size": 2000, "stored": 2000}
    assert "as stored there, in 2 blobs" in cli("stat").out
    assert "saved in all" not in cli("stat").out  # nothing is here
    assert 'castore_away_bytes{store="' in cli("stat", "--prometheus").out
    assert cli("cat", "set/one").raw == noise(1000, 1)
    assert cli("stat", "set/one", "--json").json["away"] is False
    assert re.search(r"kept by name, with bytes only in remotes: \d blob", cli("gc", "--max-size", "0").out)
    assert cli("stat", "set/one", "--json").json["away"] is True
    assert "only in remote 'team'" in cli("remote", "rm", "team").err
    told = r"pulled bytes of names that were here, from main@\w{8}: .* fetched\n"
    assert re.fullmatch(told, cli("pull", "main").out)
    assert cli("remote", "rm", "team").code == 0
    assert "kept by name" not in cli("gc", "--max-size", "0").out
    assert cli("ls").out == ""


def test_get_of_a_folder_names_each_file_that_cannot_come(
    cli: Cli, store: Store, team: str, other: Store, tmp_path: Path
) -> None:
    other.put_many([("set/one", noise(6 << 20, 1)), ("set/two", noise(6 << 20, 2))])
    other.push(to="theirs")
    assert cli("pull", "main", "--lazy").code == 0
    store.put("set/here", b"here")
    (tmp_path / "the bucket").rename(tmp_path / "gone")
    ran = cli("get", "-r", "set", "-o", "out")
    assert ran.code == 1
    assert re.findall(r"(?m)^castore: (\S+) is not written: ", ran.err) == ["out/one", "out/two"]
    assert ran.out.startswith("wrote 1 file (4 B) into out")
    assert [file.name for file in Path("out").iterdir()] == ["here"]
    end_fetcher(store)


def test_a_large_blob_of_which_a_part_is_here_says_so(
    cli: Cli, store: Store, team: str, other: Store
) -> None:
    large = noise(6 << 20)
    other.put_many([("set/large", large), ("set/small", b"1")])
    other.push(to="theirs")
    assert cli("pull", "main", "--lazy").code == 0

    def columns() -> list[str]:
        return [line[10:19].strip() for line in cli("ls", "-l", "set").out.splitlines()]

    assert columns() == ["STORED", "away", "away"]
    found = cli("stat", "set/large", "--json").json
    assert (found["remote"], found["there"] >= len(large), found["here"]) == (team, True, 0)
    with store.open("set/large") as file:
        assert file.read(10) == large[:10]

    def all_agree() -> bool:
        """Whether all commands tell the same. Parts ahead of the reader may still come meanwhile."""
        found = cli("stat", "set/large", "--json").json
        assert (found["away"], found["stored"]) == (True, 0)
        assert 1 << 20 <= found["here"] < found["there"]
        share = 100 - 100 * found["here"] // found["there"]
        told = cli("stat", "set/large").out
        assert f"\nremote      {team}\n" in told
        assert re.search(
            rf"\nthere       6.3 MB \({found['there']:,} bytes\)\nhere        .* bytes\)\n", told
        )
        blob = cli("stat", found["digest"], "--json").json
        assert (blob["remote"], blob["there"]) == (team, found["there"])
        return blob["here"] == found["here"] and columns() == ["STORED", f"{share}% away", "away"]

    until(all_agree)
    assert cli("get", "set/large", "-o", "large").code == 0
    assert columns() == ["STORED", "0% away", "away"]
    assert cli("cat", "set/small").raw == b"1"
    assert "remote" not in cli("stat", "set/small", "--json").json


def test_an_interrupt_of_warm_does_not_wait_for_a_limited_link(
    castore: Start, cli: Cli, store: Store, url: str, other: Store
) -> None:
    other.put_many((f"n/{number}", noise(500_000, number)) for number in range(40))
    other.push("n", to="theirs")
    assert cli("remote", "add", "team", url, "--rate", "100KB").code == 0
    process = castore("warm", start_new_session=True)
    try:
        told = interrupt(process, (store.path / "pages").is_dir)
    finally:
        end_fetcher(store)
    assert b"Traceback" not in told
