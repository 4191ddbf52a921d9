"""Rows of a block that go through a function: as in `datasets` to the function, and in their result."""

from __future__ import annotations

import copy
import datetime
import decimal
import inspect
import json
import pickle
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pyarrow as pa
import pytest
from datasets import Array2D, ClassLabel, Features, Image, List, Value
from datasets.formatting.formatting import LazyBatch, LazyRow

from castore.adapters.datasets import row_block
from castore.adapters.datasets.block_entries import NotInBlocksError, make_stream
from castore.adapters.datasets.row_block import MadeRows, RowForm
from castore.adapters.datasets.tables import row_batches
from tests.helpers import LONG

Row = Any
Function = Callable[..., Any]


def picture(shade: int) -> dict[str, Any]:
    image = PIL.Image.new("L", (3, 2), shade)
    return dict(Image().encode_example(image))


def texts() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"line {n} é" for n in range(7)], "n": range(7)})


def kinds() -> datasets.Dataset:
    features = Features(
        {
            "label": ClassLabel(names=["no", "yes"]),
            "small": Value("int16"),
            "real": Value("float32"),
            "flag": Value("bool"),
            "raw": Value("binary"),
            "when": Value("timestamp[us]"),
            "price": Value("decimal128(9, 2)"),
            "long": Value("large_string"),
            "list": List(Value("int32")),
            "deep": {"a": Value("int64"), "b": List({"c": Value("string")})},
            "grid": Array2D((2, 2), "int8"),
            "nothing": Value("null"),
        }
    )
    rows = [
        {
            "label": n % 2,
            "small": n,
            "real": None if n == 1 else n / 3,
            "flag": n > 2,
            "raw": bytes([n]) * n,
            "when": datetime.datetime(2026, 1, 1 + n),  # noqa: DTZ001
            "price": decimal.Decimal(n) / 4,
            "long": None if n == 0 else "x" * n,
            "list": None if n == 2 else list(range(n)),
            "deep": {"a": n, "b": [{"c": str(n)}] * n},
            "grid": [[n, 1], [2, 3]],
            "nothing": None,
        }
        for n in range(5)
    ]
    return datasets.Dataset.from_list(rows, features=features)


def pictures() -> datasets.Dataset:
    features = Features(
        {"image": Image(), "raw": Image(decode=False), "many": List(Image()), "n": Value("int64")}
    )
    rows = {
        "image": [None if n == 2 else picture(n) for n in range(4)],
        "raw": [picture(n) for n in range(4)],
        "many": [[picture(n)] * n for n in range(4)],
        "n": range(4),
    }
    table = pa.Table.from_pydict(rows, schema=features.arrow_schema)
    return datasets.Dataset(datasets.table.InMemoryTable(table), info=datasets.DatasetInfo(features=features))


def nothing_at_first() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"n": [None, None, 1, 2, None], "text": [None, "a", "b", None, "c"]})


INPUTS = [texts, kinds, pictures, nothing_at_first]


def plain_value(value: Any) -> Any:
    if isinstance(value, PIL.Image.Image):
        return value.mode, value.size, value.tobytes()
    return [plain_value(item) for item in value] if isinstance(value, list) else value


def size_of(value: Any) -> int:
    """The length of a value's text, without addresses in memory."""
    return len(str(plain_value(value)))


def first_column(row: Row) -> str:
    return str(next(iter(row)))


def pops(row: Row) -> Row:
    row.pop(first_column(row))
    return row


def deletes_and_returns_other(row: Row) -> Row:
    del row[first_column(row)]
    return {"new": 1}


def changes_in_place(row: Row) -> Row:
    row["more"] = [1, 2]
    row["more"].append(len(row))
    return {}


def joins(row: Row) -> Row:
    return row | {"new": 1.5}


def joins_behind(row: Row) -> Row:
    return {"new": 1.5} | row


def copies_deeply(row: Row) -> Row:
    other = copy.deepcopy(row)
    other["more"] = [type(other[name]).__name__ for name in other]
    return other


def updates(row: Row) -> Row:
    row |= {"new": "x"}
    return row


def copies(row: Row) -> Row:
    other, third = row.copy(), copy.deepcopy(dict(row))
    other["keys"] = sorted(third)
    return other


def appends_to_own_lists(row: Row) -> Row:
    other = row.copy()
    for name in row:
        if isinstance(row[name], list):
            other[name].append(None)
    return row


def as_table(row: Row) -> Any:
    return pa.table({"length": [len(row)]})


def as_frame(row: Row) -> Any:
    return pd.DataFrame({"length": [len(row)], "name": [first_column(row)]})


def fails_at_third(row: Row, seen: list[int]) -> Row:
    seen.append(1)
    if len(seen) == 3:
        raise LookupError("the third row")
    return {"new": 1}


MAPS: dict[str, Function] = {
    "same": lambda row: row,
    "kind": lambda row: {"kind": type(row).__name__},
    "keys of several kinds": lambda row: {"1": 2, 1: 3},
    "nothing": lambda row: None,
    "empty": lambda row: {},
    "new": lambda row: {"new": len(row)},
    "all": dict,
    "spread": lambda row: {**row, "new": 1},
    "replaced": lambda row: {first_column(row): [1, 2]},
    "replaced by None": lambda row: {first_column(row): None},
    "pops": pops,
    "deletes": deletes_and_returns_other,
    "in place": changes_in_place,
    "joins": joins,
    "joins behind": joins_behind,
    "updates": updates,
    "copies": copies,
    "copies deeply": copies_deeply,
    "appends": appends_to_own_lists,
    "table": as_table,
    "frame": as_frame,
    "user dict": lambda row: UserDict(new=1),
    "array": lambda row: {"array": np.arange(len(row), dtype=np.int8), "one": np.float32(1)},
    "image": lambda row: {"drawn": PIL.Image.new("L", (2, 2), len(row))},
    "label": lambda row: {"n": 1 if "n" in row else None},
    "wrong": lambda row: 3,
    "a bool": lambda row: True,
    "a list": lambda row: [1],
    "a string": lambda row: "text",
}
NUMBERED: dict[str, Function] = {
    "mixed": lambda row, n: {"mixed": [1, "a", {"b": 2}][n % 3]},
    "types that grow": lambda row, n: {"grows": [None, 1, 2.5][min(2, n)]},
    "other keys": lambda row, n: {"ab"[n % 2]: 1},
    "text for numbers": lambda row, n: {"n": 1 if n < 2 else "text"},
    "nothing but at first": lambda row, n: {"new": 1} if n == 0 else None,
}
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few at a time": {"writer_batch_size": 2},
    "no nulls": {"disable_nullable": True},
    "types as they are": {"on_mixed_types": None},
}


def outcome(make: Callable[[], datasets.Dataset | MadeRows], source: datasets.Dataset) -> Any:
    """The result of a map or filter, in a form that can be compared; an error by its type and text."""
    try:
        made = make()
        if isinstance(made, datasets.Dataset):
            unchanged = made._indices is None and made._data.table is source._data.table
            stream = make_stream(row_batches(made), made.features)
            return (
                made.features,
                json.dumps(made.features.to_dict()),
                unchanged,
                len(made),
                stream.to_pybytes(),
            )
        stream = make_stream(made.batches(), made.features)
        text = json.dumps(made.features.to_dict())
        return made.features, text, made.is_unchanged, made.rows, stream.to_pybytes()
    except Exception as error:
        return type(error), str(error)


def block_of(dataset: datasets.Dataset, folder: Path) -> row_block.RowBlock:
    form = RowForm.of(dataset)
    assert form is not None
    block = form.block(dataset.data.table, folder / "rows")
    assert block is not None
    return block


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", [*MAPS, *NUMBERED])
@pytest.mark.parametrize("make", INPUTS)
def test_a_map_gives_what_datasets_gives(
    make: Callable[[], datasets.Dataset], name: str, how: str, tmp_path: Path
) -> None:
    source, arguments = make(), {**HOWS[how], "with_indices": name in NUMBERED}
    function = {**MAPS, **NUMBERED}[name]
    plain = outcome(lambda: source.map(function, **arguments), source)
    assert outcome(lambda: block_of(source, tmp_path).map(function, **arguments), source) == plain


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda row, n: {"at": n}, {"with_indices": True}),
        (lambda text: {"upper": text.upper()}, {"input_columns": "text"}),
        (
            lambda n, text, at: {"both": f"{n}{text}{at}"},
            {"input_columns": ["n", "text"], "with_indices": True},
        ),
        (lambda text: {"upper": text.upper()}, {"input_columns": ["text"], "remove_columns": "text"}),
        (lambda row: {"upper": row["text"].upper()}, {"remove_columns": ["text", "n"]}),
        (lambda row: row, {"remove_columns": ["text"]}),
        (pops, {"remove_columns": ["text"]}),
        (lambda row: {"text": 1}, {"remove_columns": ["text"]}),
        (lambda row: None, {"remove_columns": ["text"]}),
        (lambda row, suffix: {"text": row["text"] + suffix}, {"fn_kwargs": {"suffix": "!"}}),
        (
            lambda row: {"n": row["n"]},
            {"features": Features({"text": Value("string"), "n": Value("float32")})},
        ),
        (lambda row: {"n": row["n"]}, {"features": Features({"n": Value("int8"), "text": Value("string")})}),
        (lambda row: {"more": 1}, {"features": Features({"text": Value("string"), "n": Value("int8")})}),
        (lambda row: {"n": "text"}, {"features": Features({"text": Value("string"), "n": Value("int8")})}),
    ],
)
def test_the_arguments_of_a_map_mean_what_they_mean_to_datasets(
    function: Function, arguments: dict[str, Any], tmp_path: Path
) -> None:
    source = texts()
    plain = outcome(lambda: source.map(function, **arguments), source)
    assert outcome(lambda: block_of(source, tmp_path).map(function, **arguments), source) == plain


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda row: True, {}),
        (lambda row: [], {}),
        (lambda row: sum(map(size_of, row.values())) % 3, {}),
        (lambda row: np.bool_(first_column(row) in row), {}),
        (lambda row: type(row) is not dict, {}),
        (lambda row, n: n % 2, {"with_indices": True}),
        (lambda row, n, least: n > least, {"with_indices": True, "fn_kwargs": {"least": 2}}),
        (lambda row: row["no such column"], {}),
    ],
)
def test_a_filter_gives_what_datasets_gives(
    make: Callable[[], datasets.Dataset], function: Function, arguments: dict[str, Any], tmp_path: Path
) -> None:
    source = make()
    plain = outcome(lambda: source.filter(function, **arguments), source)
    assert outcome(lambda: block_of(source, tmp_path).filter(function, **arguments), source) == plain


def test_a_filter_of_named_columns_gives_what_datasets_gives(tmp_path: Path) -> None:
    source = texts()
    arguments: dict[str, Any] = {"input_columns": ["n", "text"]}
    plain = outcome(lambda: source.filter(lambda n, text: str(n) in text and n, **arguments), source)
    ours = block_of(source, tmp_path)
    assert outcome(lambda: ours.filter(lambda n, text: str(n) in text and n, **arguments), source) == plain


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", ["map", "filter"])
def test_a_function_sees_what_datasets_shows(
    make: Callable[[], datasets.Dataset], kind: str, batched: bool, tmp_path: Path
) -> None:
    source = make()

    def shown(rows: Any) -> list[Any]:
        seen: list[Any] = []

        def look(row: Row) -> Any:
            names = list(row)
            about = [
                isinstance(row, LazyBatch if batched else LazyRow),
                isinstance(row, dict),
                names,
                len(row),
                names[0] in row,
            ]
            values = [(type(row[name]), plain_value(row[name])) for name in names]
            seen.append((about, values, [plain_value(row.get("no such column", 5))]))
            return [] if batched and kind == "filter" else None

        getattr(rows, kind)(look, batched=batched, batch_size=3)
        return seen

    assert shown(block_of(source, tmp_path)) == shown(source)


def lengths(batch: Row) -> Row:
    return {"length": [size_of(value) for value in batch[first_column(batch)]]}


def grows(batch: Row) -> Row:
    return {name: [*batch[name], *batch[name]] for name in list(batch)}


def loses_all(batch: Row) -> Row:
    return {name: [] for name in list(batch)}


def gives_some_only(batch: Row) -> Row:
    """Of a batch of one row nothing."""
    values = batch[first_column(batch)]
    return {"kept": [place for place in range(len(values)) if place]}


def fills_one_buffer(batch: Row, buffer: list[int] = [0] * 9) -> Row:
    count = len(batch[first_column(batch)])
    for place in range(count):
        buffer[place] += 1
    return {"buffer": buffer[:count]}


def pops_column(batch: Row) -> Row:
    batch.pop(first_column(batch))
    return batch


def adds_in_place(batch: Row) -> Row:
    batch["more"] = [1] * len(batch[first_column(batch)])
    return {}


def as_arrays(batch: Row) -> Row:
    count = len(batch[first_column(batch)])
    return {"flat": np.arange(count, dtype=np.int16), "deep": np.ones((count, 2), np.float32)}


BATCH_MAPS: dict[str, Function] = {
    "lengths": lengths,
    "grows": grows,
    "loses all": loses_all,
    "some only": gives_some_only,
    "one buffer": fills_one_buffer,
    "pops": pops_column,
    "in place": adds_in_place,
    "arrays": as_arrays,
    "list of arrays": lambda batch: {"new": [np.ones(2, np.int8)] * len(batch[first_column(batch)])},
    "series": lambda batch: {"new": pd.Series(range(len(batch[first_column(batch)])))},
    "same object": lambda batch: batch,
    "copy": lambda batch: batch.copy(),
    "deep copy": copies_deeply,
    "user dict": lambda batch: UserDict({"new": [1.5] * len(batch[first_column(batch)])}),
    "joins": lambda batch: batch | {"new": [2] * len(batch[first_column(batch)])},
    "nothing": lambda batch: None,
    "empty dict": lambda batch: {},
    "no dict": lambda batch: [1, 2],
    "a text": lambda batch: {"new": "text"},
    "a tuple": lambda batch: {"new": (1,) * len(batch[first_column(batch)])},
    "a number": lambda batch: {"new": 1},
    "an arrow array": lambda batch: {"new": pa.array([1] * len(batch[first_column(batch)]))},
    "other length": lambda batch: {"new": [1] * (len(batch[first_column(batch)]) + 1)},
    "table": lambda batch: pa.table({"new": [1, 2, 3]}),
    "frame": lambda batch: pd.DataFrame({"new": ["a", None]}),
    "no such column": lambda batch: batch["no such column"],
    "one value and none": lambda batch: {"new": [None] * len(batch[first_column(batch)])},
    "keys that are numbers": lambda batch: {1: [1] * len(batch[first_column(batch)])},
}
NUMBERED_BATCH_MAPS: dict[str, Function] = {
    "numbers": lambda batch, numbers: {"at": numbers},
    "types that grow": lambda batch, numbers: {"grows": [None if n < 2 else n / 2 for n in numbers]},
    "other keys": lambda batch, numbers: {"ab"[numbers[0] % 2]: numbers},
    "text for numbers": lambda batch, numbers: {"n": [1 if n < 2 else "text" for n in numbers]},
    "nothing at last": lambda batch, numbers: {"new": numbers} if numbers[0] == 0 else None,
}
BATCH_HOWS: dict[str, dict[str, Any]] = {
    "one": {"batch_size": 1},
    "some": {"batch_size": 2},
    "all": {},
    "some and no more": {"batch_size": 3, "drop_last_batch": True},
    "more than there are": {"batch_size": 9, "drop_last_batch": True},
    "few at a time": {"batch_size": 3, "writer_batch_size": 2},
    "other types": {"batch_size": 2, "try_original_type": False},
    "no nulls": {"batch_size": 2, "disable_nullable": True},
}


@pytest.mark.parametrize("how", BATCH_HOWS)
@pytest.mark.parametrize("name", [*BATCH_MAPS, *NUMBERED_BATCH_MAPS])
@pytest.mark.parametrize("make", INPUTS)
def test_a_map_of_batches_gives_what_datasets_gives(
    make: Callable[[], datasets.Dataset], name: str, how: str, tmp_path: Path
) -> None:
    source = make()
    arguments = {**BATCH_HOWS[how], "batched": True, "with_indices": name in NUMBERED_BATCH_MAPS}
    function = {**BATCH_MAPS, **NUMBERED_BATCH_MAPS}[name]
    plain, ours = (copy.deepcopy(function) for _ in range(2))
    if name == "one buffer":
        plain, ours = (partial(function, buffer=[0] * 9) for _ in range(2))
    expected = outcome(lambda: source.map(plain, **arguments), source)
    found = outcome(lambda: block_of(source, tmp_path).map(ours, **arguments), source)
    if "cannot construct ChunkedArray from empty vector" in str(expected[1]):
        assert found[3] == 0, "`datasets` cannot read its own result of no rows"
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda texts: {"upper": [text.upper() for text in texts]}, {"input_columns": "text"}),
        (
            lambda n, texts, at: {"both": [f"{a}{b}{c}" for a, b, c in zip(n, texts, at, strict=True)]},
            {"input_columns": ["n", "text"], "with_indices": True},
        ),
        (
            lambda texts: {"more": [*texts, *texts]},
            {"input_columns": "text", "remove_columns": ["text", "n"]},
        ),
        (lambda batch: {"upper": batch["text"]}, {"remove_columns": ["text", "n"]}),
        (lambda batch: batch, {"remove_columns": ["text"]}),
        (pops_column, {"remove_columns": ["text"]}),
        (lambda batch: {"text": [1] * len(batch["n"])}, {"remove_columns": ["text"]}),
        (lambda batch: {}, {"remove_columns": ["text", "n"]}),
        (
            lambda batch, suffix: {"text": [text + suffix for text in batch["text"]]},
            {"fn_kwargs": {"suffix": "!"}},
        ),
        (
            lambda batch: {"n": batch["n"]},
            {"features": Features({"text": Value("string"), "n": Value("float32")})},
        ),
        (
            lambda batch: {"n": ["text"]},
            {"features": Features({"text": Value("string"), "n": Value("int8")})},
        ),
    ],
)
def test_the_arguments_of_a_map_of_batches_mean_what_they_mean_to_datasets(
    function: Function, arguments: dict[str, Any], tmp_path: Path
) -> None:
    source, arguments = texts(), {"batched": True, "batch_size": 3, **arguments}
    plain = outcome(lambda: source.map(function, **arguments), source)
    assert outcome(lambda: block_of(source, tmp_path).map(function, **arguments), source) == plain


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda batch: [True] * len(batch[first_column(batch)]), {}),
        (lambda batch: (max(0, size_of(value) - 4) for value in batch[first_column(batch)]), {}),
        (lambda batch: np.arange(len(batch[first_column(batch)])) % 2 == 0, {}),
        (lambda batch: pa.array([False, True, None, True]), {}),
        (lambda batch: pa.chunked_array([[True], [False, True]]), {}),
        (lambda batch: [True, 1], {}),
        (lambda batch: None, {}),
        (lambda batch: [isinstance(batch, LazyBatch)] * len(batch[first_column(batch)]), {}),
        (lambda batch, numbers: [n % 2 for n in numbers], {"with_indices": True}),
        (
            lambda batch, numbers, least: [n > least for n in numbers],
            {"with_indices": True, "fn_kwargs": {"least": 2}},
        ),
        (lambda batch: batch["no such column"], {}),
    ],
)
def test_a_filter_of_batches_gives_what_datasets_gives(
    make: Callable[[], datasets.Dataset],
    size: int,
    function: Function,
    arguments: dict[str, Any],
    tmp_path: Path,
) -> None:
    source, arguments = make(), {"batched": True, "batch_size": size, **arguments}
    plain = outcome(lambda: source.filter(function, **arguments), source)
    assert outcome(lambda: block_of(source, tmp_path).filter(function, **arguments), source) == plain


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kept", [[], [1], [0, 2, 3]])
def test_a_filter_keeps_columns_of_which_arrow_cannot_pick_rows(
    kept: list[int], batched: bool, tmp_path: Path
) -> None:
    table = pa.table({"text": pa.array(["a", None, "longer than twelve bytes", ""], pa.string_view())})
    source = datasets.Dataset(datasets.table.InMemoryTable(table))
    block = block_of(source, tmp_path)
    is_kept: Function = lambda row, n: [place in kept for place in n] if batched else n in kept  # noqa: E731
    arguments: dict[str, Any] = {"with_indices": True, "batched": batched}
    made = block.filter(is_kept, **arguments)
    assert made.features == source.features
    rows = [row for part in made.batches() for row in part.to_pylist()]
    assert rows == source.filter(is_kept, **arguments).to_list()


def test_columns_of_torch_and_polars_are_taken_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, polars = pytest.importorskip("torch"), pytest.importorskip("polars")
    monkeypatch.setattr(row_block.RowBlock, "_let_datasets_refuse", None)
    source = texts()
    functions: list[Function] = [
        lambda batch: {"new": torch.ones(len(batch["n"]), 2)},
        lambda batch: {"new": polars.Series(batch["n"])},
        lambda batch: polars.DataFrame({"new": batch["n"]}),
    ]
    plain = [outcome(partial(source.map, function, batched=True), source) for function in functions]
    block = block_of(source, tmp_path)
    assert [outcome(partial(block.map, function, batched=True), source) for function in functions] == plain
    assert all(rows == 7 for _, _, _, rows, _ in plain)


def test_a_row_can_be_sent_to_another_process_without_its_block(tmp_path: Path) -> None:
    source = datasets.Dataset.from_dict({"text": ["x" * 1000] * 100, "n": range(100)})
    sizes, rows = [], []

    def sends(row: Row) -> None:
        row["n"]
        data = pickle.dumps(row)
        sizes.append(len(data))
        rows.append(pickle.loads(data))

    block_of(source, tmp_path).map(sends)
    assert max(sizes) < 5000
    assert [row["n"] for row in rows] == list(range(100))
    assert rows[3]["text"] == "x" * 1000
    assert rows[3].pa_table.num_rows == 1


def test_a_value_of_which_a_part_is_changed_is_read_anew(tmp_path: Path) -> None:
    source = datasets.Dataset.from_dict({"list": [[1], [2]]})

    def changes(row: Row) -> Row:
        one, other = row.copy(), row.copy()
        one["list"].append(9)
        return {"other": other["list"], "row": row["list"], "one": one["list"]}

    for rows in (source, block_of(source, tmp_path)):
        made = rows.map(changes)
        table = pa.concat_tables(made.batches()) if isinstance(made, MadeRows) else made.data.table
        assert table.to_pylist()[0] == {"list": [1], "other": [1], "row": [1], "one": [1, 9]}


def test_an_error_of_the_function_comes_out_as_it_is(tmp_path: Path) -> None:
    seen: list[int] = []
    with pytest.raises(LookupError, match=r"^the third row$"):
        block_of(texts(), tmp_path).map(fails_at_third, fn_kwargs={"seen": seen})
    assert len(seen) == 3


@pytest.mark.parametrize("first", [True, False])
def test_results_for_some_rows_only_are_left_to_datasets_unless_it_takes_them(
    first: bool, tmp_path: Path
) -> None:
    def some(row: Row) -> Row:
        return {"new": 1} if (row["n"] == 0) == first or row["n"] == 6 else None

    source = texts()
    if first:
        plain = outcome(lambda: source.map(some), source)
        assert plain[3] == 2
        assert outcome(lambda: block_of(source, tmp_path).map(some), source) == plain
    else:
        with pytest.raises(NotInBlocksError, match="returns None for some rows"):
            block_of(source, tmp_path).map(some)


def test_a_function_that_ends_an_iterator_does_not_end_the_loop_of_its_caller(tmp_path: Path) -> None:
    def ends(row: Row) -> Row:
        return next(iter([]))

    for kind in ("map", "filter"):
        for rows in (texts(), block_of(texts(), tmp_path)):
            with pytest.raises(RuntimeError, match="raised StopIteration"):
                getattr(rows, kind)(ends)


def test_a_column_that_is_named_twice_is_one_object(tmp_path: Path) -> None:
    def same(one: Any, other: Any) -> dict[str, Any]:
        one.append(9)
        return {"same": one is other, "length": len(other)}

    source = datasets.Dataset.from_dict({"list": [[1], [2, 3]]})
    arguments: dict[str, Any] = {"input_columns": ["list", "list"]}
    plain = outcome(lambda: source.map(same, **arguments), source)
    assert outcome(lambda: block_of(source, tmp_path).map(same, **arguments), source) == plain


def test_rows_that_a_function_keeps_can_be_read_later_on(tmp_path: Path) -> None:
    source = datasets.Dataset.from_dict({"n": range(50), "list": [[n] for n in range(50)]})
    kept: list[Row] = []

    def keeps(row: Row) -> Row:
        kept.append(row)
        return {"first": kept[0]["n"], "half": kept[len(kept) // 2]["list"], "own": row["list"]}

    plain = outcome(lambda: source.map(keeps), source)
    kept.clear()
    assert outcome(lambda: block_of(source, tmp_path).map(keeps), source) == plain
    assert [row["n"] for row in kept] == list(range(50))


def test_one_row_that_is_no_text_is_the_only_one_that_fails(tmp_path: Path) -> None:
    broken = pa.StringArray.from_buffers(
        4, pa.py_buffer(np.array([0, 1, 2, 3, 4], np.int32)), pa.py_buffer(b"ab\xffd")
    )
    source = datasets.Dataset(datasets.table.InMemoryTable(pa.table({"text": broken})))
    seen: list[Any] = []

    def look(row: Row) -> None:
        try:
            seen.append(row["text"])
        except UnicodeDecodeError:
            seen.append(None)

    block_of(source, tmp_path).map(look)
    assert seen == ["a", "b", None, "d"]


def test_one_time_that_python_cannot_hold_is_the_only_one_that_fails(tmp_path: Path) -> None:
    times = pa.array([0, 1, 2**62, 3], pa.timestamp("s"))
    source = datasets.Dataset(datasets.table.InMemoryTable(pa.table({"at": times})))

    def look(row: Row) -> Row:
        try:
            return {"second": row["at"].second}
        except (OverflowError, ValueError):
            return {"second": -1}

    made = block_of(source, tmp_path).map(look, remove_columns=["at"])
    assert [row["second"] for table in made.batches() for row in table.to_pylist()] == [0, 1, -1, 3]


@pytest.mark.torture
@pytest.mark.skipif(not LONG, reason="takes 4 GB of memory")
def test_rows_that_do_not_fit_into_one_piece_are_left_to_datasets(tmp_path: Path) -> None:
    half = pa.array(["x" * 2**20] * 1030)
    table = pa.table({"text": pa.chunked_array([half, half])})
    form = RowForm.of(datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="large"))
    assert form is not None
    assert form.block(table, tmp_path / "rows") is None


def test_results_that_are_too_large_for_memory_go_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = datasets.Dataset.from_dict({"n": range(100)})
    grows: Function = lambda row: {"text": "x" * row["n"] * 10}  # noqa: E731
    plain = outcome(lambda: source.map(grows), source)
    monkeypatch.setattr(row_block, "_MOST_IN_MEMORY", 5000)
    made = block_of(source, tmp_path).map(grows, writer_batch_size=8)
    assert (tmp_path / "rows").stat().st_size > 40_000
    assert not made.is_in_memory
    (tmp_path / "rows").unlink()
    assert outcome(lambda: made, source) == plain


def test_what_datasets_alone_can_do_is_left_to_it(tmp_path: Path) -> None:
    source = texts()
    assert RowForm.of(source.with_format("numpy")) is None
    assert RowForm.of(source.with_transform(lambda rows: rows)) is None
    form = RowForm.of(source.with_format("python"))
    assert form is not None
    coded = source.data.table.set_column(0, "text", source.data.table["text"].dictionary_encode())
    assert form.block(coded, tmp_path / "rows") is None


def test_rows_that_lie_in_several_pieces_are_the_same(tmp_path: Path) -> None:
    whole = texts().data.table
    pieces = pa.concat_tables([whole.slice(0, 3), whole.slice(3, 1), whole.slice(4)])
    form = RowForm.of(texts())
    assert form is not None

    def streams() -> Iterator[bytes]:
        for table in (whole, pieces):
            block = form.block(table, tmp_path / "rows")
            assert block is not None
            for made in (block.map(lambda row: {"m": row["n"]}), block.filter(lambda row: row["n"] % 2)):
                yield make_stream(made.batches(), made.features).to_pybytes()

    first, second, third, fourth = streams()
    assert (first, second) == (third, fourth)


@pytest.mark.parametrize("kind", ["map", "filter"])
def test_each_argument_of_datasets_is_known(kind: str) -> None:
    """One of a later release is left to `datasets` until somebody has looked at it."""
    parameters = {*inspect.signature(getattr(datasets.Dataset, kind)).parameters}
    assert parameters - {"self", "function", "with_rank"} <= row_block.KNOWN_ARGUMENTS
