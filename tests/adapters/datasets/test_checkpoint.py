"""Checkpoints: constant space, resuming at the right step, and messages that name the changed operator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, Pipeline
from castore.adapters.datasets.checkpoint import Checkpoint
from castore.errors import InvalidNameError
from castore.recipes import registry
from tests.adapters.datasets import noting
from tests.adapters.datasets.noting import Adds
from tests.helpers import flip, payload, recount


class Copies:
    """Changes nothing."""

    def process(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


@pytest.fixture(autouse=True)
def _fresh() -> None:
    noting.calls.clear()


@pytest.fixture
def few(texts: datasets.Dataset) -> datasets.Dataset:
    return texts.select(range(20))


def pipeline(store: Store, *operators: Any, name: str = "demo") -> Pipeline:
    return Pipeline(operators, store=store, name=name, use_checkpoint=True)


def test_a_finished_run_is_not_run_again(store: Store, few: datasets.Dataset) -> None:
    first = pipeline(store, Adds("a"), Adds("b")).run(few)
    assert len(noting.calls) == 40
    second = pipeline(store, Adds("a"), Adds("b")).run(few)
    assert len(noting.calls) == 40
    assert [step.hit for step in second.steps] == [True, True]
    assert second.dataset[:] == first.dataset[:] == few.map(lambda row: {"text": row["text"] + "ab"})[:]


def test_only_the_latest_step_is_kept_and_nothing_else(store: Store, few: datasets.Dataset) -> None:
    sizes = []
    for count in range(1, 5):
        pipeline(store, *map(Adds, "abcd"[:count])).run(few)
        assert [
            entry.name
            for entry in store.entries()
            if not entry.name.startswith((".datasets", ".checked", "checkpoints/demo/"))
        ] == []
        sizes.append(store.stat().stored)
        recount(store)
    assert len(noting.calls) == 80
    assert max(sizes) < min(sizes) * 1.1


def test_the_cache_stays_out_of_it(store: Store, few: datasets.Dataset) -> None:
    Pipeline([Adds("a")], store=store).run(few)
    run = Pipeline([Adds("a")], store=store, use_cache=True, use_checkpoint=True)
    assert not run.use_cache
    assert [step.hit for step in run.run(few).steps] == [False]
    assert len(noting.calls) == 40


def test_steps_behind_the_checkpoint_may_change(store: Store, few: datasets.Dataset) -> None:
    pipeline(store, Adds("a")).run(few)
    result = pipeline(store, Adds("a"), Adds("z")).run(few)
    assert [step.hit for step in result.steps] == [True, False]
    assert noting.calls == ["a"] * 20 + ["z"] * 20


@pytest.mark.parametrize(
    ("operators", "words"),
    [
        (
            lambda: (Adds("x"), Adds("b")),
            r"step 1 'Adds' differs: the parameter 'what' was 'a' and is now 'x'",
        ),
        (
            lambda: (Adds("a"), Adds("y")),
            r"step 2 'Adds' differs: the parameter 'what' was 'b' and is now 'y'",
        ),
        (lambda: (Adds("a"),), r"step 2 'Adds', which it includes, is not among the steps any more"),
        (lambda: (Adds("a"), Copies()), r"step 2 was 'Adds' and is now 'Copies'"),
        (
            lambda: (registry.make("clean_links_mapper"), Adds("b")),
            r"step 1 was 'Adds' and is now 'clean_links_mapper'",
        ),
    ],
)
def test_what_differs_is_said_and_the_run_starts_over(
    store: Store, few: datasets.Dataset, operators: Callable[[], tuple[Any, ...]], words: str
) -> None:
    pipeline(store, Adds("a"), Adds("b")).run(few)
    made = operators()
    with pytest.warns(CacheWarning, match=f"the checkpoint of 'demo' cannot be used: {words}; starting over"):
        result = pipeline(store, *made).run(few)
    assert [step.hit for step in result.steps] == [False] * len(made)
    plain = Pipeline(made, store=store, use_cache=False).run(few)
    assert result.dataset[:] == plain.dataset[:]


def test_another_input_starts_over(store: Store, few: datasets.Dataset) -> None:
    pipeline(store, Adds("a")).run(few)
    with pytest.warns(CacheWarning, match="the input has changed; starting over"):
        result = pipeline(store, Adds("a")).run(few.select([3, 1]))
    assert len(result.dataset) == 2


def test_projects_have_their_own(store: Store, few: datasets.Dataset) -> None:
    pipeline(store, Adds("a"), name="one").run(few)
    assert [step.hit for step in pipeline(store, Adds("a"), name="two").run(few).steps] == [False]
    assert [step.hit for step in pipeline(store, Adds("a"), name="one").run(few).steps] == [True]
    with pytest.raises(InvalidNameError):
        Checkpoint(store, "../other")


def test_a_failure_goes_on_at_the_step_that_failed(store: Store, few: datasets.Dataset) -> None:
    class Stops:
        """Fails the first time, with the same fingerprint each time."""

        def process(self, sample: dict[str, Any]) -> dict[str, Any]:
            if (store.path / "stop").exists():
                raise RuntimeError("not today")
            return sample

    operators = Adds("a"), Adds("b"), Stops(), Adds("c")
    (store.path / "stop").touch()
    with pytest.raises(RuntimeError, match="not today"):
        pipeline(store, *operators).run(few)
    (store.path / "stop").unlink()
    result = pipeline(store, *operators).run(few)
    assert [step.hit for step in result.steps] == [True, True, False, False]
    assert noting.calls == ["a"] * 20 + ["b"] * 20 + ["c"] * 20


def test_a_damaged_checkpoint_starts_over_and_is_said(store: Store, texts: datasets.Dataset) -> None:
    first = pipeline(store, Adds("a")).run(texts)
    name = next(entry.name for entry in store.entries("checkpoints") if entry.name.endswith(".arrow"))
    path, offset, length = payload(store, name)
    flip(path, offset + length // 2)
    with pytest.warns(CacheWarning, match="the checkpoint of 'demo' cannot be read: .*; starting over"):
        again = pipeline(store, Adds("a")).run(texts)
    assert [step.hit for step in again.steps] == [False]
    assert again.dataset[:] == first.dataset[:]


def test_gc_leaves_the_checkpoint_alone(store: Store, few: datasets.Dataset) -> None:
    pipeline(store, Adds("a"), Adds("b")).run(few)
    store.gc(max_size=0, grace=0)
    assert [step.hit for step in pipeline(store, Adds("a"), Adds("b")).run(few).steps] == [True, True]


def test_a_second_run_of_the_same_name_waits_and_finds_the_work_done(
    store: Store, few: datasets.Dataset
) -> None:
    results: list[Any] = []

    def run() -> None:
        results.append(pipeline(store, Adds("a"), Adds("b")).run(few))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(noting.calls) == 40
    assert sorted([step.hit for step in result.steps] for result in results) == [[False] * 2, [True] * 2]
