"""The registry of links: entries whose file was replaced by a link into a mount.

An entry whose file has become a link is the only copy of its bytes. So the entry is pinned (gc never removes
a pinned entry) and never expires. The entry's metadata has under ``source`` the link's target (``link``), the
file's permission bits (``mode``), whether the entry was pinned before (``pinned``), and the target before the
last change of the link (``was``). The metadata is written before the link is made and removed after the link
is gone: at any moment every link has its record here. Of a link that is missing, the target and the mode are
kept: the link may have been renamed, and turn up under its new name later.

Several watchers may work on one folder. A watcher that made a link confirms the record afterwards, and a
watcher that removes or overwrites a record first sees that there is no link; both do so under the index's
write lock. So either the second sees the link, or the first makes the record anew.

The mount shows the file's mtime for the entry, so tools that compare mtimes see no change.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from castore import Store
from castore.index.transaction import Write
from castore.records import Entry, EntrySpec

_OWN_KEYS = {"link", "was", "mode", "pinned"}


def target_of(entry: Entry) -> str | None:
    """The target of an entry's link, or None if the entry has no link."""
    source = entry.metadata.get("source")
    return source.get("link") if isinstance(source, dict) else None


class Binding(NamedTuple):
    """A link that stands, or will stand, for the file of an entry.

    Attributes:
        entry: as it was read; its bytes are those of the file. For a renamed file, its name is the new one.
        source: the file, as `entry_sources.source_of` gives it.
        link: the link's target.
        mode: permission bits of the file.
        was: the link's target until it is redirected.
    """

    entry: Entry
    source: dict[str, Any]
    link: str
    mode: int
    former_target: str | None = None


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
    entry, source, link, mode, former_target = binding
    before = store.entry(entry.name, expired=True)
    recorded = source | {"link": link, "mode": mode}
    if before is not None and before.pinned and (target_of(before) is None or was_pinned(before)):
        recorded["pinned"] = True
    if former_target is not None:
        recorded["was"] = former_target
    modified = source["mtime_ns"] / 1e9 if source["mtime_ns"] is not None else time.time()
    return _set_entry(txn, entry, entry.metadata | {"source": recorded}, modified, pinned=True)


def confirm_link(store: Store, entry: Entry) -> bool:
    """Whether a link that was just made has its record, which is made anew if another watcher removed it.

    Args:
        store: has the entry.
        entry: from `bind_links`.

    Returns:
        False if the store does not have the bytes any more: the link must be taken back.
    """
    with store.index.write() as txn:
        now = store.entry(entry.name, expired=True)
        if (
            now is not None
            and now.pinned
            and now.digest == entry.digest
            and target_of(now) == target_of(entry)
        ):
            return True
        return _set_entry(txn, entry, entry.metadata, entry.created, pinned=True)


def unbind_links(store: Store, entries: Iterable[Entry], *, missing: bool = False) -> None:
    """Remove the records of links that are gone. Entries stay pinned only if the user pinned them.

    The record of a link that is there stays.

    Args:
        missing: nothing is in the links' places: `find_bound` finds them again under other names.
    """
    with store.index.write() as txn:
        for entry in entries:
            if os.path.islink(entry.metadata["source"]["path"]):
                continue
            before = entry.metadata["source"]
            source = {key: value for key, value in before.items() if key not in _OWN_KEYS}
            if missing:
                source |= {"was": before["link"], "mode": before["mode"]}
            _set_entry(
                txn, entry, entry.metadata | {"source": source}, entry.created, pinned=was_pinned(entry)
            )


def unpin_file(store: Store, entry: Entry, path: str) -> None:
    """Take away the pin that was a link's, once a tool has replaced the link by a file.

    The pin of a link that is there stays, and so does one of a link that is about to be made.
    """
    with store.index.write() as txn:
        now = store.entry(entry.name, expired=True)
        if now is not None and target_of(now) is None and not os.path.islink(path):
            txn.set_pinned(entry.name, False)


def was_pinned(entry: Entry) -> bool:
    """Whether a bound entry was pinned by the user before."""
    return bool(entry.metadata["source"].get("pinned"))


def _set_entry(txn: Write, entry: Entry, metadata: dict[str, Any], created: float, *, pinned: bool) -> bool:
    text = json.dumps(metadata, sort_keys=True, ensure_ascii=False)
    spec = EntrySpec(entry.name, entry.serializer, text, None if pinned else entry.expires, pinned)
    blob = txn.blob(bytes.fromhex(entry.digest))
    if blob is None or not blob.is_here:
        return False
    # Delete the entry first: re-pointing a name would keep its pin, and its mtime if the bytes are the same.
    txn.delete_entry(entry.name)
    txn.set_entry(spec, blob, created, added=False)
    txn.touch(entry.name, time.time())
    return True


def find_bound(store: Store, prefix: str, name: str, link: str) -> Entry | None:
    """The entry that a link stands for, or None if a watcher did not make the link.

    Args:
        store: has the entries.
        prefix: of the folder's names.
        name: the name of the link's path. It is the entry's, unless the link was renamed or copied.
        link: the link's target.
    """
    # A link leads to <mountpoint>/<the entry's name, or the end of it>, and that ends with the path below the
    # folder.
    parts = link.split("/")
    endings = ("/".join(parts[start:]) for start in range(1, len(parts)))
    names = [name] + [f"{prefix}/{ending}" if prefix else ending for ending in endings if ending]
    for one in names:
        entry = store.entry(one, expired=True)
        source = None if entry is None else entry.metadata.get("source")
        if isinstance(source, dict) and link in (source.get("link"), source.get("was")):
            return entry
    return None


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
