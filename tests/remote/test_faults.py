"""Behind a network that fails, a bucket gives right bytes or a clear error, and never without an end."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from castore.errors import RemoteDeniedError, RemoteError, RemoteMissingError, RemoteUnreachableError
from castore.remote.bucket import Bucket, Patience
from castore.remote.commits import Ref, move_ref, read_ref
from castore.remote.urls import open_bucket
from tests.helpers import noise
from tests.remote.proxy import (
    LOST_ANSWER,
    LOST_REQUEST,
    TWICE,
    Fault,
    Proxy,
    answer,
    cut,
    proxy,
    stall,
)
from tests.remote.servers import Place, environment, settled

DATA = noise(1 << 20)
# Of two parts.
LARGE = DATA * 9
#: A storage on a busy machine answers sooner, so each further try is for a fault that a test has made.
PATIENCE = Patience(connect=10, silence=30, retries=3, deadline=60)
#: Seconds of silence where a test sits them out.
BRIEF = 2.5
#: After this many seconds every call has ended.
BOUND = 200.0
ALWAYS = 1000


@pytest.fixture
def link(seaweedfs: Place) -> Iterator[Proxy]:
    with proxy(seaweedfs.port) as made:
        yield made


@pytest.fixture
def retries() -> list[None]:
    """One for each further try."""
    return []


@pytest.fixture
def patience() -> Patience:
    """Tests that sit it out have less."""
    return PATIENCE


@pytest.fixture
def bucket(seaweedfs: Place, link: Proxy, retries: list[None], patience: Patience) -> Bucket:
    prefix = uuid.uuid4().hex
    seaweedfs.open(prefix).put("data", DATA)  # its patience suffices for a server that makes volumes
    with environment({**seaweedfs.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}):
        return settled(open_bucket(f"{seaweedfs.url}/{prefix}", patience, lambda: retries.append(None)))


@pytest.fixture(autouse=True)
def _ends_in_time(bucket: Bucket) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < BOUND


READS: dict[str, Callable[[Bucket], object]] = {
    "get": lambda bucket: bucket.get("data").data == DATA,
    "size": lambda bucket: bucket.size("data") == len(DATA),
    "range": lambda bucket: bucket.get_range("data", 5, 600_000) == DATA[5:600_000],
    "stream": lambda bucket: b"".join(bucket.stream("data")) == DATA,
    "listing": lambda bucket: [listed.key for listed in bucket.listing("")] == ["data"],
}


def upload(bucket: Bucket, folder: Path) -> bool:
    """A file of several parts, read back."""
    (folder / "large").write_bytes(LARGE)
    bucket.upload("large", folder / "large", lambda read: None)
    return b"".join(bucket.stream("large")) == LARGE


def replace(bucket: Bucket, key: str, data: bytes) -> bool:
    return bucket.replace(key, data, bucket.get(key).version)


# --- passing trouble -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [answer(500), answer(503), answer(429), LOST_REQUEST, LOST_ANSWER], ids=str)
def test_a_read_is_tried_again_until_it_is_answered_and_that_is_counted(
    bucket: Bucket, link: Proxy, retries: list[None], fault: Fault
) -> None:
    for read in READS.values():
        link.seen.clear()
        retries.clear()
        assert read(bucket)
        requests = len(link.seen)
        assert not retries
        link.inject(fault, 2)
        assert read(bucket)
        assert len(retries) == 2
        assert len(link.seen) == 2 * requests + 2


def test_what_is_missing_or_refused_is_not_tried_again(
    bucket: Bucket, link: Proxy, retries: list[None]
) -> None:
    with pytest.raises(RemoteMissingError):
        bucket.get("none")
    assert bucket.size("none") is None
    for status in (400, 401, 403, 418, 501):
        link.inject(answer(status))
        with pytest.raises(RemoteError):
            bucket.get("data")
    assert len(link.seen) == 7
    assert not retries


@pytest.mark.parametrize("patience", [PATIENCE._replace(silence=2 * BRIEF)], ids=["brief"])
def test_a_large_object_that_breaks_goes_on_where_it_was(
    bucket: Bucket, link: Proxy, retries: list[None], tmp_path: Path
) -> None:
    assert upload(bucket, tmp_path)
    link.seen.clear()
    coming = bucket.stream("large")
    link.inject(cut(6 << 20))
    link.inject(cut(1 << 20))
    link.inject(stall(2 << 20))
    assert b"".join(coming) == LARGE
    assert len(link.seen) == 4
    assert len(retries) == 3


def test_an_object_that_is_another_one_meanwhile_is_not_read_on(
    bucket: Bucket, link: Proxy, tmp_path: Path
) -> None:
    assert upload(bucket, tmp_path)
    coming = bucket.stream("large")
    link.inject(cut(6 << 20))
    next(coming)
    (tmp_path / "large").write_bytes(bytes(len(LARGE)))
    bucket.upload("large", tmp_path / "large", lambda read: None)
    with pytest.raises(RemoteError):
        list(coming)


@pytest.mark.parametrize(
    "fault", [answer(500), answer(503, acted=True), LOST_REQUEST, LOST_ANSWER, TWICE], ids=str
)
def test_a_write_that_may_be_repeated_is(bucket: Bucket, link: Proxy, tmp_path: Path, fault: Fault) -> None:
    link.inject(fault, 1, method="PUT")
    bucket.put("one", b"1")
    assert bucket.get("one").data == b"1"
    link.inject(fault, 2, method="PUT")
    assert upload(bucket, tmp_path)
    link.inject(fault, 1)
    bucket.delete(["one", "large"])
    assert [listed.key for listed in bucket.listing("")] == ["data"]


@pytest.mark.parametrize("step", ["uploads", "uploadId"])
@pytest.mark.parametrize(
    "fault", [answer(500), answer(503, acted=True), LOST_REQUEST, LOST_ANSWER, TWICE], ids=str
)
def test_an_upload_survives_when_its_begin_or_its_end_is_lost(
    bucket: Bucket, link: Proxy, tmp_path: Path, step: str, fault: Fault
) -> None:
    link.inject(fault, method="POST", path=step)
    assert upload(bucket, tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="obstore 0.11 leaves them to the life-cycle rule")
def test_an_upload_that_fails_leaves_no_parts_behind(bucket: Bucket, link: Proxy, tmp_path: Path) -> None:
    link.inject(answer(500), ALWAYS, method="PUT")
    with pytest.raises(RemoteUnreachableError):
        upload(bucket, tmp_path)
    # A part that another connection sent before may arrive behind the DELETE.
    assert "DELETE" in [request.method for request in link.seen if "uploadId" in request.path]
    link.heal()
    assert upload(bucket, tmp_path)


@pytest.mark.parametrize("read", ["get", "range", "stream", "listing"])
def test_an_answer_that_is_cut_is_never_taken_for_the_whole(bucket: Bucket, link: Proxy, read: str) -> None:
    for after in (0, 1, 100, 100_000):
        link.inject(cut(after))
        assert READS[read](bucket)


@pytest.mark.parametrize("patience", [PATIENCE._replace(silence=BRIEF)], ids=["brief"])
@pytest.mark.parametrize(
    "read",
    ["get", "stream", *(pytest.param(read, marks=pytest.mark.matrix) for read in ("range", "listing"))],
)
def test_an_answer_that_stands_still_is_given_up(bucket: Bucket, link: Proxy, read: str) -> None:
    link.inject(stall(100))
    assert READS[read](bucket)


def test_a_listing_that_breaks_goes_on_where_it_was(bucket: Bucket, link: Proxy) -> None:
    wanted = [f"many/{number:04d}" for number in range(1010)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: bucket.put(key, b""), wanted))
    found, listing = [], bucket.listing("many/")
    found.append(next(listing).key)
    link.inject(cut(100), 2)
    found += [listed.key for listed in listing]
    assert found == wanted


def test_bytes_are_right_over_a_slow_link(bucket: Bucket, link: Proxy, tmp_path: Path) -> None:
    link.delay, link.bandwidth = 0.03, 30e6
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda read: READS[read](bucket), READS))
    assert upload(bucket, tmp_path)


# --- trouble that stays --------------------------------------------------------------------------

LASTING = {
    "500": (answer(500), "answers 500 InternalError"),
    "503": (answer(503), "answers 503 SlowDown"),
    "nothing": (LOST_REQUEST, "no answer from 127.0.0.1"),
    "cut": (cut(10), "no answer from"),
    "silence": (stall(0), "no answer from"),
}


@pytest.mark.parametrize(
    ("fault", "patience"),
    [
        pytest.param(
            fault,
            PATIENCE._replace(silence=2 * BRIEF, deadline=2 * BRIEF) if fault == "silence" else PATIENCE,
            marks=[pytest.mark.matrix] * (fault in ("500", "cut")),
        )
        for fault in LASTING
    ],
    ids=LASTING,
)
def test_lasting_trouble_is_told_in_time(bucket: Bucket, link: Proxy, fault: str) -> None:
    kind, told = LASTING[fault]
    link.inject(kind, ALWAYS)
    for read in (READS["get"], READS["listing"]):
        with pytest.raises(RemoteUnreachableError, match=told):
            read(bucket)
    link.heal()
    assert all(read(bucket) for read in READS.values())


def test_credentials_that_expire_are_told_at_once(bucket: Bucket, link: Proxy) -> None:
    for ask in (READS["get"], READS["listing"], lambda bucket: bucket.create("one", b"1")):
        link.seen.clear()
        link.inject(answer(403))
        with pytest.raises(RemoteDeniedError, match="have expired"):
            ask(bucket)
        assert len(link.seen) == 1
        assert READS["get"](bucket)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (301, "in another region; set AWS_REGION"),
        (400, "have expired"),
        (401, "clock is wrong"),
        (418, "refuses data in"),
        (501, "is unfit"),
    ],
)
def test_a_storage_that_refuses_is_quoted_with_what_to_do(
    bucket: Bucket, link: Proxy, status: int, told: str
) -> None:
    link.inject(answer(status), ALWAYS)
    with pytest.raises(RemoteError, match=told) as caught:
        bucket.get("data")
    assert not isinstance(caught.value, RemoteUnreachableError)


def test_a_storage_that_goes_and_comes_back_is_used_again(bucket: Bucket, link: Proxy) -> None:
    link.inject(LOST_REQUEST, ALWAYS)
    with pytest.raises(RemoteUnreachableError):
        bucket.put("one", b"1")
    link.heal()
    bucket.put("one", b"1")
    assert bucket.get("one").data == b"1"


# --- conditional writes --------------------------------------------------------------------------

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
ACTED = [LOST_ANSWER, TWICE, answer(500, acted=True), answer(503, acted=True)]


@pytest.fixture
def ref(bucket: Bucket) -> Ref:
    """A ref that points at A."""
    assert move_ref(bucket, "main", None, A, 0.0)
    found = read_ref(bucket, "main")
    assert found is not None
    return found


def at(bucket: Bucket) -> bytes:
    found = read_ref(bucket, "main")
    assert found is not None
    return found.commit


@pytest.mark.parametrize("fault", ACTED, ids=str)
def test_a_ref_whose_answer_is_lost_is_known_to_be_made_or_moved(
    bucket: Bucket, link: Proxy, fault: Fault
) -> None:
    link.inject(fault, 1, method="PUT")
    assert move_ref(bucket, "main", None, A, 0.0)
    assert at(bucket) == A
    seen = read_ref(bucket, "main")
    link.inject(fault, 1, method="PUT")
    assert move_ref(bucket, "main", seen, B, 0.0)
    assert at(bucket) == B


@pytest.mark.parametrize("fault", [*ACTED, LOST_REQUEST, answer(500)], ids=str)
def test_a_ref_that_another_moved_is_not_taken_for_ones_own(
    bucket: Bucket, link: Proxy, ref: Ref, fault: Fault
) -> None:
    assert move_ref(bucket, "main", ref, B, 0.0)
    link.inject(fault, 1, method="PUT")
    assert not move_ref(bucket, "main", ref, C, 0.0)
    assert at(bucket) == B


@pytest.mark.parametrize("status", [404, 409, 412])
def test_a_write_that_the_storage_does_not_take_for_its_condition_is_refused(
    bucket: Bucket, link: Proxy, ref: Ref, status: int
) -> None:
    """S3 says 404 of a replaced object that is gone, and 409 while another write is under way."""
    link.inject(answer(status), ALWAYS, method="PUT")
    assert not bucket.replace("refs/main", b"1", ref.version)
    if status != 404:
        assert not bucket.create("refs/main", b"1")


def test_a_ref_whose_request_is_lost_is_known_not_to_be_moved(bucket: Bucket, link: Proxy, ref: Ref) -> None:
    link.inject(LOST_REQUEST, 10, method="PUT")
    assert not move_ref(bucket, "main", ref, B, 0.0)
    link.heal()
    assert at(bucket) == A


def test_a_ref_is_of_unknown_state_only_if_it_cannot_be_asked_for(
    bucket: Bucket, link: Proxy, ref: Ref
) -> None:
    link.inject(LOST_ANSWER, 1, method="PUT")
    link.inject(answer(500), ALWAYS, method="GET")
    with pytest.raises(RemoteUnreachableError):
        move_ref(bucket, "main", ref, B, 0.0)
    link.heal()
    assert at(bucket) == B


def test_a_conditional_write_that_is_lost_is_not_said_to_be_refused(bucket: Bucket, link: Proxy) -> None:
    link.inject(LOST_ANSWER, ALWAYS, method="PUT")
    with pytest.raises(RemoteUnreachableError):
        bucket.create("one", b"1")
    link.heal()
    assert bucket.get("one").data == b"1"
