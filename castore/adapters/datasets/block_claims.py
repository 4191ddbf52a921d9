"""Which run makes a block: finds results of blocks, and claims those that nobody has made or makes.

A claim is a lock on this machine: it ends with its process, and then the block is free again. Over a store's
``remote`` the same holds for all nodes. Knows neither a step nor its rows: a block is known by the key of its
result here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from castore.adapters.datasets.block_entries import BlockResult, find_result, name_of_result
from castore.adapters.datasets.mapped_files import store_locks
from castore.store import Store

if TYPE_CHECKING:
    from castore import SharedTurn


class Claim:
    """A claim of a block, among the runs of this machine, and of all nodes that share results.

    Args:
        release: ends the claim here.

    Attributes:
        turn: has the claim for other nodes; None if results are not shared.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self.turn: SharedTurn | None = None

    def end(self, *, is_kept: bool) -> None:
        """Let other runs go on, with the result if it is kept."""
        try:
            if self.turn is not None and is_kept:
                self.turn.offer()
        finally:
            if self.turn is not None:
                self.turn.end()
            self._release()


class BlockClaims:
    """The claims of one run of a step.

    Args:
        store: keeps the results.
        fresh: claim every block, also those whose results are kept, but for `made`.
    """

    def __init__(self, store: Store, *, fresh: bool) -> None:
        self._store = store
        self._fresh = fresh
        #: The keys of results that the run has made.
        self.made: set[str] = set()
        # Keys of blocks that a moment ago no other node shared.
        self._not_shared: set[str] = set()

    @property
    def are_shared(self) -> bool:
        """Whether other nodes may have results, or claims."""
        return self._store.is_shared and not self._fresh

    def fetch(self, key: str) -> None:
        """Have the result of a block here, if another node shares it."""
        if find_result(self._store, key) is None:
            turn = self._store.share(name_of_result(key), ttl=math.inf)
            if turn is not None and not turn.look():
                self._not_shared.add(key)

    def find_or_fetch(self, key: str) -> BlockResult | None:
        """The result of a block, if it is here, or another node shares it."""
        if self._store.is_shared:
            self.fetch(key)
            self._not_shared.discard(key)
        return find_result(self._store, key)

    def find_or_claim(self, key: str) -> BlockResult | Claim | None:
        """The result of a block; or a claim of it; None if another run, or node, has claimed it."""
        found = None if self._fresh and key not in self.made else find_result(self._store, key)
        if found is not None:
            return found
        if self._fresh:
            return Claim(lambda: None)
        release = store_locks(self._store).claim(name_of_result(key))
        return None if release is None else self._claim_over_nodes(key, release)

    def _claim_over_nodes(self, key: str, release: Callable[[], None]) -> BlockResult | Claim | None:
        """The result of a block that is claimed here, or a claim over all nodes; None if another node has
        claimed it.
        """
        claim = Claim(release)
        try:
            found = find_result(self._store, key)  # it may have been kept a moment ago
            begun = "ours"
            if found is None:
                claim.turn = self._store.share(name_of_result(key), ttl=math.inf)
            if claim.turn is not None:
                is_known_missing = key in self._not_shared
                self._not_shared.discard(key)
                begun = claim.turn.begin(has_looked=is_known_missing)
            if begun == "found" and claim.turn is not None:
                found = find_result(self._store, key)
                claim.turn.decline()  # evicted at once, it is no worse for other nodes
        except BaseException:
            claim.end(is_kept=False)
            raise
        if found is None and begun != "elsewhere":
            return claim
        claim.end(is_kept=False)
        return found

    def wait_for(self, key: str) -> BlockResult | None:
        """The result of a block that another run has claimed; None if that run ends without it."""
        with store_locks(self._store).hold(name_of_result(key)):
            found = find_result(self._store, key)
            turn = None if found is not None else self._store.share(name_of_result(key), ttl=math.inf)
            if turn is not None:
                with turn:
                    found = find_result(self._store, key) if turn.bring() else None
            return found
