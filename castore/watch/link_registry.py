"""The registry of links: files that were replaced by links into a mount.

A link leads to its bytes, not to a name that may get others: ``<mountpoint>/.castore/links/<digest>/<mtime in
ns>.<mark of the path>/<file's name>``. So wherever a link is renamed to, and whatever takes its place, it
shows its file. The bytes are *held* by an entry of that very name, which no listing shows. It is pinned (gc
never removes a pinned entry) and never expires; its metadata has the link's path as it was last seen, the
file's permission bits (``mode``) and owner (``uid``, ``gid``), the prefix of the mount, and the watched
folder in which the link was seen (``root``). A held entry goes only when no link leads to it
any more (link_census.py). Each link has a held entry of its own: a link that was copied gets another one.

The entry that is named after the file has the link's target in its metadata under ``source`` (``link``), the
mount's prefix if there is one, and whether the entry was pinned before (``pinned``). It is pinned, too. Both
entries are written before the link is made, and their records are removed after the link is gone: at any
moment every link has its record here.

Several watchers may work on one folder. A watcher that made a link confirms the record afterwards, and a
watcher that removes or overwrites a record first sees that there is no link; both do so under the index's
write lock. So either the second sees the link, or the first makes the record anew.

The mount shows the file's mtime for a held entry, so tools that compare mtimes see no change.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import blake3

from castore import Store
from castore.errors import NotFoundError
from castore.index.transaction import Write
from castore.names import LINKS, is_own_name
from castore.records import Entry, EntrySpec, Mount
from castore.system.mount_table import mounts
from castore.watch.folder import Root, WatchedFolder

_OWN_KEYS = {"link", "prefix", "pinned"}


def target_of(entry: Entry) -> str | None:
    """The target of an entry's link, or None if the entry has no link."""
    source = entry.metadata.get("source")
    return source.get("link") if isinstance(source, dict) else None


class Owner(NamedTuple):
    """The owner of a file, by numbers, and its permission bits."""

    uid: int
    gid: int
    mode: int


def path_of(held: Entry) -> str:
    """Where the link of a held entry was last seen; "" if that is not known."""
    return str(held.metadata.get("path", ""))


def prefix_of(held: Entry) -> str:
    """The prefix of the mount that the link of a held entry led into when it was made."""
    return str(held.metadata.get("prefix", ""))


def owner_of(held: Entry) -> Owner:
    """The owner of the file of a held entry; of numbers -1 if that is not known."""
    found = [one for key in Owner._fields if type(one := held.metadata.get(key)) is int]
    return Owner(*found) if len(found) == len(Owner._fields) else Owner(-1, -1, 0o644)


def inode_of(held: Entry) -> int | None:
    """The number of the file that a link took the place of."""
    inode = held.metadata.get("inode")
    return inode if type(inode) is int else None


def root_of(held: Entry) -> Root | None:
    """The watched folder in which the link of a held entry was last seen; None if that is not known."""
    recorded = held.metadata.get("root")
    if not isinstance(recorded, list) or list(map(type, recorded)) != [str, int, int, str]:
        return None
    return Root(*recorded)


class Binding(NamedTuple):
    """A link that stands, or will stand, for the file of an entry.

    Attributes:
        entry: as it was read; its bytes are those of the file. For a renamed file, its name is the new one.
        source: the file, as `entry_sources.source_of` gives it.
        modified: the file's mtime in ns.
        owner: of the file.
        held: name of the held entry.
        link: the link's target.
        prefix: of the mount that it leads into.
        root: the watched folder.
        inode: number of the file; None if it is a link already.
    """

    entry: Entry
    source: dict[str, Any]
    modified: int
    owner: Owner
    held: str
    link: str
    prefix: str
    root: Root
    inode: int | None = None


def held_name(digest: str, modified: int, path: str) -> str:
    """The name of the held entry of a file.

    Args:
        digest: of its bytes, in hex.
        modified: its mtime in ns.
        path: of the file.

    >>> held_name("ab" * 32, 7, "/data/a.txt").removeprefix(f"{LINKS}/{'ab' * 32}")
    '/7.b54a6208fcb4a381/a.txt'
    """
    mark = blake3.blake3(os.fsencode(path)).hexdigest(8)
    return f"{LINKS}/{digest}/{modified}.{mark}/{os.path.basename(path)}"


def target_in(mount: Mount, held: str) -> str:
    """The target of a link to a held entry. Every mount of the store has it, whatever its prefix."""
    return f"{mount.mountpoint.rstrip('/')}/{held}"


def held_of(link: str) -> str | None:
    """The name of the held entry that a link leads to, or None if no watcher made the link."""
    _, found, rest = link.rpartition(f"/{LINKS}/")
    name = f"{LINKS}/{rest}"
    return name if found and is_own_name(name) else None


def mountpoint_of(link: str) -> str:
    """Where the mount is, or was, that a link leads into.

    >>> mountpoint_of(f"/mnt/{held_name('ab' * 32, 7, '/data/a.txt')}")
    '/mnt'
    """
    return link.rpartition(f"/{LINKS}/")[0] or "/"


def modified_of(held: str) -> int:
    """The mtime in ns of the file that a held entry was made for."""
    return int(held.split("/")[3].partition(".")[0])


def link_at(path: str) -> str | None:
    """The target of the link at a path, or None if there is no link."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def find_held(store: Store, link: str) -> Entry | None:
    """The held entry that a link leads to, or None if a watcher of this store did not make the link.

    If nothing holds the bytes any more and they are still here, the entry is one that would hold them: a
    `Binding` makes it. A link that leads into another store's mount, and there to its bytes, is that store's.

    Raises:
        NotFoundError: the link leads to nothing, and the store does not have its bytes.
    """
    name = held_of(link)
    if name is None:
        return None
    held = held_entry(store, name)
    if held is not None:
        return held
    if _is_of_other_store(store, link) and os.path.exists(link):
        return None
    blob = store.blob(name.split("/")[2])
    if blob is None or not blob.is_here:
        raise NotFoundError(f"the link leads to nothing, and {store.path} does not have its bytes")
    now, digest = time.time(), blob.digest.hex()
    metadata = {"path": "", "prefix": ""}
    return Entry(
        name, digest, blob.size, blob.stored, blob.codec, modified_of(name) / 1e9, None, now, "bytes",
        metadata, True, False,
    )  # fmt: skip


def _is_of_other_store(store: Store, link: str) -> bool:
    """Whether a link leads into a mount of another store."""
    mountpoint = mountpoint_of(link)
    # The table is asked, and not the index: a mount outlives an index that is made anew.
    stores = [mount.store for mount in mounts() if str(mount.mountpoint) == mountpoint]
    return bool(stores) and stores[-1] != os.path.realpath(store.path)


def held_entry(store: Store, name: str) -> Entry | None:
    """The held entry of a name, or None."""
    return store.index.entry(name)


def is_led(held: Entry) -> bool:
    """Whether a held entry's link is where it was last seen."""
    link = link_at(path_of(held))
    return link is not None and held_of(link) == held.name


def all_held(store: Store, below: str) -> Iterator[Entry]:
    """The held entries whose links were last seen below a folder."""
    for held in store.index.own_entries(LINKS):
        if path_of(held).startswith(below.rstrip("/") + "/"):
            yield held


def bind_links(store: Store, bindings: Sequence[Binding]) -> list[Entry | None]:
    """Record links, all in one transaction.

    Returns:
        For each link the entry as it is now, or None if the store does not have its bytes.
    """
    with store.index.write() as txn:
        there = [_bind_link(store, txn, binding) for binding in bindings]
    return [
        store.entry(binding.entry.name, expired=True) if bound else None
        for binding, bound in zip(bindings, there, strict=True)
    ]


def _bind_link(store: Store, txn: Write, binding: Binding) -> bool:
    entry, source, modified, owner, held, link, prefix, root, inode = binding
    before = store.entry(entry.name, expired=True)
    recorded = source | {"link": link} | ({"prefix": prefix} if prefix else {})
    if before is not None and before.pinned and (target_of(before) is None or was_pinned(before)):
        recorded["pinned"] = True
    holding = {"path": source["path"], "prefix": prefix} | owner._asdict() | {"root": root}
    if inode is not None:
        holding["inode"] = inode
    created = modified / 1e9
    return _set_entry(txn, entry._replace(name=held), holding, created, pinned=True) and _set_entry(
        txn, entry, entry.metadata | {"source": recorded}, created, pinned=True
    )


def confirm_link(store: Store, binding: Binding) -> bool:
    """Whether a link that was just made has its records, which are made anew if another watcher removed them.

    Args:
        store: has the entry.
        binding: of `bind_links`.

    Returns:
        False if the store does not have the bytes any more: the link must be taken back.
    """
    with store.index.write() as txn:
        now = store.entry(binding.entry.name, expired=True)
        is_bound = (
            now is not None
            and now.pinned
            and now.digest == binding.entry.digest
            and target_of(now) == binding.link
        )
        return (is_bound and held_entry(store, binding.held) is not None) or _bind_link(store, txn, binding)


def unbind_links(store: Store, entries: Iterable[Entry]) -> None:
    """Remove the records of links that are gone. Entries stay pinned only if the user pinned them.

    The record of a link that is there stays, and so do the held entries: a link may have been renamed.
    """
    with store.index.write() as txn:
        for entry in entries:
            if os.path.islink(entry.metadata["source"]["path"]):
                continue
            before = entry.metadata["source"]
            source = {key: value for key, value in before.items() if key not in _OWN_KEYS}
            _set_entry(
                txn, entry, entry.metadata | {"source": source}, entry.created, pinned=was_pinned(entry)
            )


def hold_at(store: Store, seen: Iterable[tuple[Entry, str]], folder: WatchedFolder) -> None:
    """Hold the bytes of links that were seen, all in one transaction.

    Args:
        store: has the entries. Nothing is done for a link whose bytes it does not have.
        seen: held entries, and where their links are. Nothing is done for a link that is gone by now.
        folder: the watched folder that the links are in.
    """
    with store.index.write() as txn:
        for held, path in seen:
            try:
                root = folder.root_of(path)
            except OSError:
                continue
            metadata = held.metadata | {"path": path, "root": root}
            _set_entry(txn, held, metadata, held.created, pinned=True)


def release(store: Store, suspects: Sequence[Entry], folder: WatchedFolder) -> set[str]:
    """Let go of held entries, unless a link is there (again).

    Args:
        store: has the entries.
        suspects: held entries. One stays to which the record of an entry of another watched folder leads: its
            watcher looks for the link in its turn.
        folder: the folder that was looked through.

    Returns:
        The names of those that need no further look.
    """
    others = (entry for entry in store.entries_with_key("link") if not folder.names(entry.name))
    bound = {held_of(target_of(entry) or "") for entry in others}
    free = [held for held in suspects if held.name not in bound]
    return {held.name for held in suspects} - {held.name for held in free} | _delete(store, free)


def _delete(store: Store, suspects: Sequence[Entry]) -> set[str]:
    """Delete held entries whose links are not where they were last seen; returns the names of these."""
    with store.index.write() as txn:
        return {
            held.name
            for held in suspects
            if not is_led(held) and txn.delete_unchanged(held.name, bytes.fromhex(held.digest), held.metadata)
        }


def forget_lost(store: Store) -> list[Entry]:
    """Let go of all held entries whose links are not where they were last seen; returns these. Entries that
    are named after the files stay, without the pins of links.
    """
    suspects = [held for held in store.index.own_entries(LINKS) if not is_led(held)]
    names = _delete(store, suspects)
    bound = [
        entry
        for entry in (store.entries_with_key("link") if names else ())
        if held_of(target_of(entry) or "") in names
    ]
    unbind_links(store, bound)
    return [held for held in suspects if held.name in names]


class LinkRemover:
    """Lets go of what is held for the links of entries that the user removes.

    Args:
        store: has the entries.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[str, set[str]] | None = None

    def release(self, entry: Entry) -> bool:
        """Let go of what is held for the link of an entry; returns whether it was.

        A link that was seen elsewhere since keeps its bytes, and so does one that stands for another entry,
        too: its folder is watched under several prefixes.
        """
        link = target_of(entry)
        name = None if link is None else held_of(link)
        if link is None or name is None:
            return False
        names = self._others(link)
        names.discard(entry.name)
        if names:
            return False
        with self._store.index.write() as txn:
            held = held_entry(self._store, name)
            if held is None or path_of(held) != entry.metadata["source"].get("path"):
                return False
            return txn.delete_entry(name)

    def _others(self, link: str) -> set[str]:
        if self._names is None:
            self._names = {}
            for entry in self._store.entries_with_key("link"):
                target = target_of(entry)
                if target is not None:
                    self._names.setdefault(target, set()).add(entry.name)
        return self._names.setdefault(link, set())


def unpin_file(store: Store, entry: Entry, path: str) -> None:
    """Take away the pin that was a link's, once a tool has replaced the link by a file.

    The pin of a link that is there stays, and so does one of a link that is about to be made.
    """
    with store.index.write() as txn:
        now = store.entry(entry.name, expired=True)
        if now is not None and target_of(now) is None and not os.path.islink(path):
            txn.set_pinned(entry.name, False, time.time())


def was_pinned(entry: Entry) -> bool:
    """Whether a bound entry was pinned by the user before."""
    return bool(entry.metadata["source"].get("pinned"))


def _set_entry(txn: Write, entry: Entry, metadata: dict[str, Any], created: float, *, pinned: bool) -> bool:
    spec = EntrySpec(
        entry.name, entry.serializer, _text_of(metadata), None if pinned else entry.expires, pinned
    )
    blob = txn.blob(bytes.fromhex(entry.digest))
    if blob is None or not blob.is_here:
        return False
    # Delete the entry first: re-pointing a name would keep its pin, and its mtime if the bytes are the same.
    txn.delete_entry(entry.name)
    txn.set_entry(spec, blob, created, added=False)
    txn.touch(entry.name, time.time())
    return True


def _text_of(metadata: dict[str, Any]) -> str:
    text = json.dumps(metadata, sort_keys=True, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a tool has renamed a link to what is no UTF-8, and its path is recorded
        return json.dumps(metadata, sort_keys=True)
    return text


def copied_links(store: Store, prefix: str, targets: Container[str]) -> Iterator[str]:
    """Paths of links inside a folder whose entries are copies of a file among ``targets``."""
    for entry in store.entries_with_key("through", prefix):
        source = entry.metadata.get("source")
        if isinstance(source, dict) and "through" in source and source.get("path") in targets:
            yield source["through"]


def copy(store: Store, entry: Entry, name: str, source: dict[str, Any]) -> None:
    """Name the bytes of a linked entry once more, for a second link in the folder that leads to the first."""
    with store.index.write() as txn:
        _set_entry(txn, entry._replace(name=name), {"source": source}, entry.created, pinned=False)
