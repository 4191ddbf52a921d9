"""Removes pages of trees that this store hardly needs any more. `castore gc` and the fetcher call it.

Pages of bases stay, since no remote may have them, and so do those of the commits that mounts have shown
last, so that a mount can begin without a network. With such a tree its commit stays. Any other page goes when
it is a day old: whoever needs it fetches it again. Nothing here talks to a remote.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress

from castore import layout
from castore.errors import CorruptError
from castore.parts import Parts
from castore.remote.page_cache import is_commit, read_cached
from castore.remote.pages import decode
from castore.remote.remotes import Remotes

#: Seconds for which any page stays: pushes, pulls and mounts under way may read it again.
KEPT_SECONDS = 86_400.0


def trim(parts: Parts) -> None:
    """Remove them."""
    now = time.time()
    try:
        found = [entry for entry in os.scandir(parts.path / layout.PAGES) if _is_old(entry, now)]
    except FileNotFoundError:
        return
    if not found:
        return
    roots = Remotes(parts.path, parts.settings).roots()
    needed = _reachable(parts, roots)
    trees = {root.hex() for root in roots}
    for entry in found:
        if entry.name not in needed and _tree_of_commit(entry) not in trees:
            with suppress(FileNotFoundError):  # another process was faster
                os.unlink(entry.path)


def _is_old(entry: os.DirEntry[str], now: float) -> bool:
    try:
        return abs(now - entry.stat(follow_symlinks=False).st_mtime) > KEPT_SECONDS
    except FileNotFoundError:
        return False


def _tree_of_commit(entry: os.DirEntry[str]) -> str | None:
    """The tree of a cached commit, in hex digits; None if the file is no commit's."""
    try:
        with open(entry.path, "rb") as file:
            data = file.read(1)
            data += file.read() if is_commit(data) else b""
        return str(json.loads(data)["tree"]) if is_commit(data) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _reachable(parts: Parts, roots: Iterable[bytes]) -> set[str]:
    """The names of all pages of some trees. Reads the inner ones only."""
    left, found = list(roots), set()
    while left:
        digest = left.pop()
        if digest.hex() in found:
            continue
        found.add(digest.hex())
        data = read_cached(parts.path, digest)
        if data is None:
            continue
        with suppress(CorruptError):
            page = decode(data, digest)
            below = [child.page for child in page.children]
            if page.level > 1:
                left += below
            else:
                found.update(child.hex() for child in below)
    return found
