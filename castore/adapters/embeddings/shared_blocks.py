"""Blocks of items whose embeddings several nodes share over their stores' remote.

A fill goes through its items in blocks. A block that another node has encoded is fetched and added to this
node's tables; one that another node encodes now is left for later; all others are claimed, encoded here and
offered. So nodes that fill at once divide the blocks, and each ends with all rows. The rows travel as an
entry that is removed once they have arrived: the tables have them.

Must never wait while it holds a claim, so that no two nodes wait for each other.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from castore.adapters.embeddings.claims import embedding_locks
from castore.adapters.embeddings.encoder_outputs import Leaf, LeafRows, Schema, dtype_of
from castore.adapters.embeddings.shard_commit import NewRows
from castore.errors import CorruptError, FullError, SerializationError, TooLargeError
from castore.keys.encoder import key
from castore.remote.shared_results import NOTICE_SECONDS, SharedTurn
from castore.store import Store

log = logging.getLogger("castore")

# Most items of a block, with which encoding them takes longer than asking for them; fewest; and the number of
# blocks that a fill has at least, so that ranks and nodes find something to do.
_MOST_ITEMS, _FEWEST_ITEMS, _BLOCKS = 2048, 64, 64
#: The folder of blocks on their way, each below the name of its table.
BLOCKS_FOLDER = ".embeddings/blocks"
# Lifetime of a block's entry, should nobody come to remove it.
_LIFETIME = 86400.0
# Seconds between two polls for blocks that other nodes encode.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0

B = TypeVar("B", bound=Hashable)


class SharedBlocks(Generic[B]):
    """The blocks of one fill.

    Args:
        store: opened with a remote.
        name: the name of a block, which covers all that its rows depend on; see `block_name`.
        add: adds rows, one for each table; returns whether no item of the block lacks any then.
    """

    def __init__(
        self, store: Store, name: Callable[[B], str], add: Callable[[B, list[NewRows]], bool]
    ) -> None:
        self._store = store
        self._name = name
        self._add = add
        self._locks = embedding_locks(store)
        self._ours: dict[B, ExitStack] = {}
        self._turns: dict[B, SharedTurn] = {}

    def rounds(self, blocks: Iterable[B]) -> Iterator[Iterator[B]]:
        """Rounds over the blocks, the last of which leaves none. The caller goes through each round to its
        end, and calls `finish` for each block that it gets.
        """
        pause, warn_at = _SHORTEST_PAUSE, time.monotonic() + NOTICE_SECONDS
        elsewhere: list[B] = []
        yield self._claim_blocks(blocks, elsewhere)
        while elsewhere:
            left, elsewhere = elsewhere, []
            yield self._claim_blocks(left, elsewhere)
            if len(elsewhere) < len(left):
                pause, warn_at = _SHORTEST_PAUSE, time.monotonic() + NOTICE_SECONDS
                continue
            if time.monotonic() > warn_at:
                log.warning("%d blocks are encoded by other nodes; this one waits for them", len(left))
                warn_at = math.inf
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _claim_blocks(self, blocks: Iterable[B], elsewhere: list[B]) -> Iterator[B]:
        for block in blocks:
            is_ours = self._claim(block)
            if is_ours is None:
                elsewhere.append(block)
            elif is_ours:
                yield block

    def _claim(self, block: B) -> bool | None:
        """Whether this process is to encode a block; None if another one does. False: its rows are here."""
        name = self._name(block)
        release = self._locks.claim(name)
        if release is None:
            return None
        with ExitStack() as stack:
            stack.callback(release)
            turn = self._store.share(name, ttl=math.inf)
            assert turn is not None, "the store has a remote"
            stack.enter_context(turn)
            begun = turn.begin()
            while begun == "found":
                if self._take(block, name, turn):
                    return False
                begun = turn.begin()
            if begun == "elsewhere":
                return None
            self._ours[block], self._turns[block] = stack.pop_all(), turn
        return True

    def _take(self, block: B, name: str, turn: SharedTurn) -> bool:
        """Add the rows of a block that came from another node."""
        try:
            tables = [_unpack(table) for table in self._store.load(name)]
        except (
            AttributeError,
            CorruptError,
            LookupError,
            SerializationError,
            TypeError,
            ValueError,
        ) as error:
            log.warning("a block of embeddings of another node is encoded again: %s", error)
            return False
        finally:
            self._remove(name)
        return self._add(block, tables)

    def _remove(self, name: str) -> None:
        entry = self._store.entry(name)
        if entry is not None and self._store.delete_unchanged(entry):
            self._store.remove_blobs([bytes.fromhex(entry.digest)])

    def finish(self, block: B, rows: list[NewRows] | None) -> None:
        """Offer the rows of a block that was claimed here, and release the claim.

        Args:
            block: the block.
            rows: of all its items, one for each table; None if some are not known.
        """
        turn, name = self._turns.pop(block), self._name(block)
        with self._ours.pop(block):
            if rows is None:
                return
            try:
                self._store.save(name, [_pack(table) for table in rows], ttl=_LIFETIME)
            except (FullError, TooLargeError) as error:
                log.warning("a block of embeddings is not shared with other nodes: %s", error)
            else:
                if not turn.offer(keep=False):
                    self._remove(name)

    def close(self) -> None:
        """Release the claims of blocks that were not finished."""
        self._turns.clear()
        while self._ours:
            self._ours.popitem()[1].close()


def _pack(rows: NewRows) -> dict[str, Any]:
    schema = {"structure": rows.schema.structure, "leaves": [leaf._asdict() for leaf in rows.schema.leaves]}
    return {
        "schema": json.dumps(schema),
        "keys": torch.from_numpy(rows.keys.view(np.int64)),
        "leaves": [[part.values, part.lengths] for part in rows.parts],
    }


def _unpack(packed: dict[str, Any]) -> NewRows:
    """The rows that `_pack` packed.

    Raises:
        ValueError, TypeError, LookupError: it is something else.
    """
    described = json.loads(packed["schema"])
    leaves = tuple(Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in described["leaves"])
    schema = Schema(described["structure"], leaves)
    schema.rebuild(leaves)
    keys = packed["keys"]
    if keys.dtype != torch.int64 or keys.ndim != 2 or keys.shape[1] != 2:
        raise ValueError("its keys are no keys")
    parts = [
        _checked(leaf, LeafRows(*part), len(keys))
        for leaf, part in zip(leaves, packed["leaves"], strict=True)
    ]
    return NewRows(keys.numpy().view(np.uint64), schema, parts)


def _checked(leaf: Leaf, part: LeafRows, count: int) -> LeafRows:
    """Rows of a leaf, whose sizes are as the leaf says."""
    if part.values.dtype != dtype_of(leaf.stored) or tuple(part.values.shape[1:]) != leaf.shape:
        raise ValueError(f"rows of {leaf.name} are of another kind")
    lengths = part.lengths
    if (lengths is not None) != leaf.is_ragged:
        raise ValueError(f"{leaf.name} is ragged, or not")
    if lengths is None:
        rows = count
    else:
        if lengths.dtype != torch.int64 or lengths.shape != (count,) or bool((lengths < 0).any()):
            raise ValueError(f"{leaf.name} has no lengths")
        rows = int(lengths.sum())
    if len(part.values) != rows:
        raise ValueError(f"{leaf.name} has {len(part.values)} rows, not {rows}")
    return part


def block_items(total: int | None, batch_size: int) -> int:
    """The number of items of a block, a power of two. All nodes must come to the same one.

    Args:
        total: items of the fill; None if that is not known.
        batch_size: items that are encoded at once.

    >>> block_items(1_000_000, 32), block_items(10_000, 32), block_items(10, 300)
    (2048, 128, 512)
    """
    items = _MOST_ITEMS
    while total is not None and items > _FEWEST_ITEMS and items * _BLOCKS > total:
        items //= 2
    while items < batch_size:
        items *= 2
    return items


def block_name(tables: list[str], *parts: object) -> str:
    """The name of a block of some tables, below that of the first one, by which people find it.

    Args:
        tables: the names of the tables.
        parts: all else that distinguishes the block from others.
    """
    return f"{BLOCKS_FOLDER}/{tables[0]}/{key(['embedding block', tables, *parts])}"
