"""`Pipeline.blame`: rows of results lead back to the rows they were made of, and no further than is sure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from castore import Store
from castore.adapters.datasets import Blame, CacheWarning, Pipeline
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.errors import InvalidValueError, NotFoundError
from castore.recipes import make
from tests.adapters.datasets.small_blocks import small_blocks
from tests.helpers import LONG, flip, payload

STATS = "__dj__stats__"
COUNT = 2500
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _blocks() -> Iterator[None]:
    with small_blocks(6400, 100):
        yield


def texts(count: int = COUNT, *, numbered: bool = True) -> datasets.Dataset:
    """Texts, many of them equal; with numbers of rows, or without."""
    columns: dict[str, list[Any]] = {"text": [f"{n % 700} " + "word " * (n * 7 % 11) for n in range(count)]}
    if numbered:
        columns["id"] = list(range(count))
    return datasets.Dataset.from_dict(columns)


def upper(sample: Row) -> Row:
    return {"text": sample["text"].upper()}


def same(sample: Row) -> Row:
    return {"text": sample["text"]}


class Short:
    """A filter with a statistic."""

    def compute_stats(self, sample: Row) -> Row:
        sample[STATS]["length"] = len(sample["text"])
        return sample

    def process(self, sample: Row) -> bool:
        return bool(sample[STATS]["length"] % 3)


class Batched:
    """A mapper that sees batches, and drops some of their rows."""

    def process_batched(self, samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        kept = [n for n, text in enumerate(samples["text"]) if len(text) % 4]
        return {
            name: [f"{values[n]}." if name == "text" else values[n] for n in kept]
            for name, values in samples.items()
        }


def check(pipeline: Pipeline, data: datasets.Dataset, numbers: range) -> list[Blame]:
    """Blame rows of a result that has the number of its input's row in a column."""
    result = pipeline.run(data).dataset
    found = []
    for row in numbers:
        if row < len(result):
            told = pipeline.blame(data, row)
            assert told.rows_in == (result["id"][row],) * 2, row
            found.append(told)
    assert found
    return found


@pytest.mark.parametrize("count", [40, COUNT], ids=["as one piece", "in blocks"])
def test_every_kind_of_step_leads_back_to_the_row_of_the_input(store: Store, count: int) -> None:
    operators = [upper, Short(), Batched(), make("document_deduplicator"), same]
    pipeline = Pipeline(operators, store=store)
    [told, *_] = check(pipeline, texts(count), range(11, count, 97))
    assert [(step.name, step.kind) for step in told.steps] == [(s.name, s.kind) for s in pipeline.steps]
    for step, after in zip(told.steps, told.steps[1:], strict=False):
        assert step.rows_out == after.rows_in
    assert told.steps[-1].rows_out == (11, 11)
    changed = [["text"], [STATS], [], ["text"], [], []]
    assert [step.changed for step in told.steps] == changed
    assert [step.note for step in told.steps] == ["", "", "", "told by the column 'id'", "", ""]


def test_a_step_tells_its_operator_and_the_time_of_the_block(store: Store) -> None:
    data, pipeline = texts(), Pipeline([upper], store=store)
    started = time.time()
    [report] = pipeline.run(data).steps
    [step] = pipeline.blame(data, 2000).steps
    [planned] = pipeline._plan(data)
    assert (step.operator, step.key) == (planned.description.fingerprint, report.key)
    assert step.rows_timed is not None
    assert step.seconds is not None
    assert step.when is not None
    assert 0 < step.rows_timed < 500
    assert 0 < step.seconds < report.seconds
    assert started - 1 < step.when < time.time() + 1


def test_equal_rows_are_told_apart_where_a_filter_keeps_all_of_them(store: Store) -> None:
    data, pipeline = texts(numbered=False), Pipeline([Short()], store=store)
    pipeline.run(data)
    kept = [n for n, text in enumerate(data["text"][:]) if len(text) % 3]
    for row in range(0, len(kept), 131):
        assert pipeline.blame(data, row).rows_in == (kept[row], kept[row])


def test_one_of_equal_rows_is_told_as_one_of_them(store: Store) -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "b", "a", "c", "a"]})
    pipeline = Pipeline([make("document_deduplicator")], store=store)
    assert pipeline.run(data).dataset["text"][:] == ["a", "b", "c"]
    told = pipeline.blame(data, 0)
    assert told.rows_in == (0, 4)
    assert told.steps[0].note == "one of 3 equal rows: 0, 2, 4"
    assert told.steps[0].changed is None
    assert [pipeline.blame(data, row).rows_in for row in (1, 2)] == [(1, 1), (3, 3)]


def test_a_batched_mapper_without_a_column_to_tell_by_names_the_block(store: Store) -> None:
    data, pipeline = texts(numbered=False), Pipeline([upper, Batched(), Short()], store=store)
    result = pipeline.run(data).dataset
    kept = [n for n, text in enumerate(data["text"][:]) if len(text) % 4 and (len(text) + 1) % 3]
    assert len(kept) == len(result)
    for row in (0, 700, len(kept) - 1):
        told = pipeline.blame(data, row)
        assert told.rows_in is not None
        first, last = told.rows_in
        assert first <= kept[row] <= last
        assert (first % 1000, last + 1 if last + 1 == COUNT else (last + 1) % 1000) in [(0, 0), (0, COUNT)]
        assert told.steps[1].note == "a batched operator: any rows of the block may have made it"
        assert (told.steps[0].rows_in, told.steps[0].changed) == (told.rows_in, None)


class Louder:
    """A mapper that sees batches, and keeps their rows in their places."""

    def process_batched(self, samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"text": [text + "!" for text in samples["text"]]}


def test_a_batched_mapper_that_gives_as_many_rows_is_taken_at_its_word_in_the_note_alone(
    store: Store,
) -> None:
    data, pipeline = texts(numbered=False), Pipeline([Louder()], store=store)
    pipeline.run(data)
    [step] = pipeline.blame(data, 1234).steps
    assert step.rows_in == (1000, 1999)
    assert step.note.endswith("; row 1,234, if it keeps rows in their places")


class Doubled:
    """A mapper that makes two rows of each."""

    def process_batched(self, samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"text": [text + end for text in samples["text"] for end in "ab"]}


def test_a_row_that_was_made_of_others_is_not_told_as_one(store: Store) -> None:
    data, pipeline = datasets.Dataset.from_dict({"text": ["x", "y"]}), Pipeline([Doubled()], store=store)
    pipeline.run(data)
    told = pipeline.blame(data, 3)
    assert (told.rows_in, told.steps[0].changed) == ((0, 1), None)


def test_rows_before_results_that_were_dropped_are_told_as_far_as_is_sure(store: Store) -> None:
    data = texts()
    pipeline = Pipeline([upper, same, Short(), same], store=store)
    kept = [n for n, text in enumerate(data["text"][:]) if len(text) % 3]
    pipeline.run(data)
    pipeline.drop_intermediate()
    told = pipeline.blame(data, 900)
    assert told.rows_in is None
    assert [step.rows_in for step in told.steps] == [None, None, None, None, (900, 900)]
    assert "not kept any more, so the row before it is not known" in told.steps[3].note
    maps = Pipeline([upper, same], store=store, name="maps")
    maps.run(data)
    maps.drop_intermediate()
    assert maps.blame(data, 900).rows_in == (900, 900)
    assert len(kept) > 900


def test_a_block_that_gc_took_leaves_the_step_as_a_whole(store: Store) -> None:
    data, pipeline = texts(), Pipeline([Short()], store=store)
    result = pipeline.run(data).dataset
    store.delete_many([entry.name for entry in store.entries(BLOCKS_FOLDER)])
    told = pipeline.blame(data, 1200)
    assert told.rows_in == (result["id"][1200],) * 2
    assert [step.rows_timed for step in told.steps] == [COUNT, COUNT]


def test_rows_that_are_not_there_and_runs_that_are_not_kept_are_errors(store: Store) -> None:
    data, pipeline = texts(50), Pipeline([upper], store=store)
    with pytest.raises(NotFoundError, match="the result of 'upper', the last step, is not kept: the"):
        pipeline.blame(data, 0)
    pipeline.run(data)
    for row in (50, -1):
        with pytest.raises(InvalidValueError, match=f"the result has rows 0 to 49, so no row {row}"):
            pipeline.blame(data, row)
    odd: list[Any] = ["1", None, 1.5, True]
    for row in odd:
        with pytest.raises(InvalidValueError, match="blame takes the number of a row, from 0, not"):
            pipeline.blame(data, row)
    plain = Pipeline([upper], store=store, use_cache=False)
    for other in (plain, Pipeline([upper], store=store, use_checkpoint=True)):
        with pytest.raises(InvalidValueError, match="this pipeline keeps none"):
            other.blame(data, 0)


def test_a_pipeline_without_steps_hands_its_rows_on(store: Store) -> None:
    told = Pipeline([], store=store).blame(texts(5), 3)
    assert (told.rows_in, told.steps, told.source) == ((3, 3), [], None)


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=300)
KINDS = {"map": upper, "filter": Short(), "batched": Batched(), "dedup": make("document_deduplicator")}


@pytest.mark.torture
@settings(
    max_examples=60 if LONG else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(LENGTHS, st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4), st.data())
def test_no_row_is_ever_told_wrongly(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], kinds: list[str], data: Any
) -> None:
    numbered = data.draw(st.booleans())
    columns: dict[str, list[Any]] = {"text": ["w" * length for length in lengths]}
    plain = datasets.Dataset.from_dict({**columns, "id": list(range(len(lengths)))})
    operators = [KINDS[kind] for kind in kinds]
    folder = tmp_path_factory.mktemp("blame")
    with small_blocks(1000, 10), Store(folder / "store", memory=0) as store:
        pipeline = Pipeline(operators, store=store)
        oracle = Pipeline(operators, store=store, use_cache=False).run(plain).dataset["id"][:]
        given_rows = plain if numbered else plain.remove_columns("id")
        result = pipeline.run(given_rows).dataset
        assert len(result) == len(oracle)
        if not len(result):
            return
        row = data.draw(st.integers(0, len(result) - 1))
        told = pipeline.blame(given_rows, row)
        assert told.rows_in is not None
        assert told.rows_in[0] <= oracle[row] <= told.rows_in[1]
        if numbered:
            assert told.rows_in == (oracle[row], oracle[row])


def test_blame_of_a_damaged_result_says_so(store: Store) -> None:
    data, pipeline = texts(), Pipeline([upper, Short()], store=store)
    pipeline.run(data)
    name = pipeline._plan(data)[0].name
    arrow = sorted(e.name for e in store.entries(name) if e.name.endswith(".arrow"))
    path, offset, length = payload(store, arrow[0])
    flip(path, offset + length // 2)
    with Store(store.path, memory=0) as other, pytest.warns(CacheWarning, match="is damaged"):
        told = Pipeline([upper, Short()], store=other).blame(data, 5)
    assert told.steps[-1].rows_in is not None
