"""The hashes of a deduplicator, block by block: those of blocks that were hashed before come from the store.

A deduplicator needs all rows to decide which of them stay, but hashes each row alone. Hashing takes most of
the time. A block's result has only the columns that `compute_hash` adds.

Must never be used for a `compute_hash` that changes columns it is given: `NotInBlocksError` has the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter

from castore.adapters.datasets.block_entries import BlockResult, NotInBlocksError, saved_by
from castore.adapters.datasets.block_runner import BlockRun
from castore.adapters.datasets.block_step import BlockCall, BlockStep, parse_features
from castore.adapters.datasets.call_watch import EarlyCalls
from castore.adapters.datasets.cutting import Cut
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.operator_state import OperatorState
from castore.adapters.datasets.private_copies import result_like
from castore.adapters.datasets.row_block import MadeRows, RowForm, made_rows
from castore.adapters.datasets.steps import BATCH_ROWS, RunOptions, Step, hash_rows
from castore.adapters.datasets.tables import table_in_memory, table_mapped
from castore.keys.table_digest import table_digest
from castore.store import Store


class Hashed(NamedTuple):
    """A dataset with its hashes.

    Attributes:
        dataset: the rows and the columns of hashes.
        rows_reused: rows whose hashes were kept.
        seconds_saved: time that those took when they were computed.
    """

    dataset: datasets.Dataset
    rows_reused: int
    seconds_saved: float


def hash_step(step: Step, dataset: datasets.Dataset, operator: str, **options: Any) -> BlockStep:
    """The hashes of a deduplicator as a step of blocks.

    Args:
        step: the deduplicator.
        dataset: its input.
        operator: the fingerprint of the deduplicator, as `compute_hash` sees it.
        options: ``num_proc``, ``on_rows`` and ``title`` of the `BlockStep`.
    """
    form = None if step.is_async() else RowForm.of(dataset)

    def run(call: BlockCall) -> MadeRows:
        return _new_columns(step, call, form)

    return BlockStep(
        dataset,
        run,
        {"kind": "hash", "operator": operator},
        Cut(BATCH_ROWS if step.sees_batches() else None, BATCH_ROWS),
        OperatorState(step.operator.compute_hash, step.name),
        EarlyCalls(),
        keeps_count=True,
        at_once=step.rows_at_once(),
        is_async=step.is_async(),
        **options,
    )


def _new_columns(step: Step, call: BlockCall, form: RowForm | None) -> MadeRows:
    """The columns that a deduplicator adds to a block of that form."""
    given, alone = call.source.features, None if form is None else form.block(call.table, call.file)
    features = None if call.features is None else datasets.Features({**given, **call.features})
    options = RunOptions(
        file=str(call.file), watch=call.watch, fingerprint=call.fingerprint, features=features
    )
    made = call.made(hash_rows(step.operator, call.rows if alone is None else alone, options))
    new = [name for name in made.features if name not in given]
    if not new or made.rows != len(call.table):
        raise NotInBlocksError("its compute_hash adds no column, or has other rows")
    hashed = pa.concat_tables(made.batches())
    columns = call.table.column_names
    if columns != [name for name in hashed.column_names if name in given] or _differ(
        call.table, hashed.select(columns)
    ):
        raise NotInBlocksError("its compute_hash changes columns that it is given")
    table = hashed.select(new)
    return made_rows(table, datasets.Features({name: made.features[name] for name in new}), table)


def _differ(one: pa.Table, other: pa.Table) -> bool:
    return table_digest(one) != table_digest(other)


def compute_hashes(
    store: Store,
    step: BlockStep,
    options: StorageOptions,
    temp_dir: str | os.PathLike[str] | None,
    file: Path,
    fingerprint: str,
) -> Hashed:
    """A deduplicator's input with the hashes, those of new blocks computed now.

    Args:
        store: keeps the hashes.
        step: a `hash_step`.
        options: the storage options of hashes.
        temp_dir: the folder of uncompressed files; by default below the store.
        file: the path for an Arrow file of the result.
        fingerprint: the fingerprint of the result.

    Raises:
        NotInBlocksError: the hashes have to be computed in one pass.
        Exception: an exception of the deduplicator; the hashes of earlier blocks are kept.
    """
    run, dataset = BlockRun(store, step, options, temp_dir), step.dataset
    results = run.run()
    features = datasets.Features({**dataset.features, **parse_features(results[0].features)})
    with pa.OSFile(str(file), "wb") as sink, ArrowWriter(features=features, stream=sink) as writer:
        for table in _joined(store, dataset, results):
            writer.write_table(table)
        writer.finalize(close_stream=False)
    hashed = result_like(dataset, features, fingerprint)
    hashed._data, hashed._indices = table_mapped(str(file)), None
    return Hashed(hashed, *saved_by(results))


def _joined(store: Store, dataset: datasets.Dataset, results: Sequence[BlockResult]) -> Iterator[pa.Table]:
    """The rows of each block, with their hashes."""
    rows, first = dataset.with_format("arrow", columns=dataset.column_names), 0
    for result in results:
        # By digest: nobody finds the results of an operator that remembers rows by their keys.
        blob = store.blob(result.digest)
        data = None if blob is None else store.get_blob(blob)
        if data is None:
            raise NotInBlocksError("gc has taken some of its hashes; make room, or set a larger max_size")
        table, hashes = rows[first : first + result.rows_in], table_in_memory(data).table
        for name in hashes.column_names:
            table = table.append_column(name, hashes.column(name))
        first += result.rows_in
        yield table
