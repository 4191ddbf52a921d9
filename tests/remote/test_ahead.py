"""Bytes and names that come in the background: `Store.prefetch` and `Remote.begin_pull`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from castore import Store
from castore.errors import InvalidNameError, InvalidValueError, RemoteMissingError
from castore.index import places
from castore.remote.fetcher import Fetcher
from castore.remote.fetcher_client import FetcherClient
from castore.remote.process import open_parts
from tests.helpers import agrees_with_disk, noise, text
from tests.mount.conftest import until
from tests.remote.nodes import fetchers, know, node

pytestmark = pytest.mark.usefixtures("forked_processes")

CONTENTS = {f"set/{number:04}": text(400, number) for number in range(3000)}
# Bytes a second of slow remotes, and what lies there: some seconds' worth.
_SLOW, _SLOWER = 800_000, 200_000
SLOW = {f"set/{number:04}": noise(400, number) for number in range(5000)}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _pushed(tmp_path_factory.mktemp("ahead"), CONTENTS)


@pytest.fixture(scope="module")
def slow_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _pushed(tmp_path_factory.mktemp("slow"), SLOW)


def _pushed(folder: Path, contents: dict[str, bytes]) -> str:
    with Store(folder / "one") as one:
        one.put_many(contents.items())
        know(one, "team", (folder / "bucket").as_uri()).push()
    return (folder / "bucket").as_uri()


@pytest.fixture
def lazy(url: str, tmp_path: Path) -> Iterator[Store]:
    with node(tmp_path / "two", url, memory=0) as store:
        store.pull(remote="team", lazy=True)
        yield store


def away(store: Store) -> int:
    return store.stat().away.blobs


# prefetch


def test_names_are_fetched_in_the_background_and_no_others(lazy: Store) -> None:
    names = sorted(CONTENTS)[500:1700]
    lazy.prefetch(names)
    until(lambda: away(lazy) == len(CONTENTS) - len(names))
    lazy.prefetch(name for name in names)  # nothing of it is away
    assert not any(entry.away for entry in map(lazy.entry, names) if entry is not None)
    assert lazy.get_many(names) == [CONTENTS[name] for name in names]
    assert away(lazy) == len(CONTENTS) - len(names)
    lazy.prefetch(lazy)
    until(lambda: away(lazy) == 0)
    assert {name: lazy.get(name) for name in lazy} == CONTENTS
    agrees_with_disk(lazy)


def test_names_of_the_store_itself_and_names_that_are_missing_are_passed_over(lazy: Store) -> None:
    lazy.put("mine", b"1")
    lazy.prefetch(["mine", "nowhere", "set/0000", "set/0000"])
    until(lambda: away(lazy) == len(CONTENTS) - 1)


def test_a_blob_that_the_remote_has_lost_keeps_no_other_one_away(tmp_path: Path) -> None:
    contents = {f"small/{number:03}": text(2000, number) for number in range(300)}
    with Store(tmp_path / "one") as one:
        one.put_many(contents.items())
        one.put("large", noise(2 << 20))
        know(one, "team", (tmp_path / "bucket").as_uri()).push()
    [lost] = (path for path in (tmp_path / "bucket" / "objects").rglob("*") if path.is_file())
    lost.unlink()
    with node(tmp_path / "two", (tmp_path / "bucket").as_uri(), memory=0) as two:
        two.pull(remote="team", lazy=True)
        two.prefetch(two)
        assert two.get_many(sorted(contents)) == [contents[name] for name in sorted(contents)]
        assert two.get("large") is None
        assert {name: two.get(name) for name in contents} == contents


def test_a_store_that_has_all_bytes_starts_no_process(url: str, tmp_path: Path) -> None:
    with Store(tmp_path / "plain") as plain:
        plain.put("a", b"1")
        plain.prefetch(["a", "b"])
        assert not fetchers(plain)
    with node(tmp_path / "two", url) as two:
        two.pull(remote="team")
        two.prefetch(two)
        assert not fetchers(two)


def test_what_is_no_list_of_names_is_an_error(lazy: Store) -> None:
    with pytest.raises(InvalidValueError, match="prefetch"):
        lazy.prefetch("set/0000")
    with pytest.raises(InvalidNameError):
        lazy.prefetch(["../a"])


def test_a_reader_need_not_wait_for_what_comes_ahead(slow_url: str, tmp_path: Path) -> None:
    with node(tmp_path / "two", slow_url, memory=0) as two:
        two.pull(remote="team", lazy=True)
        _take_rate(two, slow_url, _SLOW)
        two.prefetch(sorted(SLOW))
        last = max(SLOW)
        assert two.get(last) == SLOW[last]
        until(lambda: away(two) == 0)
        came = {name: _came_at(two, name) for name in sorted(SLOW)[::50]}
        assert 0 < _came_at(two, last) < max(came.values())


def _came_at(store: Store, name: str) -> float:
    found = store.find(name)
    assert found is not None
    return places.of_blobs(store.index, [found.blob.digest])[found.blob.digest].fetched


def test_a_fetcher_stays_until_all_has_come_that_was_asked_for(slow_url: str, tmp_path: Path) -> None:
    with node(tmp_path / "two", slow_url, memory=0) as two:
        two.pull(remote="team", lazy=True)
        _take_rate(two, slow_url, _SLOW)
        two.prefetch(sorted(SLOW))
        FetcherClient(two.path).done()  # no reader is left: it would end after half a second
        until(lambda: away(two) == 0)
        until(lambda: not fetchers(two))


def _take_rate(store: Store, url: str, rate: int | None) -> None:
    """Have bytes of a remote come at another rate from now on."""
    (store.path / "remotes" / "team" / "remote.json").unlink()
    know(store, "team", url, read_only=True, rate=rate)


def test_groups_of_a_fetcher_count_down(lazy: Store) -> None:
    with closing(open_parts(lazy.path, max_size=None, durable=False)) as parts:
        fetcher = Fetcher(parts)
        digests = places.away_digests(parts.index, sorted(CONTENTS))
        assert len(digests) == len(CONTENTS)
        fetcher.prefetch(digests)
        until(lambda: not fetcher.is_busy)
        assert away(lazy) == 0
        fetcher.prefetch([bytes(32)])  # nothing has this digest
        until(lambda: not fetcher.is_busy)


# begin_pull


def test_a_pull_in_the_background_ends_as_a_pull_does(url: str, tmp_path: Path) -> None:
    with node(tmp_path / "two", url) as two:
        pull = two.remote("team").begin_pull(prefix="set")
        pulled = pull.result(120)
        assert (pulled.added, pulled.ref) == (len(CONTENTS), "main")
        assert {name: two.get(name) for name in two} == CONTENTS
        assert two.remote("team").begin_pull().result(120).unchanged == len(CONTENTS)


def test_its_errors_come_with_the_result_and_those_of_arguments_at_once(url: str, tmp_path: Path) -> None:
    with node(tmp_path / "two", url) as two:
        team = two.remote("team")
        with pytest.raises(RemoteMissingError, match="has no ref 'nowhere'"):
            team.begin_pull("nowhere").result(120)
        with pytest.raises(InvalidNameError):
            team.begin_pull("..")
        with pytest.raises(InvalidValueError):
            team.begin_pull(commit="x")


def test_children_that_are_forked_while_a_pull_starts_do_not_keep_it(url: str, tmp_path: Path) -> None:
    with node(tmp_path / "two", url) as two:
        for _ in range(4):
            reading, writing = os.pipe()
            pull = two.remote("team").begin_pull()
            children = [_waiting_child(reading, writing) for _ in range(20)]
            try:
                pull.result(120)
            finally:
                os.close(writing)
                for child in children:
                    os.waitpid(child, 0)
                os.close(reading)


def _waiting_child(reading: int, writing: int) -> int:
    """A child that waits until nobody has the end of a pipe open any more, and holds all else open."""
    if pid := os.fork():
        return pid
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)


def test_a_pull_knows_whether_it_is_the_first(url: str, tmp_path: Path) -> None:
    with node(tmp_path / "two", url) as two:
        team = two.remote("team")
        two.put("mine", b"1")
        for prefix, below in (("set", ""), ("", "theirs"), ("set", "others")):
            for is_first in (True, False):
                pull = team.begin_pull(prefix=prefix, below=below)
                assert pull.is_first is is_first
                pull.result(120)
        assert not team.begin_pull().is_first


def test_an_epoch_beside_a_pull_reads_the_bytes_of_the_ref(tmp_path: Path) -> None:
    adapters = pytest.importorskip("castore.adapters.torch")
    names = [f"set/{number:04}" for number in range(1500)]
    url = (tmp_path / "bucket").as_uri()
    with Store(tmp_path / "one") as one:
        know(one, "team", url)
        with node(tmp_path / "two", url) as two:
            for version in (b"1 ", b"2 "):
                one.put_many((name, version + name.encode()) for name in names)
                one.push(to="team")
                pull = two.remote("team").begin_pull()
                sampler = adapters.WindowSampler(two, names, window=100, pull=pull)
                read = {names[index]: two.get(names[index]) for index in sampler}
                assert read == {name: version + name.encode() for name in names}


_BEGIN = """
import sys
from castore import Store
store = Store(sys.argv[1])
pull = store.remote("team").begin_pull()
while not len(store):
    assert not pull.done()
print("some names are there", flush=True)
"""


def test_a_program_may_end_before_its_pull_does(slow_url: str, tmp_path: Path) -> None:
    with Store(tmp_path / "two", memory=0) as two:
        know(two, "team", slow_url, read_only=True, rate=_SLOWER)
        ran = subprocess.run(
            [sys.executable, "-c", _BEGIN, two.path], capture_output=True, text=True, timeout=120, check=False
        )
        assert (ran.returncode, ran.stdout) == (0, "some names are there\n"), ran.stderr
        _take_rate(two, slow_url, None)
        pulled = two.pull(remote="team")  # waits until the other one has ended
        assert pulled.unchanged > 0
        assert pulled.added > 0
        assert pulled.unchanged + pulled.added == len(SLOW)
        assert {name: two.get(name) for name in two} == SLOW
        agrees_with_disk(two)
