"""The base of a ref: the root of the tree of names on which a store and the ref agreed last (see compare.py).

A push moves the ref first and keeps the base afterwards, and may be killed between the two, or never learn
whether the storage moved the ref. So it notes the next base, with its commit, before it moves the ref. A
later call that finds this commit in the history of the ref counts the base as valid.
"""

from __future__ import annotations

from contextlib import suppress

from castore.errors import CorruptError, RemoteMissingError
from castore.remote import commits
from castore.remote.bucket import Bucket
from castore.remote.remotes import PendingBase, Remotes


class Base:
    """The base of one ref, for one push or pull.

    Args:
        remotes: of the store; keeps bases.
        remote: name of the remote.
        ref: the ref.
        below: the folder in the store that the ref's names are in, "" for none.
    """

    def __init__(self, remotes: Remotes, remote: str, ref: str, below: str = "") -> None:
        self._remotes = remotes
        self._where = remote, ref, below
        self._pending: list[PendingBase] = []

    def root(self, bucket: Bucket, newest: bytes | None) -> bytes | None:
        """The root, or None if there is no base.

        Args:
            bucket: has the history.
            newest: the ref's newest commit; None if there is no such ref.
        """
        kept = self._remotes.base(*self._where)
        noted = [one for one in self._remotes.pending(*self._where) if one.replaces == kept]
        # Nobody has moved the ref since, so a request of the killed push may still be under way.
        self._pending = [one for one in noted if one.parent == newest]
        left = [one for one in noted if one.parent != newest]
        if newest is None or not left:
            return kept
        # A lost commit ends what can be known, as an old one does.
        with suppress(CorruptError, RemoteMissingError):
            for digest, commit in commits.history(bucket, newest):
                if found := next((one for one in left if one.commit == digest), None):
                    self._pending.append(found)
                    return found.root
                left = [one for one in left if one.parent != commit.parent]
                if not left:
                    break
        return kept

    def note(self, commit: bytes, parent: bytes | None, root: bytes | None) -> None:
        """Note the base that counts once the ref has a commit. Comes before the ref is moved.

        Args:
            commit: digest of the commit.
            parent: the commit before it, or None.
            root: of the next base; None if it is the present one.
        """
        if root is None:
            return
        kept = self._remotes.base(*self._where)
        self._pending.append(PendingBase(commit, parent, kept, root))
        self._remotes.set_pending(*self._where, self._pending)

    def keep(self, root: bytes | None) -> None:
        """Keep the next base: the store and the ref agree on it. None keeps the present one."""
        if root is None:
            return
        self._remotes.set_base(*self._where, root)
