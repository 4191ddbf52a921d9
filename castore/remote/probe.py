"""Finds out by trying what a bucket can do.

The name of a storage shows little. rclone's `serve s3` ignores the condition of a write, so each of twelve
racing writers is answered that it won. rclone answers a range with the whole object.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import NamedTuple

from castore.errors import RemoteDeniedError, RemoteError, RemoteUnreachableError
from castore.remote.bucket import Bucket

#: Where a probe writes objects, which it removes. Their names begin with an id of the probe.
PROBE = "probe/"
_WRITERS = 8
_ROUNDS = 2
# Seconds of difference between two clocks from which on the user is told.
_CLOCK_TOLERANCE = 60.0
# Bytes; an object that is read whole to compare its ranges.
_LARGEST = 1 << 20


class Findings(NamedTuple):
    """The abilities of a bucket. None stands for an ability that could not be tried.

    Attributes:
        lists: a listing has an object as soon as it is written.
        ranges: exactly the bytes are given that were asked for.
        writes: objects can be written.
        creates: of several writers that create one object, one gets the answer that it did.
        swaps: of several writers that replace one version of an object, one gets the answer that it did.
        deletes: objects can be removed, as a collector does.
        clock: the storage's clock minus that of this machine, in seconds.
        sentences: what is wrong, or may surprise.
    """

    lists: bool | None
    ranges: bool | None
    writes: bool | None
    creates: bool | None
    swaps: bool | None
    deletes: bool | None
    clock: float | None
    sentences: tuple[str, ...]

    @property
    def fit_for_reading(self) -> bool:
        """Whether stores can read from it; what could not be tried does not count."""
        return self.lists is not False and self.ranges is not False

    @property
    def fit_for_sharing(self) -> bool:
        """Whether several stores can write to it."""
        return self.fit_for_reading and bool(self.writes and self.creates and self.swaps)


def probe(bucket: Bucket, *, writes: bool = True) -> Findings:
    """Try a bucket out, below `PROBE`.

    Args:
        bucket: what is tried.
        writes: False to write nothing; less is found out then.

    Raises:
        RemoteUnreachableError: the storage gives no answers.
        RemoteError: there is no such bucket.
    """
    trial = _Trial(bucket)
    lists, largest = trial.list_any()
    if not (writes and trial.write()):
        return Findings(
            lists,
            trial.read_ranges(largest),
            False if writes else None,
            None,
            None,
            None,
            None,
            trial.sentences,
        )
    try:
        lists, clock = trial.list_own() if lists else (False, None)
        ranges = trial.read_ranges(trial.first)
        creates, swaps = trial.race()
    finally:
        deletes = trial.clean_up()
    return Findings(lists, ranges, True, creates, swaps, deletes, clock, trial.sentences)


class _Trial:
    """Tries one ability after another, and keeps sentences of what is wrong."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._prefix = f"{PROBE}{uuid.uuid4().hex}-"
        self._keys: list[str] = []
        self._began = 0.0
        self.sentences: tuple[str, ...] = ()
        self.first = ""

    def _note(self, sentence: object) -> bool:
        self.sentences += (str(sentence),)
        return False

    def _key(self, name: str) -> str:
        self._keys.append(self._prefix + name)
        return self._keys[-1]

    def list_any(self) -> tuple[bool, str]:
        """Whether listing is allowed, and the key of an object to read."""
        try:
            some = islice(self._bucket.listing(""), 1000)
            fitting = [listed for listed in some if listed.size <= _LARGEST]
        except RemoteDeniedError as error:
            return self._note(error), ""
        return True, max(fitting, key=lambda listed: listed.size).key if fitting else ""

    def write(self) -> bool:
        """Whether objects can be written."""
        self._began = time.time()
        self.first = self._key("first")
        try:
            self._bucket.put(self.first, bytes(range(256)) * 16)
        except RemoteDeniedError as error:
            return self._note(error)
        return True

    def list_own(self) -> tuple[bool, float | None]:
        """Whether the first object is in a listing, and how the storage's clock goes."""
        listing = self._bucket.listing(PROBE)  # has what other probes write, too
        found = {listed.key: listed.modified for listed in listing if listed.key.startswith(self._prefix)}
        if list(found) != [self.first]:
            return self._note(f"a listing of {self._bucket.url} does not have what was just written"), None
        # Most storages give whole seconds, rounded down.
        ahead, behind = found[self.first] - time.time(), self._began - 1 - found[self.first]
        clock = ahead if ahead > 0 else -max(behind, 0)
        if abs(clock) > _CLOCK_TOLERANCE:
            self._note(
                f"the clock of {self._bucket.url} is {abs(clock):.0f} seconds"
                f" {'ahead of' if clock > 0 else 'behind'} this machine's; set the one that is wrong"
            )
        return True, clock

    def read_ranges(self, key: str) -> bool | None:
        """Whether ranges of an object are what was asked for; None without an object."""
        whole = self._bucket.get(key).data if key else b""
        if len(whole) < 3:
            return None
        ranges = [(1, 2), (len(whole) // 2, len(whole)), (len(whole) - 1, len(whole))]
        try:
            found = [self._bucket.get_range(key, *one) for one in ranges]
        except RemoteUnreachableError:
            raise
        except RemoteError as error:
            return self._note(error)
        if found != [whole[start:end] for start, end in ranges]:
            return self._note(
                f"{self._bucket.url} gives other bytes than those of the range that was asked for"
            )
        return True

    def race(self) -> tuple[bool, bool]:
        """Whether one writer at most creates an object, and whether one at most replaces a version.

        All rounds run at once. SeaweedFS lets a writer that meets another one at its object wait for a second
        or more, so rounds in a row would take twice as long.
        """
        with ThreadPoolExecutor(2 * _ROUNDS) as threads:
            created = [
                threads.submit(self._create, self._key(f"created-{number}")) for number in range(_ROUNDS)
            ]
            swapped = [
                threads.submit(self._swap, self._key(f"swapped-{number}")) for number in range(_ROUNDS)
            ]
        return self._found_nothing(created), self._found_nothing(swapped)

    def _found_nothing(self, rounds: list[Future[str | None]]) -> bool:
        for one in rounds:
            try:
                wrong: object = one.result()
            except RemoteUnreachableError:
                raise
            except RemoteError as error:
                wrong = error
            if wrong is not None:
                return self._note(wrong)
        return True

    def _create(self, key: str) -> str | None:
        """Let writers race to create an object; the result is a sentence where more than one did."""
        bucket, says = self._bucket, f"{self._bucket.url} ignores the condition of a write:"
        winners = _race(partial(bucket.create, key))
        again = bucket.create(key, _bytes())
        if len(winners) > 1:
            return f"{says} {len(winners)} of {_WRITERS} that created one object were told that they did"
        if again or bucket.get(key).data not in (winners or [bucket.get(key).data]):
            return f"{says} an object that was there was created again"
        return None

    def _swap(self, key: str) -> str | None:
        """Let writers race to replace an object; the result is a sentence where not exactly one can."""
        bucket, says = self._bucket, f"{self._bucket.url} ignores the version that a write compares:"
        bucket.create(key, _bytes())
        first = bucket.get(key).version
        winners = _race(partial(bucket.replace, key, version=first))
        second = bucket.get(key)
        stale = bucket.replace(key, _bytes(), first)
        works = winners or bucket.replace(key, _bytes(), bucket.get(key).version)
        if len(winners) > 1:
            return f"{says} {len(winners)} of {_WRITERS} that replaced it were told that they did"
        if stale or (winners and second.data != winners[0]):
            return f"{says} one that was replaced before passed for the newest"
        if not works:
            return f"{bucket.url} never replaces an object under the condition of its version"
        return None

    def clean_up(self) -> bool:
        """Remove what was written; whether that is allowed."""
        try:
            self._bucket.delete(self._keys)
        except RemoteDeniedError as error:
            return self._note(f"{error}; {len(self._keys)} small objects stay below {PROBE}")
        return True


def _bytes() -> bytes:
    """Such as no other writer has: on S3 the same bytes would be the same version."""
    return uuid.uuid4().hex.encode()


def _race(write: Callable[[bytes], bool]) -> list[bytes]:
    """The data of each writer that was answered that it won."""
    barrier = threading.Barrier(_WRITERS)

    def run(data: bytes) -> bool:
        barrier.wait()
        return write(data)

    every = [_bytes() for _ in range(_WRITERS)]
    with ThreadPoolExecutor(_WRITERS) as threads:
        return [data for data, won in zip(every, threads.map(run, every), strict=True) if won]
