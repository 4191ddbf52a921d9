"""The base of a ref: the root of the tree of names on which a store and the ref agreed last (see compare.py).

A push moves the ref first and keeps the base afterwards, and may be killed between the two, or never learn
whether the storage moved the ref. So it notes the next base, with its commit, before it moves the ref. A
later call that finds this commit in the history of the ref counts the base as valid.

A pull names first and keeps the base afterwards, too. So it notes the commit's tree, and the names before and
after each transaction. A later call counts these names as agreed on. Without this, a name that the ref has
changed once more would be a conflict of the store with an interrupted pull.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from castore.errors import CorruptError, RemoteMissingError
from castore.parts import Parts
from castore.remote import commits
from castore.remote.bucket import Bucket
from castore.remote.compare import Difference, agree, compare, open_base
from castore.remote.page_cache import PageCache
from castore.remote.pages import Row
from castore.remote.remotes import BegunPull, PendingBase, Remotes, mark_of
from castore.remote.tree import Tree


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
        self._found: bytes | None = None
        self._settled: bytes | None = None

    def tree(self, bucket: Bucket, newest: bytes | None, parts: Parts, pages: PageCache) -> Tree | None:
        """The base, or None: there is none, or some of its pages are lost. Differences are then conflicts.

        Args:
            bucket: has the history.
            newest: the ref's newest commit; None if there is no such ref.
            parts: of the store.
            pages: of the base.
        """
        self._found, self._settled = self._root(bucket, newest), None
        base = open_base(self._where_they_part(newest, pages), pages)
        begun = self._remotes.begun_pull(*self._where)
        if begun is None or begun.replaces != self._found:
            return base
        with suppress(CorruptError, RemoteMissingError):  # of a commit that was collected
            base = self._with_names_of(begun, base, parts, pages)
            self._settled = base.root
        return base

    def _where_they_part(self, newest: bytes | None, pages: PageCache) -> bytes | None:
        """The root of the base; or of the ref's newest commit, if the ref has gone back to one before.

        Somebody has brought an older version of the ref back, say. Names that came into it since are changes
        of this store then: nobody has removed or changed them.
        """
        if self._found is None or newest is None:
            return self._found
        with suppress(CorruptError, RemoteMissingError):
            if pages.comes_before(newest, self._found):
                return pages.commit(newest).tree
        return self._found

    def _with_names_of(self, begun: BegunPull, base: Tree | None, parts: Parts, pages: PageCache) -> Tree:
        """The base with the names that an interrupted pull has brought."""
        below = self._where[2]
        names = f"{below}/{begun.prefix}" if below and begun.prefix else below or begun.prefix
        ours = parts.index.entries(names, time.time(), damaged=False)
        theirs = Tree(begun.tree, pages.read, pages.expect)
        agreed: list[tuple[str, Row]] = []
        for compared in compare(ours, theirs, None, begun.prefix, below):
            row = compared.theirs
            if row is None:
                continue
            mark = mark_of(row.name)
            # The pull may have been killed within a transaction.
            if mark in begun.came or (mark in begun.coming and compared.difference is Difference.NONE):
                agreed.append((row.name, row))
        return Tree(agree(base, agreed, pages.read, pages.keep), pages.read, pages.expect)

    def _root(self, bucket: Bucket, newest: bytes | None) -> bytes | None:
        """The root, or None if there is no base. A noted base has the names of pulls that had begun."""
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

    def begin_pull(self, tree: bytes, prefix: str, agreed: Sequence[str]) -> None:
        """Note that a pull is about to bring names. Comes before the first of them.

        Args:
            tree: root of the commit's tree.
            prefix: the names are at and below it.
            agreed: names that the store has already as the tree has them, and the base has not.
        """
        if self._settled is not None:  # what an earlier pull has brought stays agreed on
            self._remotes.set_base(*self._where, self._settled)
            self._found, self._settled = self._settled, None
            self._pending = [one._replace(replaces=self._found) for one in self._pending]
            if self._pending:
                self._remotes.set_pending(*self._where, self._pending)
        self._remotes.begin_pull(*self._where, BegunPull(self._found, tree, prefix))
        self.note_names(agreed, came=True)

    def note_names(self, names: Iterable[str], *, came: bool) -> None:
        """Note names, as the tree has them, that the pull has brought or is about to bring."""
        self._remotes.note_names(*self._where, names, came=came)

    def keep(self, root: bytes | None) -> None:
        """Keep the next base: the store and the ref agree on it. None keeps the present one."""
        if root is None:
            return
        self._remotes.set_base(*self._where, root)
