"""The outcomes of calls to a remote, as plain values. Outcomes cross from one process to another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, NamedTuple

Progress = Callable[[int, int], object]
"""The ``progress`` of a remote's calls: it gets what is done, and what there is in all, in stored bytes."""


Prefetch = Literal["none", "open", "all"]
"""The choices of prefetching for a mount of a remote: nothing, the rest of a file that is read, or all."""


class Warmed(NamedTuple):
    """The outcome of `Remote.warm`.

    Attributes:
        ref: the ref.
        commit: its commit, 64 hex digits.
        names: number of names whose bytes are in the store now.
        stored: their stored bytes.
    """

    ref: str
    commit: str
    names: int
    stored: int


class Pushed(NamedTuple):
    """The outcome of a push.

    Attributes:
        ref: the ref.
        commit: its commit now, 64 hex digits.
        added, changed, removed: names that are new in the ref, that have other bytes or metadata, that are
            gone.
        sent: bytes of objects, pages and the commit that were uploaded.
        objects: number of those.
        gone: names that others have removed from the ref since, and that it was not given back.
    """

    ref: str
    commit: str
    added: int
    changed: int
    removed: int
    sent: int
    objects: int
    gone: int = 0


class RemoteCollected(NamedTuple):
    """The outcome of `Remote.gc`. Sizes are stored bytes.

    Attributes:
        deleted, freed: number of objects that were deleted, and their bytes.
        condemned, size: number of objects that are garbage, and their bytes.
        until: when the next run may delete them, by the storage's clock in seconds since the epoch; None if
            there are none.
    """

    deleted: int
    freed: int
    condemned: int
    size: int
    until: float | None


class BackgroundPull(Future["Pulled"]):
    """A pull that is under way: a future of its outcome. `Remote.begin_pull` makes it.

    The future is for the process that began the pull: in a forked child it never ends.

    Attributes:
        is_first: whether the store had no name at or below the prefix when it began. A name that is there now
            has come with this pull then. In another store the name may still have the bytes of before.
    """

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first


class Pulled(NamedTuple):
    """The outcome of a pull.

    Attributes:
        ref: the ref.
        commit: the commit whose names are in the store now, 64 hex digits.
        added, changed, unchanged: names that are new in the store, that are other bytes now, that were there.
        fetched: stored bytes that came over the network.
        expired: names of the commit that have expired, and did not come.
        removed: names of the store whose place a file or a folder of the commit has taken.
    """

    ref: str
    commit: str
    added: int
    changed: int
    unchanged: int
    fetched: int
    expired: int = 0
    removed: int = 0


class RemoteCommit(NamedTuple):
    """A commit of a ref.

    Attributes:
        commit: 64 hex digits.
        time: when it was made by its writer's clock, seconds since the epoch.
        writer: user and host of its writer.
        note: text of its writer.
        entries: number of names.
        size: sum of their sizes in bytes.
    """

    commit: str
    time: float
    writer: str
    note: str
    entries: int
    size: int


class RemoteChange(NamedTuple):
    """A name that differs between two commits.

    Attributes:
        name: of the entry.
        old, new: its size in bytes before and after, None where there is none.
    """

    name: str
    old: int | None
    new: int | None


class RemoteProblem(NamedTuple):
    """A thing that a ref means and that is missing or damaged.

    Attributes:
        ref: a ref that means it.
        key: of the object in the bucket.
        why: what is wrong.
        names: some of the names that need it.
    """

    ref: str
    key: str
    why: str
    names: tuple[str, ...]


class RemoteResult(NamedTuple):
    """A shared result of a computation.

    Attributes:
        key: of the computation.
        size, stored: its bytes, uncompressed and as they are stored.
        created: when it was computed, seconds since the epoch.
        used: when a node last used it, to a day, by the storage's clock.
        expires: when it stops being good, or None for never.
    """

    key: str
    size: int
    stored: int
    created: float
    used: float
    expires: float | None


class RemoteUsage(NamedTuple):
    """The contents of a remote.

    Attributes:
        refs: number of refs.
        objects, objects_size: objects with the bytes of blobs, and their bytes.
        trees, trees_size: pages of trees and commits, and their bytes.
        results, results_size: records of shared results, and their bytes. Those of large results are objects.
    """

    refs: int
    objects: int
    objects_size: int
    trees: int
    trees_size: int
    results: int
    results_size: int

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.objects_size + self.trees_size + self.results_size


class Checked(NamedTuple):
    """The outcome of a check.

    Attributes:
        refs: all refs, sorted.
        objects: number of objects that refs mean and that are there.
        problems: what is missing or damaged.
        orphans: number of objects that no ref means: those of interrupted pushes, and of commits that were
            removed. None if it cannot be told, because a ref, a commit or a page of a tree is lost.
        orphaned: their bytes.
        history: objects that only older commits need, and that are missing or damaged. Nothing repairs these;
            `Remote.gc` with ``keep_commits`` ends the history before them.
        warnings: sentences on what the storage cannot do, and on what may surprise, such as a clock that is
            wrong. None of them is a problem of what refs mean.
    """

    refs: list[str]
    objects: int
    problems: list[RemoteProblem]
    orphans: int | None
    orphaned: int | None
    history: list[RemoteProblem]
    warnings: tuple[str, ...] = ()
