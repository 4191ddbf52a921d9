"""The state of collections in a bucket, and the side of a writer in it: nothing that a push needs is deleted.

A collection has an *epoch*: a number and a list of condemned keys. The list is published, and at least a
grace period later the keys that are still condemned are deleted. A push reads the state when it begins and
once more just before it moves its ref, and begins again if the state has changed meanwhile. So the push knows
the list of every epoch in which a key that it needs could be deleted:

- While the epoch's keys are only condemned, a push that needs one uploads that key again. The collector lists
  the keys once more after the deletion has begun, and does not delete keys that were written meanwhile.
- While keys are deleted, a push that needs one waits for the end, and then uploads that key.

A push that read the state before the epoch was published moves its ref long before the grace period ends, and
the collector, which reads all refs once more before it deletes, finds what the push needs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from castore.errors import RemoteError, RemoteMissingError
from castore.remote.bucket import Bucket
from castore.remote.keys import commit_key

#: Below it a bucket keeps all of this.
FOLDER = "gc/"
STATE = FOLDER + "state"
#: Below it are notes: a collection has removed this commit, and the one after it was there.
CUTS = FOLDER + "cut/"
#: Below it are lists of condemned keys.
LISTS = FOLDER + "condemned/"
#: Phases of an epoch.
IDLE, CONDEMNED, DELETING = "idle", "condemned", "deleting"
#: Seconds from a push's reading of the state to the last try to move its ref. Grace periods are far longer.
FRESH_SECONDS = 240.0
#: Seconds for which a push waits for the end of a deletion, and between two polls.
WAIT_SECONDS, POLL_SECONDS = 900.0, 2.0
# Keys of one object of a list.
_KEYS = 200_000


class State(NamedTuple):
    """The state of a bucket's collections.

    Attributes:
        epoch: number of the last collection that began.
        phase: its phase.
        collector: id of the process that changed the state last.
        list: id of the list of condemned keys.
        lists: number of objects that it has.
        time: when the search for its garbage began, by the storage's clock, in Unix time. For people alone:
            the grace period begins when the state says condemned.
        before: condemned are only keys that were written before this time.
        beat: counts signs of life while keys are deleted.
        version: to compare when the state is replaced; None if there is none yet.
    """

    epoch: int = 0
    phase: str = IDLE
    collector: str = ""
    list: str = ""
    lists: int = 0
    time: float = 0.0
    before: float = 0.0
    beat: int = 0
    version: Any = None

    @property
    def moment(self) -> tuple[int, str, str]:
        """Equal for two readings between which a push has nothing to do."""
        return self.epoch, self.phase, self.collector


def read_state(bucket: Bucket) -> State:
    """The state.

    Raises:
        RemoteError: it is damaged, or of another format.
    """
    try:
        found = bucket.get(STATE)
    except RemoteMissingError:
        return State()
    try:
        fields = json.loads(found.data)
        if fields.pop("format") != 1:
            raise ValueError("another format")
        state = State(**fields, version=found.version)
        if state.phase not in (IDLE, CONDEMNED, DELETING):
            raise ValueError("no such phase")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RemoteError(f"{STATE} in {bucket.url} is none that this castore can read: {error}") from error
    return state


def write_state(bucket: Bucket, new: State, seen: State) -> bool:
    """Replace the state if it is still ``seen``; False if somebody else has changed it.

    After an answer that was lost, the collector's id distinguishes its own write from another's.
    """
    fields = new._asdict()
    del fields["version"]
    data = json.dumps({"format": 1, **fields}, separators=(",", ":")).encode()
    if seen.version is None:
        written = bucket.create(STATE, data)
    else:
        written = bucket.replace(STATE, data, seen.version)
    return written or read_state(bucket)._replace(version=None) == new._replace(version=None)


def list_key(state: State, number: int) -> str:
    """The key of one object with condemned keys."""
    return f"{LISTS}{state.list}/{number}"


def write_list(bucket: Bucket, state: State, keys: list[str]) -> State:
    """Write the list of condemned keys; returns the state with its length."""
    pieces = [keys[start : start + _KEYS] for start in range(0, len(keys), _KEYS)]
    for number, piece in enumerate(pieces):
        bucket.put(list_key(state, number), "\n".join(piece).encode())
    return state._replace(lists=len(pieces))


def read_list(bucket: Bucket, state: State) -> Iterator[str]:
    """The condemned keys of a state, whatever has become of them."""
    for number in range(state.lists):
        yield from bucket.get(list_key(state, number)).data.decode().split("\n")


def cut_key(commit: bytes) -> str:
    """The key of the note that a collection has removed a commit that a kept one comes after."""
    return CUTS + commit.hex()


def was_cut(bucket: Bucket, commit: bytes, after: bytes) -> bool:
    """Whether a collection has removed a commit. One that is gone without a note is lost.

    Args:
        bucket: lacks the commit.
        commit: the commit.
        after: the commit after it, which has been read. A collection that removes it meanwhile removes it
            before those that are older.
    """
    return bucket.size(cut_key(commit)) is not None or bucket.size(commit_key(after)) is None


class Guard:
    """The side of one push. Its threads may share it.

    Args:
        bucket: of the remote.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Read the state."""
        while True:
            self._state = read_state(self._bucket)
            try:
                self._condemned = frozenset(read_list(self._bucket, self._state))
                return
            except RemoteMissingError:
                if self.is_current():
                    raise
                # the collection has just ended

    def must_upload(self, keys: Iterable[str]) -> set[str]:
        """Call before keys are uploaded, or counted on. Returns those that must be uploaded in any case.

        Raises:
            RemoteError: a deletion of the keys does not end.
        """
        needed = self._condemned.intersection(keys)
        if not needed:
            return set()
        with self._lock:
            if self._state.phase == DELETING:
                self._wait()
        return set(needed)

    def _wait(self) -> None:
        waited = 0.0
        while self.is_current():
            if waited >= WAIT_SECONDS:
                raise RemoteError(
                    f"a collection of {self._bucket.url} deletes objects that this push needs, and does not"
                    " end; if its process is gone, `castore remote gc` ends it; then push again"
                )
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS

    def is_current(self) -> bool:
        """Whether the state is still that of `begin`. If not, the push begins again."""
        return read_state(self._bucket).moment == self._state.moment
