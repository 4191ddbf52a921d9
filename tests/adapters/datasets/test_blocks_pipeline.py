"""Operators of pipelines in small blocks: each gives what one pass over all rows gives, and rows that are
appended run alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, Pipeline
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.adapters.datasets.ram_results import RamPipeline, RamResults
from tests.adapters.datasets.small_blocks import small_blocks, told

STATS = "__dj__stats__"
COUNT, MORE = 1400, 60
#: Bytes and rows of a block. A pipeline writes 1,000 rows at a time, so its first block has as many.
BYTES, ROWS = 3200, 50


class Ran:
    """Counts rows that ran in this process; the count does not count in keys."""

    rows = 0

    def __castore_key__(self) -> str:
        return "Ran"

    def __call__(self, rows: int = 1) -> None:
        Ran.rows += rows


ran = Ran()


@pytest.fixture(autouse=True)
def _blocks() -> Iterator[None]:
    Ran.rows = 0
    with small_blocks(BYTES, ROWS):
        yield


def rows(count: int) -> datasets.Dataset:
    """Texts, some of them equal."""
    return datasets.Dataset.from_dict(
        {
            "text": [f"{n % 1100} " + "word " * (n * 7 % 11) for n in range(count)],
            "number": list(range(count)),
            "tags": [None if n % 7 == 0 else [{"b": n, "a": "x"}] * (n % 3) for n in range(count)],
        }
    )


def lower(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"text": sample["text"].upper(), "size": len(sample["text"])}


async def later(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"text": sample["text"] + "."}


class Length:
    """A filter with a statistic."""

    def compute_stats(self, sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        sample[STATS]["length"] = len(sample["text"])
        return sample

    def process(self, sample: dict[str, Any]) -> bool:
        ran()
        return bool(sample[STATS]["length"] > 9)


class OtherStats:
    """A filter whose statistic has another type, and is missing at first."""

    def compute_stats(self, sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        sample[STATS]["share"] = None if sample["number"] < 500 else sample["number"] / 3
        return sample

    def process(self, sample: dict[str, Any]) -> bool:
        ran()
        return bool((sample[STATS]["share"] or 0) < 400)


class Batched:
    """A map of batches, which counts the rows of each."""

    def is_batched_op(self) -> bool:
        return True

    def process_batched(self, samples: dict[str, list[Any]]) -> dict[str, Any]:
        ran(len(samples["text"]))
        return {**samples, "of": [len(samples["text"])] * len(samples["text"])}


class BatchedFilter:
    """A filter of batches with a statistic: it keeps every third row of a batch."""

    def is_batched_op(self) -> bool:
        return True

    def compute_stats_batched(self, samples: dict[str, list[Any]]) -> dict[str, Any]:
        ran(len(samples["text"]))
        for place, stats in enumerate(samples[STATS]):
            stats["place"] = place
        return samples

    def process_batched(self, samples: dict[str, list[Any]]) -> Iterator[bool]:
        ran(len(samples["text"]))
        return (stats["place"] % 3 == 0 for stats in samples[STATS])


class Deduplicator:
    """Keeps the first of equal texts."""

    def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "hash": hashlib.sha256(sample["text"].encode()).hexdigest()}

    def process(self, data: datasets.Dataset) -> datasets.Dataset:
        seen: dict[str, int] = {}
        for place, digest in enumerate(data["hash"]):
            seen.setdefault(digest, place)
        return data.select(sorted(seen.values()))


class Late:
    """A map whose column has no value in the first thousand rows."""

    def process(self, sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {**sample, "late": None if sample["number"] < 1000 else "text"}


class Fails:
    """A map that fails."""

    def process(self, sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"n": 1 // (sample["number"] - 1277)}


OPERATORS: dict[str, Callable[[], list[Any]]] = {
    "a function": lambda: [lower],
    "a coroutine function": lambda: [later],
    "a filter": lambda: [Length()],
    "two filters": lambda: [Length(), OtherStats()],
    "batches": lambda: [Batched()],
    "a filter of batches": lambda: [BatchedFilter()],
    "after a filter, batches": lambda: [Length(), Batched(), BatchedFilter()],
    "a deduplicator": lambda: [lower, Deduplicator(), Length()],
    "a type that comes late": lambda: [Late()],
    "an error late": lambda: [lower, Fails()],
    "all": lambda: [lower, Length(), Deduplicator(), Batched(), OtherStats(), later, BatchedFilter()],
}
#: Operators that "all" has, too: `make torture` runs them alone.
IN_ALL = {"a function", "a coroutine function", "a filter", "batches", "a filter of batches"}


def outcome(make: Callable[[], Any]) -> Any:
    """All that is seen of a result; the type of an error."""
    try:
        return told(make())
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(
    ("name", "num_proc"),
    [
        *(pytest.param(name, None, marks=[pytest.mark.matrix] * (name in IN_ALL)) for name in OPERATORS),
        pytest.param("all", 2, marks=pytest.mark.matrix),
        ("an error late", 2),
    ],
)
def test_operators_in_blocks_give_what_one_pass_gives(name: str, num_proc: int | None, store: Store) -> None:
    for count in (COUNT, COUNT + MORE):
        data = rows(count)
        uncached = Pipeline(OPERATORS[name](), store=store, use_cache=False)
        plain = outcome(lambda: uncached.run(data).dataset)  # noqa: B023
        made = Pipeline(OPERATORS[name](), store=store, num_proc=num_proc)
        assert outcome(lambda: made.run(data).dataset) == plain  # noqa: B023
    assert list(store.entries(BLOCKS_FOLDER))
    Ran.rows = 0
    assert outcome(lambda: Pipeline(OPERATORS[name](), store=store).run(data).dataset) == plain
    assert Ran.rows == 0 or not isinstance(plain, dict)


def test_rows_that_are_appended_run_alone_through_all_steps(store: Store) -> None:
    def run(count: int) -> Any:
        Ran.rows = 0
        return Pipeline([lower, Length(), later, OtherStats()], store=store).run(rows(count))

    run(COUNT)
    result = run(COUNT + MORE)
    assert 6 * MORE * 0.5 < Ran.rows < 6 * (MORE + 5 * ROWS)
    assert result.steps[0].rows_in == COUNT + MORE


def test_a_row_that_is_deleted_costs_the_blocks_around_it(store: Store) -> None:
    operators = [lower, Length(), later, OtherStats()]
    data = rows(COUNT)
    Pipeline(operators, store=store).run(data)
    Ran.rows = 0
    less = data.select([n for n in range(COUNT) if n != 1150])
    result = Pipeline(operators, store=store).run(less)
    assert 0 < Ran.rows < 6 * 12 * ROWS
    assert told(result.dataset) == told(Pipeline(operators, store=store, use_cache=False).run(less).dataset)


def test_a_step_behind_one_that_gives_the_same_rows_as_before_runs_no_row(store: Store) -> None:
    def trimmed(sample: dict[str, Any]) -> dict[str, Any]:
        return {"text": sample["text"].strip()}

    def trimmed_by_another(sample: dict[str, Any]) -> dict[str, Any]:
        return {"text": sample["text"].lstrip().rstrip()}

    data = rows(COUNT)
    Pipeline([trimmed, lower, Length()], store=store).run(data)
    edited, *others = Pipeline([trimmed_by_another, lower, Length()], store=store).run(data).steps
    assert edited.rows_reused == 0
    assert [step.rows_in for step in others] == [step.rows_reused for step in others]


def test_explain_tells_of_every_step_what_its_run_finds_kept(store: Store) -> None:
    pipeline = Pipeline([lower, Length(), later, OtherStats()], store=store)
    pipeline.run(rows(COUNT))
    foretold = pipeline.explain(rows(COUNT + MORE))
    ran = pipeline.run(rows(COUNT + MORE))
    assert len(foretold) == len(ran.steps) > 5
    for each, step in zip(foretold, ran.steps, strict=True):
        assert each.rows_reused is not None
        # A block that runs may still give what is kept, and the next step finds that.
        assert 1000 < each.rows_reused <= step.rows_reused < COUNT + MORE
        assert each.blocks_in is not None
        assert each.blocks_reused is not None
        assert 1 <= each.blocks_in - each.blocks_reused <= 2
    assert [each.rows_in for each in foretold[:3]] == [COUNT + MORE] * 3
    assert [each.rows_in for each in foretold[3:]] == [None] * (len(foretold) - 3)  # behind a filter
    assert foretold[0].rows_reused == ran.steps[0].rows_reused


def test_a_report_tells_the_time_that_reused_rows_took_when_they_ran(store: Store) -> None:
    pipeline = Pipeline([lower, Length(), later, OtherStats()], store=store)
    first, again, more, every = (pipeline.run(rows(n)) for n in (COUNT, COUNT, COUNT + MORE, COUNT + MORE))
    for steps in zip(first.steps, again.steps, more.steps, every.steps, strict=True):
        ran, hit, edited, last = (step.seconds_saved for step in steps)
        assert ran == 0.0
        assert hit > 0.0
        assert last > 0.0
        assert 0.0 < edited < last
        assert 0 < (steps[2].rows_run or 0) < 6 * ROWS
        assert (steps[0].rows_run, steps[1].rows_run) == (steps[0].rows_in, 0)


def test_explain_tells_how_many_rows_would_run(store: Store) -> None:
    def shout(sample: dict[str, Any]) -> dict[str, Any]:
        return {"text": sample["text"].upper()}

    rows = datasets.Dataset.from_dict({"text": [f"{n} " + "word " * (n % 40) for n in range(3000)]})
    with small_blocks():
        pipeline = Pipeline([shout], store=store)
        pipeline.run(rows)
        edited = datasets.concatenate_datasets([rows, datasets.Dataset.from_dict({"text": ["one more"]})])
        [told] = pipeline.explain(edited)
        [ran] = pipeline.run(edited).steps
        assert told.rows_in == ran.rows_in == 3001
        assert told.rows_reused == ran.rows_reused
        assert 1000 < ran.rows_reused < 3001
        assert told.blocks_in is not None
        assert told.blocks_reused == told.blocks_in - 1
        assert str(told) == (
            f"{told.name}: miss: the input dataset has changed; {3001 - ran.rows_reused} of 3,001 rows run "
            f"(1 of {told.blocks_in} blocks)"
        )
        [again] = pipeline.explain(edited)
        assert (again.hit, again.rows_in) == (True, None)
        assert told.is_sure
        shorter = edited.select(range(1, 3000))
        [told] = pipeline.explain(shorter)
        [ran] = pipeline.run(shorter).steps
        assert (told.rows_in, told.rows_reused) == (2999, ran.rows_reused)
        assert ran.rows_reused > 1000
        assert not told.is_sure  # the first block has changed, and decides about the types of all
        assert str(told).endswith(" blocks), if new rows have the types of the others")


class CountedHashes(Deduplicator):
    """Counts the rows that it hashes."""

    def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        return super().compute_hash(sample)


class BatchedHashes(Deduplicator):
    """Hashes batches; the place in the batch counts."""

    def is_batched_op(self) -> bool:
        return True

    def compute_hash_batched(self, samples: dict[str, list[Any]]) -> dict[str, Any]:
        ran(len(samples["text"]))
        return {**samples, "hash": [f"{place % 7}{text}" for place, text in enumerate(samples["text"])]}


class ChangesText(CountedHashes):
    """A deduplicator that changes what it is given, in one row late."""

    def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
        return super().compute_hash(sample | {"text": "x" if sample["number"] == 1177 else sample["text"]})


def twice(count: int) -> datasets.Dataset:
    """Rows of which the last hundred have texts of earlier ones, in a format that shows some columns."""
    data = rows(count)
    texts = [f"{n} {text}" for n, text in enumerate(data["text"])]
    texts[-100:] = texts[:100]
    data = data.remove_columns(["text", "tags"]).add_column("text", texts).add_column("hidden", texts)
    return data.with_format("numpy", columns=["number", "text"])


@pytest.mark.parametrize(
    ("deduplicator", "num_proc"),
    [
        (CountedHashes, None),
        pytest.param(BatchedHashes, None, marks=pytest.mark.matrix),
        (BatchedHashes, 2),
    ],
)
def test_hashes_of_blocks_that_stay_are_not_computed_again(
    deduplicator: Callable[[], Any], num_proc: int | None, store: Store
) -> None:
    pipeline = Pipeline([deduplicator()], store=store, num_proc=num_proc)
    pipeline.run(twice(COUNT))
    foretold, before = pipeline.explain(twice(COUNT + MORE)), Ran.rows
    ran = pipeline.run(twice(COUNT + MORE))
    plain = Pipeline([deduplicator()], store=store, use_cache=False).run(twice(COUNT + MORE))
    assert told(ran.dataset) == told(plain.dataset)
    assert len(ran.dataset) == COUNT + MORE - 100 or deduplicator is BatchedHashes
    [step] = ran.steps
    assert step.rows_in == COUNT + MORE
    assert COUNT / 2 < step.rows_reused < COUNT
    assert step.seconds_saved > 0
    assert foretold[0].rows_reused == step.rows_reused
    if num_proc is None:
        assert before == Ran.rows - (COUNT + MORE) - (COUNT + MORE - step.rows_reused)


def test_a_deduplicator_that_changes_its_rows_hashes_all_of_them_in_one_pass_and_says_so(
    store: Store,
) -> None:
    with pytest.warns(CacheWarning, match="hashed all rows in one pass.*changes columns that it is given"):
        ran = Pipeline([ChangesText()], store=store).run(twice(COUNT))
    plain = Pipeline([ChangesText()], store=store, use_cache=False).run(twice(COUNT))
    assert told(ran.dataset) == told(plain.dataset)
    assert "x" in ran.dataset.with_format(None)["text"]


class Describes(Deduplicator):
    """A deduplicator that gives its result a description of its own."""

    def process(self, data: datasets.Dataset) -> datasets.Dataset:
        kept = super().process(data)
        kept.info.description = "all different"
        return kept


def described(count: int, name: str) -> datasets.Dataset:
    """The same rows, with a description of that name, and ids of its first two letters."""
    data = rows(count)
    features = data.features
    features["number"].id = features["tags"].feature["b"].id = f"the id {name[:2]}"
    info = datasets.DatasetInfo(name, citation=f"see {name}", license="MIT", features=features)
    return datasets.Dataset(data.data, info=info)


def about(data: datasets.Dataset) -> dict[str, Any]:
    return {**data.info.copy().__dict__, "features": data.features.to_dict()}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, 40, marks=pytest.mark.matrix) for name in ("a function", "a filter", "its own")),
        ("a deduplicator", 40),
        pytest.param("a deduplicator", COUNT, marks=pytest.mark.matrix),
        *((name, COUNT) for name in ("a function", "a filter", "its own")),
    ],
)
def test_a_result_has_the_description_and_the_ids_of_the_present_input(
    name: str, count: int, store: Store
) -> None:
    made = [lower, Describes(), later] if name == "its own" else OPERATORS[name]()
    for given in ("one", "only", "other", "one"):
        data = described(count, given)
        plain = Pipeline(made, store=store, use_cache=False).run(data).dataset
        for _ in range(2):
            assert about(Pipeline(made, store=store).run(data).dataset) == about(plain)
        # One step at a time, over results that the last run has kept.
        result = data
        for operator in made:
            result = Pipeline([operator], store=store).run(result).dataset
        assert about(result) == about(plain)


def test_another_description_alone_runs_nothing(store: Store) -> None:
    Pipeline([lower, Length()], store=store).run(rows(COUNT))
    Ran.rows = 0
    data = rows(COUNT)
    data.info.description = "the same rows"
    ran = Pipeline([lower, Length()], store=store).run(data)
    assert (Ran.rows, ran.hits) == (0, 3)
    assert ran.dataset.info.description == "the same rows"


def test_a_description_that_is_changed_in_place_is_that_of_later_results(store: Store) -> None:
    first = Pipeline([lower], store=store).run(rows(COUNT)).dataset
    for text in ("one", "other"):
        first.info.description = text
        assert Pipeline([later], store=store).run(first).dataset.info.description == text


def test_results_in_ram_have_the_description_of_the_present_input(store: Store) -> None:
    results = RamResults(5)
    for text in ("one", "other"):
        data = rows(40)
        data.info.description = text
        kept = RamPipeline([lower], store=store, results=results)
        assert [kept.run(data).dataset.info.description for _ in range(2)] == [text, text]
