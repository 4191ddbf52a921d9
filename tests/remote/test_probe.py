"""A probe finds out what a bucket can do, and recognises one that is unfit."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from castore.errors import RemoteDeniedError, RemoteError, RemoteMissingError, RemoteUnreachableError
from castore.remote.bucket import Listed, Versioned
from castore.remote.folder_bucket import FolderBucket
from castore.remote.probe import probe
from tests.mount.conftest import until
from tests.remote.servers import READER, READERS_SECRET, Place, free_ports, has_azurite

STORAGES = ["folder", "moto", "seaweedfs", "gcs", *(["azurite"] if has_azurite() else [])]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_fit_bucket_is_found_fit_and_left_clean(request: pytest.FixtureRequest, storage: str) -> None:
    place: Place = request.getfixturevalue(storage)
    bucket = place.fresh()
    bucket.put("objects/one", b"12345")
    found = probe(bucket)
    assert found.sentences == ()
    assert found[:6] == (True,) * 6
    assert found.clock is not None
    assert abs(found.clock) < 5
    assert (found.fit_for_reading, found.fit_for_sharing) == (True, True)
    assert [listed.key for listed in bucket.listing("")] == ["objects/one"]


def test_rclone_is_unfit(rclone: Place) -> None:
    bucket = rclone.fresh()
    found = probe(bucket)
    assert (found.ranges, found.creates, found.swaps) == (False, False, False)
    assert (found.lists, found.writes, found.deletes) == (True, True, True)
    assert (found.fit_for_reading, found.fit_for_sharing) == (False, False)
    told = "\n".join(found.sentences)
    assert "with the whole object" in told
    assert "8 of 8 that created one object were told that they did" in told
    assert "8 of 8 that replaced it were told that they did" in told


def test_a_reader_is_found_to_be_one(seaweedfs: Place) -> None:
    prefix = uuid.uuid4().hex
    seaweedfs.open(prefix).put("objects/one", b"12345")
    found = probe(seaweedfs.open(prefix, AWS_ACCESS_KEY_ID=READER, AWS_SECRET_ACCESS_KEY=READERS_SECRET))
    assert found[:7] == (True, True, False, None, None, None, None)
    assert (found.fit_for_reading, found.fit_for_sharing) == (True, False)
    assert "AccessDenied" in found.sentences[0]


def test_a_probe_that_shall_not_write_does_not(rclone: Place, tmp_path: Path) -> None:
    assert probe(FolderBucket(tmp_path / "none"), writes=False)[:3] == (True, None, None)
    assert os.listdir(tmp_path) == []
    bucket = rclone.fresh()
    bucket.put("objects/one", b"12345")
    found = probe(bucket, writes=False)
    assert found[:6] == (True, False, None, None, None, None)
    assert not found.fit_for_reading


def test_no_answer_is_an_error_and_no_finding(seaweedfs: Place) -> None:
    with pytest.raises(RemoteUnreachableError):
        probe(seaweedfs.fresh(AWS_ENDPOINT_URL=f"http://127.0.0.1:{free_ports(1)[0]}"))
    with pytest.raises(RemoteError, match="there is no bucket"):
        probe(seaweedfs._replace(url="s3://no-such-bucket").open())


# --- storages with one fault each ----------------------------------------------------------------


class NoDeletes(FolderBucket):
    def delete(self, keys: object) -> None:
        raise RemoteDeniedError("no permission to delete")


class LateListings(FolderBucket):
    def listing(self, prefix: str) -> Iterator[Listed]:
        return iter(())


class DeniedListings(FolderBucket):
    def listing(self, prefix: str) -> Iterator[Listed]:
        raise RemoteDeniedError("no permission to list")


class ClockBehind(FolderBucket):
    def listing(self, prefix: str) -> Iterator[Listed]:
        return (listed._replace(modified=listed.modified - 3600) for listed in super().listing(prefix))


class ClockAhead(FolderBucket):
    def listing(self, prefix: str) -> Iterator[Listed]:
        return (listed._replace(modified=listed.modified + 3600) for listed in super().listing(prefix))


class OtherRanges(FolderBucket):
    def get_range(self, key: str, start: int, end: int) -> bytes:
        return super().get_range(key, 0, end - start)


class CreatesInTurns(FolderBucket):
    """Looks, and then writes: only those that race get through."""

    looked: ClassVar[list[str]] = []

    def create(self, key: str, data: bytes) -> bool:
        try:
            super().get(key)
        except RemoteMissingError:
            self.looked.append(key)
            if "created" in key:  # many race: two have looked before one writes
                until(lambda: self.looked.count(key) > 1)
            if not super().create(key, data):
                assert super().replace(key, data, super().get(key).version) is not None
            return True
        return False


class SwapsStaleVersions(FolderBucket):
    def replace(self, key: str, data: bytes, version: Any) -> bool:
        return super().replace(key, data, version) or super().replace(key, data, self.get(key).version)


class NeverSwaps(FolderBucket):
    def replace(self, key: str, data: bytes, version: Any) -> bool:
        return False


class NoVersions(FolderBucket):
    def get(self, key: str) -> Versioned:
        return super().get(key)._replace(version=None)

    def replace(self, key: str, data: bytes, version: Any) -> bool:
        raise RemoteError("gives objects no version")


FAULTS: dict[str, tuple[Callable[[Path], FolderBucket], str, str]] = {
    "no deletes": (NoDeletes, "deletes", "small objects stay below probe/"),
    "late listings": (LateListings, "lists", "does not have what was just written"),
    "denied listings": (DeniedListings, "lists", "no permission to list"),
    "a clock behind": (ClockBehind, "clock", "behind this machine's"),
    "a clock ahead": (ClockAhead, "clock", "ahead of this machine's"),
    "other ranges": (OtherRanges, "ranges", "other bytes than those of the range"),
    "creation in turns": (CreatesInTurns, "creates", "that created one object were told that they did"),
    "stale versions": (SwapsStaleVersions, "swaps", "ignores the version"),
    "no swap": (NeverSwaps, "swaps", "never replaces"),
    "no versions": (NoVersions, "swaps", "gives objects no version"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_found_and_told(tmp_path: Path, fault: str) -> None:
    kind, ability, told = FAULTS[fault]
    found = probe(kind(tmp_path / "bucket"))
    assert told in "\n".join(found.sentences)
    if ability == "clock":
        assert found.clock is not None
        assert abs(found.clock) == pytest.approx(3600, abs=300)  # a busy machine takes its time
        assert (found.clock > 0) == ("ahead" in fault)
        assert found.fit_for_sharing
        return
    assert getattr(found, ability) is False
    assert found.fit_for_sharing == (ability == "deletes")
    assert found.fit_for_reading == (ability not in ("lists", "ranges"))
