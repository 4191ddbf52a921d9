"""`castore process --blame`: the file, the row and the line that a row of the result comes from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import wait
from castore.recipes import Recipe, blame, by_file, process
from tests.cli.conftest import Ran, folder  # noqa: F401 - a fixture
from tests.recipes.recipes import recipe

Row = dict[str, Any]


def upper(sample: Row) -> Row:
    return {"text": sample["text"].upper()}


class Odd:
    """Keeps every other row."""

    def compute_stats(self, sample: Row) -> Row:
        return sample

    def process(self, sample: Row) -> bool:
        return bool(sample["n"] % 2)


def rows_of(number: int, count: int = 30) -> list[Row]:
    return [{"text": f"{number} has {n}", "n": n} for n in range(count)]


def lines(rows: list[Row], between: str = "\n") -> str:
    return "".join(json.dumps(row) + between for row in rows)


WRITERS: dict[str, Callable[[Path, list[Row]], object]] = {
    "jsonl": lambda path, rows: path.write_text(lines(rows)),
    "jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows).encode())),
    "json": lambda path, rows: path.write_text(json.dumps(rows)),
    "csv": lambda path, rows: datasets.Dataset.from_list(rows).to_csv(path, index=False),
    "parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(path),
}


def make(root: Path, **keys: Any) -> Recipe:
    keys.setdefault("dataset_path", str(root / "data"))
    return Recipe(export_path=str(root / "out.jsonl"), process=[upper, Odd()], **keys)


@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        # Each file read alone, or files together, in turn; `make torture` has both for each kind.
        pytest.param(kind, unit, marks=[pytest.mark.matrix] * (number % 2 != at))
        for number, kind in enumerate(WRITERS)
        for at, unit in enumerate((1, 1 << 21))
    ],
)
def test_a_row_leads_to_its_file(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, kind: str, unit: int
) -> None:
    monkeypatch.setattr(by_file, "UNIT_BYTES", unit)
    (tmp_path / "data").mkdir()
    for number in range(3):
        WRITERS[kind](tmp_path / "data" / f"{number}.{kind}", rows_of(number))
    process(make(tmp_path), store=store)
    for row in (0, 14, 15, 31, 44):
        found = blame(make(tmp_path), store, row)
        file, place = divmod(row, 15)
        assert found.rows_in == (file * 30 + place * 2 + 1,) * 2
        assert found.source is not None
        assert found.source.path == str(tmp_path / "data" / f"{file}.{kind}")
        assert found.source.row == place * 2 + 1
        assert found.source.line == (place * 2 + 2 if kind.startswith("jsonl") else None)


def test_a_line_is_told_where_each_line_is_a_row(tmp_path: Path, store: Store) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.jsonl").write_text(lines(rows_of(0), "\n\n"))
    (tmp_path / "data" / "1.jsonl").write_text(lines(rows_of(1), "\n").replace(', "n"', ',\n"n"'))
    process(make(tmp_path), store=store)
    found = [blame(make(tmp_path), store, row).source for row in (1, 16)]
    assert [place and (place.row, place.line) for place in found] == [(3, 7), (3, None)]


def test_a_file_that_was_moved_is_told_by_its_new_name(tmp_path: Path, store: Store) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.jsonl").write_text(lines(rows_of(0)))
    process(make(tmp_path), store=store)
    (tmp_path / "data").rename(tmp_path / "moved")
    place = blame(make(tmp_path, dataset_path=str(tmp_path / "moved")), store, 0).source
    assert place is not None
    assert place.path == str(tmp_path / "moved" / "0.jsonl")


def test_files_that_were_read_together_are_not_guessed(tmp_path: Path, store: Store) -> None:
    (tmp_path / "data").mkdir()
    mixed = [{"text": "x", "n": 1, "d": {"p": 1}}, {"text": "y", "n": 3, "d": {"q": "z"}}]
    for number in range(2):
        (tmp_path / "data" / f"{number}.json").write_text(json.dumps(mixed))
    process(make(tmp_path), store=store)
    found = blame(make(tmp_path), store, 3)
    assert found.rows_in == (3, 3)
    assert found.source is not None
    assert (found.source.path, found.source.row) == (None, None)
    assert found.source.note == "the files were read together, so their rows were not counted"
    one = make(tmp_path, dataset_path=str(tmp_path / "data" / "1.json"))
    process(one, store=store)
    place = blame(one, store, 1).source
    assert place is not None
    assert (place.path, place.row, place.note) == (str(tmp_path / "data" / "1.json"), 1, "")


def test_rows_of_several_sources_and_drawn_rows(tmp_path: Path, store: Store) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text(lines(rows_of(number)))
    configs = [{"path": str(tmp_path / f"{number}.jsonl")} for number in range(2)]
    both = make(tmp_path, dataset_path="", dataset={"configs": configs})
    process(both, store=store)
    place = blame(both, store, 20).source
    assert place is not None
    assert (place.path, place.line) == (str(tmp_path / "1.jsonl"), 12)
    drawn = make(tmp_path, dataset_path="", dataset={"configs": configs, "max_sample_num": 10})
    process(drawn, store=store)
    place = blame(drawn, store, 0).source
    assert place is not None
    assert (place.path, place.row, place.note) == (None, None, "the rows were drawn from several sources")


def test_a_folder_of_save_to_disk_is_told_with_the_row(tmp_path: Path, store: Store) -> None:
    datasets.Dataset.from_list(rows_of(0)).save_to_disk(tmp_path / "data")
    process(make(tmp_path), store=store)
    place = blame(make(tmp_path), store, 2).source
    assert place is not None
    assert (place.path, place.row, place.line) == (str(tmp_path / "data"), 5, None)


def test_the_files_are_read_again_where_the_store_has_lost_them(tmp_path: Path, store: Store) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.jsonl").write_text(lines(rows_of(0)))
    process(make(tmp_path), store=store)
    wait()
    lost = [e.name for e in store.entries("steps/") if e.name.startswith("steps/source_")]
    assert lost
    store.delete_many(lost)
    found = blame(make(tmp_path), store, 2)
    assert found.rows_in == (5, 5)


def test_the_command_tells_operators_and_the_line(here: Callable[..., Ran], place: Path) -> None:
    path = recipe(place)
    assert here("--config", path).code == 0
    report = here("--config", path, "--blame", "40", "--json").json
    exported = (place / "outputs/demo.jsonl").read_text().splitlines()
    text = json.loads(exported[40])
    source = json.loads((place / "data/demo.jsonl").read_text().splitlines()[report["source"]["line"] - 1])
    assert source["n"] == text["n"]
    assert report["rows_in"] == [report["source"]["row"]] * 2
    ran = here("--config", path, "--blame", "40")
    assert ran.code == 0
    told = ran.out.splitlines()
    for step in report["steps"]:
        assert any(line.startswith(f" {step['name']} ") and step["operator"][:8] in line for line in told)
    assert told[-1] == (
        f"row 40 of the result is row {report['rows_in'][0]} of the input: "
        f"line {report['source']['line']} of {place}/data/demo.jsonl"
    )


def test_the_command_refuses_rows_that_are_not_there_and_two_questions(
    here: Callable[..., Ran], place: Path
) -> None:
    path = recipe(place)
    ran = here("--config", path, "--blame", "0")
    assert ran.code == 1
    assert "the last step, is not kept: the pipeline has not run" in ran.err
    assert here("--config", path).code == 0
    assert "so no row 99999; give one of its rows" in here("--config", path, "--blame", "99999").err
    ran = here("--config", path, "--blame", "0", "--explain")
    assert ran.code == 2
    assert "--blame answers a question of its own" in ran.err
