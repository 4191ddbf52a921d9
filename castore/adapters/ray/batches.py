"""`map_batches` of Ray Data with results that are kept, and shared over nodes.

A batch is named by its rows and by the function's fingerprint. So a run that is started again computes no
batch twice, wherever it runs: Ray Data reads the input again, and begins with the first batch again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
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
_ARGUMENTS = ("fn_args", "fn_kwargs", "fn_constructor_args", "fn_constructor_kwargs")


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
        function: of a batch, a generator function of one, or a class whose objects are such functions; it
            gives the same result for the same batch. A class makes its object in an actor, as soon as a batch
            is not kept: give its arguments as ``fn_constructor_args`` and ``fn_constructor_kwargs``.
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
    given = {name: options.pop(name, None) for name in _ARGUMENTS}
    made = partial(function, *(given["fn_constructor_args"] or ()), **(given["fn_constructor_kwargs"] or {}))
    arguments = given["fn_args"] or (), given["fn_kwargs"] or {}
    is_class = isinstance(function, type)
    call = partial(_arguments, *arguments[0], **arguments[1])
    operator = made if is_class else function
    fingerprint = operator_fingerprint(operator)
    if any(arguments):  # beside the function, which may read the docstrings of functions that it gets
        fingerprint = key([fingerprint, operator_fingerprint([operator, call])])
    settings = Place.of(store), fingerprint, batch_format, arguments
    options |= {"batch_size": batch_size, "batch_format": "pyarrow"}
    if is_class:
        return dataset.map_batches(_KeptBatches, fn_constructor_args=(made, *settings), **options)
    kept = _KeptBatches(lambda: function, *settings)

    def find_or_compute(batch: pa.Table) -> pa.Table:  # Ray takes functions and classes, and no objects
        return kept(batch)

    return dataset.map_batches(find_or_compute, **options)


class _KeptBatches:
    """A function of a batch that looks for each result in the node's store first.

    Args:
        make: makes the function that computes, when the first batch is not kept.
        place: of the node's store.
        fingerprint, batch_format: of the function, and of what it takes.
        arguments: of the function besides the batch, and those with names.
    """

    def __init__(
        self,
        make: Callable[[], Callable[..., Any]],
        place: Place,
        fingerprint: str,
        batch_format: str,
        arguments: tuple[Any, dict[str, Any]],
    ) -> None:
        self._make, self._place = make, place
        self._fingerprint, self._batch_format, self._arguments = fingerprint, batch_format, arguments
        self._function: Callable[..., Any] | None = None

    def __call__(self, batch: pa.Table) -> pa.Table:
        name = f"{BATCHES_FOLDER}/{key([self._fingerprint, self._batch_format, _digest(batch)])}"
        table: pa.Table = _open(self._place).get_or_compute(name, lambda: self._compute(batch))
        return table

    def _compute(self, batch: pa.Table) -> pa.Table:
        if self._function is None:
            self._function = self._make()
        positional, named = self._arguments
        given = BlockAccessor.for_block(batch).to_batch_format(self._batch_format)
        result = self._function(given, *positional, **named)
        parts = result if inspect.isgenerator(result) else [result]
        tables = [BlockAccessor.for_block(BlockAccessor.batch_to_block(part)).to_arrow() for part in parts]
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")


def _arguments(*positional: Any, **named: Any) -> None:
    """Stands for a function whose arguments alone are to be hashed."""


@cache
def _open(place: Place) -> Store:
    return place.open()


def _digest(batch: pa.Table) -> str:
    """The digest of a batch's columns, types and rows, wherever its rows lie in memory."""
    sink = pa.BufferOutputStream()
    whole = batch.take(pa.array(range(len(batch)), pa.int64())).combine_chunks()  # a slice has other buffers
    with pa.ipc.new_stream(sink, whole.schema.remove_metadata()) as writer:
        writer.write_table(whole.replace_schema_metadata(None))
    return blake3(sink.getvalue()).hexdigest()
