"""A docstring names the errors that a caller meets: each call here raises one, and the docstring has it."""

from __future__ import annotations

import inspect
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import castore
from castore import Batch, Remote, Store

#: Calls of a store's methods with wrong arguments or at a wrong time, by method and error. The store has the
#: names "a/b", "x" and "pickle".
STORE: dict[str, dict[str, list[Callable[[Any], object]]]] = {
    "put": {
        "InvalidNameError": [lambda s: s.put("../a", b"")],
        "NameConflictError": [lambda s: s.put("a", b"")],
        "SerializationError": [lambda s: s.put("c", "text"), lambda s: s.put("c", b"", metadata={1: 2})],
        "InvalidValueError": [
            lambda s: s.put("c", b"", codec="no"),
            lambda s: s.put("c", b"", codec="zstd", level=99),
            lambda s: s.put("c", b"", ttl="no"),
            lambda s: s.put("c", b"", pin="no"),
            lambda s: s.put("c", b"", serializer="no"),
        ],
        "TooLargeError": [lambda s: s.put("c", os.urandom(200_000))],
        "FullError": [lambda s: s.put("c", os.urandom(90_000))],
    },
    "put_file": {
        "FileNotFoundError": [lambda s: s.put_file("c", "/no/such/file")],
        "InvalidNameError": [lambda s: s.put_file("..", __file__)],
        "NameConflictError": [lambda s: s.put_file("a", __file__)],
        "SerializationError": [lambda s: s.put_file("c", __file__, metadata={1: 2})],
        "InvalidValueError": [lambda s: s.put_file("c", "/"), lambda s: s.put_file("c", __file__, ttl="no")],
    },
    "put_stream": {
        "InvalidNameError": [lambda s: s.put_stream("..", io.BytesIO())],
        "NameConflictError": [lambda s: s.put_stream("a", io.BytesIO())],
        "SerializationError": [lambda s: s.put_stream("c", io.StringIO("text"))],
        "InvalidValueError": [
            lambda s: s.put_stream("c", b""),
            lambda s: s.put_stream("c", io.BytesIO(), codec="no"),
        ],
        "TooLargeError": [lambda s: s.put_stream("c", io.BytesIO(os.urandom(200_000)))],
        "FullError": [lambda s: s.put_stream("c", io.BytesIO(os.urandom(90_000)))],
    },
    "create": {
        "InvalidNameError": [lambda s: s.create("..")],
        "NameConflictError": [
            lambda s: _write(s.create("a"), b""),
            lambda s: _write(s.create("x", replace=False), b""),
        ],
        "SerializationError": [lambda s: s.create("c", metadata={1: 2})],
        "InvalidValueError": [lambda s: s.create("c", ttl="no"), lambda s: s.create("c", codec="no")],
        "TooLargeError": [lambda s: _write(s.create("c"), os.urandom(200_000))],
        "FullError": [lambda s: _write(s.create("c"), os.urandom(90_000))],
    },
    "put_many": {
        "InvalidNameError": [lambda s: s.put_many([("..", b"")])],
        "NameConflictError": [lambda s: s.put_many([("a", b"")])],
        "SerializationError": [lambda s: s.put_many([("c", "text")])],
        "InvalidValueError": [
            lambda s: s.put_many([("c",)]),
            lambda s: s.put_many(5),
            lambda s: s.put_many([], ttl="no"),
        ],
        "TooLargeError": [lambda s: s.put_many([("c", os.urandom(200_000))])],
        "FullError": [lambda s: s.put_many([("c", os.urandom(90_000))])],
    },
    "put_if": {
        "InvalidNameError": [
            lambda s: s.put_if(("..", None), []),
            lambda s: s.put_if(("new", None), [("..", b"")]),
            lambda s: s.put_if(("new", None), [], drop=[".."]),
        ],
        "NameConflictError": [lambda s: s.put_if(("new", None), [("a", b"")])],
        "SerializationError": [
            lambda s: s.put_if(("new", None), [("c", "text")]),
            lambda s: s.put_if(("new", None), [("c", object())], serializer="msgpack"),
        ],
        "InvalidValueError": [
            lambda s: s.put_if("new", []),
            lambda s: s.put_if(("new", None), [], drop="x"),
            lambda s: s.put_if(("new", None), [("c", b"")], codec="no"),
            lambda s: s.put_if(("new", None), [("c", b"")], serializer="no"),
        ],
        "TooLargeError": [lambda s: s.put_if(("new", None), [("c", os.urandom(200_000))])],
        "FullError": [lambda s: s.put_if(("new", None), [("c", os.urandom(90_000))])],
    },
    "batch": {"InvalidValueError": [lambda s: s.batch(codec="no")]},
    "get": {"InvalidNameError": [lambda s: s.get(".."), lambda s: s.get(["x"])]},
    "get_many": {
        "InvalidNameError": [lambda s: s.get_many([".."])],
        "InvalidValueError": [lambda s: s.get_many("x"), lambda s: s.get_many(5)],
    },
    "prefetch": {
        "InvalidNameError": [lambda s: s.prefetch([".."])],
        "InvalidValueError": [lambda s: s.prefetch("x"), lambda s: s.prefetch(5)],
    },
    "open": {"NotFoundError": [lambda s: s.open("no")], "InvalidNameError": [lambda s: s.open("..")]},
    "blob": {"InvalidValueError": [lambda s: s.blob("no")]},
    "open_blob": {
        "NotFoundError": [lambda s: s.open_blob("0" * 64)],
        "InvalidValueError": [lambda s: s.open_blob("no")],
    },
    "save": {
        "InvalidNameError": [lambda s: s.save("..", 1)],
        "NameConflictError": [lambda s: s.save("a", 1)],
        "SerializationError": [lambda s: s.save("c", object()), lambda s: s.save("c", 1, metadata={1: 2})],
        "InvalidValueError": [
            lambda s: s.save("c", 1, serializer="no"),
            lambda s: s.save("c", 1, ttl="no"),
        ],
        "TooLargeError": [lambda s: s.save("c", os.urandom(200_000))],
        "FullError": [lambda s: s.save("c", os.urandom(90_000))],
    },
    "load": {
        "NotFoundError": [lambda s: s.load("no")],
        "InvalidNameError": [lambda s: s.load("..")],
        "SerializationError": [lambda s: s.load("pickle")],
    },
    "get_or_compute": {
        "InvalidNameError": [lambda s: s.get_or_compute("..", int)],
        "NameConflictError": [lambda s: s.get_or_compute("a", int)],
        "SerializationError": [
            lambda s: s.get_or_compute("pickle", int),
            lambda s: s.get_or_compute("c", object),
            lambda s: s.get_or_compute("c", int, metadata={1: 2}),
        ],
        "InvalidValueError": [
            lambda s: s.get_or_compute("c", 5),
            lambda s: s.get_or_compute("c", int, ttl="no"),
            lambda s: s.get_or_compute("c", int, serializer="no"),
            lambda s: s.get_or_compute("c", lambda: s.get_or_compute("c", int)),
        ],
        "ZeroDivisionError": [lambda s: s.get_or_compute("c", lambda: 1 / 0)],
    },
    "cached": {
        "InvalidValueError": [lambda s: s.cached(5), lambda s: s.cached(ttl="no")(_same)(1)],
        "InvalidNameError": [lambda s: s.cached(prefix="..")(_same)(1)],
        "NameConflictError": [lambda s: s.cached(prefix="x")(_same)(1)],
        "UnhashableError": [lambda s: s.cached(_same)(number for number in [1])],
        "SerializationError": [lambda s: s.cached(_object)()],
    },
    "__contains__": {"InvalidNameError": [lambda s: ".." in s]},
    "entry": {"InvalidNameError": [lambda s: s.entry("..")]},
    "entries": {"InvalidNameError": [lambda s: s.entries("..")]},
    "children": {"InvalidNameError": [lambda s: s.children("..")]},
    "copy": {
        "NotFoundError": [lambda s: s.copy("no", "c")],
        "InvalidNameError": [lambda s: s.copy("x", ".."), lambda s: s.copy("..", "c")],
        "NameConflictError": [lambda s: s.copy("x", "a")],
    },
    "rename": {
        "NotFoundError": [lambda s: s.rename("no", "c")],
        "InvalidNameError": [lambda s: s.rename("x", ".."), lambda s: s.rename("..", "c")],
        "NameConflictError": [lambda s: s.rename("x", "a")],
    },
    "delete": {"InvalidNameError": [lambda s: s.delete("..")]},
    "delete_many": {
        "InvalidNameError": [lambda s: s.delete_many([".."])],
        "InvalidValueError": [lambda s: s.delete_many("x"), lambda s: s.delete_many(5)],
    },
    "pin": {"NotFoundError": [lambda s: s.pin("no")], "InvalidNameError": [lambda s: s.pin("..")]},
    "unpin": {"NotFoundError": [lambda s: s.unpin("no")], "InvalidNameError": [lambda s: s.unpin("..")]},
    "train_dictionary": {
        "DictionaryError": [lambda s: s.train_dictionary("c")],
        "InvalidNameError": [lambda s: s.train_dictionary("..")],
        "InvalidValueError": [
            lambda s: s.train_dictionary("", samples=0),
            lambda s: s.train_dictionary("", size="no"),
            lambda s: s.train_dictionary("", level=99),
            lambda s: s.train_dictionary("", ["text"] * 200),
            lambda s: s.train_dictionary("", 5),
        ],
    },
    "drop_dictionary": {"InvalidNameError": [lambda s: s.drop_dictionary("..")]},
    "recompress": {"InvalidNameError": [lambda s: s.recompress("..")]},
    "add_remote": {
        "InvalidNameError": [lambda s: s.add_remote("..", "file:///proc/no")],
        "InvalidValueError": [
            lambda s: s.add_remote("t", "no"),
            lambda s: s.add_remote("t", "file:///proc/no", requests=0),
            lambda s: s.add_remote("t", "file:///proc/no", rate="no"),
            lambda s: s.add_remote("t", f"file://{s.path}/inside"),
        ],
        "RemoteMissingError": [lambda s: s.add_remote("t", "file:///proc/no")],
    },
    "remote": {"NotFoundError": [lambda s: s.remote("no")], "InvalidNameError": [lambda s: s.remote("..")]},
    "remove_remote": {
        "NotFoundError": [lambda s: s.remove_remote("no")],
        "InvalidNameError": [lambda s: s.remove_remote("..")],
    },
    "push": {
        "NotFoundError": [lambda s: s.push(to="no")],
        "InvalidNameError": [lambda s: s.push(to="..")],
    },
    "pull": {
        "NotFoundError": [lambda s: s.pull(remote="no")],
        "InvalidNameError": [lambda s: s.pull(remote="..")],
    },
    "flush": {"InvalidValueError": [lambda s: s.flush(seconds="no"), lambda s: s.flush(seconds=-1)]},
    "gc": {"InvalidValueError": [lambda s: s.gc("no"), lambda s: s.gc(grace="no"), lambda s: s.gc(-1)]},
    "verify": {"InvalidValueError": [lambda s: s.verify(sample=2), lambda s: s.verify(sample="no")]},
    "find": {"InvalidNameError": [lambda s: s.find("..")]},
    "find_many": {
        "InvalidNameError": [lambda s: s.find_many([".."])],
        "InvalidValueError": [lambda s: s.find_many("x")],
    },
    "entries_with_key": {"InvalidNameError": [lambda s: s.entries_with_key("key", "..")]},
    "delete_unchanged": {"InvalidValueError": [lambda s: s.delete_unchanged("x")]},
    "names_of": {"InvalidValueError": [lambda s: s.names_of("no")]},
    "blobs_starting_with": {
        "InvalidValueError": [lambda s: s.blobs_starting_with("no"), lambda s: s.blobs_starting_with("", -1)]
    },
    "get_blob": {"InvalidValueError": [lambda s: s.get_blob("x")]},
    "bring": {"InvalidValueError": [lambda s: s.bring("x")]},
    "path_of": {"InvalidValueError": [lambda s: s.path_of("x")]},
    "remove_blobs": {"InvalidValueError": [lambda s: s.remove_blobs(["no"]), lambda s: s.remove_blobs(5)]},
    "count_use": {"InvalidNameError": [lambda s: s.count_use("..")]},
    "has_dictionary": {"InvalidNameError": [lambda s: s.has_dictionary("..")]},
    "share": {
        "InvalidNameError": [lambda s: s.share("..")],
        "InvalidValueError": [lambda s: s.share("a", ttl="no")],
    },
    "find_shared": {
        "InvalidNameError": [lambda s: s.find_shared([".."])],
        "InvalidValueError": [lambda s: s.find_shared("a"), lambda s: s.find_shared(["a"], ttl="no")],
    },
    "offer_shared": {
        "InvalidNameError": [lambda s: s.offer_shared([".."])],
        "InvalidValueError": [lambda s: s.offer_shared("a")],
    },
}

#: The same of a batch: the block ends after the call. `_ended` ends it before.
BATCH: dict[str, dict[str, list[Callable[[Any], object]]]] = {
    "put": {
        "InvalidNameError": [lambda b: b.put("..", b"")],
        "SerializationError": [lambda b: b.put("c", "text"), lambda b: b.put("c", b"", metadata={1: 2})],
        "InvalidValueError": [
            lambda b: b.put("c", b"", ttl="no"),
            lambda b: b.put("c", b"", codec="no"),
            lambda b: b.put("c", b"", pin="no"),
            lambda b: _ended(b).put("c", b""),
        ],
    },
    "put_file": {
        "FileNotFoundError": [lambda b: b.put_file("c", "/no/such/file")],
        "InvalidNameError": [lambda b: b.put_file("..", __file__)],
        "SerializationError": [lambda b: b.put_file("c", __file__, metadata={1: 2})],
        "InvalidValueError": [
            lambda b: b.put_file("c", "/"),
            lambda b: b.put_file("c", __file__, ttl="no"),
            lambda b: _ended(b).put_file("c", __file__),
        ],
    },
    "link": {
        "InvalidNameError": [lambda b: b.link("..", "0" * 64)],
        "SerializationError": [lambda b: b.link("c", "0" * 64, metadata={1: 2})],
        "InvalidValueError": [lambda b: b.link("c", "no"), lambda b: b.link("c", "0" * 64, ttl="no")],
        "NotFoundError": [lambda b: b.link("c", "0" * 64)],
    },
    "delete": {
        "InvalidNameError": [lambda b: b.delete("..")],
        "InvalidValueError": [lambda b: _ended(b).delete("x")],
    },
    "rename": {
        "InvalidNameError": [lambda b: b.rename({"c": ".."})],
        "InvalidValueError": [lambda b: _ended(b).rename({})],
    },
    "run": {
        "NameConflictError": [lambda b: b.run(lambda: b.put("a", b""))],
        "TooLargeError": [lambda b: b.run(lambda: b.put("c", os.urandom(200_000)))],
        "FullError": [lambda b: b.run(lambda: b.put("c", os.urandom(90_000)))],
        "InvalidValueError": [lambda b: _ended(b).run(int), lambda b: b.run(5)],
        "ZeroDivisionError": [lambda b: b.run(lambda: 1 / 0)],
    },
    "commit": {
        "NameConflictError": [lambda b: (b.put("a", b""), b.commit())],
        "TooLargeError": [lambda b: (b.put("c", os.urandom(200_000)), b.commit())],
        "FullError": [lambda b: (b.put("c", os.urandom(90_000)), b.commit())],
        "InvalidValueError": [lambda b: _ended(b).commit()],
    },
}

#: The same of a remote that the store has been pushed to, but for the pickle.
REMOTE: dict[str, dict[str, list[Callable[[Any], object]]]] = {
    "push": {
        "InvalidNameError": [lambda r: r.push(".."), lambda r: r.push("x", ref="..")],
        "NotFoundError": [lambda r: r.push("no")],
        "InvalidValueError": [lambda r: r.push()],
    },
    "pull": {
        "InvalidNameError": [
            lambda r: r.pull(".."),
            lambda r: r.pull(prefix=".."),
            lambda r: r.pull(below=".."),
        ],
        "RemoteMissingError": [
            lambda r: r.pull("no"),
            lambda r: r.pull(commit="000000"),
            lambda r: r.pull(prefix="no"),
        ],
    },
    "begin_pull": {
        "InvalidNameError": [
            lambda r: r.begin_pull(".."),
            lambda r: r.begin_pull(prefix=".."),
            lambda r: r.begin_pull(below=".."),
        ],
        "InvalidValueError": [lambda r: r.begin_pull(commit="x"), lambda r: r.begin_pull(commit=5)],
    },
    "log": {
        "InvalidNameError": [lambda r: r.log("..")],
        "RemoteMissingError": [lambda r: r.log("no"), lambda r: r.log(commit="000000")],
        "InvalidValueError": [lambda r: r.log(limit=0), lambda r: r.log(commit=5)],
    },
    "diff": {
        "InvalidNameError": [
            lambda r: r.diff(("..", None), ("main", None)),
            lambda r: r.diff(("main", None), ("main", None), prefix=".."),
        ],
        "RemoteMissingError": [
            lambda r: r.diff(("no", None), ("main", None)),
            lambda r: r.diff(("main", "000000"), ("main", None)),
        ],
        "InvalidValueError": [
            lambda r: r.diff("main", ("main", None)),
            lambda r: r.diff(("main", None), ("main", 5)),
        ],
    },
    "warm": {
        "InvalidNameError": [lambda r: r.warm(".."), lambda r: r.warm(ref="..")],
        "RemoteMissingError": [
            lambda r: r.warm("no"),
            lambda r: r.warm(ref="no"),
            lambda r: r.warm(commit="000000"),
        ],
        "InvalidValueError": [lambda r: r.warm(shard=(1, 1)), lambda r: r.warm(commit=5)],
    },
    "gc": {"InvalidValueError": [lambda r: r.gc(keep_commits=0), lambda r: r.gc(grace=1)]},
}

FUNCTIONS: dict[str, dict[str, list[Callable[[Any], object]]]] = {
    "key": {
        "UnhashableError": [lambda c: c.key(object())],
        "InvalidNameError": [lambda c: c.key(1, prefix="..")],
        "InvalidValueError": [lambda c: c.key(1, content=5), lambda c: c.key(1, content=Path("/no/such"))],
    },
    "register_type": {
        "InvalidValueError": [
            lambda c: c.register_type(int, encode=str, decode=int),
            lambda c: c.register_type("no", encode=str, decode=int),
        ]
    },
    "Store": {
        "StoreError": [lambda c: c.Store("/proc/no")],
        "InvalidValueError": [
            lambda c: c.Store("no", codec="no"),
            lambda c: c.Store("no", max_size="no"),
            lambda c: c.Store("no", ttl="no"),
            lambda c: c.Store(5),
        ],
    },
}


#: Errors that a docstring may name by their base class.
BASES = {
    "FileNotFoundError": {"OSError"},
    "RemoteMissingError": {"RemoteError", "RemoteMissingError"},
    "ZeroDivisionError": {"Exception"},
}


def _write(block: Any, data: bytes) -> None:
    with block as file:
        file.write(data)


def _ended(batch: Batch) -> Batch:
    batch.__exit__(None, None, None)
    return batch


def _same(value: Any) -> Any:
    return value


def _object() -> object:
    return object()


def raised_by(docstring: str | None) -> set[str]:
    """The errors that a docstring names below "Raises:"."""
    section = (inspect.cleandoc(docstring or "") + "\n").partition("Raises:\n")[2].partition("\n\n")[0]
    heads = re.findall(r"^ {4}([A-Z]\w+(?:, [A-Z]\w+)*):", section, re.M)
    return {name for head in heads for name in head.split(", ")}


def check(value: Any, docstring: str | None, cases: dict[str, list[Callable[[Any], object]]]) -> None:
    named = raised_by(docstring)
    for expected, calls in cases.items():
        for number, call in enumerate(calls):
            with pytest.raises(Exception) as raised:  # noqa: PT011  # its type is compared
                call(value)
            assert type(raised.value).__name__ == expected, (expected, number, raised.value)
            bases = {expected} if hasattr(castore, expected) and "Remote" not in expected else BASES[expected]
            assert bases & named, f"{expected} is not among the errors of the docstring: {named}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Full of pinned bytes, up to some 80 kB."""
    path = tmp_path / "store"
    with Store(path, codec="none", allow_pickle=True) as first:
        first.put("a/b", b"1")
        first.put("x", b"2", pin=True)
        first.put("full", os.urandom(50_000), pin=True)
        first.save("pickle", object, serializer="pickle")
    with Store(path, codec="zstd", max_size=100_000) as store:
        yield store


@pytest.mark.parametrize("method", STORE)
def test_the_errors_of_a_store_stand_in_its_docstrings(store: Store, method: str) -> None:
    check(store, getattr(Store, method).__doc__, STORE[method])


@pytest.mark.parametrize("method", BATCH)
def test_the_errors_of_a_batch_stand_in_its_docstrings(store: Store, method: str) -> None:
    for expected, calls in BATCH[method].items():
        for call in calls:
            batch = store.batch()
            try:
                check(batch, getattr(Batch, method).__doc__, {expected: [call]})
            finally:
                batch.discard()


@pytest.mark.parametrize("method", REMOTE)
def test_the_errors_of_a_remote_stand_in_its_docstrings(store: Store, tmp_path: Path, method: str) -> None:
    remote = store.add_remote("team", f"file://{tmp_path}/bucket")
    remote.push("a")
    check(remote, getattr(Remote, method).__doc__, REMOTE[method])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_errors_of_the_functions_stand_in_their_docstrings(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(castore, getattr(castore, function).__doc__, FUNCTIONS[function])


def test_every_method_of_a_store_that_can_fail_by_its_arguments_was_tried() -> None:
    takes_nothing_wrong = {"close", "counters", "mounts", "remotes", "require_writable", "stat", "totals"}
    public = {name for name, value in vars(Store).items() if inspect.isfunction(value) and name[0] != "_"}
    assert public - takes_nothing_wrong == STORE.keys() - {"__contains__"}
