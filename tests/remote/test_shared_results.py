"""Stores share over a remote what they compute: once for all nodes, and never a wrong result.

A node is a store of its own; each has a fetcher of its own, so nodes of one machine share nothing but the
remote.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from castore import Store
from castore.errors import CacheWarning, CorruptError, InvalidValueError, NotFoundError, RemoteError
from castore.remote import claims, shared_results
from castore.remote.bucket import Listed
from castore.remote.collect import collect
from castore.remote.fetcher_client import FetcherClient
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import claim_key, object_key, result_key
from castore.remote.page_cache import PageCache
from castore.remote.pages import digest_of
from castore.remote.result_records import INLINE_BYTES, Record, decode_record, encode_record
from tests.clocks import pass_time
from tests.helpers import in_processes, noise, text
from tests.mount.conftest import until
from tests.remote.nodes import end_fetcher, fetchers, know
from tests.remote.proxy import LOST_REQUEST, Fault, answer, proxy, stall
from tests.remote.servers import Place, environment, s3_place

pytestmark = pytest.mark.usefixtures("forked_processes")

#: Results that lie in their records, in objects, in several parts, and of types that serializers keep.
VALUES: dict[str, Callable[[], Any]] = {
    "number": lambda: 17,
    "nothing": lambda: None,
    "empty bytes": lambda: b"",
    "words": lambda: {"words": ["a", "b"], "counts": {"a": 1.5}},
    "raw bytes": lambda: noise(40_000),
    "inline at most": lambda: noise(64 << 10),
    "just an object": lambda: noise((64 << 10) + 1),
    "array": lambda: np.arange(300_000, dtype=np.int64),
    "several frames": lambda: text(3 << 20).decode(),
    "large": lambda: noise(9 << 20),
}


class Nodes:
    """Stores over one remote, and how often each result was computed."""

    def __init__(self, folder: Path, url: str, stack: ExitStack) -> None:
        self.folder, self.url = folder, url
        self._stack = stack
        self.computed = 0

    def node(self, name: str, **options: Any) -> Store:
        """A node's store. One of this name may have been here before."""
        path = self.folder / name
        if not path.exists():
            with Store(path) as store:
                know(store, "team", self.url)
        store = self._stack.enter_context(Store(path, **({"remote": "team"} | options)))
        self._stack.callback(end_fetcher, store)
        return store

    def compute(self, value: Any) -> Callable[[], Any]:
        def work() -> Any:
            self.computed += 1
            return value

        return work

    @property
    def bucket(self) -> FolderBucket:
        return FolderBucket(self.folder / "bucket")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, (tmp_path / "bucket").as_uri(), stack)


@pytest.fixture(scope="module")
def bucket_url(seaweedfs: Place, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A remote on object storage that the tests of this module share, with keys of their own."""
    url = f"{seaweedfs.url}/{uuid.uuid4().hex}"
    with environment(seaweedfs.environment), Store(tmp_path_factory.mktemp("maker") / "store") as maker:
        maker.add_remote("team", url)
    return url


@pytest.fixture
def shared(seaweedfs: Place, bucket_url: str, tmp_path: Path) -> Iterator[Nodes]:
    """Nodes over object storage."""
    with environment(seaweedfs.environment), ExitStack() as stack:
        yield Nodes(tmp_path, bucket_url, stack)


def equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other)) if isinstance(other, np.ndarray) else one == other


# --- found by other nodes -------------------------------------------------------------------------


def finds_all_of(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        for name, make in VALUES.items():
            assert equal(first.get_or_compute(f"set/{name}", nodes.compute(make())), make())
    assert nodes.computed == len(VALUES)
    other = nodes.node("other")
    for name, make in VALUES.items():
        found = other.get_or_compute(f"set/{name}", nodes.compute("computed again"))
        assert equal(found, make()), name
        assert type(found) is type(make())
    assert nodes.computed == len(VALUES)


def _results(store: Store) -> tuple[int, int]:
    use = store.stat().remotes
    return use.found, use.offered


def test_what_one_node_has_computed_another_finds(nodes: Nodes) -> None:
    finds_all_of(nodes)
    for name, counted in (("first", (0, len(VALUES))), ("other", (len(VALUES), 0))):
        with nodes.node(name, remote="") as store:
            FetcherClient(store.path).done()  # a fetcher writes its counts at its end
            until(lambda: _results(store) == counted)  # noqa: B023


def test_what_one_node_has_computed_another_finds_on_object_storage(shared: Nodes) -> None:
    finds_all_of(shared)


def test_a_result_that_came_is_an_entry_as_if_it_were_computed_here(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a/b", nodes.compute([1, 2]), metadata={"made": "here"}, ttl=3600)
        until_time = first.entry("a/b")
    other = nodes.node("other")
    other.get_or_compute("a/b", nodes.compute(None))
    found = other.entry("a/b")
    assert found is not None
    assert until_time is not None
    assert (found.metadata, found.serializer, found.away) == ({"made": "here"}, "msgpack", False)
    assert found.expires == pytest.approx(until_time.expires, abs=60)
    end_fetcher(other)
    nodes.bucket.folder.rename(nodes.folder / "elsewhere")
    assert other.load("a/b") == [1, 2]


def test_functions_are_shared_by_their_code_and_arguments(nodes: Nodes) -> None:
    log = str(nodes.folder / "log")

    def length(words: list[str]) -> int:
        with open(log, "a") as file:
            file.write("computed\n")
        return len(words)

    with nodes.node("first") as first:
        assert first.cached(prefix="lengths")(length)(["a"]) == 1
    cached = nodes.node("other").cached(prefix="lengths")(length)
    assert [cached(["a"]), cached(["a", "b"])] == [1, 2]
    assert Path(log).read_text().split() == ["computed"] * 2


def test_a_result_that_needs_a_dictionary_brings_it(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        samples = {f"many/{number}": text(700, number) for number in range(600)}
        first.put_many(samples.items())
        first.train_dictionary("many")
        first.get_or_compute("many/new", nodes.compute(text(700, 9999)))
        assert len(list((first.path / "objects" / "dicts").iterdir())) > 0
    other = nodes.node("other")
    assert other.get_or_compute("many/new", nodes.compute(b"")) == text(700, 9999)
    assert nodes.computed == 1


def test_the_variable_names_the_remote_where_no_argument_does(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTORE_REMOTE", "team")
    with nodes.node("first", remote=None) as first:
        first.get_or_compute("a", nodes.compute(1))
    assert nodes.node("other", remote=None).get_or_compute("a", nodes.compute(2)) == 1
    assert nodes.node("third", remote="").get_or_compute("a", nodes.compute(3)) == 3


def test_a_remote_that_the_store_does_not_know_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match="castore remote add nobody"):
        Store(tmp_path / "store", remote="nobody")
    monkeypatch.setenv("CASTORE_REMOTE", "nobody")
    with Store(tmp_path / "store") as store:
        store.put("a", b"1")
        with pytest.raises(NotFoundError, match="castore remote add nobody"):
            store.get_or_compute("b", lambda: 1)


# --- never a wrong result -------------------------------------------------------------------------


def flip_all(nodes: Nodes, folder: str) -> None:
    for path in (nodes.folder / "bucket" / folder).rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.chmod(0o600)
            path.write_bytes(data)


@pytest.mark.parametrize(
    ("folder", "size"),
    [("keys", 3000), ("keys", 200_000), ("packs", 200_000), ("objects", 2 << 20), ("objects", 9 << 20)],
)
def test_damaged_bytes_are_computed_again_and_replaced(nodes: Nodes, folder: str, size: int) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(noise(size)))
    flip_all(nodes, folder)
    with nodes.node("second") as second:
        assert second.get_or_compute("a", nodes.compute(noise(size))) == noise(size)
    assert nodes.computed == 2
    assert nodes.node("third").get_or_compute("a", nodes.compute(None)) == noise(size)
    assert nodes.computed == 2


def test_a_record_of_another_computation_is_none(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(1))
    [path] = (nodes.folder / "bucket" / result_key("a")).parent.rglob("0*1")
    other = nodes.folder / "bucket" / (result_key("b") + "~")
    other.mkdir(parents=True)
    (other / path.name).write_bytes(path.read_bytes())
    assert nodes.node("other").get_or_compute("b", nodes.compute(2)) == 2


def test_a_result_whose_bytes_are_gone_is_computed_again(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(noise(200_000)))
    nodes.bucket.delete([one.key for one in nodes.bucket.listing("packs/")])
    with nodes.node("second") as second:
        assert second.get_or_compute("a", nodes.compute(noise(200_000))) == noise(200_000)
    assert nodes.computed == 2
    assert nodes.node("third").get_or_compute("a", nodes.compute(None)) == noise(200_000)
    assert nodes.computed == 2


def test_pickles_are_neither_offered_nor_taken(nodes: Nodes) -> None:
    with nodes.node("first", allow_pickle=True) as first:
        assert first.get_or_compute("a", nodes.compute({1, 2}), serializer="pickle") == {1, 2}
    assert list(nodes.bucket.listing("keys/")) == []
    with nodes.node("first", allow_pickle=True) as first:
        first.get_or_compute("b", nodes.compute([1]))
    record = decode_record(nodes.bucket.get(result_key("b")).data, result_key("b"))
    disguised = encode_record(Record(record.row._replace(serializer="pickle"), record.payload))
    nodes.bucket.delete([result_key("b")])
    assert nodes.bucket.create(result_key("b"), disguised)
    assert nodes.node("other", allow_pickle=True).get_or_compute("b", nodes.compute([2])) == [2]


def test_a_result_is_as_old_as_its_computation(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(1))
    record = decode_record(nodes.bucket.get(result_key("a")).data, result_key("a"))
    old = record.row._replace(created=record.row.created - 7200)
    nodes.bucket.delete([result_key("a")])
    assert nodes.bucket.create(result_key("a"), encode_record(Record(old, record.payload)))
    second = nodes.node("second")
    assert second.get_or_compute("a", nodes.compute(0), ttl="3h") == 1
    left = second.entry("a")
    assert left is not None
    assert left.expires is not None
    assert left.expires - time.time() < 3600 + 60
    with nodes.node("third") as third:
        assert third.get_or_compute("a", nodes.compute(2), ttl="1h") == 2
    assert nodes.node("fourth").get_or_compute("a", nodes.compute(0), ttl="1h") == 2


def test_an_expired_result_is_computed_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(1), ttl="1h")
    pass_time(monkeypatch, 7200, "time")
    with nodes.node("second") as second:
        assert second.get_or_compute("a", nodes.compute(2)) == 2
    assert nodes.node("third").get_or_compute("a", nodes.compute(3)) == 2


def test_a_result_that_the_caller_refuses_is_computed_again_and_replaced(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute("stale"))
    with nodes.node("second") as second:
        found = second.get_or_compute("a", nodes.compute("new"), validate=lambda value: value != "stale")
        assert found == "new"
    assert nodes.node("third").get_or_compute("a", nodes.compute(None)) == "new"


def test_the_first_of_two_results_is_kept(nodes: Nodes) -> None:
    """A node that computed without looking, because the remote was away, overwrites nothing."""
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(1))
    with nodes.node("second", remote="") as second:
        second.get_or_compute("a", nodes.compute(2))
    with nodes.node("second") as second, second._shared.turn("a", None) as turn:  # type: ignore[union-attr]
        turn.offer()
    assert nodes.node("third").get_or_compute("a", nodes.compute(3)) == 1


CONF = """
import dataclasses

@dataclasses.dataclass
class Conf:
    {fields}: int
"""


@pytest.mark.parametrize("there", ["not imported", "with other fields"])
def test_a_result_that_this_node_cannot_load_is_computed_here_and_stays_for_others(
    nodes: Nodes, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"conf_of_{uuid.uuid4().hex}"
    (nodes.folder / f"{name}.py").write_text(CONF.format(fields="x"))
    monkeypatch.syspath_prepend(nodes.folder)
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(importlib.import_module(name).Conf(7)))
    record = nodes.bucket.get(result_key("a")).data
    monkeypatch.delitem(sys.modules, name)
    if there == "with other fields":
        (nodes.folder / f"{name}.py").write_text(CONF.format(fields="other"))
        importlib.invalidate_caches()
        sys.modules.pop(name, None)
        importlib.import_module(name)
    with nodes.node("second") as second:
        assert second.get_or_compute("a", nodes.compute("mine")) == "mine"
        assert second.load("a") == "mine"
    assert nodes.bucket.get(result_key("a")).data == record
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_result_for_which_a_node_has_no_room_stays_for_others(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(noise(3 << 20)))
    Store(nodes.folder / "small", max_size="1MB").close()
    with Store(nodes.folder / "small") as small:
        know(small, "team", nodes.url)
    with nodes.node("small") as small:
        assert small.get_or_compute("a", nodes.compute(b"x")) == b"x"
    assert nodes.node("third").get_or_compute("a", nodes.compute(None)) == noise(3 << 20)


def test_a_forgotten_result_is_computed_again(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute("bad"))
        assert first.remote("team").forget("a", "b") == 1
        first.delete("a")
        assert first.get_or_compute("a", nodes.compute("good")) == "good"
    assert nodes.node("second").get_or_compute("a", nodes.compute(None)) == "good"


def test_a_result_that_is_still_offered_is_forgotten_too(shared: Nodes, seaweedfs: Place) -> None:
    with behind_a_proxy(shared, seaweedfs) as link, shared.node("first") as first:
        link.inject(Fault(delay=2.0), method="PUT", path="/keys/")
        first.get_or_compute("forgotten/late", shared.compute("bad"))
        assert first.remote("team").forget("forgotten/late") == 1


# --- trouble --------------------------------------------------------------------------------------


def test_a_read_only_remote_is_read_from_and_never_written_to(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(1))
    before = sorted(nodes.bucket.listing(""))
    with Store(tmp_path / "guest") as guest:
        know(guest, "team", nodes.url, read_only=True)
    with nodes.node("guest") as guest:
        assert guest.get_or_compute("a", nodes.compute(0)) == 1
        assert guest.get_or_compute("b", nodes.compute(2)) == 2
    assert sorted(nodes.bucket.listing("")) == before


@contextmanager
def behind_a_proxy(shared: Nodes, place: Place) -> Iterator[Any]:
    with proxy(place.port) as link, environment(s3_place(link.port).environment):
        yield link


def test_a_remote_that_is_silent_costs_a_known_delay_once(
    shared: Nodes, seaweedfs: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CASTORE_REMOTE_TIMEOUT", "1s")
    with behind_a_proxy(shared, seaweedfs) as link, caplog.at_level(logging.WARNING, "castore"):
        node = shared.node("other")
        node.get_or_compute("silent/before", shared.compute(0))
        link.inject(stall(0), 1000)
        for number in range(20):
            assert node.get_or_compute(f"silent/{number}", shared.compute(number)) == number
        told = [
            record for record in caplog.records if "is not asked for results for 60 s" in record.getMessage()
        ]
        assert len(told) == 1
        # Another process sees it while this one goes on.
        words = [sys.executable, "-m", "castore", "--store", str(node.path), "stat"]
        figures = json.loads(subprocess.run([*words, "--json"], capture_output=True, check=True).stdout)
        assert figures["remotes"]["left_alone"] == 1
        shown = subprocess.run(words, capture_output=True, check=True, text=True).stdout
        assert "left alone for a minute 1 time" in " ".join(shown.replace("│", " ").split())


def test_a_remote_that_refuses_ends_no_computation(
    shared: Nodes, seaweedfs: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with behind_a_proxy(shared, seaweedfs) as link, caplog.at_level(logging.WARNING, "castore"):
        node = shared.node("other")
        link.inject(answer(403), 1000)
        assert node.get_or_compute("refused/a", shared.compute(1)) == 1
        assert node.get_or_compute("refused/b", shared.compute(2)) == 2
    assert len([record for record in caplog.records if "is not asked" in record.getMessage()]) == 1


def test_an_offer_that_fails_is_told_at_the_end(
    shared: Nodes, seaweedfs: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with behind_a_proxy(shared, seaweedfs) as link, caplog.at_level(logging.WARNING, "castore"):
        link.inject(answer(403), 1000, method="PUT", path="/keys/")
        with shared.node("other") as node:
            assert node.get_or_compute("failing", shared.compute(1)) == 1
    assert "could not be offered to remote 'team'" in caplog.text


def test_a_fetcher_that_is_killed_while_a_node_computes_loses_no_offer(nodes: Nodes) -> None:
    with nodes.node("first") as first:

        def compute() -> int:
            end_fetcher(first)
            return 1

        assert first.get_or_compute("a", compute) == 1
    assert nodes.node("other").get_or_compute("a", nodes.compute(2)) == 1


def test_what_a_killed_fetcher_has_not_offered_is_offered_at_the_end(nodes: Nodes) -> None:
    first = nodes.node("first")
    for number in range(5):
        first.get_or_compute(f"a/{number}", nodes.compute(number))
    end_fetcher(first)
    nodes.bucket.delete([one.key for one in nodes.bucket.listing("keys/")])
    first.close()
    other = nodes.node("other")
    assert [other.get_or_compute(f"a/{number}", nodes.compute(None)) for number in range(5)] == list(range(5))


def test_a_remote_that_is_removed_meanwhile_ends_no_computation(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    first = nodes.node("first")
    assert first.get_or_compute("a", nodes.compute(1)) == 1
    first.remove_remote("team")
    with caplog.at_level(logging.WARNING, "castore"):
        assert first.get_or_compute("b", nodes.compute(2)) == 2
    assert "is not asked for results" in caplog.text


def test_nothing_is_written_to_a_folder_whose_file_system_is_gone(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    first = nodes.node("first")
    assert first.get_or_compute("a/0", nodes.compute(1)) == 1
    first.close()
    until(lambda: not list(nodes.bucket.listing("claims/")))
    (nodes.folder / "bucket").rename(nodes.folder / "elsewhere")
    (nodes.folder / "bucket").mkdir()
    with caplog.at_level(logging.WARNING, "castore"):
        assert first.get_or_compute("a/1", nodes.compute(2)) == 2
        assert first.get_or_compute("b/0", nodes.compute(2)) == 2
        first.close()
    assert [path for path in (nodes.folder / "bucket").rglob("*") if path.is_file()] == []
    assert "is its file system mounted?" in caplog.text


def test_another_process_of_the_node_asks_a_silent_remote_no_second_time(
    shared: Nodes, seaweedfs: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTORE_REMOTE_TIMEOUT", "2s")
    with behind_a_proxy(shared, seaweedfs) as link:
        node = shared.node("other")
        node.get_or_compute("again/before", shared.compute(0))
        node.close()  # all that it had to offer has come
        link.inject(LOST_REQUEST, 1000)
        node.get_or_compute("again/0", shared.compute(0))

        def asks_nothing(number: int) -> bool:
            seen = len(link.seen)
            with Store(node.path, remote="team") as second:
                second.get_or_compute(f"again/{number}", shared.compute(number))
            return len(link.seen) == seen

        # The first request may still be tried again while the next process asks.
        assert any(asks_nothing(number) for number in range(1, 6))


def test_an_error_of_the_computation_releases_the_claim(nodes: Nodes) -> None:
    first = nodes.node("first")
    with pytest.raises(ZeroDivisionError):
        first.get_or_compute("a", lambda: 1 // 0)
    until(lambda: not list(nodes.bucket.listing("claims/")))
    assert first.get_or_compute("a", nodes.compute(1)) == 1


def test_a_budget_that_cannot_hold_a_result_is_that_of_a_computation(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(noise(5 << 20)))
    Store(nodes.folder / "small", max_size="4MB").close()
    with Store(nodes.folder / "small") as small:
        know(small, "team", nodes.url)
    small = nodes.node("small")
    with pytest.warns(CacheWarning, match="more than the whole store may hold"):
        assert small.get_or_compute("a", nodes.compute(noise(5 << 20))) == noise(5 << 20)
    assert "a" not in small


def test_a_computation_that_asks_for_itself_is_an_error_all_the_same(nodes: Nodes) -> None:
    first = nodes.node("first")
    with pytest.raises(InvalidValueError, match="asks for its own result"):
        first.get_or_compute("a", lambda: first.get_or_compute("a", lambda: 1))


# --- several at once ------------------------------------------------------------------------------


def test_nodes_that_ask_at_once_compute_once(nodes: Nodes) -> None:
    """Eight nodes, of which each computation takes long enough to be claimed."""
    count, keys = 8, [f"set/{number}" for number in range(5)]
    for number in range(count):
        nodes.node(f"node{number}").close()
    log = nodes.folder / "computed"

    def compute(key: str) -> str:
        with open(log, "a") as file:
            file.write(f"{key}\n")
        time.sleep(0.6)  # the work
        return key.upper()

    def ask(number: int) -> list[str]:
        with Store(nodes.folder / f"node{number}", remote="team") as store:
            return [store.get_or_compute(key, partial(compute, key)) for key in keys]

    answers = in_processes(count, ask)
    assert answers == [[key.upper() for key in keys]] * count
    assert sorted(log.read_text().split()) == keys
    until(lambda: not list(nodes.bucket.listing("claims/")))


def test_quick_computations_are_not_claimed(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_results, "WORTH_SECONDS", 60.0)
    monkeypatch.setattr(shared_results, "WORTH_LOOKUPS", 1e9)
    with nodes.node("first") as first:
        first.get_or_compute("set/0", nodes.compute(0))
        claimed: list[Listed] = []
        for number in range(1, 20):

            def compute(number: int = number) -> int:
                claimed.extend(nodes.bucket.listing("claims/"))
                return number

            first.get_or_compute(f"set/{number}", compute)
    assert [one for one in claimed if one.key != claim_key("set/0")] == []


def computing(nodes: Nodes, compute: Callable[[], int]) -> int:
    """The node `first` as a process that computes "a"."""
    child = os.fork()
    if not child:
        with Store(nodes.folder / "first", remote="team") as first:
            first.get_or_compute("a", compute)
        os._exit(0)
    return child


@pytest.mark.parametrize(
    "killed", ["the node", pytest.param("its fetcher and the node", marks=pytest.mark.matrix)]
)
def test_the_work_of_a_killed_node_is_taken_over(nodes: Nodes, killed: str) -> None:
    nodes.node("first").close()
    second = nodes.node("second")
    begun = nodes.folder / "begun"

    def compute() -> int:
        begun.touch()
        signal.pause()
        return 0

    child = computing(nodes, compute)
    until(begun.exists)
    assert [one.key for one in nodes.bucket.listing("claims/")] == [claim_key("a")]
    if killed != "the node":
        for pid in fetchers(Store(nodes.folder / "first")):
            os.kill(pid, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert second.get_or_compute("a", nodes.compute(1)) == 1


def test_a_claim_without_a_sign_of_life_is_taken_over_and_one_with_signs_is_not(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.node("first").close()
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    first, second = claims.Claims(nodes.bucket), claims.Claims(nodes.bucket)
    held = first.take("a")
    assert held is not None
    assert second.take("a") is None  # seen for the first time
    monkeypatch.setattr(claims, "LOST_SECONDS", 0.0)
    taken = second.take("a")
    assert taken is not None
    held.keep()  # ends by itself: it is another node's now
    held.release()
    assert [one.key for one in nodes.bucket.listing("claims/")] == [taken.key]
    monkeypatch.setattr(claims, "LOST_SECONDS", 60.0)
    beating = threading.Thread(target=taken.keep)
    beating.start()
    before = nodes.bucket.get(taken.key).data
    until(lambda: nodes.bucket.get(taken.key).data != before)
    taken.release()
    beating.join()
    assert list(nodes.bucket.listing("claims/")) == []


def test_a_child_that_outlives_its_parent_keeps_nobody_waiting(nodes: Nodes) -> None:
    nodes.node("first").close()
    second = nodes.node("second")
    begun, forked = nodes.folder / "begun", nodes.folder / "forked"

    def compute() -> int:
        grandchild = os.fork()
        if not grandchild:
            forked.write_text(str(os.getpid()))
            signal.pause()
        begun.touch()
        signal.pause()
        return 0

    child = computing(nodes, compute)
    until(lambda: begun.exists() and forked.exists() and bool(forked.read_text()))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        until(lambda: not list(nodes.bucket.listing("claims/")))
        assert second.get_or_compute("a", nodes.compute(1)) == 1
    finally:
        os.kill(int(forked.read_text()), signal.SIGKILL)


def test_processes_of_one_node_ask_the_remote_once(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(noise(100_000)))
    nodes.node("other").close()

    def ask(number: int) -> bytes:
        with Store(nodes.folder / "other", remote="team") as store:
            return bytes(store.get_or_compute("a", lambda: b"computed"))

    assert in_processes(4, ask) == [noise(100_000)] * 4


# --- housekeeping ---------------------------------------------------------------------------------


def collect_twice(nodes: Nodes) -> None:
    """Condemn, and delete, without a grace period; all objects are hours old."""
    for path in nodes.bucket.folder.rglob("*"):
        if path.is_file():
            found = path.stat()
            os.utime(path, (found.st_atime - 7200, found.st_mtime - 7200))
    with nodes.node("collector", remote="") as store, ThreadPoolExecutor(2) as pool:
        pages = PageCache(store.path, nodes.bucket, pool, (0o700, 0o600))
        for _ in range(2):
            collect(nodes.bucket, pages, keep_commits=None, grace=0, dry_run=False)


def test_a_collection_leaves_shared_results_and_removes_expired_ones(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("good", nodes.compute(noise(2 << 20)))
        first.get_or_compute("small", nodes.compute(1))
        first.get_or_compute("expired", nodes.compute(noise(2 << 20, 2)), ttl=0.01)
        first.get_or_compute("small and expired", nodes.compute(2), ttl=0.01)
    assert len(list(nodes.bucket.listing("objects/"))) == 2
    collect_twice(nodes)
    assert {one.key for one in nodes.bucket.listing("keys/")} == {result_key("good"), result_key("small")}
    assert len(list(nodes.bucket.listing("objects/"))) == 1
    other = nodes.node("other")
    assert other.get_or_compute("good", nodes.compute(None)) == noise(2 << 20)
    assert other.get_or_compute("small", nodes.compute(None)) == 1


def age(nodes: Nodes, key: str, seconds: float) -> None:
    """Have a record look as if it was written that long ago."""
    for path in (nodes.bucket.folder / f"{result_key(key)}~").iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def last_use(nodes: Nodes, key: str) -> float:
    return nodes.bucket.get(result_key(key)).modified


def test_a_result_that_no_node_uses_goes_with_a_collection_that_is_told_to(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        for key in ("used", "unused", "new"):
            first.get_or_compute(key, nodes.compute(noise(2 << 20)))
    for key in ("used", "unused"):
        age(nodes, key, 40 * 86_400)
    with nodes.node("second") as second:
        assert second.get_or_compute("used", nodes.compute(None)) == noise(2 << 20)
        until(lambda: last_use(nodes, "used") > time.time() - 3600)
    with nodes.node("collector", remote="") as store, ThreadPoolExecutor(2) as pool:
        pages = PageCache(store.path, nodes.bucket, pool, (0o700, 0o600))
        later: dict[str, Any] = {"keep_commits": None, "grace": -60.0, "dry_run": False}
        for _ in range(2):
            collect(nodes.bucket, pages, unused=None, **later)
        assert len(list(nodes.bucket.listing("keys/"))) == 3
        for _ in range(2):
            collect(nodes.bucket, pages, unused=30 * 86_400.0, **later)
    assert {one.key for one in nodes.bucket.listing("keys/")} == {result_key("used"), result_key("new")}
    assert len(list(nodes.bucket.listing("objects/"))) == 1  # all three have the same bytes
    with nodes.node("third") as third:
        assert third.get_or_compute("unused", nodes.compute(b"again")) == b"again"


def test_a_use_is_noted_once_a_day_and_by_nobody_who_only_reads(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(1))
    age(nodes, "a", 3600)
    before = last_use(nodes, "a")
    with nodes.node("second") as second:
        assert second.get_or_compute("a", nodes.compute(2)) == 1
    assert last_use(nodes, "a") == before
    age(nodes, "a", 3 * 86_400)
    before = last_use(nodes, "a")
    with Store(nodes.folder / "reader") as store:
        know(store, "team", nodes.url, read_only=True)
    with nodes.node("reader") as reader:
        assert reader.get_or_compute("a", nodes.compute(2)) == 1
    assert last_use(nodes, "a") == before


def test_results_are_listed_with_their_last_use(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("features/a", nodes.compute(text(100_000).decode()))
        first.get_or_compute("features/b", nodes.compute(1), ttl="1h")
        first.get_or_compute("featuresque", nodes.compute(2))
        remote = first.remote("team")
    age(nodes, "features/a", 2 * 86_400)
    one, other = remote.results("features")
    assert (one.key, one.size, one.expires) == ("features/a", 100_000, None)
    assert one.used < time.time() - 86_400 < one.created <= time.time()
    assert (other.key, other.expires is not None) == ("features/b", True)
    assert [found.key for found in remote.results()] == ["features/a", "features/b", "featuresque"]
    assert [found.key for found in remote.results("features/b")] == ["features/b"]
    usage = remote.usage()
    assert (usage.refs, usage.results, usage.objects) == (0, 3, 0)
    assert usage.size == usage.results_size == sum(found.size for found in nodes.bucket.listing("keys/"))
    with pytest.raises(InvalidValueError, match="at least 2 days"):
        remote.gc(unused="1d")


def test_results_that_the_remote_did_not_take_are_offered_at_the_end(nodes: Nodes) -> None:
    first = nodes.node("first")
    away = nodes.bucket.folder.with_name("away")
    nodes.bucket.folder.rename(away)
    for number in range(3):
        first.get_or_compute(f"meanwhile/{number}", nodes.compute(noise(100_000, number)))
    away.rename(nodes.bucket.folder)
    first.close()
    with nodes.node("second") as second:
        for number in range(3):
            assert second.get_or_compute(f"meanwhile/{number}", nodes.compute(None)) == noise(100_000, number)


def test_claims_that_killed_nodes_left_go_with_a_collection(nodes: Nodes) -> None:
    nodes.node("first").close()
    assert claims.Claims(nodes.bucket).take("a") is not None
    collect_twice(nodes)
    assert list(nodes.bucket.listing("claims/")) == []


def test_a_check_knows_shared_results(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(noise(200_000)))
        first.get_or_compute("b", nodes.compute(1))
    checked = nodes.node("first").remote("team").check()
    assert (checked.problems, checked.orphans, checked.objects) == ([], 0, 3)


# --- what records are -----------------------------------------------------------------------------


def test_no_flipped_bit_of_a_record_is_taken(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("a", nodes.compute(noise(100)))
    key = result_key("a")
    data = nodes.bucket.get(key).data
    assert decode_record(data, key).row.name == "a"
    for at in range(len(data)):
        for bit in (1, 128):
            wrong = bytearray(data)
            wrong[at] ^= bit
            with pytest.raises(CorruptError):
                decode_record(bytes(wrong), key)
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            decode_record(data[:end], key)


def test_the_bytes_of_a_record_are_where_the_page_says(nodes: Nodes) -> None:
    with nodes.node("first") as first:
        first.get_or_compute("small", nodes.compute(1))
        first.get_or_compute("large", nodes.compute(noise(INLINE_BYTES + 1)))
    rows = {
        name: decode_record(nodes.bucket.get(result_key(name)).data, result_key(name))
        for name in ("small", "large")
    }
    assert digest_of(rows["small"].payload or b"") == rows["small"].row.place.object
    assert rows["large"].payload is None
    [listed] = nodes.bucket.listing("packs/")
    assert listed.key == object_key(rows["large"].row.place.object, packed=True)


def test_results_of_an_outage_are_offered_later(nodes: Nodes) -> None:
    nodes.node("first").close()
    (nodes.folder / "bucket").rename(nodes.folder / "elsewhere")
    with nodes.node("first") as first:
        for number in range(70):
            first.get_or_compute(f"later/{number}", nodes.compute(number))
        with pytest.raises(RemoteError, match="is its file system mounted"):
            first.offer_shared(["later/0"], wait=True)
    (nodes.folder / "elsewhere").rename(nodes.folder / "bucket")
    before = nodes.computed
    told: list[tuple[int, int]] = []
    with nodes.node("first") as first:
        names = [entry.name for entry in first.entries("later")]
        first.offer_shared(names, wait=True, progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 70), (64, 70), (70, 70)]
    with nodes.node("other") as other:
        for number in range(70):
            assert other.get_or_compute(f"later/{number}", nodes.compute(number)) == number
    assert nodes.computed == before
