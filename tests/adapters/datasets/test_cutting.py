"""Cuts follow from the rows alone: not from their chunks, nor, but for a few blocks, from rows elsewhere."""

from __future__ import annotations

import datetime
import decimal
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castore.adapters.datasets import cutting
from castore.adapters.datasets.cutting import Cut, cut
from castore.keys.table_digest import table_digest
from tests.adapters.datasets.small_blocks import BYTES, ROWS, small_blocks

BY_CONTENT = Cut()
#: The fewest bytes of one row, so that `ROWS` rows are a block.
LEAST_ROW = BYTES // ROWS
FIRST_TIME = datetime.datetime(2020, 1, 1)  # noqa: DTZ001


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def _maybe(chance: random.Random, value: Any) -> Any:
    return None if chance.random() < 0.1 else value


def _text(chance: random.Random, most: int = 120) -> str:
    return "".join(chance.choices("abcdeé ", k=chance.randrange(most)))


_VALUES: dict[str, tuple[pa.DataType, Callable[[random.Random], Any]]] = {
    "integers": (pa.int64(), lambda chance: _maybe(chance, chance.randrange(10**9))),
    "small integers": (pa.int8(), lambda chance: _maybe(chance, chance.randrange(100))),
    "floats": (pa.float32(), lambda chance: _maybe(chance, chance.random())),
    "bools": (pa.bool_(), lambda chance: _maybe(chance, chance.random() < 0.5)),
    "decimals": (
        pa.decimal128(20, 2),
        lambda chance: _maybe(chance, decimal.Decimal(chance.randrange(10**9)) / 100),
    ),
    "timestamps": (
        pa.timestamp("us"),
        lambda chance: FIRST_TIME + datetime.timedelta(seconds=chance.randrange(10**8)),
    ),
    "texts": (pa.string(), lambda chance: _maybe(chance, _text(chance))),
    "large texts": (pa.large_string(), lambda chance: _maybe(chance, _text(chance))),
    "bytes": (pa.binary(), lambda chance: _maybe(chance, chance.randbytes(chance.randrange(100)))),
    "bytes of one length": (pa.binary(12), lambda chance: _maybe(chance, chance.randbytes(12))),
    "empty texts": (pa.string(), lambda chance: ""),
    "nothing but nulls": (pa.string(), lambda chance: None),
    "no type": (pa.null(), lambda chance: None),
    "lists": (
        pa.list_(pa.int32()),
        lambda chance: _maybe(
            chance, [_maybe(chance, chance.randrange(9)) for _ in range(chance.randrange(30))]
        ),
    ),
    "large lists of texts": (
        pa.large_list(pa.string()),
        lambda chance: _maybe(chance, [_text(chance, 20) for _ in range(chance.randrange(9))]),
    ),
    "lists of lists": (
        pa.list_(pa.list_(pa.float64())),
        lambda chance: [[chance.random()] * chance.randrange(4) for _ in range(chance.randrange(5))],
    ),
    "lists of one length": (
        pa.list_(pa.int16(), 5),
        lambda chance: _maybe(chance, [chance.randrange(999) for _ in range(5)]),
    ),
    "lists of one length of texts": (
        pa.list_(pa.string(), 3),
        lambda chance: _maybe(chance, [_text(chance, 9) for _ in range(3)]),
    ),
    "structs": (
        pa.struct({"a": pa.int64(), "b": pa.struct({"c": pa.string(), "d": pa.list_(pa.bool_())})}),
        lambda chance: _maybe(
            chance,
            {
                "a": chance.randrange(99),
                "b": _maybe(chance, {"c": _text(chance, 50), "d": [True, None]}),
            },
        ),
    ),
    "lists of structs": (
        pa.list_(pa.struct({"a": pa.string()})),
        lambda chance: [_maybe(chance, {"a": _text(chance, 9)}) for _ in range(chance.randrange(4))],
    ),
    "maps": (
        pa.map_(pa.string(), pa.int64()),
        lambda chance: list({_text(chance, 9): number for number in range(chance.randrange(4))}.items()),
    ),
    "dictionaries": (
        pa.dictionary(pa.int32(), pa.string()),
        lambda chance: _maybe(chance, chance.choice(["", "one", "some", "x" * 100])),
    ),
}  # fmt: skip
# Kinds whose rows, or nearly all, are equal for the test of a row.
_ALIKE = {"bools", "empty texts", "nothing but nulls", "no type", "dictionaries", "small integers"}
KINDS = [*_VALUES, "extensions", "lists of extensions"]


def _column(kind: str, rows: int, chance: random.Random) -> pa.Array:
    if kind == "extensions":
        storage = pa.array(
            [[[chance.random()] * 2] * 3 for _ in range(rows)], pa.list_(pa.list_(pa.float32()))
        )
        return pa.ExtensionArray.from_storage(
            datasets.features.features.Array2DExtensionType((3, 2), "float32"), storage
        )
    if kind == "lists of extensions":
        values = _column("extensions", 2 * rows, chance)
        return pa.ListArray.from_arrays(pa.array(range(0, 2 * rows + 1, 2), pa.int32()), values)
    type_, value = _VALUES[kind]
    return pa.array([value(chance) for _ in range(rows)], type_)


def _table(kind: str, rows: int, chance: random.Random) -> pa.Table:
    return pa.table({kind: _column(kind, rows, chance)})


def _chunked(table: pa.Table, places: list[int], chance: random.Random) -> list[pa.Table]:
    """The same rows as several tables, some with a copy of their own, some of several chunks, some empty."""
    ends = sorted({0, len(table), *(place % (len(table) + 1) for place in places)})
    parts: list[pa.Table] = []
    for begin, end in itertools.pairwise(ends):
        part = table.slice(begin, end - begin)
        way = chance.randrange(4)
        if way == 0:
            part = pa.ipc.open_stream(_stream(part)).read_all()
        elif way == 1 and len(part) > 1:
            part = pa.concat_tables([part.slice(0, len(part) // 2), part.slice(len(part) // 2)])
        elif way == 2:
            parts.append(table.slice(begin, 0))
        parts.append(part)
    return parts


def _stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _sizes(table: pa.Table) -> list[int]:
    return [int(size) for size in cutting._measure(table)[0]]


def _lengths(tables: list[pa.Table], rule: Cut = BY_CONTENT) -> list[int]:
    return [len(block) for block in cut(tables, rule)]


def _digests(table: pa.Table, rule: Cut = BY_CONTENT) -> list[str]:
    return [table_digest(block) for block in cut([table], rule)]


# --- however the rows come ----------------------------------------------------------------------------------


_RULES = [Cut(), Cut(multiple=7), Cut(multiple=1), Cut(first_rows=90)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(
    rule=st.sampled_from(_RULES),
    rows=st.integers(0, 300),
    places=st.lists(st.integers(0, 300), max_size=6),
    seed=st.integers(0, 999),
)
def test_blocks_are_the_rows_however_they_were_chunked(
    kind: str, rule: Cut, rows: int, places: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    whole = _table(kind, rows + 5, chance).slice(5)  # arrays that begin in the middle of their buffers
    chunked = _chunked(whole, places, chance)
    blocks = list(cut(iter(chunked), rule))
    assert [len(block) for block in blocks] == _lengths([whole], rule)
    assert all(len(block) for block in blocks)
    assert sum(map(len, blocks)) == rows
    if blocks:
        assert pa.concat_tables(blocks).to_pylist() == whole.to_pylist()
        assert blocks[0].schema == whole.schema


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_between_a_quarter_of_the_target_and_four_times_as_much(kind: str) -> None:
    whole = _table(kind, 1500, random.Random(kind))
    blocks = list(cut([whole], BY_CONTENT))
    for block in blocks[:-1]:
        sizes = _sizes(block)
        assert sum(sizes) >= BYTES // 4
        assert sum(sizes[:-1]) < 4 * BYTES
    assert sum(_sizes(blocks[-1])[:-1]) < 4 * BYTES


@pytest.mark.parametrize("kind", sorted(set(_VALUES) - _ALIKE))
def test_rows_that_differ_are_cut_where_their_content_says_so(kind: str) -> None:
    whole = _table(kind, 3000, random.Random(kind))
    blocks = list(cut([whole], BY_CONTENT))
    average = sum(_sizes(whole)) / len(blocks)
    assert 0.7 * BYTES < average < 2 * BYTES
    assert len({sum(_sizes(block)) for block in blocks}) > len(blocks) / 4, "always after as many bytes"


@pytest.mark.parametrize("is_first", [False, True])
def test_a_column_whose_values_are_all_equal_hides_no_other(is_first: bool) -> None:
    column = _column("integers", 3000, random.Random(8))
    names = ["a", "b"] if is_first else ["b", "a"]
    table = pa.table({"a": [5] * 3000, "b": column}).select(names)
    assert 20 < 3000 / len(_lengths([table])) < 45


@pytest.mark.parametrize("kind", ["integers", "texts", "lists of one length", "structs", "extensions"])
def test_rows_that_are_all_equal_are_cut_at_four_times_the_target_at_the_latest(kind: str) -> None:
    row = _table(kind, 1, random.Random(2))
    lengths = _lengths([pa.concat_tables([row] * 3000)])
    assert len(lengths) > 1
    assert max(lengths) <= -(-4 * BYTES // _sizes(row)[0])


@pytest.mark.parametrize("kind", ["empty texts", "nothing but nulls", "no type"])
def test_rows_without_a_value_are_cut_no_more_often_than_others_that_are_equal(kind: str) -> None:
    lengths = _lengths([_table(kind, 1000, random.Random(0))])
    assert set(lengths[:-1]) == {4 * ROWS}


def test_a_row_larger_than_a_block_ends_its_block() -> None:
    texts = ["x" * (9 * BYTES) if number % 50 == 25 else "y" for number in range(200)]
    blocks = [block.column(0).to_pylist() for block in cut([pa.table({"text": texts})], BY_CONTENT)]
    assert [
        place
        for block in blocks
        for place, text in enumerate(block, 1)
        if text[0] == "x" and place < len(block)
    ] == []


def test_sizes_are_those_of_the_values() -> None:
    long = "x" * 300
    table = pa.table(
        {
            "text": [long, long * 2, None, ""],
            "numbers": pa.array([[1] * 100, None, [], [1] * 10], pa.list_(pa.int64())),
            "struct": pa.array([{"a": long, "b": 1}] * 4, pa.struct({"a": pa.string(), "b": pa.int16()})),
            "flag": [True, False, None, True],
        }
    )
    assert _sizes(table) == [300 + 800 + 302 + 1, 600 + 302 + 1, 302 + 1, 80 + 302 + 1]


# --- what a change costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6)
@given(rows=st.integers(1, 500), more=st.integers(1, 200), seed=st.integers(0, 999))
def test_rows_that_are_appended_change_the_last_block_at_most(
    kind: str, rows: int, more: int, seed: int
) -> None:
    whole = _table(kind, rows + more, random.Random(seed))
    for rule in (BY_CONTENT, Cut(multiple=8), Cut(first_rows=100)):
        before, after = _lengths([whole.slice(0, rows)], rule), _lengths([whole], rule)
        assert after[: len(before) - 1] == before[:-1]


@pytest.mark.parametrize("kind", sorted({*KINDS} - _ALIKE))
def test_a_row_that_is_changed_inserted_or_deleted_changes_few_blocks(kind: str) -> None:
    chance = random.Random(kind)
    whole = _table(kind, 1200, chance)
    extra = _table(kind, 60, chance)
    before, ends = _digests(whole), np.cumsum(_lengths([whole]))
    changed = []
    for number in range(60):
        place = chance.randrange(len(whole))
        head, tail = whole.slice(0, place), whole.slice(place + number % 2)
        row = [extra.slice(number, 1)] if number % 3 else []
        after = _digests(pa.concat_tables([head, *row, tail]))
        changed.append(len(set(after) - set(before)))
        same = int(np.searchsorted(ends, place, side="right"))  # blocks before that of the row
        assert after[:same] == before[:same]
    assert max(changed) <= 12
    assert sum(changed) / len(changed) < 2.5


def test_a_shuffle_of_blocks_costs_the_seams_alone() -> None:
    whole = _table("texts", 4000, random.Random(3))
    halves = [whole.slice(2000), whole.slice(0, 2000)]
    before, after = _digests(whole), _digests(pa.concat_tables(halves))
    assert len(set(after) - set(before)) <= 6


# --- by position --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 3, 32, 100, 10_000])
@pytest.mark.parametrize("kind", ["integers", "texts", "bools"])
def test_by_position_blocks_end_after_whole_batches(kind: str, multiple: int) -> None:
    whole = _table(kind, 1111, random.Random(multiple))
    blocks = list(
        cut(
            whole.to_batches(100) and [pa.Table.from_batches([b]) for b in whole.to_batches(100)],
            Cut(multiple),
        )
    )
    assert all(len(block) % multiple == 0 for block in blocks[:-1])
    assert all(sum(_sizes(block)) >= BYTES for block in blocks[:-1])
    if multiple < 100:
        assert len(blocks) > 4
        assert max(sum(_sizes(block)[: -2 * multiple]) for block in blocks) < BYTES


def test_by_position_a_change_that_keeps_the_sizes_costs_its_block() -> None:
    numbers = list(range(2000))
    before = _digests(pa.table({"n": numbers}), Cut(multiple=8))
    numbers[777] = -1
    after = _digests(pa.table({"n": numbers}), Cut(multiple=8))
    assert len(after) == len(before)
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


@pytest.mark.parametrize("multiple", [None, 8])
@settings(max_examples=15)
@given(
    first_rows=st.integers(0, 700), rows=st.integers(1, 600), places=st.lists(st.integers(0, 600), max_size=4)
)
def test_the_first_block_has_as_many_rows_as_it_must(
    multiple: int | None, first_rows: int, rows: int, places: list[int]
) -> None:
    chance = random.Random(first_rows)
    whole = _table("texts", rows, chance)
    first, *rest = _lengths(_chunked(whole, places, chance), Cut(multiple, first_rows))
    assert first >= min(first_rows, rows)
    free = _lengths([whole], Cut(multiple))
    if free[0] >= first_rows:
        assert [first, *rest] == free


def test_few_rows_are_small_and_many_or_large_ones_are_not() -> None:
    assert cutting.is_small(ROWS // 4, 10)
    assert not cutting.is_small(ROWS // 4 + 1, 10)
    assert not cutting.is_small(1, BYTES + 1)
