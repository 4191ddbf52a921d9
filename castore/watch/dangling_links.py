"""Finds links that stand for files and lead to nothing, since their mount is gone.

Nothing else reports them. To other tools such a file is missing, so they compute it anew, in silence, on
every run. This module reads the list of links (link_registry.py) and the disk, and changes neither.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from castore import Store
from castore.names import LINKS
from castore.parts import Parts
from castore.records import Entry
from castore.repair.doctor import Diagnosis
from castore.units import format_size
from castore.watch.link_registry import is_led, link_at, mountpoint_of, path_of, target_of
from castore.watch.reports import Event

#: Seconds between two checks whether links still lead somewhere.
_CHECK_SECONDS = 2.0


#: The key under which an entry's metadata has the link that stands for its file.
LINK = "link"


class LinkedMount(NamedTuple):
    """A mount as its links show it, whether it exists or not.

    Attributes:
        mountpoint: where it is, or was.
        prefix: what it shows, or showed.
    """

    mountpoint: str
    prefix: str

    def command(self, store: str | os.PathLike[str]) -> str:
        """The command that mounts it again."""
        shown = [f"--prefix={self.prefix}"] if self.prefix else []
        return shlex.join(["castore", "--store", os.fspath(store), "mount", *shown, self.mountpoint])


class Link(NamedTuple):
    """A link that stands for a file.

    Attributes:
        mount: the mount that it leads into.
        name: of the entry that has the file's bytes.
        path: of the link.
        resolves: whether its target exists.
    """

    mount: LinkedMount
    name: str
    path: str
    resolves: bool


def bound_links(entries: Iterable[Entry]) -> Iterator[Link]:
    """The links that stand for the files of entries; others are passed over."""
    live: set[LinkedMount] = set()
    for entry in entries:
        source = entry.metadata.get("source")
        if not isinstance(source, dict) or "link" not in source:
            continue
        path, link = str(source.get("path")), source["link"]
        if link_at(path) == link:  # else a tool has replaced the link by a file, or somebody has moved it
            mount = LinkedMount(mountpoint_of(link), source.get("prefix", ""))
            resolves = os.path.exists(link) if mount in live else _resolves(link)
            if resolves:
                live.add(mount)
            yield Link(mount, entry.name, path, resolves)


def link_of(entry: Entry) -> str | None:
    """The path of the link that stands for an entry's file, or None if there is no such link."""
    link = target_of(entry)
    if link is None:
        return None
    path = str(entry.metadata["source"].get("path"))
    return path if link_at(path) == link else None


def prefixes_of(store: Store, root: str) -> dict[str, int]:
    """The prefixes of the names that a folder's links stand for, with the number of links of each."""
    found: Counter[str] = Counter()
    for link in bound_links(store.entries_with_key(LINK)):
        below = os.path.relpath(link.path, root)
        if link.path.startswith(f"{root}/") and f"/{link.name}".endswith(f"/{below}"):
            found[link.name.removesuffix(below).rstrip("/")] += 1
    return dict(found)


def _resolves(path: str) -> bool:
    """Whether the path exists and its mount answers. The kernel's dentry cache may answer a lookup alone."""
    try:
        os.statvfs(path)
    except OSError:
        return False
    return True


class LostLinks(NamedTuple):
    """Links of one mount that lead to nothing.

    Attributes:
        mount: the mount that is gone.
        links: the number of links.
        example: the path of one.
    """

    mount: LinkedMount
    links: int
    example: str

    def sentence(self) -> str:
        """The problem, in a sentence."""
        files = (
            f"{self.example} is a link"
            if self.links == 1
            else f"{self.links:,} files, {self.example} first, are links"
        )
        why = (
            f"since the mount at {self.mount.mountpoint} does not show their bytes"
            if self._is_mounted
            else f"since no live mount at {self.mount.mountpoint} shows their bytes"
        )
        return f"{files} to nothing, {why}: other tools take such files for missing, and compute them anew"

    @property
    def _is_mounted(self) -> bool:
        return _resolves(self.mount.mountpoint) and os.path.ismount(self.mount.mountpoint)

    def advice(self, store: str | os.PathLike[str]) -> str:
        """The remedy."""
        if self._is_mounted:
            return "start `castore watch DIR --as PREFIX` anew: it holds the bytes again that are still here"
        return (
            f"`{self.mount.command(store)}` brings them back;"
            " `castore watch DIR --as PREFIX --restore` puts the files in their place"
        )


def group_lost(found: Iterable[Link]) -> list[LostLinks]:
    """The links that lead to nothing, grouped by mount."""
    counts: Counter[LinkedMount] = Counter()
    examples: dict[LinkedMount, str] = {}
    for link in found:
        if not link.resolves:
            counts[link.mount] += 1
            examples.setdefault(link.mount, link.path)
    return [LostLinks(mount, count, examples[mount]) for mount, count in sorted(counts.items())]


def examine(parts: Parts) -> list[Diagnosis]:
    """Report links that lead to nothing: a further check for `castore.repair.doctor.examine`."""
    found = [
        Diagnosis(one.sentence(), False, one.advice(parts.path))
        for one in group_lost(bound_links(parts.index.entries_with_key(LINK)))
    ]
    lost = [held for held in parts.index.own_entries(LINKS) if not is_led(held)]
    if lost:
        size = format_size(sum(held.stored for held in lost))
        found.append(
            Diagnosis(
                f"{size} are kept for links of `castore watch --replace` that are not where they were last"
                f" seen ({len(lost):,}, {path_of(lost[0])!r} first)",
                False,
                "if they are on a disk that is not mounted, mount it; `castore watch DIR --as PREFIX` looks"
                " for renamed links in the folder; if they are gone for good, `castore doctor --forget-links`"
                " lets go of their bytes",
            )
        )
    return found


class LinkMonitor:
    """Reports once when links of a folder cease to lead somewhere, and once when they do again.

    Args:
        store: has the entries of the links.
        prefix: of the folder's names.
        report: called with ``unmounted`` and ``mounted`` events.
    """

    def __init__(self, store: Store, prefix: str, report: Callable[[Event], Any]) -> None:
        self._store, self._prefix, self._report = store, prefix, report
        # One link of each mount, checked every few seconds, and whether it led somewhere at the last full
        # check.
        self._witnesses: dict[LinkedMount, tuple[str, bool]] = {}
        self._reported: set[LinkedMount] = set()
        self._check_at = 0.0

    def check_all(self) -> None:
        """Check all links."""
        self._check_at = time.monotonic() + _CHECK_SECONDS
        found: list[Link] = []
        self._witnesses = {}
        for link in bound_links(self._store.entries_with_key(LINK, self._prefix)):
            known = self._witnesses.get(link.mount)
            if known is None or (known[1] and not link.resolves):
                self._witnesses[link.mount] = link.path, link.resolves
            if not link.resolves:
                found.append(link)
        lost = {one.mount: one for one in group_lost(found)}
        for mount in self._reported - lost.keys():
            self._report(Event("mounted", path=mount.mountpoint, reason="links lead there again"))
        for mount in lost.keys() - self._reported:
            one = lost[mount]
            reason = f"{one.sentence()}; {one.advice(self._store.path)}"
            self._report(Event("unmounted", path=mount.mountpoint, reason=reason))
        self._reported = set(lost)

    def check_if_due(self) -> None:
        """Check one link of each mount, every few seconds, and all links if one has changed."""
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + _CHECK_SECONDS
        if any(_resolves(path) != resolves for path, resolves in self._witnesses.values()):
            self.check_all()

    def take_event(self, event: Event) -> None:
        """Take an event of the watcher: a link that it has made or redirected is one to check."""
        if event.event in ("replaced", "relinked"):
            entry = self._store.entry(event.name, expired=True)
            for one in bound_links([entry] if entry is not None else []):
                self._witnesses.setdefault(one.mount, (event.path, True))
