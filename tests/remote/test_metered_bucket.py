"""A remote's requests are counted and bounded, whatever process makes them."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.cli.metrics import exposition
from castore.errors import InvalidValueError, RemoteMissingError, RemoteUnreachableError
from castore.remote.bucket import Patience, Versioned
from castore.remote.folder_bucket import FolderBucket
from castore.remote.metered_bucket import BURST_SECONDS, MeteredBucket, open_metered
from tests.helpers import noise
from tests.mount.conftest import until
from tests.remote.nodes import end_fetcher
from tests.remote.proxy import answer, proxy
from tests.remote.servers import Place, environment


class Counting(FolderBucket):
    """Knows how many requests are under way at once."""

    running = most = 0
    lock = threading.Lock()
    three = threading.Event()

    def get(self, key: str) -> Versioned:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            if self.running == 3:
                self.three.set()
        try:
            assert self.three.wait(60)
            # Others come meanwhile, if they may.
            time.sleep(0.01)
            return super().get(key)
        finally:
            with self.lock:
                self.running -= 1


def test_no_more_requests_run_at_once_than_are_allowed(store: Store, tmp_path: Path) -> None:
    bucket = Counting(tmp_path / "bucket")
    bucket.put("one", b"1")
    metered = MeteredBucket(bucket, 3)
    with ThreadPoolExecutor(12) as pool:
        assert {found.data for found in pool.map(metered.get, ["one"] * 40)} == {b"1"}
    assert bucket.most == 3


def test_no_more_bytes_pass_in_a_second_than_are_allowed(store: Store, tmp_path: Path) -> None:
    rate, data = 4_000_000, noise(500_000)
    metered = MeteredBucket(FolderBucket(tmp_path / "bucket"), None, rate)
    (tmp_path / "large").write_bytes(data)
    began = time.monotonic()
    metered.put("a", data)
    metered.upload("b", tmp_path / "large", lambda size: None)
    assert metered.get("a").data == data
    assert b"".join(metered.stream("b")) == data
    assert metered.get_range("a", 0, 500_000) == data
    assert time.monotonic() - began >= 5 * len(data) / rate - BURST_SECONDS


def test_requests_bytes_and_errors_are_counted(store: Store, tmp_path: Path) -> None:
    metered = MeteredBucket(FolderBucket(tmp_path / "bucket"))
    assert metered.create("refs/a", b"1")
    assert metered.replace("refs/a", b"2", metered.get("refs/a").version)
    metered.report_to(store.parts.usage)  # of what was asked before, too
    metered.put("objects/b", bytes(1000))
    assert metered.size("objects/b") == 1000
    assert len(metered.get_range("objects/b", 0, 10)) == 10
    assert [one.key for one in metered.listing("objects/")] == ["objects/b"]
    metered.delete(["objects/b"])
    with pytest.raises(RemoteMissingError):
        metered.get("objects/b")
    store.parts.usage.flush()
    used = store.stat().remotes
    assert used[:8] == (4, 3, 1, 1, 11, 1002, 0, 0)
    assert used.requests == 9
    assert used.seconds > 0


def test_requests_that_are_tried_again_are_told_from_those_that_fail(store: Store, seaweedfs: Place) -> None:
    patience = Patience(connect=10, silence=60, retries=3, deadline=120)
    seaweedfs.open("retried").put("one", b"1")
    with proxy(seaweedfs.port) as link:
        with environment({**seaweedfs.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}):
            metered = open_metered(f"{seaweedfs.url}/retried", patience=patience)
        metered.report_to(store.parts.usage)
        link.inject(answer(503), 2)
        assert metered.get("one").data == b"1"
        link.inject(answer(500), 100)
        with pytest.raises(RemoteUnreachableError):
            metered.size("one")
    store.parts.usage.flush()
    used = store.stat().remotes
    assert (used.requests, used.retries, used.errors) == (2, 2 + 3, 1)
    told = [
        line
        for line in exposition(store.stat()).splitlines()
        if line.startswith("castore_remote_retries_total{")
    ]
    assert [line.rpartition(" ")[2] for line in told] == ["5"]


def test_an_answer_that_was_asked_for_ahead_is_given_once(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path / "bucket")
    bucket.put("one", b"1")
    metered = MeteredBucket(bucket)
    metered.ask_ahead(["one", "two"])
    for asked in metered._ahead.values():
        asked._thread.join()
    bucket.put("one", b"2")
    bucket.put("two", b"2")
    assert metered.get("one").data == b"1"
    with pytest.raises(RemoteMissingError):
        metered.get("two")
    assert [metered.get(key).data for key in ("one", "two")] == [b"2", b"2"]


class Held(FolderBucket):
    """Answers when it is let."""

    released = threading.Event()

    def size(self, key: str) -> int | None:
        assert self.released.wait(60)
        return super().size(key)


@pytest.mark.parametrize(
    ("url", "requests", "asked"), [("s3://b", None, 3), ("s3://b", 1, 0), ("file:", None, 0)]
)
def test_connections_are_opened_ahead_unless_requests_are_bounded(
    tmp_path: Path, url: str, requests: int | None, asked: int
) -> None:
    bucket = Held(tmp_path / "bucket")
    bucket.url = url
    before = set(threading.enumerate())
    MeteredBucket(bucket, requests).connect(3, "one")
    asking = set(threading.enumerate()) - before
    bucket.released.set()
    for thread in asking:
        thread.join()
    bucket.released.clear()
    assert len(asking) == asked


def test_an_object_that_nobody_needs_is_waited_for_no_longer_than_told(tmp_path: Path) -> None:
    bucket = FolderBucket(tmp_path / "bucket")
    bucket.put("one", b"1")
    released = threading.Event()

    class Slow(FolderBucket):
        def get(self, key: str) -> Versioned:
            assert released.wait(60)
            return super().get(key)

    metered = MeteredBucket(bucket)
    assert metered.get_within("one", 60) == b"1"
    assert metered.get_within("none", 60) is None
    slow = MeteredBucket(Slow(tmp_path / "bucket"))
    slow.ask_ahead(["one"])
    assert slow.get_within("one", 0) is None
    released.set()
    assert slow.get_within("one", 60) == b"1"


def test_what_pushes_pulls_and_mounts_ask_is_in_the_figures(tmp_path: Path) -> None:
    with Store(tmp_path / "one") as one, Store(tmp_path / "two") as two:
        one.put("large", noise(3 << 20))
        one.add_remote("team", (tmp_path / "bucket").as_uri()).push()
        sent = one.stat().remotes
        assert sent.sent > 3 << 20 > sent.received
        two.add_remote("team", (tmp_path / "bucket").as_uri())
        before = two.stat().remotes
        with castore_fuse.mounted(two, remote="team") as root:
            assert (root / "large").read_bytes() == noise(3 << 20)
        until(lambda: two.stat().remotes.received - before.received > 3 << 20)
        end_fetcher(two)
        two.pull(remote="team")
        assert two.stat().remotes.received - before.received < 4 << 20, "a pull fetches nothing twice"
        assert json.loads((tmp_path / "two/remotes/team/remote.json").read_text())["rate"] is None


def test_bounds_are_kept_with_the_remote_and_checked(store: Store, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    store.put("name", noise(400_000))
    team = store.add_remote("team", url, requests=2, rate="400KB")
    assert store.remote("team").settings[-2:] == (2, 400_000)
    began = time.monotonic()
    team.push()
    assert time.monotonic() - began > 1 - BURST_SECONDS
    for wrong in ({"requests": 0}, {"rate": 0}, {"requests": -1}):
        with pytest.raises(InvalidValueError, match=r"1 or more|at least 1"):
            store.add_remote("other", url, **wrong)  # type: ignore[arg-type]
    assert store.remotes() == ["team"]
    assert os.listdir(tmp_path / "bucket")
