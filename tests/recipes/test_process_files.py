"""Input and output of recipes: every kind of file, found, identified, read lazily, and written whole or not
at all.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import errno
import gzip
import json
import os
import pickle
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from castore import Store
from castore.adapters.datasets import background
from castore.adapters.datasets.lazy_dataset import LazyDataset
from castore.adapters.datasets.private_copies import private_copy
from castore.errors import CacheWarning, CastoreError, FullError, InvalidValueError, NotFoundError
from castore.recipes import export, runner, sources
from castore.recipes.recipe import Recipe
from castore.recipes.runner import open_source, process
from tests.helpers import flip, payload

ROWS: list[dict[str, Any]] = [{"text": "größe\n2", "n": 1}, {"text": "", "n": None}, {"text": "c", "n": 3}]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_folder(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": write_jsonl,
    "a.ndjson": write_jsonl,
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode())
    ),
    "a.parquet": lambda path: datasets.Dataset.from_list(ROWS).to_parquet(path),
    "a.csv": lambda path: path.write_text('text,n\n"größe\n2",1\n"",\nc,3\n'),
    "a.tsv": lambda path: path.write_text('text\tn\n"größe\n2"\t1\n""\t\nc\t3\n'),
    "saved": write_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_is_read(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    dataset = sources.read(sources.find(tmp_path / name), tmp_path / "work")
    empty = None if name.endswith(("csv", "tsv")) else ""
    assert [row["text"] for row in dataset.to_list()] == ["größe\n2", empty, "c"]
    assert [row["n"] for row in dataset.to_list()] == [1, None, 3]


OTHERS: list[dict[str, Any]] = [{"text": "other", "n": 0}]


def decoy(path: Path) -> None:
    """A file of the same kind with other rows, or a folder."""
    path.parent.mkdir(exist_ok=True)
    rows = datasets.Dataset.from_list(OTHERS)
    if path.suffix == "":
        rows.save_to_disk(path)
    elif path.suffix == ".parquet":
        rows.to_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        rows.to_csv(path, sep="," if path.suffix == ".csv" else "\t", index=False)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(json.dumps(OTHERS[0]).encode()))
    else:
        path.write_text(json.dumps(OTHERS if path.suffix == ".json" else OTHERS[0]) + "\n")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        # Each kind of file in one of the folders, in turn; `make torture` has all of both.
        pytest.param(name, folder, marks=[pytest.mark.matrix] * (number % 3 != at))
        for number, name in enumerate(WRITERS)
        for at, folder in enumerate(["run[2]", "run?", "run*"])
    ],
)
def test_a_path_that_exists_is_no_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    (tmp_path / folder).mkdir()
    named = name.replace("a", "a[1]", 1)
    WRITERS[name](tmp_path / folder / named)
    decoy(tmp_path / "run2" / named)
    decoy(tmp_path / folder / name.replace("a", "a1", 1))
    monkeypatch.chdir(tmp_path / folder)
    for path in (named, tmp_path / folder / named, f"./{named}"):
        dataset = sources.read(sources.find(path), f"work-{folder}")
        assert dataset["n"][:] == [1, None, 3], path
    for path in (named, str(tmp_path / folder / named)):
        with Store("store") as store:
            recipe = Recipe("", "out.jsonl", [], dataset={"configs": [{"type": "local", "path": path}]})
            assert process(recipe, store=store).rows_out == 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
def test_only_stars_are_patterns_and_not_those_of_folders_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for folder in ("run[2]/deep", "run2", "ru*", "rub"):
        (tmp_path / folder).mkdir(parents=True)
    for file in (f"run[2]/{name}", f"run[2]/deep/{name}", f"run2/{name}", f"ru*/{name}", f"rub/{name}"):
        (tmp_path / file).write_text("x\n")
    monkeypatch.chdir(tmp_path)
    ending = Path(name).suffix
    found = {
        pattern: sources.find(pattern).files
        for pattern in (f"run[2]/*{ending}", f"run[2]/**/*{ending}", f"ru*/*{ending}", f"r*[2]/{name}")
    }
    assert found == {
        f"run[2]/*{ending}": (f"run[2]/{name}",),
        f"run[2]/**/*{ending}": (f"run[2]/{name}", f"run[2]/deep/{name}"),
        f"ru*/*{ending}": (f"ru*/{name}",),
        f"r*[2]/{name}": (f"run[2]/{name}",),
    }
    for nothing in (f"run?/{name}", f"run[23]/{name}"):
        with pytest.raises(NotFoundError, match="there is no data at dataset_path"):
            sources.find(nothing)


@pytest.mark.parametrize("name", ["a::b.jsonl", "x::y/a.jsonl", "x::saved"])
def test_a_path_with_two_colons_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    kind = "saved" if name.endswith("saved") else "a.jsonl"
    WRITERS[kind](tmp_path / kind)
    (tmp_path / kind).rename(tmp_path / name)
    with pytest.raises(InvalidValueError, match="cannot be read, since it contains '::'; rename it"):
        sources.find(tmp_path / name)


DATED: dict[str, Any] = {
    "text": "2024-01-02",
    "zone": "2024-01-02T03:04:05+02:00",
    "deep": {"a": "2024-01-02 03:04:05", "l": ["2024-01-02"], "s": [{"x": "2024-01-02T00:00:00Z", "i": 1}]},
    "date": None,
    "i": 7,
    "f": 0.5,
    "b": True,
    "": "2024-01-02T03:04:05.123456789Z",
}


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_strings_that_look_like_dates_stay_strings(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines_of([DATED] * 3))
    (tmp_path / "b.json").write_text(json.dumps([DATED] * 3, indent=2))
    for name in ("a.jsonl", "b.json"):
        dataset = sources.read(sources.find(tmp_path / name), tmp_path / "work")
        assert dataset.to_list() == [DATED] * 3
    recipe = Recipe(str(tmp_path / "a.jsonl"), str(tmp_path / "out.jsonl"), [lambda sample: sample])
    with Store(tmp_path / "store") as store:
        process(recipe, store=store)
    assert (tmp_path / "out.jsonl").read_text() == lines_of([DATED] * 3)


EXACT: list[dict[str, Any]] = [
    {"id": 9007199254740993, "loss": 1e-12, "zip": "02134"},
    {"id": None, "loss": 0.12345678901234566, "zip": 5},
    {"id": -1, "loss": 1.7976931348623157e308, "zip": "null"},
    {"id": 2**63 - 1, "loss": 5e-324, "zip": None},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_numbers_and_strings_are_read_as_they_are_written(tmp_path: Path, name: str) -> None:
    # Plain `datasets` reads an array's 1e-12 as 0.0, and "02134" beside numbers as 2134.
    text = json.dumps(EXACT) if name == "a.json" else lines_of(EXACT)
    opener: Callable[..., Any] = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt") as file:
        file.write(text)
    assert sources.read(sources.find(tmp_path / name), tmp_path / "work").to_list() == EXACT
    recipe = Recipe(str(tmp_path / name), str(tmp_path / "out.jsonl"), [lambda sample: sample])
    with Store(tmp_path / "store") as store:
        process(recipe, store=store)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == EXACT


@pytest.mark.parametrize(
    ("rows", "ending"),
    [
        pytest.param(rows, ending, marks=[pytest.mark.matrix] * (rows == 1 or ending == "json"))
        for rows in (1, 3)
        for ending in ("jsonl", "json")
    ],
)
@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        ({"n": 5}, {"n": "02134"}, "field 'n' has other values than int64"),
        ({"n": 0.5}, {"n": "7"}, "field 'n' has other values than double"),
        ({"n": True}, {"n": "true"}, "field 'n' has other values than bool"),
        ({"n": True}, {"n": 5}, "field 'n' has other values than bool"),
        ({"n": 0.5}, {"n": False}, "field 'n' has other values than double"),
        ({"n": [{"m": 1}]}, {"n": [{"m": "01"}]}, "field 'n.m' has other values than int64"),
        ({"n": 5}, {"n": [5]}, "field 'n' has other values than int64"),
        ({"n": [5]}, {"n": 5}, "field 'n' has other values than list"),
    ],
)
def test_a_file_that_does_not_fit_those_before_is_refused_and_named(
    tmp_path: Path,
    store: Store,
    first: dict[str, Any],
    later: dict[str, Any],
    words: str,
    ending: str,
    rows: int,
) -> None:
    for name, row in (("a", first), ("b", first), ("c", later)):
        text = lines_of([row] * rows) if ending == "jsonl" else json.dumps([row] * rows)
        (tmp_path / f"{name}.{ending}").write_text(text)
    recipe = Recipe(str(tmp_path / f"*.{ending}"), str(tmp_path / "out" / "o.jsonl"), [lambda sample: sample])
    with pytest.raises(InvalidValueError, match=re.escape(words)) as caught:
        process(recipe, store=store)
    assert f"in {str(tmp_path / f'c.{ending}')!r}: " in str(caught.value)


@pytest.mark.parametrize(
    "values", [[1, "a"], [{"q": 1}, {"q": "a"}], [[1, "a"]], [{"x": {"q": 1}}, {"x": {"q": "a"}}], ["a", {}]]
)
def test_a_column_of_several_types_may_be_missing_in_files_around_it(
    tmp_path: Path, values: list[Any]
) -> None:
    files = {"a": [{"n": 1}], "b": [{"n": 2, "m": value} for value in values], "c": [{"n": 3}]}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text(lines_of(rows))
    made = sources.read(sources.find(tmp_path / "*.jsonl"), tmp_path / "work")
    assert made.to_list() == [{"m": None, **row} for rows in files.values() for row in rows]


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        ({"q": "x"}, 7, "field 'm' has the value '7' where other rows have objects"),
        ({"q": "x"}, "text", "field 'm' has the value 'text' where other rows have objects"),
        ([{"q": "x"}], 1.5, "field 'm' has the value '1.5' where other rows have lists"),
        ({"in": {"q": "x"}}, {"in": True}, "field 'm.in' has the value 'True' where other rows have objects"),
    ],
)
def test_a_file_that_does_not_fit_values_of_several_types_is_named_and_not_the_file_that_has_them(
    tmp_path: Path, store: Store, first: Any, later: Any, words: str
) -> None:
    other = json.loads(json.dumps(first).replace('"x"', "1"))
    files = {"a": [1], "b": [first, other], "c": [other], "d": [None, later], "e": [None]}
    for name, values in files.items():
        text = lines_of([{"t": name} if value == 1 else {"t": name, "m": value} for value in values])
        (tmp_path / f"{name}.jsonl").write_text(text)
    recipe = Recipe(str(tmp_path / "*.jsonl"), str(tmp_path / "out" / "o.jsonl"), [lambda sample: sample])
    with pytest.raises(InvalidValueError, match=re.escape(words)) as caught:
        process(recipe, store=store)
    assert f"in {str(tmp_path / 'd.jsonl')!r}: " in str(caught.value)


def test_the_only_file_of_a_folder_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('\n[{"n": 1},\n{"n": ')
    with pytest.raises(InvalidValueError, match=re.escape(f"in {str(tmp_path / 'data' / 'a.jsonl')!r}: ")):
        sources.read(sources.find(tmp_path / "data"), tmp_path / "work")
    with pytest.raises(InvalidValueError, match=r"a\.jsonl' as json: Expecting value"):
        sources.read(sources.find(tmp_path / "data" / "a.jsonl"), tmp_path / "work")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"n": 1}\n\n[11, 22]\n{"n": 2}\n',
         r"line 3 of '.*a\.jsonl' is no JSON object \('\[11, 22\]'\); mend the line, or leave it out"),
        ('{"n": 1}\n{"n": 2,}\n', "line 2 of .* is no JSON object"),
        ('{"n": 1}\n{"n": 2,}', "line 2 of .* is no JSON object"),
        ('{"n": 1}\n{"n": "tw', "line 2 of .* is cut off"),
        ('{"n": 1}\n null\n{"n": 2}\n', "line 2 of .* is no JSON object"),
        ('null\n{"n": 1}\n', "a line is null, which is no row; write an object there, or none"),
        (" null \n\nnull", "a line is null"),
        ('\n{"n": 1}\n{"n": ', "line 3 of .* is cut off; check that the program"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_object_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(InvalidValueError, match=words):
        sources.read(sources.find(tmp_path / "a.jsonl"), tmp_path / "work")


@pytest.mark.parametrize("later", ["n,t\n", "n,t\n2,b\n", "n,t\n2,b\n3,c\n"])
def test_tables_may_name_their_columns_in_another_order(tmp_path: Path, store: Store, later: str) -> None:
    (tmp_path / "a.csv").write_text("t,n\na,1\n")
    (tmp_path / "b.csv").write_text(later)
    recipe = Recipe(str(tmp_path / "*.csv"), str(tmp_path / "out.jsonl"), [lambda sample: sample])
    process(recipe, store=store)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    behind = [line.split(",") for line in later.splitlines()[1:]]
    assert rows == [{"t": "a", "n": 1}, *({"t": t, "n": int(n)} for n, t in behind)]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_one_object_over_several_lines_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    row = {"date": "2024-01-02", "id": "007", "created_at": "2024", "2024": 3}
    (tmp_path / name).write_text(json.dumps(row, indent=2))
    assert sources.read(sources.find(tmp_path / name), tmp_path / "work").to_list() == [row]


def test_what_a_string_is_does_not_hang_on_the_rows_around_it(tmp_path: Path) -> None:
    # More rows of each kind than one read returns, which takes 10 MB.
    words = [{"pad": "words", "t": "words", "long": "word " * 300}] * 8_000
    dates = [{"pad": "2024-01-02", "t": "2024-01-02T03:04:05Z", "long": "word " * 300}] * 8_000
    for number, rows in enumerate(([*words, *dates], [*dates, *words])):
        (tmp_path / "a.jsonl").write_text(lines_of(rows))
        dataset = sources.read(sources.find(tmp_path / "a.jsonl"), tmp_path / f"work{number}")
        assert dataset["t"][:] == [row["t"] for row in rows]
        assert dataset["pad"][:] == [row["pad"] for row in rows]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([["a"], ["b", 7]], ["a", "b", "7"]),
        ([["012"], [True]], ["012", "true"]),
        ([["a"], ["null", 1.5, None, '"q"', False], ["b"]], ["a", "null", "1.5", None, '"q"', "false", "b"]),
        ([["a"], ["a", ["x"]]], None),
        ([["a"], ["a", {"q": 1}]], None),
        ([["a"], [{"q": 1}]], None),
        ([["a"], [[1]]], None),
        ([[1], ["a", 2]], None),
    ],
)
def test_a_file_of_several_types_behind_one_of_strings_has_strings_or_is_refused(
    tmp_path: Path, files: list[list[Any]], expected: list[str | None] | None
) -> None:
    """Regression: the strings of the second file were in quotes, lists and objects became texts."""
    for number, values in enumerate(files):
        (tmp_path / f"{number}.jsonl").write_text(lines_of([{"text": "t", "v": value} for value in values]))
    if expected is None:
        with pytest.raises(InvalidValueError, match=r"1\.jsonl'.*'v'"):
            sources.read(sources.find(tmp_path), tmp_path / "work")
        return
    assert sources.read(sources.find(tmp_path), tmp_path / "work")["v"][:] == expected
    recipe = Recipe(str(tmp_path / "*.jsonl"), str(tmp_path / "out" / "o.jsonl"), [shout])
    with Store(tmp_path / "store", memory=0) as store:
        process(recipe, store=store)
    lines = (tmp_path / "out" / "o.jsonl").read_text().splitlines()
    assert [json.loads(line)["v"] for line in lines] == expected


def shout(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "text": row["text"].upper()}


def test_chats_are_read_as_they_are(tmp_path: Path) -> None:
    rows = [{"id": "1", "source": "s", "model": "m", "system_prompt": "p", "messages": [{"role": "user"}]}]
    (tmp_path / "a.jsonl").write_text(lines_of(rows))
    assert sources.read(sources.find(tmp_path / "a.jsonl"), tmp_path / "work").to_list() == rows


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_only_empty_cells_of_a_table_are_null(tmp_path: Path, name: str, separator: str) -> None:
    words = ["NA", "null", "nan", "None", "N/A", "#N/A", "-nan", "<NA>", "2024-01-02", ""]
    rows = "".join(f"{word}{separator}7{separator}\n" for word in words)
    (tmp_path / name).write_text(separator.join(("text", "n", "empty")) + "\n" + rows)
    dataset = sources.read(sources.find(tmp_path / name), tmp_path / "work")
    assert dataset["text"][:] == [*words[:-1], None]
    assert dataset["n"][:] == [7] * len(words)
    assert dataset["empty"][:] == [None] * len(words)


#: Cells of the first 12,000 rows, cells of the later rows, and the resulting column.
MIXED: dict[str, tuple[list[str], list[str], list[Any]]] = {
    "zip": (["a1", "b2"], ["007", "008"], ["a1", "b2", "007", "008"]),
    "late": (["007", "1"], ["x", ""], ["007", "1", "x", None]),
    "n": (["1", "2"], ["", "3.5"], [1, 2, None, 3.5]),
    "id": (
        ["9007199254740993", ""],
        ["9007199254740995", "1"],
        [9007199254740993, None, 9007199254740995, 1],
    ),
    "big": (["18446744073709551615", "1"], ["-1", "2"], ["18446744073709551615", "1", "-1", "2"]),
    "flag": (["True", ""], ["False", "True"], [True, None, False, True]),
    "odd": (["True", "False"], ["1", "0"], ["True", "False", "1", "0"]),
    "begun": (["", ""], ["x", "1"], [None, None, "x", "1"]),
    "ended": (["x", "01"], ["", ""], ["x", "01", None, None]),
    "empty": (["", ""], ["", ""], [None] * 4),
}


@pytest.mark.parametrize("column", MIXED)
@pytest.mark.parametrize("files", [1, 2])
def test_a_column_of_a_table_has_one_type_and_loses_nothing(tmp_path: Path, column: str, files: int) -> None:
    early, late, expected = MIXED[column]
    pieces = [
        [cell for cell in part for _ in range(6_000)] for part in (early, late)
    ]  # pandas reads 10,000 rows at a time
    if files == 1:
        pieces = [pieces[0] + pieces[1]]
    (tmp_path / "data").mkdir()
    for number, cells in enumerate(pieces):
        (tmp_path / f"data/{number}.csv").write_text(
            f"{column},k\n" + "".join(f"{cell},1\n" for cell in cells)
        )
    dataset = sources.read(sources.find(tmp_path / "data"), tmp_path / "work")
    assert dataset[column][::6_000] == expected
    assert len(dataset) == 24_000


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    for name, text in (("b.txt", "two\nlines\n"), ("a.txt", "one"), ("c.txt", "")):
        (tmp_path / name).write_text(text)
    dataset = sources.read(sources.find(tmp_path), tmp_path / "work")
    assert dataset["text"][:] == ["one", "two\nlines\n", ""]


def test_folders_are_walked_in_order_and_past_what_is_hidden_or_no_data(tmp_path: Path) -> None:
    for name in (
        "b/2.jsonl",
        "b/1.jsonl",
        "a/9.jsonl",
        ".git/x.jsonl",
        "b/.tmp.jsonl",
        "README.md",
        "z.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name)
    found = [os.path.relpath(file, tmp_path) for file in sources.find(tmp_path).files]
    assert found == ["z.json", "a/9.jsonl", "b/1.jsonl", "b/2.jsonl"]
    pattern = str(tmp_path / "b" / "**" / "*.jsonl")
    assert [os.path.basename(file) for file in sources.find(pattern).files] == ["1.jsonl", "2.jsonl"]


def test_several_paths_are_one_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl")
    write_jsonl(tmp_path / "a.jsonl")
    found = sources.find_all([str(tmp_path / "b.jsonl"), str(tmp_path / "a*.jsonl")])
    assert [os.path.basename(file) for file in found.files] == ["b.jsonl", "a.jsonl"]


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("a.jsonk", NotFoundError, "there is no data at dataset_path '.*a.jsonk'; did you mean 'a.jsonl'"),
        ("nowhere/a.jsonl", NotFoundError, "there is no data"),
        ("empty", NotFoundError, "holds no data"),
        ("*.parquet", NotFoundError, "holds no data"),
        (
            "mixed",
            InvalidValueError,
            "several kinds, such as .*; choose with a pattern, like '.*mixed/\\*.jsonl'",
        ),
        ("notes.md", InvalidValueError, "has an unknown ending"),
        ("splits", InvalidValueError, "several splits; choose one, like '.*splits/test'"),
    ],
)
def test_what_cannot_be_found_is_said(
    tmp_path: Path, path: str, kind: type[CastoreError], words: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    write_jsonl(tmp_path / "mixed" / "a.jsonl")
    WRITERS["a.csv"](tmp_path / "mixed" / "b.csv")
    datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")}).save_to_disk(
        tmp_path / "splits"
    )
    with pytest.raises(kind, match=words):
        sources.find(tmp_path / path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("a.jsonl", b"\xff\xfe\x00\x01"),
        ("a.jsonl.gz", b"no gzip"),
        ("a.parquet", b"PAR1 but not really"),
        ("a.csv", b'a,b\n1,2,3\n"'),
        ("a.txt", b"\xff\xfe"),
        ("a.jsonl", b""),
        ("a.csv", b""),
    ],
)
def test_a_damaged_file_is_an_error_of_one_line(
    tmp_path: Path, name: str, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidValueError, match="cannot read dataset_path") as caught:
        sources.read(sources.find(tmp_path / name), tmp_path / "work")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": "caf\xe9"}\n',
         "line 2 of '.*a.jsonl' is not UTF-8 (byte 0xe9 at 13)"),
        ("a.jsonl", b'{"text": "ok"}\n' * 100_000 + b'{"text": "caf\xe9"}\n', "line 100001 of"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "caf\xe9"}\n', mtime=0), "line 1 of"),
        ("a.jsonl", '{"text": "ok"}\n'.encode("utf-16"),
         ("line 1 of '.*a.jsonl' is not UTF-8 (byte 0xff at 0); "
          "convert the file, for example with `iconv -f UTF-16")),
        ("a.csv", b"text\ncaf\xe9\n",
         ("line 2 of '.*a.csv' is not UTF-8 (byte 0xe9 at 3); "
          "convert the file, for example with `iconv -f LATIN1")),
        ("a.txt", b"ok\ncaf\xe9\n", "line 2 of"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_utf8_is_named_with_the_line(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    pattern = re.escape(words).replace(re.escape(".*"), ".*")
    with pytest.raises(InvalidValueError, match=pattern):
        sources.read(sources.find(tmp_path / name), tmp_path / "work")


# Identifying sources


def test_content_tells_files_apart_and_their_place_does_not(tmp_path: Path, store: Store) -> None:
    for name in ("a/x.jsonl", "b/y.jsonl"):
        (tmp_path / name).parent.mkdir()
        write_jsonl(tmp_path / name)
    one, other = (sources.find(tmp_path / name) for name in ("a", "b"))
    assert sources.identify(one, store) == sources.identify(other, None)
    before = sources.identify(one, store)
    (tmp_path / "a/x.jsonl").write_text('{"text": "new", "n": 1}\n')
    assert sources.identify(one, store) != before


def test_the_same_bytes_under_another_ending_are_another_source(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv", "a.txt"):
        (tmp_path / name).write_text("a,b\n")
    assert len({sources.identify(sources.find(tmp_path / n), None) for n in ("a.csv", "a.tsv", "a.txt")}) == 3


def test_paths_and_times_tell_files_apart_where_that_is_asked_for(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    one, other = (sources.find(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    for telling in ("path", "combined"):
        before = sources.identify(one, None, telling)
        assert before == sources.identify(one, None, telling)
        assert before != sources.identify(other, None, telling)
    by_path, by_both = (sources.identify(one, None, telling) for telling in ("path", "combined"))
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("c", "d"))
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert sources.identify(one, None, "path") == by_path
    assert sources.identify(one, None, "combined") != by_both


# Reading lazily


@pytest.fixture
def opened(tmp_path: Path, store: Store) -> Iterator[Callable[[], Any]]:
    write_jsonl(tmp_path / "a.jsonl")
    found = sources.find(tmp_path / "a.jsonl")
    yield lambda: open_source(found, store, cached=True, codec="zstd")
    background.wait()


def test_the_second_time_the_source_is_not_read_before_it_is_looked_at(opened: Callable[[], Any]) -> None:
    first = opened()
    background.wait()
    second = opened()
    assert isinstance(second, LazyDataset)
    assert (len(second), second.features, second._fingerprint) == (3, first.features, first._fingerprint)
    assert not second.is_read
    assert second.to_list() == first.to_list()
    assert second.is_read


@pytest.mark.parametrize(
    "use",
    [
        lambda d: d.map(lambda row: {"text": row["text"] + "!"}),
        lambda d: d.filter(lambda row: row["n"] == 1),
        lambda d: d.select([2, 0]),
        lambda d: d.shuffle(seed=1),
        lambda d: d.with_format("arrow").with_format(None),
        lambda d: d.remove_columns(["n"]),
        lambda d: d.shard(2, 0),
        copy.deepcopy,
        lambda d: pickle.loads(pickle.dumps(d)),
        lambda d: datasets.concatenate_datasets([d, d]),
        private_copy,  # of the result of a function that returns None
    ],
)
def test_a_lazy_dataset_is_used_like_any_other(opened: Callable[[], Any], use: Callable[[Any], Any]) -> None:
    plain = opened()
    background.wait()
    lazy = opened()
    assert isinstance(lazy, LazyDataset)
    assert use(lazy).to_list() == use(plain).to_list()


def test_a_run_that_goes_on_behind_its_checkpoint_does_not_read_its_source(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_files: list[str] = []

    def noting(source: sources.Source, folder: Any) -> datasets.Dataset:
        read_files.append(source.path)
        return sources.read(source, folder)

    monkeypatch.setattr(runner, "read", noting)
    broken = tmp_path / "broken"

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if broken.exists():
            raise RuntimeError("broken")
        return sample

    write_jsonl(tmp_path / "a.jsonl")
    recipe = Recipe(
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "out.jsonl"),
        ["clean_links_mapper", fails],
        use_checkpoint=True,
    )
    broken.touch()
    for reads in (1, 1):  # the second run fails after the checkpoint
        with pytest.raises(RuntimeError):
            process(recipe, store=store)
        assert len(read_files) == reads
    broken.unlink()
    outcome = process(recipe, store=store)
    assert [step.hit for step in outcome.steps] == [True, False]
    assert (outcome.rows_in, outcome.rows_out, len(read_files)) == (3, 3, 1)
    assert process(recipe, store=store).rows_in == 3
    assert len(read_files) == 1
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more", "n": 9}) + "\n")
    with pytest.warns(CacheWarning, match="the input has changed"):
        assert process(recipe, store=store).rows_in == 4
    assert len(read_files) == 2


def test_a_damaged_source_in_the_store_is_read_again_and_said_so(
    opened: Callable[[], Any], store: Store
) -> None:
    expected = opened().to_list()
    background.wait()
    name = next(entry.name for entry in store.entries("steps") if entry.name.endswith(".arrow"))
    path, offset, length = payload(store, name)
    flip(path, offset + length // 2)
    late = opened()
    with pytest.warns(CacheWarning, match="is damaged and runs again"):
        assert late.to_list() == expected


def test_a_saved_folder_is_mapped_where_it_is(tmp_path: Path, store: Store) -> None:
    write_folder(tmp_path / "saved")
    before = list(store.entries())
    dataset = open_source(sources.find(tmp_path / "saved"), store, cached=True, codec="zstd")
    assert dataset.cache_files[0]["filename"].startswith(str(tmp_path / "saved"))
    assert list(store.entries()) == before
    assert dataset._fingerprint.startswith("castore")


# Writing


@pytest.mark.parametrize("name", ["o.jsonl", "o.json", "o.parquet", "o", "deep/er/o.jsonl"])
def test_what_is_written_reads_back(tmp_path: Path, name: str) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    written: list[int] = []
    size = export.export(dataset, tmp_path / name, written.append)
    assert sum(written) == 3
    assert size > 0
    back = sources.read(sources.find(tmp_path / name), tmp_path / "work")
    assert back.to_list() == ROWS
    export.export(dataset.select([0]), tmp_path / name)
    assert len(sources.read(sources.find(tmp_path / name), tmp_path / "work")) == 1


def test_csv_is_what_others_read(tmp_path: Path) -> None:
    export.export(datasets.Dataset.from_list(ROWS), tmp_path / "o.csv")
    assert sources.read(sources.find(tmp_path / "o.csv"), tmp_path / "work")["n"][:] == [1, None, 3]


def test_jsonl_says_what_was_in_the_rows(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(
        [
            {"n": 1, "big": 2**62, "f": 0.1, "when": dt.date(2026, 1, 2), "deep": {"a": [1, None]}},
            {"n": None},
        ]
    )
    export.export(dataset, tmp_path / "o.jsonl")
    first, second = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert first == {"n": 1, "big": 2**62, "f": 0.1, "when": "2026-01-02", "deep": {"a": [1, None]}}
    assert second["n"] is None


def test_floats_in_objects_of_several_forms_keep_all_digits(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "meta": {"x": 0.5043033792893158}, "list": [{"y": 5e-324}]},
        {"text": "b", "meta": {"x": 1e300, "z": 1}, "list": [{"z": 0.1}, {"y": 1.7976931348623157e308}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = sources.read(sources.find(tmp_path / "a.jsonl"), tmp_path / "work")
    export.export(dataset, tmp_path / "o.jsonl")
    assert [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()] == rows


def test_values_without_one_type_come_back_as_they_were(tmp_path: Path) -> None:
    lines = '{"text": "a", "meta": {"x": 1}}\n{"text": "b", "meta": [1, 2]}\n{"text": "c", "meta": "[1]"}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    dataset = sources.read(sources.find(tmp_path / "a.jsonl"), tmp_path / "work")
    export.export(dataset, tmp_path / "o.jsonl")
    assert [json.loads(line)["meta"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == dataset[
        "meta"
    ][:]


def test_statistics_and_hashes_stay_out(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict(
        {"text": ["a"], "__dj__stats__": [{"x": 1}], "__dj__hash_minhash": [b"x"]}
    )
    export.export(dataset, tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl").read_text() == '{"text": "a"}\n'


@pytest.mark.parametrize("other", ["clean.jsonl", "models/weights.bin", "README.md", "train/notes.txt"])
def test_a_folder_with_files_of_others_is_not_replaced(tmp_path: Path, other: str) -> None:
    """Regression: a second export into a folder removed all that others had put there."""
    place = tmp_path / "outputs"
    made = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    made.save_to_disk(place) if other.startswith("train") else made["train"].save_to_disk(place)
    datasets.load_from_disk(place).map(lambda row: {"n": 1})  # leaves a cache there
    export.export(datasets.Dataset.from_list(ROWS), place)
    if other.startswith("train"):
        made.save_to_disk(place)
    (place / other).parent.mkdir(exist_ok=True)
    (place / other).write_text("mine")
    with pytest.raises(InvalidValueError, match=f"has '{other.partition('/')[0]}.*export would remove it"):
        export.export(datasets.Dataset.from_list(ROWS), place)
    assert (place / other).read_text() == "mine"


@pytest.mark.parametrize("name", ["o.jsonl", "o"])
def test_a_link_at_the_place_of_an_export_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "disk" / "there")
    for _ in range(2):
        export.export(datasets.Dataset.from_list(ROWS), tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["there"]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["disk", name])


@pytest.mark.parametrize("name", ["o.jsonl", "o.json", "o.csv", "o.parquet", "o"])
def test_a_dataset_without_rows_is_written(tmp_path: Path, name: str) -> None:
    export.export(datasets.Dataset.from_list(ROWS).select([]), tmp_path / name)
    if name == "o.json":
        assert json.loads((tmp_path / name).read_text()) == []
    if name == "o":
        back = datasets.load_from_disk(str(tmp_path / name))
        assert (len(back), back.column_names) == (0, [*ROWS[0]])
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("o.xlsx", "has the unknown ending '.xlsx'; use .jsonl, .json, .csv, .parquet, or a folder"),
        ("photos", "exists and is not a folder of save_to_disk"),
        ("file", "exists and is not a folder of save_to_disk"),
        ("folder.jsonl", "is a folder; remove it"),
        ("pipe.jsonl", "'.*/pipe.jsonl' is no regular file, and would be replaced by one"),
        ("file/o.jsonl", "cannot be made, since '.*/file' is not a folder"),
        ("file/there/o", "cannot be made, since '.*/file' is not a folder"),
    ],
)
def test_nothing_of_others_is_overwritten(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InvalidValueError, match=words):
        export.export(datasets.Dataset.from_list(ROWS), tmp_path / name)
    assert (tmp_path / "photos" / "cat.jpg").read_text() == "x"
    assert (tmp_path / "pipe.jsonl").is_fifo()


def test_a_place_where_nothing_can_be_written_is_named_and_not_the_temporary_file() -> None:
    with pytest.raises(
        InvalidValueError,
        match=r"^export_path '/proc/o.jsonl' cannot be written \(No such file or directory\)",
    ):
        export.export(datasets.Dataset.from_list(ROWS), "/proc/o.jsonl")


@pytest.mark.parametrize("name", ["o.jsonl", "o.parquet", "o"])
def test_a_file_that_a_row_names_and_that_is_gone_is_no_fault_of_the_export(
    tmp_path: Path, name: str
) -> None:
    missing = str(tmp_path / "cat.png")
    rows = datasets.Dataset.from_dict({"image": [missing]}).cast_column("image", datasets.Image())
    with pytest.raises(FileNotFoundError, match=r"cat\.png"):
        export.export(rows, tmp_path / name)


def test_what_has_no_json_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "o.jsonl").write_text("old")
    with pytest.raises(InvalidValueError, match="JSON has no form for a value of type bytes; export to"):
        export.export(datasets.Dataset.from_dict({"image": [b"\xff"]}), tmp_path / "o.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl"]
    assert (tmp_path / "o.jsonl").read_text() == "old"


@pytest.mark.parametrize("value", [["a"], {"b": 1}])
def test_a_csv_names_the_column_that_it_has_no_place_for(tmp_path: Path, value: Any) -> None:
    (tmp_path / "o.csv").write_text("old")
    with pytest.raises(
        InvalidValueError, match=r"column 'tags' is of type .*cannot hold; export to \.jsonl, \.parquet or"
    ):
        export.export(datasets.Dataset.from_list([{"text": "x", "tags": value}]), tmp_path / "o.csv")
    assert (tmp_path / "o.csv").read_text() == "old"


@pytest.mark.parametrize("name", ["o.jsonl", "o.json", "o.csv", "o.parquet", "o"])
def test_an_export_is_synced_before_it_takes_its_place(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", note)
    rows = datasets.Dataset.from_dict({"a": [1, 2]})
    export.export(rows, tmp_path / name)
    files = list((tmp_path / name).rglob("*")) or [tmp_path / name]
    assert {Path(path).name for path in synced} >= {path.name for path in files} - {name}
    assert len(synced) >= len(files) + 1
    assert synced[-1] == str(tmp_path)  # the name itself


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_is_replaced_where_nothing_can_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """As on some network file systems. If the second rename fails, the old folder is back in its place."""

    def refuse(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".part" and fails:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    old, new = (datasets.Dataset.from_dict({"a": [number]}) for number in (1, 2))
    export.export(old, tmp_path / "o")
    monkeypatch.setattr(export, "exchange", refuse)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InvalidValueError, match="Input/output") if fails else contextlib.nullcontext():
        export.export(new, tmp_path / "o")
    assert datasets.load_from_disk(tmp_path / "o")["a"][:] == [1 if fails else 2]
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_what_a_writer_refuses_is_said_of_the_export(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"image": [b"\xff"]})
    with pytest.raises(
        InvalidValueError, match=r"cannot be written to export_path '.*o\.csv': .*UTF8.*; export in another"
    ):
        export.export(rows, tmp_path / "o.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["o.jsonl", "o.parquet", "o.csv", "o"])
def test_a_full_disk_leaves_the_old_export(tmp_path: Path, name: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        export.export(datasets.Dataset.from_list(ROWS), disk / name)
        before = sorted(disk.iterdir())
        large = datasets.Dataset.from_dict({"text": [os.urandom(500).hex() for _ in range(2000)]})
        with pytest.raises(FullError, match=f"the disk of .*{name} is full"):
            export.export(large, disk / name)
        assert sorted(disk.iterdir()) == before
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_full_disk_beside_an_input_is_not_the_inputs_fault(tmp_path: Path, name: str) -> None:
    """Regression: "cannot read dataset_path …: No space left on device", as wrong usage."""
    disk = tmp_path / "disk"
    disk.mkdir()
    rows = datasets.Dataset.from_dict({"text": [os.urandom(500).hex() for _ in range(2000)]})
    export.export(rows, tmp_path / name)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(FullError, match=f"the disk of {disk} is full"):
            sources.read(sources.find(tmp_path / name), disk)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("in/a.jsonl", "in/a.jsonl"),
        ("in", "in/b.jsonl"),
        ("in/*.jsonl", "in/../in/b.jsonl"),
        ("link.jsonl", "in/a.jsonl"),
        ("saved", "saved"),
        ("saved/shards", "saved"),
    ],
)
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_an_export_replaces_nothing_that_it_is_made_from(
    tmp_path: Path, source: str, target: str, use_checkpoint: bool
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / "in" / name)
    (tmp_path / "link.jsonl").symlink_to("in/a.jsonl")
    write_folder(tmp_path / "saved")
    (tmp_path / "saved" / "shards").mkdir()
    write_jsonl(tmp_path / "saved" / "shards" / "c.jsonl")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    recipe = Recipe(
        dataset_path=str(tmp_path / source),
        export_path=str(tmp_path / target),
        process=[{"text_length_filter": {"min_len": 1000}}],
        use_checkpoint=use_checkpoint,
    )
    with Store(tmp_path / "store") as store:
        with pytest.raises(InvalidValueError, match=r"would replace .*, which this|has 'shards' beside"):
            process(recipe, store=store)
        assert list(store.entries()) == []
    assert all(file.read_bytes() == content for file, content in before.items())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("in", "in/o.jsonl"),
        ("in", "in/deep/o"),
        ("in/*.jsonl", "in/o.jsonl"),
        ("in/**/*.jsonl", "in/a/b/o.jsonl"),
    ],
)
def test_an_export_that_the_next_run_would_read_is_refused(tmp_path: Path, source: str, target: str) -> None:
    """Regression: the first run wrote it, and no later one could replace it."""
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl")
    recipe = Recipe(str(tmp_path / source), str(tmp_path / target), [])
    with (
        Store(tmp_path / "store") as store,
        pytest.raises(InvalidValueError, match="the next run would read export_path"),
    ):
        process(recipe, store=store)
    assert [*(tmp_path / "in").iterdir()] == [tmp_path / "in" / "a.jsonl"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("in/a.jsonl", "in/o.jsonl"),
        ("in/*.jsonl", "in/o.parquet"),
        ("in", "in/.o.jsonl"),
        ("in/*.jsonl", "in/b/o.jsonl"),
    ],
)
def test_an_export_that_no_run_would_read_may_lie_beside_the_input(
    tmp_path: Path, source: str, target: str
) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl")
    recipe = Recipe(str(tmp_path / source), str(tmp_path / target), [])
    with Store(tmp_path / "store") as store:
        assert [process(recipe, store=store).rows_out for _ in range(2)] == [3, 3]


def test_a_folder_is_read_behind_links_but_no_link_twice_on_one_way(tmp_path: Path) -> None:
    """Regression: rows behind a link to a folder were left out without a word."""
    for folder in ("in", "real"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / f"{folder}.jsonl")
    (tmp_path / "in" / "linked").symlink_to("../real")
    (tmp_path / "in" / "loop").symlink_to(".")
    (tmp_path / "in" / ".hidden").symlink_to("../real")
    for pattern in ("in", "in/**", "in/**/*.jsonl", "in/**/**/*.jsonl", "i*/**/*.jsonl"):
        found = sources.find(tmp_path / pattern).files
        assert [os.path.relpath(file, tmp_path) for file in found] == ["in/in.jsonl", "in/linked/real.jsonl"]
    found = sources.find(tmp_path / "in/**/.hidden/*.jsonl").files
    assert [os.path.relpath(file, tmp_path) for file in found][:1] == ["in/.hidden/real.jsonl"]


def test_blank_lines_of_a_file_of_one_column_are_its_empty_cells(tmp_path: Path) -> None:
    """Regression: they were left out, and with them cells of spaces and the nulls of an export."""
    rows = [{"text": "a"}, {"text": "   "}, {"text": None}, {"text": "b"}]
    export.export(datasets.Dataset.from_list(rows), tmp_path / "o.csv")
    (tmp_path / "plain.csv").write_text("text\na\n   \n\nb\n")
    for name in ("o.csv", "plain.csv"):
        assert sources.read(sources.find(tmp_path / name), tmp_path / name[0]).to_list() == rows
    (tmp_path / "two.csv").write_text("text,n\na,1\n\nb,2\n\n")
    assert len(sources.read(sources.find(tmp_path / "two.csv"), tmp_path / "two")) == 2


@pytest.mark.parametrize("name", ["csv", "tsv"])
def test_large_integers_beside_fractions_of_another_file_are_an_error(tmp_path: Path, name: str) -> None:
    """Regression: they lost digits."""
    for file, number in (("a", "1.5"), ("b", str(2**53 + 1))):
        (tmp_path / f"{file}.{name}").write_text(f"n\n{number}\n")
    recipe = Recipe(str(tmp_path / f"*.{name}"), str(tmp_path / "out.jsonl"), [lambda sample: sample])
    with (
        Store(tmp_path / "store") as store,
        pytest.raises(InvalidValueError, match=r"column 'n' has integers over 2\^53 beside fractions"),
    ):
        process(recipe, store=store)
    (tmp_path / f"a.{name}").write_text("n\n-1\n")
    with Store(tmp_path / "store") as store:
        process(recipe, store=store)
    assert (tmp_path / "out.jsonl").read_text() == '{"n": -1}\n{"n": 9007199254740993}\n'


def test_parquet_files_and_row_groups_without_rows_are_passed_over(tmp_path: Path) -> None:
    """Regression: "BatchSize must be greater than 0" ended the run."""
    table = pa.table({"text": ["a", "b"]})
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "b.parquet")
    with pq.ParquetWriter(tmp_path / "c.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    recipe = Recipe(str(tmp_path / "*.parquet"), str(tmp_path / "out.jsonl"), [lambda sample: sample])
    with Store(tmp_path / "store") as store:
        assert process(recipe, store=store).rows_out == 4


@pytest.mark.filterwarnings("ignore:the checkpoint of .* the input has changed")
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_an_image_that_was_edited_is_noticed_in_every_later_run(
    tmp_path: Path, store: Store, use_checkpoint: bool
) -> None:
    """Regression: the rows come from the store then, and what they name did not count."""
    paths = [str(tmp_path / f"{place}.png") for place in range(3)]

    def paint(place: int, grey: int) -> None:
        Image.new("L", (4, 4), grey).save(paths[place])

    for place in range(3):
        paint(place, place)
    images = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    table = images.with_format("arrow")[:].replace_schema_metadata(images.data.schema.metadata)
    pq.write_table(table, tmp_path / "in.parquet")

    def bright(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "grey": sample["image"].getpixel((0, 0))}

    recipe = Recipe(
        str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"), [bright], use_checkpoint=use_checkpoint
    )
    for number, expected in enumerate([[0, 1, 2], [0, 1, 2], [101, 1, 2], [101, 102, 2], [101, 102, 2]]):
        for place, grey in enumerate(expected):
            if grey > 100 and number in (2, 3) and place == number - 2:
                paint(place, grey)
        steps = process(recipe, store=store).steps
        assert pq.read_table(tmp_path / "out.parquet")["grey"].to_pylist() == expected
        assert [step.hit for step in steps] == [number in (1, 4)]


def test_an_export_beside_what_is_read_is_written(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl")
    for _ in range(2):  # the second one replaces the first
        for target in ("out.jsonl", "out"):
            recipe = Recipe(dataset_path=str(tmp_path / "in"), export_path=str(tmp_path / target), process=[])
            with Store(tmp_path / "store") as store:
                assert process(recipe, store=store).rows_out == 3


@pytest.mark.parametrize("source", ["pipes/x.jsonl", "pipes"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, source: str) -> None:
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "x.jsonl")
    with pytest.raises(InvalidValueError, match=r"x\.jsonl' is not a regular file"):
        sources.find(tmp_path / source)


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", b""), ("a.jsonl", b"\n"), ("a.csv", b"")])
def test_a_file_without_rows_is_said_to_have_none(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidValueError, match=f"{name}' as .*: it has no rows"):
        sources.read(sources.find(tmp_path / name), tmp_path / "work")


@pytest.mark.parametrize("name", ["ds_cache_dir", "temp_dir"])
def test_an_empty_folder_of_a_recipe_is_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{name} is empty"):
        Recipe("in.jsonl", "out.jsonl", []).replace(**{name: ""})
