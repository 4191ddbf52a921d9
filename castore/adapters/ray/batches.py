"""`map_batches` of Ray Data with results that are kept, and shared over nodes.

A batch is named by its rows and by the function's fingerprint. So a run that is started again computes no
batch twice, wherever it runs: Ray Data reads the input again, and begins with the first batch again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pyarrow as pa
from blake3 import blake3
from ray.data import Dataset
from ray.data.block import BlockAccessor

from castore.adapters.datasets import operator_fingerprint
from castore.adapters.ray.nodes import Place
from castore.keys.encoder import key
from castore.store import Store

#: The folder of batches' results.
BATCHES_FOLDER = ".ray/batches"


def map_batches(
    dataset: Dataset,
    function: Callable[[Any], Any],
    store: Store,
    *,
    batch_size: int = 1024,
    batch_format: str = "numpy",
    **options: Any,
) -> Dataset:
    """`ray.data.Dataset.map_batches`, with results that are kept in the nodes' stores and shared.

    Args:
        dataset: of Ray Data. Its batches must be the same each time: no shuffle with a new seed before.
        function: of a batch; it gives the same result for the same batch.
        store: of this process, opened with a ``remote``; the nodes' stores are found as `run_on_nodes` finds
            them.
        batch_size: rows of a batch, at most. Another size finds nothing that is kept.
        batch_format: ``"numpy"``, ``"pandas"`` or ``"pyarrow"``: what ``function`` takes. It returns any of
            these.
        options: of Ray's ``map_batches``.

    Raises:
        InvalidValueError: the store has no ``remote``.
        UnhashableError: the function has no stable hash.
    """
    place, fingerprint = Place.of(store), operator_fingerprint(function)

    def find_or_compute(batch: pa.Table) -> pa.Table:
        name = f"{BATCHES_FOLDER}/{key([fingerprint, batch_format, _digest(batch)])}"
        return _open(place).get_or_compute(name, lambda: _compute(function, batch, batch_format))

    return dataset.map_batches(find_or_compute, batch_size=batch_size, batch_format="pyarrow", **options)


@cache
def _open(place: Place) -> Store:
    return place.open()


def _compute(function: Callable[[Any], Any], batch: pa.Table, batch_format: str) -> pa.Table:
    given = BlockAccessor.for_block(batch).to_batch_format(batch_format)
    return BlockAccessor.for_block(BlockAccessor.batch_to_block(function(given))).to_arrow()


def _digest(batch: pa.Table) -> str:
    """The digest of a batch's columns, types and rows, wherever its rows lie in memory."""
    sink = pa.BufferOutputStream()
    whole = batch.take(pa.array(range(len(batch)), pa.int64())).combine_chunks()  # a slice has other buffers
    with pa.ipc.new_stream(sink, whole.schema.remove_metadata()) as writer:
        writer.write_table(whole.replace_schema_metadata(None))
    return blake3(sink.getvalue()).hexdigest()
