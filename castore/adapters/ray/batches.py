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
from castore.adapters.ray.nodes import Place, is_same_here
from castore.errors import CacheWarning, InvalidValueError, warn
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
        InvalidValueError: the store has no ``remote``, or the function is async.
        UnhashableError: the function has no stable hash.

    Warns:
        CacheWarning: in a worker whose code of the function is another one: its results are not kept.
    """
    if any(map(_is_async, (function, getattr(function, "__call__", None)))):  # noqa: B004 - a class has one
        raise InvalidValueError(
            f"{function!r} is async, which castore's map_batches does not take; use Ray's"
        )
    given = {name: options.pop(name, None) for name in _ARGUMENTS}
    made = partial(function, *(given["fn_constructor_args"] or ()), **(given["fn_constructor_kwargs"] or {}))
    arguments = given["fn_args"] or (), given["fn_kwargs"] or {}
    is_class = isinstance(function, type)
    call = partial(_arguments, *arguments[0], **arguments[1])
    operator = made if is_class else function
    own = fingerprint = operator_fingerprint(operator)
    if any(arguments):  # beside the function, which may read the docstrings of functions that it gets
        fingerprint = key([fingerprint, operator_fingerprint([operator, call])])
    # Blocks come as they are: a block of pandas would lose some of its types on the way through Arrow.
    options |= {"batch_size": batch_size, "batch_format": None}
    settings = Place.of(store), operator, is_class, own, fingerprint, batch_format, arguments
    if is_class:
        return dataset.map_batches(_KeptBatches, fn_constructor_args=settings, **options)
    kept = _KeptBatches(*settings)

    def find_or_compute(batch: Any) -> pa.Table:  # Ray takes functions and classes, and no objects
        return kept(batch)

    return dataset.map_batches(find_or_compute, **options)


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


class _OtherCodeError(Exception):
    """The function is another one here than where its fingerprint was taken."""


class _KeptBatches:
    """A function of a batch that looks for each result in the node's store first.

    Args:
        place: of the node's store.
        operator: the function; or what makes it, when the first batch is not kept.
        makes: whether the operator makes the function.
        own: the operator's fingerprint where the work was begun. Ray sends functions of modules by their
            names, and a worker may have other files, or have imported them before they were edited.
        fingerprint: of the operator and its arguments.
        batch_format: what the function takes.
        arguments: of the function besides the batch, and those with names.
    """

    def __init__(
        self,
        place: Place,
        operator: Callable[..., Any],
        makes: bool,
        own: str,
        fingerprint: str,
        batch_format: str,
        arguments: tuple[Any, dict[str, Any]],
    ) -> None:
        self._place, self._operator, self._makes, self._own = place, operator, makes, own
        self._fingerprint, self._batch_format, self._arguments = fingerprint, batch_format, arguments
        self._function: Callable[..., Any] | None = None
        self._has_warned = False

    def __call__(self, batch: Any) -> pa.Table:
        name = f"{BATCHES_FOLDER}/{key([self._fingerprint, self._batch_format, self._digest(batch)])}"
        try:
            table: pa.Table = _open(self._place).get_or_compute(name, lambda: self._compute_own(batch))
        except _OtherCodeError:
            return self._compute(batch)
        return table

    def _compute_own(self, batch: Any) -> pa.Table:
        """The result, for keeping.

        Raises:
            _OtherCodeError: the function is another one here.
        """
        if is_same_here(self._operator, self._own):
            return self._compute(batch)
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{_name(self._operator)} is another function in this worker of Ray than where the work was "
                "begun, so its results are not kept; start Ray's workers anew, with the same files",
                CacheWarning,
            )
        raise _OtherCodeError

    def _compute(self, batch: Any) -> pa.Table:
        if self._function is None:
            self._function = self._operator() if self._makes else self._operator
        positional, named = self._arguments
        given = BlockAccessor.for_block(batch).to_batch_format(self._batch_format)
        result = self._function(given, *positional, **named)
        parts = result if inspect.isgenerator(result) else [result]
        tables = [BlockAccessor.for_block(BlockAccessor.batch_to_block(part)).to_arrow() for part in parts]
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})

    def _digest(self, batch: Any) -> str:
        """The digest of a batch's columns, types and rows, wherever its rows lie in memory."""
        if not isinstance(batch, pa.Table):  # a block of pandas
            return operator_fingerprint(batch)
        sink = pa.BufferOutputStream()
        # A slice has other buffers.
        whole = batch.take(pa.array(range(len(batch)), pa.int64())).combine_chunks()
        if self._batch_format == "numpy":  # arrays have no metadata
            whole = whole.replace_schema_metadata(None)
        with pa.ipc.new_stream(sink, whole.schema) as writer:
            writer.write_table(whole)
        return blake3(sink.getvalue()).hexdigest()


def _arguments(*positional: Any, **named: Any) -> None:
    """Stands for a function whose arguments alone are to be hashed."""


@cache
def _open(place: Place) -> Store:
    return place.open()


def _name(operator: Any) -> str:
    function = operator.func if isinstance(operator, partial) else operator
    return str(getattr(function, "__qualname__", type(function).__qualname__))
