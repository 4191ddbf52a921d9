"""A storage in memory, and actors on it that take turns at each call, in an order of chance.

Actors run the real code of pushes, pulls and collections. Only one runs at a time, and the storage decides
after each call which one goes on, so a seed always gives the same interleaving. Time is the storage's own.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from castore.errors import RemoteMissingError, RemoteUnreachableError
from castore.remote import commits
from castore.remote.bucket import Listed, Versioned
from castore.remote.collection_state import STATE, cut_key
from castore.remote.keys import REFS, SETTINGS, commit_key, object_key, page_key
from castore.remote.remotes import BegunPull, PendingBase, Remotes, mark_of
from castore.remote.tree import Tree


class Killed(BaseException):
    """The actor's process is gone."""


class Inline(Executor):
    """Runs all work at once, in the thread that asks for it."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


class _Actor:
    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name = name
        self.turn = threading.Semaphore(0)
        self.is_killed = False
        # Whether the actor is about to move a ref or to delete keys, soon after a look at the state, as it
        # must.
        self.is_hot = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work,))

    def _run(self, work: Callable[[], object]) -> None:
        self.turn.acquire()
        try:
            work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True

    is_over = False


class World:
    """The storage and its time.

    Args:
        seed: of all chance.
        grace: seconds that collectors wait.

    Attributes:
        now: the storage's clock.
        trace: calls, for a failure's message.
        remotes: the bases of each store that takes part, by its number.
    """

    def __init__(self, seed: int, grace: float) -> None:
        self.chance = random.Random(seed)
        self.grace = grace
        self.now = 1e9
        self.objects: dict[str, tuple[bytes, int, float]] = {SETTINGS: (b'{"format":1}', 0, self.now)}
        self.trace: list[str] = []
        self.remotes: defaultdict[int, Remotes] = defaultdict(MemoryRemotes)
        self._writes = 0
        self._back = threading.Semaphore(0)
        self._here = threading.local()
        # Each state that a ref has had, and until when it was the ref's newest.
        self.heads: list[tuple[str, bytes, float | None]] = []
        self._whole: dict[bytes, frozenset[str]] = {}

    @property
    def clock(self) -> Any:
        """Stands for the module `time` in the code of the actors."""
        return SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.step("sleep")

    # Turns

    def run(self, actors: dict[str, Callable[[], object]], *, kills: bool) -> None:
        """Let actors run to their ends, all at once."""
        made = [_Actor(name, self._bound(work)) for name, work in actors.items()]
        for actor in made:
            actor.thread.start()
        # With much inertia an actor does a lot between two calls of another one.
        inertia, actor = self.chance.choice([0.0, 0.7, 0.95]), made[0]
        while waiting := [actor for actor in made if not actor.is_over]:
            if actor.is_over or self.chance.random() >= inertia:
                actor = self.chance.choice(waiting)
            self._let_time_pass(waiting)
            if kills and self.chance.random() < 0.01:
                actor.is_killed = True
            self._here.actor = None
            self._running = actor
            actor.turn.release()
            self._wait_for(actor)
        for actor in made:
            actor.thread.join()
            if actor.error is not None:
                raise actor.error

    def _bound(self, work: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            self._here.actor = self._running
            work()

        return run

    def _wait_for(self, actor: _Actor) -> None:
        while not self._back.acquire(timeout=0.01):
            if not actor.thread.is_alive():
                return

    def _let_time_pass(self, waiting: Sequence[_Actor]) -> None:
        self.now += 1
        # Pushes and collectors act soon upon a state that they have read; else any time may pass.
        if self.chance.random() < 0.08 and not any(actor.is_hot for actor in waiting):
            self.now += self.chance.choice([self.grace / 3, self.grace, 2 * self.grace])

    def step(self, call: str) -> None:
        """Give the turn away, and wait for the next one."""
        actor: _Actor | None = getattr(self._here, "actor", None)
        if actor is None:
            return
        if actor.is_killed:
            raise Killed
        self.trace.append(f"{actor.name}: {call}")
        actor.is_hot = call.startswith((f"get {STATE}", f"write {REFS}", "delete "))
        self._back.release()
        actor.turn.acquire()
        if actor.is_killed:
            raise Killed

    # The storage

    def write(self, key: str, data: bytes) -> None:
        self._writes += 1
        self.objects[key] = data, self._writes, self.now
        if key.startswith(REFS):
            self.heads = [
                (ref, commit, self.now if ref == key and until is None else until)
                for ref, commit, until in self.heads
            ]
            ref = key.removeprefix(REFS)
            found = commits.read_ref(Quiet(self), ref)
            assert found is not None
            self.heads.append((key, found.commit, None))
        self.check()

    def check(self) -> None:
        """Each ref, and each commit that was a ref's newest in the grace period, has all that it means. The
        history of each ref has a first commit, or ends with a collector's note.
        """
        for ref, commit, until in self.heads:
            at: bytes | None = commit if until is None else None
            while at is not None and commit_key(at) in self.objects:
                at = commits.read_commit(Quiet(self), at).parent
            is_whole = at is None or cut_key(at) in self.objects
            assert is_whole, "\n".join([f"the history of {ref} breaks off", *self.trace[-60:]])
            if until is None or until > self.now - self.grace:
                missing = self._meant(commit) - self.objects.keys()
                assert not missing, (
                    f"{ref} at {self.now} (newest until {until}) lacks {missing}\n"
                    + "\n".join(self.trace[-60:])
                )

    def _meant(self, commit: bytes) -> frozenset[str]:
        if commit not in self._whole:
            quiet = Quiet(self)
            root = commits.read_commit(quiet, commit).tree
            tree = Tree(root, lambda digest: quiet.get(page_key(digest)).data)
            keys = {page_key(page) for page in tree.pages()} | {commit_key(commit)}
            keys |= {object_key(row.place.object, packed=row.place.is_packed) for row in tree.rows()}
            self._whole[commit] = frozenset(keys)
        return self._whole[commit]


class MemoryBucket:
    """The storage as an actor sees it. See `Bucket`."""

    url = "memory:"

    def __init__(self, world: World, *, loses_answers: bool = False) -> None:
        self._world = world
        self._loses = loses_answers

    def get(self, key: str) -> Versioned:
        self._world.step(f"get {key}")
        if key not in self._world.objects:
            raise RemoteMissingError(f"there is no {key}")
        return Versioned(*self._world.objects[key])

    def size(self, key: str) -> int | None:
        self._world.step(f"size {key}")
        return len(self._world.objects[key][0]) if key in self._world.objects else None

    def get_range(self, key: str, start: int, end: int) -> bytes:
        return self.get(key).data[start:end]

    def stream(self, key: str) -> Iterator[bytes]:
        yield self.get(key).data

    def put(self, key: str, data: Any) -> None:
        self._world.step(f"put {key}")
        self._world.write(key, bytes(data))

    def upload(self, key: str, path: Path, progress: Callable[[int], object]) -> None:
        self.put(key, path.read_bytes())

    def create(self, key: str, data: bytes) -> bool:
        return self._conditional(key, data, None)

    def replace(self, key: str, data: bytes, version: Any) -> bool:
        return self._conditional(key, data, version)

    def renew(self, key: str, seen: Versioned) -> None:
        self.replace(key, seen.data, seen.version)

    def _conditional(self, key: str, data: bytes, version: Any) -> bool:
        self._world.step(f"write {key}")
        found = self._world.objects.get(key)
        is_won = (found is None) if version is None else (found is not None and found[1] == version)
        if is_won:
            self._world.write(key, data)
        if self._loses and self._world.chance.random() < 0.1:
            raise RemoteUnreachableError("the answer was lost")
        return is_won

    def listing(self, prefix: str) -> Iterator[Listed]:
        self._world.step(f"list {prefix}")
        found = [
            Listed(key, len(data), modified)
            for key, (data, _, modified) in sorted(self._world.objects.items())
            if key.startswith(prefix)
        ]
        yield from found

    def delete(self, keys: Iterable[str]) -> None:
        # One at a time: a storage promises no more.
        for key in keys:
            self._world.step(f"delete {key}")
            self._world.objects.pop(key, None)
            self._world.check()

    def remove_unfinished(self, before: float) -> None:
        """There is nothing."""


class MemoryRemotes(Remotes):
    """The bases of a store, in memory: those on disk would take most of the time."""

    def __init__(self) -> None:
        self._roots: dict[str, bytes] = {}
        self._notes: dict[str, list[PendingBase]] = {}
        self._begun: dict[str, BegunPull] = {}

    def base(self, name: str, ref: str, below: str) -> bytes | None:
        return self._roots.get(ref)

    def set_base(self, name: str, ref: str, below: str, base: bytes) -> None:
        self._roots[ref] = base
        self._notes.pop(ref, None)
        self._begun.pop(ref, None)

    def pending(self, name: str, ref: str, below: str) -> list[PendingBase]:
        return self._notes.get(ref, [])

    def set_pending(self, name: str, ref: str, below: str, pending: Sequence[PendingBase]) -> None:
        self._notes[ref] = list(pending)

    def begun_pull(self, name: str, ref: str, below: str) -> BegunPull | None:
        return self._begun.get(ref)

    def begin_pull(self, name: str, ref: str, below: str, begun: BegunPull) -> None:
        self._begun[ref] = begun

    def note_names(self, name: str, ref: str, below: str, names: Iterable[str], *, came: bool) -> None:
        begun, marks = self._begun[ref], frozenset(map(mark_of, names))
        kind = "came" if came else "coming"
        self._begun[ref] = begun._replace(**{kind: getattr(begun, kind) | marks})


class Quiet(MemoryBucket):
    """The storage for checks, which take no turn."""

    def get(self, key: str) -> Versioned:
        assert key in self._world.objects, f"{key} is missing\n" + "\n".join(self._world.trace[-60:])
        return Versioned(*self._world.objects[key])
