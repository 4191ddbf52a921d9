"""Where a row of a pipeline's result comes from: a row of the input, through each step.

Maps and statistics of one row at a time keep the numbers of rows. A filter, a deduplicator or a selector
hands rows on as they are, so its rows are found among those of its input: within a block, where the step ran
block by block. A batched mapper may make any rows of a batch. The rows of such a mapper are traced by a
column of names or numbers that it hands on; without one, only the rows of the block can be named. Reads kept
results, and runs nothing.

Must never claim what is not known: a row that may be one of several is given as a range, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from castore.adapters.datasets import step_runner
from castore.adapters.datasets.block_entries import BlockResult
from castore.adapters.datasets.block_runner import BlockRun
from castore.adapters.datasets.block_step import BlockStep
from castore.adapters.datasets.lazy_table import LazyTable
from castore.adapters.datasets.source_blocks import SourceBlock, source_blocks
from castore.adapters.datasets.step_plan import PlannedStep
from castore.adapters.datasets.tables import row_batches

RowRange = tuple[int, int]
"""The numbers of the first and the last of some rows, from 0."""


@dataclasses.dataclass(frozen=True)
class SourceRow:
    """The place of a row in the files that a recipe reads.

    Attributes:
        path: the file; None if it is not known.
        row: the number of the row in the file, from 0; None if it is not known.
        line: the number of the line in a file of JSON lines, from 1; None for other files.
        note: the reason why something is not known, or "".
    """

    path: str | None
    row: int | None
    line: int | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class BlameStep:
    """One step on the way of a row.

    Attributes:
        name, kind: as in `StepReport`.
        operator: the operator's fingerprint, 64 hexadecimal digits.
        key: the key of the kept result.
        rows_out: first and last number of the rows behind the step that are meant, from 0: the same number
            twice where one row is known; None where none is.
        rows_in: the same before the step.
        changed: names of columns whose values differ before and behind the step; None where the row is not
            known on both sides.
        seconds: time that the step took for the rows of `rows_timed`; None where it is not known.
        rows_timed: rows of the block that the row was in, or of the whole step.
        when: seconds since the epoch at which the result was kept; None where it is not known.
        note: the reason why something is not known, or "".
    """

    name: str
    kind: str
    operator: str
    key: str
    rows_out: RowRange | None
    rows_in: RowRange | None
    changed: list[str] | None
    seconds: float | None
    rows_timed: int | None
    when: float | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Blame:
    """Where a row of a pipeline's result comes from.

    Attributes:
        row: the number of the row in the result, from 0.
        rows_in: first and last number of the rows of the input that are meant: the same number twice where
            one row is known; None where none is.
        steps: the steps, from the input on.
        source: the row's place in the files of a recipe; None for a dataset that no recipe read.
    """

    row: int
    rows_in: RowRange | None
    steps: list[BlameStep]
    source: SourceRow | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON."""
        return dataclasses.asdict(self)


class RanStep(NamedTuple):
    """A step that has run.

    Attributes:
        planned: the step.
        record: the record that is kept with its result; empty where the result is not kept.
        when: seconds since the epoch at which the result was kept; None where it is not.
        before, after: its input and its result; None where they are not kept.
        blocks: a run of it over its input, and the step of that run, if it runs block by block.
    """

    planned: PlannedStep
    record: dict[str, Any]
    when: float | None
    before: datasets.Dataset | None
    after: datasets.Dataset | None
    blocks: tuple[BlockRun, BlockStep] | None


class _Span(NamedTuple):
    """Rows of a step that ran together: all of them, or those of a block.

    Attributes:
        first_in, rows_in: the number of the first row before the step, and the number of rows.
        first_out, rows_out: the same behind it.
        seconds, when: as in `BlameStep`.
        read_in, read_out: yield the rows before and behind the step as tables.
    """

    first_in: int
    rows_in: int
    first_out: int
    rows_out: int
    seconds: float | None
    when: float | None
    read_in: Callable[[], Iterator[pa.Table]]
    read_out: Callable[[], Iterator[pa.Table]]


def trace(passed: Sequence[RanStep], row: int) -> Blame:
    """Where a row of the last step's result comes from."""
    rows: RowRange | None = (row, row)
    steps: list[BlameStep] = []
    for step in reversed(passed):
        steps.insert(0, _trace_step(step, rows))
        rows = steps[0].rows_in
    return Blame(row, rows, steps)


def _trace_step(step: RanStep, rows: RowRange | None) -> BlameStep:
    planned = step.planned
    found = BlameStep(
        planned.step.name, planned.step.kind, planned.description.fingerprint, planned.key,
        rows, None, None, None, None, step.when,
    )  # fmt: skip
    if rows is None:
        return found
    span = _find_span(step, rows)
    if _keeps_numbers(step):
        found = dataclasses.replace(found, rows_in=rows)
    if span is None:
        lost = "its input, or its result, is not kept any more"
        note = lost if found.rows_in is not None else f"{lost}, so the row before it is not known"
        return dataclasses.replace(found, note=note)
    seconds = span.seconds or None
    found = dataclasses.replace(found, seconds=seconds, rows_timed=span.rows_in, when=span.when)
    block = span.first_in, span.first_in + span.rows_in - 1
    if found.rows_in is None:
        if rows[0] != rows[1] or rows[0] >= span.first_out + span.rows_out:
            last = _find_span(step, (rows[1], rows[1])) or span
            reach = block[0], last.first_in + last.rows_in - 1
            return dataclasses.replace(found, rows_in=reach, note="the rows of the blocks that it may be in")
        if planned.step.kind in ("map", "stats"):
            found = _find_by_column(found, span, rows[0])
        else:
            found = _find_row(found, span, rows[0])
    if found.rows_in is None or found.rows_in[0] != found.rows_in[1] or rows[0] != rows[1]:
        return found
    one = _row_at(span.read_in(), found.rows_in[0] - span.first_in)
    other = _row_at(span.read_out(), rows[0] - span.first_out)
    changed = [name for name in {**one, **other} if repr(one.get(name, span)) != repr(other.get(name, span))]
    return dataclasses.replace(found, changed=changed)


def _keeps_numbers(step: RanStep) -> bool:
    """Whether row number N behind the step is row number N before it."""
    kind, record = step.planned.step.kind, step.record
    if kind not in ("map", "stats") or (kind == "map" and step.planned.step.sees_batches()):
        return False
    return record.get("rows_in") == record.get("rows_out")


def _find_row(found: BlameStep, span: _Span, row: int) -> BlameStep:
    """The step with the row before it, for a step that hands rows on as they are."""
    wanted = _row_at(span.read_out(), row - span.first_out)
    before, behind = (list(_places(read(), wanted)) for read in (span.read_in, span.read_out))
    numbers = [span.first_in + place for place in before]
    if not numbers:
        note = "no row before the step is like it, so the operator has made it from others"
        return dataclasses.replace(found, note=note)
    # Equal rows stay in their order, but where a selector chooses it.
    if len(before) == len(behind) == 1 or (len(before) == len(behind) and found.kind != "select"):
        number = numbers[behind.index(row - span.first_out)]
        return dataclasses.replace(found, rows_in=(number, number))
    note = f"one of {len(numbers):,} equal rows: {', '.join(map(str, numbers[:5]))}"
    note += ", ..." if len(numbers) > 5 else ""
    return dataclasses.replace(found, rows_in=(numbers[0], numbers[-1]), note=note)


def _find_by_column(found: BlameStep, span: _Span, row: int) -> BlameStep:
    """The step with the row before it, for a batched mapper: found by a column of values that all differ.

    Where all values of such a column were there before the step, the mapper hands that column on.
    """
    before, behind = (pa.concat_tables(read()) for read in (span.read_in, span.read_out))
    for name in before.column_names:
        if (
            name not in behind.column_names
            or before.schema.field(name).type != behind.schema.field(name).type
        ):
            continue
        old, new = before.column(name), behind.column(name)
        if not _is_text_or_integer(old.type) or not _all_differ(old) or not _all_differ(new):
            continue
        if pc.all(pc.is_in(new, value_set=old)).as_py():
            number = span.first_in + int(pc.index(old, new[row - span.first_out]).as_py())
            return dataclasses.replace(found, rows_in=(number, number), note=f"told by the column {name!r}")
    note = "a batched operator: any rows of the block may have made it"
    if span.rows_in == span.rows_out:
        note += f"; row {span.first_in + row - span.first_out:,}, if it keeps rows in their places"
    return dataclasses.replace(found, rows_in=(span.first_in, span.first_in + span.rows_in - 1), note=note)


def _all_differ(column: pa.ChunkedArray) -> bool:
    return column.null_count == 0 and bool(pc.count_distinct(column).as_py() == len(column))


def _is_text_or_integer(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind))


# --- rows that ran together ---------------------------------------------------------------------------------


def _find_span(step: RanStep, rows: RowRange) -> _Span | None:
    """The rows that ran together with the first of some rows behind a step; None if they are not kept."""
    before, after = step.before, step.after
    if before is None or after is None:
        return None
    return _find_block(step, rows[0], after) or _Span(
        0,
        len(before),
        0,
        len(after),
        step_runner.work_seconds(step.record),
        step.when,
        lambda: row_batches(before),
        lambda: row_batches(after),
    )


def _find_block(step: RanStep, row: int, after: datasets.Dataset) -> _Span | None:
    """The block that a row behind a step was in; None if not all blocks are known."""
    if step.blocks is None:
        return None
    run, cut = step.blocks
    first_in = first_out = files = 0
    held: _Span | None = None
    for block, result, _, _ in run.find(source_blocks(cut.dataset, cut.rule)):
        if result is None or block is None:
            return None
        if held is None and row < first_out + result.rows:
            read = _reader_of(after, result, files, first_out)
            held = _Span(
                first_in, result.rows_in, first_out, result.rows,
                result.seconds, result.when, partial(_rows_of, block), read,
            )  # fmt: skip
        first_in, first_out = first_in + result.rows_in, first_out + result.rows
        files += bool(result.rows)
    return held if (first_in, first_out) == (len(cut.dataset), len(after)) else None


def _rows_of(block: SourceBlock) -> Iterator[pa.Table]:
    yield block.read()


def _reader_of(
    after: datasets.Dataset, result: BlockResult, file: int, first: int
) -> Callable[[], Iterator[pa.Table]]:
    """A function that yields the rows of a block's result, which is a file of the step's result."""
    table = after._data
    blobs = table.blobs if isinstance(table, LazyTable) else ()
    if len(blobs) > file and blobs[file].digest.hex() == result.digest:
        return lambda: iter([table.read_file(file)])
    return lambda: iter([after.with_format("arrow")[first : first + result.rows]])


def _row_at(tables: Iterator[pa.Table], place: int) -> dict[str, Any]:
    """A row of some tables, by its place in all of them."""
    for table in tables:
        if place < len(table):
            [row] = table.slice(place, 1).to_pylist()
            return dict(row)
        place -= len(table)
    raise IndexError(place)


def _places(tables: Iterator[pa.Table], wanted: dict[str, Any]) -> Iterator[int]:
    """The places of all rows that are equal to a row, in the columns that the row has."""
    first = 0
    names = list(wanted)
    for table in tables:
        alike = _alike(table, wanted)
        for place in alike:
            [row] = table.slice(place, 1).to_pylist()
            if all(name in row and repr(row[name]) == repr(wanted[name]) for name in names):
                yield first + place
        first += len(table)


def _alike(table: pa.Table, wanted: dict[str, Any]) -> list[int]:
    """The places of the rows that may be equal to a row: those with the same texts and integers."""
    mask = None
    for field in table.schema:
        value = wanted.get(field.name)
        kind = field.type
        if value is None or not _is_text_or_integer(kind):
            continue
        same = pc.equal(table.column(field.name), pa.scalar(value, kind))
        mask = same if mask is None else pc.and_kleene(mask, same)
    if mask is None:
        return list(range(len(table)))
    return [int(place) for place in pc.indices_nonzero(pc.fill_null(mask, False)).to_pylist()]
