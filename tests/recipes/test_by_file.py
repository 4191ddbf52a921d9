"""Sources by file: each file is read once, and the rows are those of reading all files at once."""

from __future__ import annotations

import ast
import csv
import dataclasses
import gzip
import io
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any
from unittest import mock

import datasets
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from castore import Store
from castore.adapters.datasets import CacheWarning, Pipeline, source_blocks, wait
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.adapters.datasets.source_units import UNITS_FOLDER
from castore.errors import InvalidValueError
from castore.recipes import Recipe, by_file, file_reader, mixture, runner, sources
from castore.recipes.json_reader import LinesFile
from tests.adapters.datasets.small_blocks import slow_blocks, small_blocks, told
from tests.helpers import LONG, flip, payload
from tests.warm import Started, WarmPython

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]


class Reading:
    """The files that were read to rows, by name, and the store that keeps them."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.files: list[str] = []

    def read(self, source: Any = None) -> Any:
        """Read the folder as a recipe does; what a user sees of the dataset."""
        self.files.clear()
        found = sources.find(self.folder) if source is None else source
        return told(runner.open_source(found, self.store, cached=True, codec="zstd"))

    def read_whole(self) -> Any:
        """The same, all files at once, by nothing that is kept."""
        return told(sources.read(sources.find(self.folder), self.folder.parent / "work"))


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    """A folder of files, each a unit of its own, over an empty store."""
    monkeypatch.setattr(by_file, "UNIT_BYTES", 1)
    (tmp_path / "data").mkdir()
    with Store(tmp_path / "store", memory=0) as store, small_blocks():
        found = Reading(store, tmp_path / "data")
        read = file_reader.read_tables

        def noting(kind: str, files: Any, *rest: Any) -> Any:
            found.files += [Path(file).name for file in files]
            return read(kind, files, *rest)

        monkeypatch.setattr(file_reader, "read_tables", noting)
        yield found


def rows_of(number: int, count: int = 40) -> list[Row]:
    return [{"text": f"{number}-{n} " + "word " * (n % 7), "n": n, "x": n / 4} for n in range(count)]


def write_lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


WRITERS: dict[str, Callable[[Path, list[Row]], object]] = {
    "jsonl": write_lines,
    "json": lambda path, rows: path.write_text(json.dumps(rows)),
    "jsonl.gz": lambda path, rows: path.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0)
    ),
    "csv": write_csv,
    "tsv": write_csv,
    "parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(path),
    "txt": lambda path, rows: path.write_text("\n".join(row["text"] for row in rows)),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_new_file_costs_itself_and_a_moved_or_removed_one_nothing(reading: Reading, kind: str) -> None:
    write, folder = WRITERS[kind], reading.folder
    for number in range(4):
        write(folder / f"{number}.{kind}", rows_of(number))
    assert reading.read() == reading.read_whole()
    assert reading.files == [f"{number}.{kind}" for number in range(4)]

    write(folder / f"1b.{kind}", rows_of(9))
    assert reading.read() == reading.read_whole()
    assert reading.files == [f"1b.{kind}"]

    os.rename(folder / f"1b.{kind}", folder / f"8.{kind}")
    (folder / f"2.{kind}").unlink()
    assert reading.read() == reading.read_whole()
    assert reading.files == []

    write(folder / f"3.{kind}", rows_of(3, 41))
    assert reading.read() == reading.read_whole()
    assert reading.files == [f"3.{kind}"]

    os.rename(folder / f"0.{kind}", folder / f"9.{kind}")  # another file is the first
    assert reading.read() == reading.read_whole()
    assert reading.files == []


ONE, TWO = [{"a": 1, "b": "x"}] * 3, [{"a": 2, "b": "y"}] * 3
DIFFERENT: dict[str, list[tuple[str, list[Row] | str]]] = {
    "a column is missing": [("0.jsonl", ONE), ("1.jsonl", [{"b": "z"}] * 2), ("2.jsonl", [{"a": 1}])],
    "a column is null": [("0.jsonl", ONE), ("1.jsonl", [{"a": None, "b": None}] * 2)],
    "a column is null in the first file": [("0.jsonl", [{"a": None}] * 2), ("1.jsonl", [{"a": 1}] * 2)],
    "integers, then numbers": [("0.jsonl", [{"a": 1}] * 2), ("1.jsonl", [{"a": 2.0}] * 2)],
    "numbers, then integers": [("0.jsonl", [{"a": 0.5}] * 2), ("1.jsonl", [{"a": 2}] * 2)],
    "numbers, then texts": [("0.jsonl", [{"a": 1}] * 2), ("1.jsonl", [{"a": "7"}, {"a": "8"}])],
    "texts, then numbers": [("0.jsonl", [{"a": "x"}] * 2), ("1.jsonl", [{"a": 7}, {"a": 8}])],
    "columns in another order": [("0.jsonl", ONE), ("1.jsonl", [{"b": "z", "a": 3}] * 2)],
    "a new column": [("0.jsonl", ONE), ("1.jsonl", [{"a": 1, "b": "z", "c": 3}] * 2)],
    "an empty file first": [("0.jsonl", ""), ("1.jsonl", ONE), ("2.jsonl", ""), ("3.jsonl", TWO)],
    "nothing but empty files": [("0.jsonl", ""), ("1.jsonl", "")],
    "objects of several forms": [("0.jsonl", [{"a": {"p": 1}}, {"a": {"q": 2}}]), ("1.jsonl", [{"a": {}}])],
    "objects of several forms, later": [
        ("0.jsonl", [{"a": "x"}] * 2),
        ("1.jsonl", [{"a": "y"}, {"a": {"q": 2}}]),
        ("2.jsonl", [{"a": "z"}] * 2),
    ],
    "a mark of the order of bytes": [("0.jsonl", '\ufeff{"a": 1}\n{"a": 2}\n'), ("1.jsonl", [{"a": 1}])],
    "lists of objects": [("0.json", json.dumps(ONE)), ("1.json", json.dumps([{"a": None}] * 2))],
    "lists of one object each": [("0.json", json.dumps(ONE[:1])), ("1.json", json.dumps([{"a": 2.5}]))],
    "a list, then lines": [("0.json", json.dumps(ONE)), ("1.json", '{"a": 1.5}\n{"a": 2}\n')],
    "texts that look like dates": [("0.jsonl", [{"a": "2024-01-02"}] * 2), ("1.jsonl", [{"a": "x"}] * 2)],
    "a file that is no JSON": [("0.jsonl", ONE), ("1.jsonl", "no JSON"), ("2.jsonl", TWO)],
    "CSV: numbers, then words": [
        ("0.csv", "a,b\n007,1\n"), ("1.csv", "a,b\nx,2\n"), ("2.csv", "a,b\n08,3\n"),
    ],
    "CSV: integers, then fractions": [("0.csv", "a\n1\n2\n"), ("1.csv", "a\n0.5\n1\n")],
    "CSV: empty cells, then numbers": [("0.csv", "a,b\n,1\n,2\n"), ("1.csv", "a,b\n5,1\n6,2\n")],
    "CSV: a column is missing": [("0.csv", "a,b\n1,x\n2,y\n"), ("1.csv", "b\nz\nz\n")],
    "CSV: rows of one file each": [("0.csv", "a,b\n1,x\n"), ("1.csv", "b\nz\n")],
    "CSV: nothing but names of columns": [("0.csv", "a,b\n"), ("1.csv", "a,b\n1,x\n")],
    "CSV: no rows at all": [("0.csv", "a,b\n"), ("1.csv", "a,b\n")],
    "CSV: more cells than names": [("0.csv", "a,b\n1,2,3\n4,5,6\n"), ("1.csv", "a,b\n1,2\n3,4\n")],
    "documents": [("0.txt", "one\r\ntwo"), ("1.txt", ""), ("2.txt", "three\n")],
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_files_that_differ_give_what_reading_all_at_once_gives(reading: Reading, what: str) -> None:
    for name, content in DIFFERENT[what]:
        if isinstance(content, str):
            (reading.folder / name).write_bytes(content.encode())
        else:
            write_lines(reading.folder / name, content)
    whole = rows_or_error(reading.read_whole)
    assert rows_or_error(reading.read) == whole
    wait()
    assert rows_or_error(reading.read) == whole


def assert_equal_or_both_refused(reading: Reading) -> None:
    assert rows_or_error(reading.read) == rows_or_error(reading.read_whole)


def rows_or_error(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except InvalidValueError as error:
        return str(error)


BROKEN: dict[str, tuple[str, str, str]] = {
    "texts behind numbers": ("jsonl", '{"a": 1}\n{"a": 2}\n', '{"a": "x"}\n{"a": "y"}\n'),
    "a list behind numbers": ("jsonl", '{"a": 1}\n{"a": 2}\n', '{"a": [1]}\n{"a": [2]}\n'),
    "a number behind lists": ("jsonl", '{"a": [1]}\n{"a": [2]}\n', '{"a": 1}\n{"a": 2}\n'),
    "no JSON": ("jsonl", '{"a": 1}\n{"a": 2}\n', "{]\n{]\n"),
    "another column": ("csv", "a\n1\n2\n", "b\n1\n2\n"),
    "more cells than names": ("csv", "a,b\n1,2\n", "a,b\n1,2,3\n4,5,6\n"),
    "an end of each row that is a comma": ("csv", "a,b\n1,2\n", "a,b\n1,2,\n4,5,\n"),
    "quotes that do not end": ("csv", "a,b\n1,2\n", 'a,b\n"1,2\n3,4\n'),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_error_names_the_file(reading: Reading, what: str) -> None:
    kind, good, bad = BROKEN[what]
    for number in range(5):
        (reading.folder / f"{number}.{kind}").write_text(bad if number == 3 else good)
    for read in (reading.read, reading.read_whole):
        with pytest.raises(InvalidValueError) as raised:
            read()
        assert f": in {str(reading.folder / f'3.{kind}')!r}: " in str(raised.value)


@pytest.mark.parametrize("empty", ["0", "2", "4"])
def test_an_error_names_the_file_that_has_it_and_no_empty_one(reading: Reading, empty: str) -> None:
    _, good, bad = BROKEN["no JSON"]
    for number in range(5):
        (reading.folder / f"{number}.jsonl").write_text(bad if number == 3 else good)
    (reading.folder / f"{empty}.jsonl").write_text("")
    for read in (reading.read, reading.read_whole):
        with pytest.raises(InvalidValueError) as raised:
            read()
        assert f": in {str(reading.folder / '3.jsonl')!r}: " in str(raised.value)


@pytest.mark.parametrize("blank", ["\n", " \n\t\r\n"])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("place", ["a first line", "a middle line", "a last line", "a file"])
def test_blank_lines_are_no_rows_also_where_a_column_has_several_types(
    reading: Reading, place: str, is_mixed: bool, blank: str
) -> None:
    first, second = '{"a": "x", "n": 1}\n', '{"a": "y", "n": 2}\n'
    if is_mixed:
        (reading.folder / "0.jsonl").write_text('{"a": "z", "n": 0}\n{"a": {"p": 1}, "n": 0}\n')
    (reading.folder / "1.jsonl").write_text(first + second)
    expected = reading.read_whole()
    (reading.folder / ("2.jsonl" if place == "a file" else "1.jsonl")).write_text(
        {
            "a first line": blank + first + second,
            "a middle line": first + blank + second,
            "a last line": first + second + blank,
            "a file": blank,
        }[place]
    )
    assert reading.read() == reading.read_whole() == expected


@given(
    lines=st.lists(st.sampled_from(['{"a": 1}', '"\\n"', "", " ", "\t\r", "2"])),
    ends=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    sizes=st.lists(st.integers(1, 12), min_size=1),
)
def test_blank_lines_are_left_out_however_a_file_is_read(
    lines: list[str], ends: str, last: bool, sizes: list[int]
) -> None:
    data = (ends.join(lines) + ends * last).encode()
    file, found = LinesFile(io.BytesIO(data)), []
    for size in itertools.cycle(sizes):
        batch = file.read(size)
        if not batch:
            break
        batch += file.readline()
        found += batch.splitlines()
    assert [line.strip() for line in found] == [line.strip() for line in data.splitlines() if line.strip()]


def test_a_type_in_one_csv_file_that_changes_those_of_all_reads_all(reading: Reading) -> None:
    for number in range(3):
        (reading.folder / f"{number}.csv").write_text(f"a,b\n00{number},x\n7,y\n")
    assert reading.read()["rows"][0] == repr({"a": 0, "b": "x"})
    (reading.folder / "3.csv").write_text("a,b\nword,x\n")
    rows = reading.read()
    assert rows == reading.read_whole()
    assert rows["rows"][0] == repr({"a": "000", "b": "x"})
    assert len(reading.files) == 4


EVERYDAY: dict[str, tuple[list[list[Row]], dict[str, list[Any]]]] = {
    "null at first": ([[{"a": None}], [{"a": "x"}]], {"a": [None, "x"]}),
    "fractions behind integers": ([[{"a": 1}], [{"a": 2.5}]], {"a": [1.0, 2.5]}),
    "empty lists at first": ([[{"a": []}], [{"a": ["x"]}]], {"a": [[], ["x"]]}),
    "objects that get a field": (
        [[{"a": {"p": 1}}], [{"a": {"p": 2.5, "q": "y"}}]],
        {"a": [{"p": 1.0, "q": None}, {"p": 2.5, "q": "y"}]},
    ),
    "lists of objects that get one": (
        [[{"a": [{"p": 1}, {"p": 2}]}], [{"a": [{"q": None, "p": 3}]}, {"a": [{"q": "y"}]}]],
        {
            "a": [
                [{"p": 1, "q": None}, {"p": 2, "q": None}],
                [{"p": 3, "q": None}],
                [{"p": None, "q": "y"}],
            ]
        },
    ),
    "columns that the first rows lack": (
        [[{"b": 1}], [{"a": "x", "b": 2}], [{"c": True, "a": "y"}]],
        {"b": [1, 2, None], "a": [None, "x", "y"], "c": [None, None, True]},
    ),
}


@pytest.mark.parametrize("what", EVERYDAY)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_rows_of_all_files_decide_the_columns_and_types_of_json(
    reading: Reading, kind: str, what: str
) -> None:
    files, expected = EVERYDAY[what]
    for number, rows in enumerate(files):
        WRITERS[kind](reading.folder / f"{number}.{kind}", rows)
    found = reading.read()
    assert found == reading.read_whole()
    columns = [list(row.items()) for row in map(ast.literal_eval, found["rows"])]
    assert columns == [list(zip(expected, row, strict=True)) for row in zip(*expected.values(), strict=True)]
    wait()
    reading.read()
    assert reading.files == []


def test_a_json_file_with_another_column_reads_all_and_the_next_one_itself(reading: Reading) -> None:
    for number in range(3):
        write_lines(reading.folder / f"{number}.jsonl", [{"a": number}] * 3)
    reading.read()
    write_lines(reading.folder / "3.jsonl", [{"b": "x", "a": 0.5}] * 3)
    assert reading.read() == reading.read_whole()
    assert set(reading.files) == {"0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"}
    for name, row in (("4", {"a": 7}), ("0a", {"a": 7.5}), ("2a", {"b": "y"})):
        write_lines(reading.folder / f"{name}.jsonl", [row] * 3)
        rows = reading.read()
        assert rows == reading.read_whole()
        assert reading.files == [f"{name}.jsonl"]
    os.rename(reading.folder / "0.jsonl", reading.folder / "9.jsonl")  # another file is the first
    assert reading.read() == reading.read_whole()
    assert reading.files == []
    (reading.folder / "3.jsonl").unlink()
    assert reading.read() == reading.read_whole()


def test_files_behind_another_column_that_depend_on_each_other_are_tried_once(reading: Reading) -> None:
    write_lines(reading.folder / "0.jsonl", [{"a": 1}] * 3)
    write_lines(reading.folder / "1.jsonl", [{"b": 1}] * 3)
    write_lines(reading.folder / "2.jsonl", [{"c": {"p": 1}}, {"c": "x"}])
    assert rows_or_error(reading.read) == rows_or_error(reading.read_whole)
    write_lines(reading.folder / "3.jsonl", [{"a": 3}] * 3)
    assert rows_or_error(reading.read) == rows_or_error(reading.read_whole)
    assert reading.files == []


@pytest.mark.torture
@settings(
    max_examples=60 if LONG else 8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example([{"c": 1}, {"b": 1}, {"a": 1, "b": 1}], [{0, 2}, {0, 1, 2}])
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.sampled_from([1, 0.5, None, [], [1.5]]), max_size=3),
        min_size=3,
        max_size=5,
    ),
    st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=2, max_size=4),
)
def test_columns_do_not_depend_on_what_was_read_before(
    tmp_path_factory: pytest.TempPathFactory, pool: list[Row], runs: list[set[int]]
) -> None:
    """Not even their order, whichever files of a folder were there in earlier runs."""
    place = tmp_path_factory.mktemp("order")
    with Store(place / "store", memory=0) as store, small_blocks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_file, "UNIT_BYTES", 1)
        for number, chosen in enumerate(runs):
            folder = place / str(number)
            folder.mkdir()
            for which in chosen:
                if which < len(pool):
                    write_lines(folder / f"{which}.jsonl", [pool[which]] * 2)
            if any(folder.iterdir()):
                assert_equal_or_both_refused(Reading(store, folder))
                wait()


def test_an_integer_that_no_fraction_equals_is_an_error_with_its_column(reading: Reading) -> None:
    write_lines(reading.folder / "0.jsonl", [{"b": 1, "a": 2**60 + 1}] * 2)
    write_lines(reading.folder / "1.jsonl", [{"b": 1, "a": 0.5}] * 2)
    for read in (reading.read, reading.read_whole):
        with pytest.raises(InvalidValueError, match=rf"column 'a', among those of all rows: .*{2**60 + 1}"):
            read()


VALUES = [1, 2.5, None, "x", "7", True, {"p": 1}, [1], []]
FILES = st.lists(
    st.lists(st.dictionaries(st.sampled_from("ab"), st.sampled_from(VALUES), max_size=2), max_size=4),
    min_size=1,
    max_size=4,
)


@pytest.mark.torture
@settings(
    max_examples=60 if LONG else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(FILES, st.sampled_from(["jsonl", "json"]))
def test_any_files_of_json_give_what_reading_all_at_once_gives(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[Row]], kind: str
) -> None:
    place = tmp_path_factory.mktemp("json")
    (place / "data").mkdir()
    for number, rows in enumerate(files):
        WRITERS[kind](place / "data" / f"{number}.{kind}", rows)
    with Store(place / "store", memory=0) as store, small_blocks():
        before, by_file.UNIT_BYTES = by_file.UNIT_BYTES, 1
        try:
            assert_equal_or_both_refused(Reading(store, place / "data"))
            wait()
        finally:
            by_file.UNIT_BYTES = before


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["add", "change", "delete", "rename", "swap"]), st.integers(0, 9), st.integers(0, 30)
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.torture
@settings(max_examples=25 if LONG else 6, deadline=None)
@given(EDITS)
def test_any_edits_of_a_folder_read_new_content_alone(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("edits") / "data"
    folder.mkdir()
    write_lines(folder / "5.jsonl", rows_of(0))
    read_before: set[bytes] = set()
    with pytest.MonkeyPatch.context() as patch, Store(folder.parent / "store", memory=0) as store:
        patch.setattr(by_file, "UNIT_BYTES", 1)
        read: list[bytes] = []
        real = file_reader.read_tables

        def noting(kind: str, files: Any, *rest: Any) -> Any:
            read.extend(Path(file).read_bytes() for file in files)
            return real(kind, files, *rest)

        patch.setattr(file_reader, "read_tables", noting)
        with small_blocks():
            for what, number, other in [("", 0, 0), *edits]:
                edit(folder, what, number, other)
                read.clear()
                rows = runner.open_source(sources.find(folder), store, cached=True, codec="zstd")
                assert told(rows) == told(sources.read(sources.find(folder), folder.parent / "work"))
                there = {path.read_bytes() for path in folder.iterdir()}
                # Each new content was read, and read once. A folder of a known state reads nothing.
                assert len(read) == len(set(read))
                assert set(read) == there - read_before
                read_before |= there


def edit(folder: Path, what: str, number: int, other: int) -> None:
    """One change of a folder, which keeps at least one file."""
    paths = sorted(folder.iterdir())
    path = paths[number % len(paths)]
    if what == "add":
        write_lines(folder / f"{number}{other}.jsonl", rows_of(other))
    elif what == "change":
        write_lines(path, rows_of(other, 35))
    elif what == "delete" and len(paths) > 1:
        path.unlink()
    elif what == "rename":
        path.rename(folder / f"{number}{other} moved.jsonl")
    elif what == "swap":
        second = paths[other % len(paths)]
        one, two = path.read_bytes(), second.read_bytes()
        path.write_bytes(two)
        second.write_bytes(one)


def test_small_files_are_read_together_and_a_new_one_costs_its_neighbours(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_file, "UNIT_BYTES", 500)
    for number in range(100):
        (reading.folder / f"{number:03d}.txt").write_text(f"document {number} " * 4)
    assert reading.read() == reading.read_whole()
    units = len(list(reading.store.entries(UNITS_FOLDER)))
    assert 5 < units < 50
    (reading.folder / "050b.txt").write_text("another document")
    assert reading.read() == reading.read_whole()
    assert 0 < len(reading.files) < 50


def lower(sample: Row) -> Row:
    return {"text": sample["text"].upper()}


def test_a_line_changed_within_a_large_file_runs_its_blocks_alone(reading: Reading) -> None:
    rows = [{"text": f"{n} " + "word " * (n % 9), "tag": None if n % 3 else f"{n}"} for n in range(1700)]
    path = reading.folder / "0.jsonl"
    write_lines(path, rows)
    pipeline = Pipeline([lower], store=reading.store)
    source = sources.find(reading.folder)
    pipeline.run(runner.open_source(source, reading.store, cached=True, codec="zstd"))
    rows[1500]["text"] = "changed"
    write_lines(path, rows)
    result = pipeline.run(runner.open_source(source, reading.store, cached=True, codec="zstd"))
    assert result.dataset["text"][:] == [str(row["text"]).upper() for row in rows]
    [step] = result.steps
    assert step.rows_in == 1700
    assert step.rows_reused > 1400


def test_a_new_file_costs_its_rows_in_every_step(reading: Reading) -> None:
    for number in range(20):
        write_lines(reading.folder / f"{number:02d}.jsonl", rows_of(number, 100))
    pipeline = Pipeline([lower], store=reading.store)
    pipeline.run(runner.open_source(sources.find(reading.folder), reading.store, cached=True, codec="zstd"))
    write_lines(reading.folder / "15b.jsonl", rows_of(99, 100))
    dataset = runner.open_source(sources.find(reading.folder), reading.store, cached=True, codec="zstd")
    [step] = pipeline.run(dataset).steps
    assert step.rows_in == 2100
    assert 100 <= 2100 - step.rows_reused < 600


@pytest.fixture
def a_block_for_each_file(reading: Reading) -> Iterator[None]:
    """Ends before `reading` does. `monkeypatch` is undone later, and would bring the small blocks of
    `reading` back for all tests that follow.
    """
    with small_blocks(2**20, 10_000), mock.patch.object(source_blocks, "_SMALLEST_FILE", 1):
        yield


@pytest.mark.usefixtures("a_block_for_each_file")
def test_a_new_file_in_front_costs_itself_and_not_the_one_that_was_first(reading: Reading) -> None:
    for number in range(1, 5):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number, 1300))
    pipeline = Pipeline([lower, shorter], store=reading.store)

    def run() -> list[tuple[int | None, int | None]]:
        source = sources.find(reading.folder)
        dataset = runner.open_source(source, reading.store, cached=True, codec="zstd")
        result = pipeline.run(dataset)
        assert told(result.dataset) == told(dataset.map(both_of_batch, batched=True))
        return [(step.rows_in, step.rows_run) for step in result.steps]

    assert run() == [(5200, 5200)] * 2
    write_lines(reading.folder / "0.jsonl", rows_of(0, 1300))
    assert run() == [(6500, 1300)] * 2
    (reading.folder / "2.jsonl").rename(reading.folder / "9.jsonl")
    assert run() == [(6500, 0)] * 2
    (reading.folder / "0.jsonl").rename(reading.folder / "8.jsonl")
    (reading.folder / "9.jsonl").rename(reading.folder / "90.jsonl")
    assert run() == [(6500, 0)] * 2  # the first run has left a first block
    reading.store.delete_many([entry.name for entry in reading.store.entries("steps")])
    assert run() == [(6500, 0)] * 2
    lowered = next(entry.name for entry in reading.store.entries("steps") if "/lower_" in entry.name)
    files = {entry.digest for entry in reading.store.entries(lowered.rpartition("/")[0])}
    assert len(files & {entry.digest for entry in reading.store.entries(BLOCKS_FOLDER)}) == 5
    pipeline.drop_intermediate()
    assert not files & {entry.digest for entry in reading.store.entries(BLOCKS_FOLDER)}


@pytest.mark.usefixtures("a_block_for_each_file")
@pytest.mark.parametrize("name", ["0.jsonl", "2.jsonl"])
def test_a_second_file_costs_itself(reading: Reading, name: str) -> None:
    pipeline = Pipeline([lower, shorter], store=reading.store)
    costs = []
    for number, file in enumerate(("1.jsonl", name)):
        write_lines(reading.folder / file, rows_of(number, 2600))
        source = sources.find(reading.folder)
        dataset = runner.open_source(source, reading.store, cached=True, codec="zstd")
        result = pipeline.run(dataset)
        assert told(result.dataset) == told(dataset.map(both_of_batch, batched=True))
        costs.append([step.rows_run for step in result.steps])
    assert costs == [[2600, 2600]] * 2


class _Switch:
    """Does not count in keys."""

    is_on = True

    def __castore_key__(self) -> str:
        return "switch"


switch = _Switch()


def breaks_late(sample: dict[str, Any]) -> dict[str, Any]:
    if switch.is_on and sample["n"] == 550:
        raise RuntimeError("row 550")
    return sample


def test_explain_foretells_what_a_broken_run_of_small_files_has_left(reading: Reading) -> None:
    """Regression: files that are no blocks by themselves were not read, so nothing seemed to be kept."""
    for number in range(3):
        lines = [{"text": f"{number} {row}", "n": 200 * number + row} for row in range(200)]
        write_lines(reading.folder / f"{number}.jsonl", lines)
    recipe = Recipe(str(reading.folder), str(reading.folder.parent / "out.jsonl"), [breaks_late])
    with small_blocks(100 * 64, 100), slow_blocks(16):
        switch.is_on = True
        with pytest.raises(RuntimeError, match="row 550"):
            runner.process(recipe, store=reading.store)
        switch.is_on = False
        [foretold] = runner.explain(recipe, reading.store)
        [step] = runner.process(recipe, store=reading.store).steps
    assert (foretold.rows_in, foretold.rows_reused) == (600, step.rows_reused)
    assert step.rows_reused > 300


@pytest.mark.usefixtures("a_block_for_each_file")
def test_explain_foretells_what_a_new_first_file_costs(reading: Reading) -> None:
    for number in range(1, 5):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number, 1300))
    recipe = Recipe(str(reading.folder), str(reading.folder.parent / "out.jsonl"), [lower, shorter])
    runner.process(recipe, store=reading.store)
    for row, reused in (({"text": "new", "n": 1, "x": 0.5}, 5200), ({"text": "new", "n": 1.5, "x": 0.5}, 0)):
        write_lines(reading.folder / "0.jsonl", [row] * 1300)
        reading.files.clear()
        foretold = runner.explain(recipe, reading.store)
        assert reading.files == []
        ran = runner.process(recipe, store=reading.store).steps
        for explained, step in zip(foretold, ran, strict=True):
            assert step.rows_reused == reused
            assert (explained.rows_reused, explained.blocks_reused, explained.blocks_in) == (5200, 4, 5)
            assert not explained.is_sure
            sentence = "1 of 5 blocks run, and 5,200 rows do not, if new rows have the types of the others"
            assert str(explained).endswith(sentence)


def shorter(sample: Row) -> Row:
    return {"text": sample["text"][:20]}


def both_of_batch(samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The rows that `lower` and `shorter` make of rows, by one call for many of them."""
    rows = ({"text": text} for text in samples["text"])
    return {"text": [shorter(lower(row))["text"] for row in rows]}


def test_explain_names_files_that_are_new_or_changed_or_gone_or_moved(reading: Reading) -> None:
    for number in range(20):
        write_lines(reading.folder / f"{number:02d}.jsonl", rows_of(number, 100))
    recipe = Recipe(
        str(reading.folder), str(reading.folder.parent / "out.jsonl"), [lower, shorter], project_name="p"
    )
    runner.process(recipe, store=reading.store)
    assert all(step.hit for step in runner.explain(recipe, reading.store))
    write_lines(reading.folder / "17b.jsonl", rows_of(99, 100))
    write_lines(reading.folder / "14.jsonl", rows_of(14, 101))
    (reading.folder / "12.jsonl").unlink()
    (reading.folder / "16.jsonl").rename(reading.folder / "16 moved.jsonl")
    reading.files.clear()
    first, second = runner.explain(recipe, reading.store)
    assert reading.files == []  # the new file is not read for that
    assert first.files is not None
    names = {what: [Path(p).name for p in paths] for what, paths in dataclasses.asdict(first.files).items()}
    assert names == {
        "new": ["17b.jsonl"], "changed": ["14.jsonl"], "gone": ["12.jsonl"], "moved": ["16 moved.jsonl"]
    }  # fmt: skip
    sentence = "1 file is new (17b.jsonl), 1 file has changed (14.jsonl), 1 file is gone (12.jsonl), "
    assert first.changes == [sentence + "1 file was moved (16 moved.jsonl)"]
    assert second.files is None
    ran = runner.process(recipe, store=reading.store).steps
    for explained, step in zip((first, second), ran, strict=True):
        assert explained.rows_in is None
        assert explained.blocks_in is not None
        assert explained.blocks_reused is not None
        run = explained.blocks_in - explained.blocks_reused
        assert 2 <= run <= 6  # small blocks run with their neighbours
        assert explained.rows_reused is not None
        assert abs(explained.rows_reused - step.rows_reused) < 200
        assert step.rows_reused > 1200
        assert str(explained).endswith(
            f"{run} of {explained.blocks_in} blocks run, and {explained.rows_reused:,} rows do not, "
            "if new rows have the types of the others"
        )


def test_explain_compares_with_the_run_over_the_same_files_whatever_ran_since(
    reading: Reading, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    for number in range(3):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number))
        write_lines(tmp_path / "other" / f"x{number}.jsonl", rows_of(10 + number))
    one, two = (
        Recipe(str(folder), str(tmp_path / "out.jsonl"), [lower])
        for folder in (reading.folder, tmp_path / "other")
    )
    for recipe in (one, two):
        runner.process(recipe, store=reading.store)
    write_lines(reading.folder / "3.jsonl", rows_of(3))
    [explained] = runner.explain(one, reading.store)
    assert explained.changes == ["1 file is new (3.jsonl)"]
    (tmp_path / "third").mkdir()
    write_lines(tmp_path / "third" / "y.jsonl", rows_of(20))
    [explained] = runner.explain(
        dataclasses.replace(one, dataset_path=str(tmp_path / "third")), reading.store
    )
    assert explained.changes == ["the input dataset has changed"]


def test_explain_counts_rows_where_an_operator_has_changed(reading: Reading) -> None:
    for number in range(3):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number, 200))
    out = str(reading.folder.parent / "out.jsonl")
    runner.process(Recipe(str(reading.folder), out, [lower]), store=reading.store)
    [explained] = runner.explain(Recipe(str(reading.folder), out, [shorter]), reading.store)
    assert explained.changes == ["the store has no result of this operator"]
    assert (explained.rows_in, explained.files) == (None, None)  # nothing of it is kept
    assert runner.explain(Recipe(str(reading.folder), out, [lower]), reading.store)[0].hit


def test_the_blocks_of_a_step_and_of_its_files_take_their_space_once(reading: Reading) -> None:
    for number in range(3):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number, 200))
    rows = reading.read()
    arrow = [entry for entry in reading.store.entries() if entry.name.endswith(".arrow")]
    assert arrow
    for entry in arrow:
        assert f"{BLOCKS_FOLDER}/{entry.digest}" in reading.store.names_of(entry.digest)
    before = reading.store.totals().unique
    write_lines(reading.folder / "3.jsonl", rows_of(3, 200))
    assert reading.read() != rows
    assert reading.store.totals().unique - before < before / 2


@pytest.mark.parametrize("damage", ["lost", "damaged"])
def test_a_block_that_is_gone_costs_its_file(reading: Reading, damage: str) -> None:
    for number in range(3):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number, 200))
    whole = reading.read()
    [step] = [e for e in reading.store.entries("steps") if e.name.endswith("state.json")]
    folder = step.name.rpartition("/")[0]
    data = sorted(entry.name for entry in reading.store.entries(folder) if entry.name.endswith(".arrow"))
    digest = reading.store.entry(data[0]).digest  # type: ignore[union-attr]
    if damage == "lost":
        reading.store.delete_many([f"{BLOCKS_FOLDER}/{digest}", *data, step.name])
        assert reading.read() == whole
    else:
        path, offset, length = payload(reading.store, data[0])
        flip(path, offset + length // 2)
        with pytest.warns(CacheWarning, match="is damaged and runs again"):
            assert reading.read() == whole
    assert reading.files == ["0.jsonl"]


@pytest.fixture
def start_reading(warm_datasets: WarmPython, reading: Reading) -> Callable[..., Started]:
    """Starts a process that reads a folder; see `folders_job`."""

    def start(folder: Path, stem: str, told: Path) -> Started:
        words = ["-m", "tests.recipes.folders_job", folder, reading.store.path, stem, told]
        return warm_datasets.start(words, stdout=PIPE, text=True)

    return start


def test_processes_that_read_the_same_files_at_once_read_each_once(
    reading: Reading, tmp_path: Path, start_reading: Callable[..., Started]
) -> None:
    (tmp_path / "more").mkdir()
    for number in range(8):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number))
        write_lines(tmp_path / "more" / f"{number}.jsonl", rows_of(number))
    write_lines(tmp_path / "more" / "8.jsonl", rows_of(8))
    running = [
        start_reading(folder, "none", tmp_path / "told")
        for folder in (reading.folder, tmp_path / "more", reading.folder)
    ]
    read = [name for process in running for name in process.communicate()[0].split()]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(read) == [f"{number}.jsonl" for number in range(9)]
    assert reading.read() == reading.read_whole()
    assert reading.files == []


def test_a_first_run_that_is_killed_goes_on_behind_the_files_that_were_done(
    reading: Reading, tmp_path: Path, start_reading: Callable[..., Started]
) -> None:
    for number in range(6):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number))
    process = start_reading(reading.folder, "4", tmp_path / "told")
    while not (tmp_path / "told").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert reading.read() == reading.read_whole()
    assert reading.files == ["4.jsonl", "5.jsonl"]


def test_a_file_that_changes_while_it_is_read_is_an_error_and_keeps_nothing(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number))
    read = file_reader.read_tables

    def write_meanwhile(kind: str, files: Any, *rest: Any) -> Any:
        if Path(files[0]).name == "1.jsonl":
            write_lines(reading.folder / "1.jsonl", rows_of(1, 41))
        yield from read(kind, files, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(file_reader, "read_tables", write_meanwhile)
        with pytest.raises(InvalidValueError, match=r"1.jsonl' has changed since this run first read it"):
            reading.read()
    assert reading.read() == reading.read_whole()
    assert reading.files == ["1.jsonl", "2.jsonl"]


def test_a_file_that_changes_while_all_are_read_at_once_is_an_error(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(reading.folder / "0.jsonl", [{"a": {"p": 1}}, {"a": {"q": 1}}])
    read = mixture.read

    def write_meanwhile(source: Any, folder: Any) -> datasets.Dataset:
        rows = read(source, folder)
        write_lines(reading.folder / "0.jsonl", rows_of(1))
        return rows

    source = sources.find(reading.folder)
    with monkeypatch.context() as patch:
        patch.setattr("castore.recipes.runner.read", write_meanwhile)
        with pytest.raises(InvalidValueError, match="has changed since this run first read it"):
            len(runner.open_source(source, reading.store, cached=False, codec="zstd"))


def test_files_that_depend_on_each_other_are_kept_once_and_tried_once(reading: Reading) -> None:
    for number in range(3):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number))
    write_lines(reading.folder / "3.jsonl", [{"text": "x", "n": 1, "x": 0.5}, {"text": 7, "n": 2}])
    assert reading.read() == reading.read_whole()
    wait()
    assert reading.files == ["0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"]
    assert list(reading.store.entries(BLOCKS_FOLDER)) == []
    write_lines(reading.folder / "4.jsonl", rows_of(4))
    assert reading.read() == reading.read_whole()
    wait()
    assert reading.files == []
    (reading.folder / "3.jsonl").unlink()
    assert reading.read() == reading.read_whole()
    assert reading.files == ["0.jsonl", "1.jsonl", "2.jsonl", "4.jsonl"]


def test_a_run_tells_how_many_files_it_read(reading: Reading) -> None:
    for number in range(3):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number))
    recipe = Recipe(str(reading.folder), str(reading.folder.parent / "out.jsonl"), [lower])
    first = runner.process(recipe, store=reading.store)
    again = runner.process(recipe, store=reading.store)
    write_lines(reading.folder / "3.jsonl", rows_of(3))
    more = runner.process(recipe, store=reading.store)
    assert [(ran.files, ran.files_read) for ran in (first, again, more)] == [(3, 3), (3, 0), (4, 1)]
    assert (first.seconds_saved, again.seconds_saved) == (0.0, 0.0)
    assert more.seconds_saved > 0.0
    whole = runner.process(dataclasses.replace(recipe, use_cache=False), store=reading.store)
    assert (whole.files, whole.files_read) == (4, 4)


def test_a_store_without_room_for_the_files_reads_them_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(4):
        lines = [json.dumps({"text": os.urandom(3000).hex()}) for _ in range(100)]
        (tmp_path / "data" / f"{number}.jsonl").write_text("\n".join(lines))
    source = sources.find(tmp_path / "data")
    with Store(tmp_path / "store", memory=0, max_size="1MB") as store, small_blocks(1 << 16, 10_000):
        with pytest.warns(CacheWarning, match="read together, so a change of one .* no room for all of them"):
            rows = told(runner.open_source(source, store, cached=True, codec="zstd"))
        with pytest.warns(CacheWarning, match="was not stored"):
            wait()
        assert list(store.entries(UNITS_FOLDER)) == []
    assert rows == told(sources.read(source, tmp_path / "work"))


def test_several_sources_without_a_limit_are_read_by_file(reading: Reading, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for number in range(2):
        write_lines(reading.folder / f"{number}.jsonl", rows_of(number))
        datasets.Dataset.from_list(rows_of(5 + number)).to_parquet(tmp_path / "more" / f"{number}.parquet")
    parts = [(str(reading.folder), 1.0), (str(tmp_path / "more"), 2.0)]
    both = mixture.find_sources(parts, None)
    assert reading.read(both) == told(mixture.read(both, tmp_path / "work"))
    assert reading.files == ["0.jsonl", "1.jsonl", "0.parquet", "1.parquet"]
    write_lines(reading.folder / "2.jsonl", rows_of(3))
    both = mixture.find_sources(parts, None)
    assert reading.read(both) == told(mixture.read(both, tmp_path / "work"))
    assert reading.files == ["2.jsonl"]
    drawn = mixture.find_sources(parts, 50)
    assert reading.read(drawn) == told(mixture.read(drawn, tmp_path / "work"))
    assert reading.files == []


def test_sources_whose_columns_differ_are_joined_as_a_whole(reading: Reading, tmp_path: Path) -> None:
    write_lines(reading.folder / "0.jsonl", [{"a": 1, "b": "x"}] * 3)
    write_lines(tmp_path / "other.jsonl", [{"a": 1, "c": 0.5}] * 3)
    parts = [(str(reading.folder), 1.0), (str(tmp_path / "other.jsonl"), 1.0)]
    both = mixture.find_sources(parts, None)
    assert reading.read(both) == told(mixture.read(both, tmp_path / "work"))
