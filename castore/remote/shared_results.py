"""A store's door to the results that several stores share over a remote. See `castore.Store`.

A store asks for a result before it computes, and offers what it has computed. The fetcher does both, in the
background where it can, so a process that uses this may fork. A remote that gives no answer costs a known
delay once, and is then left alone for a while. Must never: end a computation because of the remote.
"""

from __future__ import annotations

import logging
import math
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeVar

from castore.errors import (
    CorruptError,
    FullError,
    InvalidValueError,
    MissingDependencyError,
    NotFoundError,
    RemoteError,
    RemoteMissingError,
    SerializationError,
    StoreError,
    TooLargeError,
)
from castore.parts import Parts
from castore.remote.fetcher_client import FetcherClient, storage_timeout
from castore.remote.remotes import Remotes, RemoteSettings
from castore.system.forks import reset_after_fork

log = logging.getLogger("castore")

T = TypeVar("T")

#: Seconds within which a remote says whether it has a result; less with a shorter time-out of the storage.
LOOKUP_SECONDS = 10.0
#: Seconds for which a remote is left alone that gave no answer.
SILENT_SECONDS = 60.0
#: A computation is worth a claim if it takes so many seconds, or so many times as long as the look-up of
#: its result. A claim takes about as long as two look-ups.
WORTH_SECONDS, WORTH_LOOKUPS = 0.5, 5.0
# Weight of the last computation in the average by which others are expected to take as long.
_WEIGHT = 0.25
#: Seconds after which a node that waits for another one logs that it waits.
NOTICE_SECONDS = 30.0
# The fetcher of results that none has taken.
_NO_FETCHER = ""
# Results that were offered and are remembered until the store is closed.
_OFFERED = 10_000
# Results that are looked up, or offered, with one request to the fetcher.
_AT_ONCE = 64
# Errors of a remote, and of the store's knowledge of it. They end no computation.
_TROUBLE = (CorruptError, NotFoundError, RemoteError, StoreError)
# Seconds between two polls for a result that another node computes.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
#: Seconds that the end of a store waits for results to be offered.
CLOSE_SECONDS = 60.0


class _Lookup(NamedTuple):
    """The outcome of the look-up of a result.

    Attributes:
        is_here: the result is in the store now.
        record: digest of the remote's record; None for no record, or no answer.
        is_bad: nobody can use the record: a new result is to replace it.
    """

    is_here: bool
    record: bytes | None
    is_bad: bool


def lookup_timeout() -> float:
    """Seconds within which a remote says whether it has a result.

    Raises:
        InvalidValueError: the variable that shortens them makes no sense.
    """
    return min(LOOKUP_SECONDS - 1.0, storage_timeout())


class SharedResults:
    """The results of computations that a remote has, and offers to it.

    Every method raises a `NotFoundError` if the store knows no such remote.

    Args:
        parts: of the store.
        remote: the remote's name in this store.
    """

    def __init__(self, parts: Parts, remote: str) -> None:
        self._parts = parts
        self.remote = remote
        self._fetcher = FetcherClient(parts.path)
        self._silent_until = 0.0
        # By which fetcher each result was offered, and whether it stays in the store.
        self._offered: deque[tuple[str, str, bool]] = deque(maxlen=_OFFERED)
        reset_after_fork(self)
        # How long computations below each folder of names take: a moving average, as the last of a step's
        # blocks is often short.
        self._seconds: dict[str, float] = {}
        # The quickest look-up of a result. Others had to wait, for the fetcher to start for example.
        self._lookup_seconds = WORTH_SECONDS

    def _after_fork(self) -> None:
        self._offered.clear()  # those are the parent's to wait for

    @cached_property
    def _settings(self) -> RemoteSettings:
        return Remotes(self._parts.path, self._parts.settings).get(self.remote)

    def turn(self, name: str, lifetime: float | None) -> SharedTurn:
        """This process's turn to find or compute a result. Others on this machine wait for it meanwhile.

        Args:
            name: key of the computation.
            lifetime: seconds after its computation for which a result is good; None for ever.
        """
        return SharedTurn(
            name, partial(self.find, name, lifetime), partial(self.claim, name), partial(self.offer, name)
        )

    def find(self, name: str, lifetime: float | None, known: bytes | None) -> _Lookup:
        """Have the result of a computation in the store, if the remote has a good one.

        Args:
            name: key of the computation.
            lifetime: seconds after its computation for which a result is good; None for ever.
            known: digest of a record that is of no use.
        """
        began = time.monotonic()
        try:
            found = self._ask(self._fetcher.call, "find_result", name=name, lifetime=lifetime, known=known)
        except (FullError, TooLargeError) as error:
            log.warning("a result in remote %r cannot be kept: %s", self.remote, error)
            return _Lookup(False, None, False)
        if found is None:
            return _Lookup(False, None, False)
        self._lookup_seconds = min(self._lookup_seconds, time.monotonic() - began)
        is_here, row, record = found
        if row is None:
            return _Lookup(is_here, record, not is_here)
        try:
            self._fetcher.call("keep_result", remote=self.remote, row=row)
        except (CorruptError, RemoteMissingError) as error:
            log.warning("a result in remote %r is computed again: %s", self.remote, error)
            return _Lookup(False, record, True)
        except (FullError, TooLargeError) as error:
            log.warning("a result in remote %r cannot be kept: %s", self.remote, error)
            return _Lookup(False, record, False)
        except _TROUBLE as error:
            self._leave_alone(error)
            return _Lookup(False, record, False)
        return _Lookup(True, record, False)

    def claim(self, name: str) -> tuple[bool, socket.socket | None]:
        """Claim a computation, so that other nodes wait for its result.

        Returns:
            Whether this process is to compute, and the connection that holds the claim; None without one.
        """
        if self._settings.read_only or self._settings.single_writer or self._is_quick(name):
            return True, None
        held = self._ask(self._fetcher.open_call, "claim_result", name=name)
        if held is None:
            return True, None
        is_mine, connection = held
        if not is_mine:
            connection.close()
        return is_mine, connection if is_mine else None

    def offer(
        self, name: str, refused: bytes | None, claim: socket.socket | None, seconds: float, *, keep: bool
    ) -> bool:
        """Have a result uploaded in the background, unless the remote has one.

        Args:
            name: key of the computation, which is an entry of the store.
            refused: a record of the remote that is not good, in whose place the result comes.
            claim: the connection that holds the claim; None without one.
            seconds: that the computation took.
            keep: whether the entry stays in the store afterwards.

        Returns:
            Whether it is uploaded now, or tried again when the store is closed.
        """
        folder = _folder(name)
        before = self._seconds.get(folder, seconds)
        self._seconds[folder] = before + _WEIGHT * (seconds - before)
        if self._settings.read_only:
            return False
        call = self._fetcher.call if claim is None else partial(self._fetcher.go_on, claim)
        begun = self._ask(call, "offer_result", name=name, refused=refused, keep=keep)
        if begun is None and claim is not None:  # the fetcher that held the claim was killed
            begun = self._ask(self._fetcher.call, "offer_result", name=name, refused=refused, keep=keep)
        if begun is None and not keep:  # it would take space until the end
            return False
        self._note([name], begun, keep=keep)
        return True

    def _note(self, names: list[str], begun: tuple[str, str | None] | None, *, keep: bool) -> None:
        """Remember results until they are known to be in the remote, also those that it did not take now."""
        fetcher, failure = begun or (_NO_FETCHER, None)
        self._offered += [(fetcher, name, keep) for name in names]
        self._warn(failure)

    def find_many(self, names: Sequence[str], lifetime: float | None) -> None:
        """Have those of some results in the store that the remote has, as `find`; damaged ones are left out.

        Args:
            names: keys of the computations.
            lifetime: seconds after its computation for which a result is good; None for ever.
        """
        large: list[Any] = []
        for some in _chunks(names):
            rows = self._ask(self._fetcher.call, "find_results", names=some, lifetime=lifetime)
            if rows is None:
                break
            large += rows
        if large:
            try:
                self._fetcher.call("keep_results", remote=self.remote, rows=large)
            except _TROUBLE as error:
                self._leave_alone(error)

    def offer_many(self, names: Sequence[str]) -> None:
        """Have results uploaded in the background, unless the remote has them.

        Args:
            names: keys of computations, which are entries of the store.
        """
        if self._settings.read_only:
            return
        for some in _chunks(names):
            self._note(some, self._ask(self._fetcher.call, "offer_results", names=some), keep=True)

    def offer_now(self, names: Sequence[str], progress: Callable[[int, int], object]) -> None:
        """Have results in the remote, unless it has them.

        Args:
            names: keys of computations, which are entries of the store.
            progress: called with the number of results that are there, and of all.

        Raises:
            InvalidValueError: the remote is only read.
            RemoteError: it did not take them.
        """
        if self._settings.read_only:
            raise InvalidValueError(
                f"remote {self.remote!r} was added with --read-only: nothing is offered to it"
            )
        for done, some in enumerate(_chunks(names)):
            progress(done * _AT_ONCE, len(names))
            while not self._offer_and_wait(some):
                continue
        progress(len(names), len(names))

    def _offer_and_wait(self, names: list[str]) -> bool:
        """Offer results until they are in the remote; False if the fetcher was killed, and has lost them."""
        by, _ = self._fetcher.call("offer_results", timeout=LOOKUP_SECONDS, remote=self.remote, names=names)
        left = len(names)
        while left:
            fetcher, left, failure = self._finish(time.monotonic() + LOOKUP_SECONDS)
            if failure is not None:
                raise RemoteError(f"a result could not be offered to remote {self.remote!r}: {failure}")
            if fetcher != by:
                return False
        return True

    def _ask(self, call: Callable[..., Any], do: str, **fields: Any) -> Any:
        """A request to the fetcher; None if there is no answer, or if none is to be expected."""
        known = self._settings  # an error if the store has never known the remote
        if time.monotonic() < self._silent_until:
            return None
        try:
            return call(do, timeout=lookup_timeout() + 1.0, remote=known.name, **fields)
        except _TROUBLE as error:
            self._leave_alone(error)
        return None

    def _leave_alone(self, error: Exception) -> None:
        self._silent_until = time.monotonic() + SILENT_SECONDS
        self._parts.usage.counts["remote_left_alone"] += 1
        self._parts.usage.flush_some()  # the process may go on for days
        log.warning("remote %r is not asked for results for %g s: %s", self.remote, SILENT_SECONDS, error)

    def _is_quick(self, name: str) -> bool:
        """Whether computations beside this one take too little time to be worth a claim."""
        worth = min(WORTH_SECONDS, WORTH_LOOKUPS * self._lookup_seconds)
        return self._seconds.get(_folder(name), math.inf) < worth

    def close(self) -> None:
        """Wait until results are in the remote, for at most `CLOSE_SECONDS`.

        Results that no fetcher has taken, or that a killed one may have lost, are offered again.
        """
        offered, self._offered = self._offered, deque(maxlen=_OFFERED)
        if not offered:
            return
        try:
            self._finish_all(offered)
        finally:
            self._remove_left({name for _, name, keep in offered if not keep})

    def _remove_left(self, names: Iterable[str]) -> None:
        """Remove entries that were there to be uploaded alone, and were not."""
        for name in names:
            from castore.remote.result_sharing import remove_entry  # the fetcher's side, which loads far more

            if (entry := self._parts.index.entry(name)) is not None:
                remove_entry(self._parts, entry)

    def _finish_all(self, offered: Iterable[tuple[str, str, bool]]) -> None:
        is_silent = time.monotonic() < self._silent_until  # it may be back, which is worth a short wait
        until = time.monotonic() + (LOOKUP_SECONDS if is_silent else CLOSE_SECONDS)
        try:
            fetcher, left, failure = self._finish(until)
            # A fetcher that was killed may not have come to them. To offer a result twice does no harm.
            if again := {name: keep for by, name, keep in offered if by != fetcher}:
                offer = partial(self._fetcher.call, timeout=LOOKUP_SECONDS, remote=self.remote)
                for some in _chunks([name for name, keep in again.items() if keep]):
                    offer("offer_results", names=some)
                for name in (name for name, keep in again.items() if not keep):
                    offer("offer_result", name=name, refused=None, keep=False)
                fetcher, left, failure = self._finish(until)
        except _TROUBLE as error:
            log.warning("results may not have come into remote %r: %s", self.remote, error)
            return
        self._warn(failure)
        if left:
            log.warning(
                "%d results are still on their way into remote %r, and lost if this machine ends now",
                left,
                self.remote,
            )

    def _finish(self, until: float) -> tuple[str, int, str | None]:
        """Wait for offers; returns the fetcher's id, how many are under way, and why one failed."""
        seconds = max(until - time.monotonic(), 0.0)
        fetcher, left, failure = self._fetcher.call(
            "finish_offers", timeout=seconds + 1.0, seconds=max(seconds - 1.0, 0.0)
        )
        return fetcher, left, failure

    def _warn(self, failure: str | None) -> None:
        if failure is not None:
            log.warning("a result could not be offered to remote %r: %s", self.remote, failure)


class SharedTurn(AbstractContextManager["SharedTurn"]):
    """One process's turn at a computation whose result stores share. `Store.share` makes it; a context.

    Args:
        name: key of the computation.
        find: looks a result up, given a record that is of no use.
        claim: claims the computation.
        offer: has the result uploaded.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[bytes | None], Any],
        claim: Callable[[], tuple[bool, socket.socket | None]],
        offer: Callable[..., bool],
    ) -> None:
        self._name = name
        self._find, self._claim, self._offer = find, claim, offer
        self._known: bytes | None = None
        self._refused: bytes | None = None
        self._connection: socket.socket | None = None
        self._began = 0.0
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self.end()  # a child that outlives its parent must not keep other nodes waiting

    def look(self) -> bool:
        """Have a result in the store, if the remote has one that was not found before."""
        found: _Lookup = self._find(self._known)
        if found.record != self._known:
            # A result that the caller cannot use either is one to replace: see `decline`.
            self._known, self._refused = found.record, found.record if found.is_bad or found.is_here else None
        return found.is_here

    def decline(self) -> None:
        """The result that was found is good, and of no use here: it is not to be replaced."""
        self._refused = None

    def begin(self, *, has_looked: bool = False) -> Literal["found", "ours", "elsewhere"]:
        """Have a result in the store, or the turn to compute it. Never waits for another node.

        A caller that cannot use a result calls this once more.

        Args:
            has_looked: a look-up a moment ago found none.

        Returns:
            ``"found"``: it is in the store now. ``"ours"``: this process is to compute it. ``"elsewhere"``:
            another node computes it.
        """
        if not has_looked and self.look():
            return "found"
        if self._connection is not None:
            return "ours"
        is_ours, self._connection = self._claim()
        if self._connection is not None and self.look():  # it came between the first look-up and the claim
            return "found"
        self._began = time.monotonic()
        return "ours" if is_ours else "elsewhere"

    def bring(self) -> bool:
        """Have a result in the store: True. False means that this process is to compute it.

        Waits while another node computes it. A caller that cannot use the result calls this once more.
        """
        pause, warn_at = _SHORTEST_PAUSE, time.monotonic() + NOTICE_SECONDS
        while (begun := self.begin()) == "elsewhere":
            if time.monotonic() > warn_at:
                log.warning("%r is computed by another node; this one waits for its result", self._name)
                warn_at = math.inf
            time.sleep(pause * (1 + random.SystemRandom().random()))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return begun == "found"

    def load(self, load: Callable[[], tuple[bool, T]]) -> tuple[bool, T | None]:
        """Load another node's result; ``(False, None)`` means that this process is to compute it.

        Args:
            load: loads the result from the store; returns whether it is there and good, and the result.
        """
        while self.bring():
            try:
                hit, value = load()
            except (CorruptError, MissingDependencyError, SerializationError) as error:
                log.warning("the result of another node for %r is of no use here: %s", self._name, error)
                self.decline()
            else:
                if hit:
                    return True, value
        return False, None

    def offer(self, *, keep: bool = True) -> bool:
        """Offer the result, which is in the store now.

        Args:
            keep: whether the entry stays in the store once it is offered.

        Returns:
            False if it is not uploaded, for a remote that is only read, for example: the entry stays then.
        """
        seconds = time.monotonic() - self._began
        return self._offer(self._refused, self._connection, seconds, keep=keep)

    def end(self) -> None:
        """Let others compute, unless a result was offered."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __exit__(self, *exc: object) -> None:
        self.end()


def _chunks(names: Sequence[str]) -> Iterator[list[str]]:
    return (list(names[start : start + _AT_ONCE]) for start in range(0, len(names), _AT_ONCE))


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
