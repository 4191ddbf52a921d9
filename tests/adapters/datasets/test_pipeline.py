"""Pipelines over real text: unchanged steps come from the cache, and the result equals that of plain
datasets.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
import warnings
from pathlib import Path
from subprocess import PIPE
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, Pipeline, Progress
from castore.errors import InvalidValueError, UnhashableError
from tests.adapters.datasets import pipelines
from tests.adapters.datasets.pipelines import LengthFilter, operators, plainly
from tests.helpers import flip, payload
from tests.warm import Started, WarmPython

ALL = "12s3t45"


@pytest.fixture(autouse=True)
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The steps that ran since the last call, a letter each."""
    path = tmp_path / "runs"
    monkeypatch.setenv("CASTORE_TEST_RUNS", str(path))
    monkeypatch.setattr(pipelines, "noted", pipelines.Noted())

    def since() -> str:
        letters = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        pipelines.noted.seen.clear()
        return letters

    return since


@pytest.fixture(scope="module")
def data() -> datasets.Dataset:
    return pipelines.texts()


def test_a_run_is_what_datasets_makes_and_a_rerun_runs_nothing(
    store: Store, data: datasets.Dataset, ran: Any
) -> None:
    plain = plainly(data)
    ran()
    first = Pipeline(operators(), store=store).run(data)
    assert ran() == ALL
    assert first.dataset[:] == plain[:]
    assert first.dataset.features == plain.features
    assert 0 < len(first.dataset) < len(data)
    second = Pipeline(operators(), store=store).run(data)
    assert ran() == ""
    assert second.dataset[:] == plain[:]
    assert second.hits == len(second.steps) == 7
    report = [
        (step.name, step.kind, step.rows_in, step.rows_out, step.logical, step.stored, step.key)
        for step in first.steps
    ]
    assert report == [
        (step.name, step.kind, step.rows_in, step.rows_out, step.logical, step.stored,
         step.key) for step in second.steps
    ]  # fmt: skip
    assert all(0 < step.stored < step.logical for step in first.steps)


def test_changing_the_third_step_runs_it_and_those_behind_it(
    store: Store, data: datasets.Dataset, ran: Any
) -> None:
    Pipeline(operators(), store=store).run(data)
    ran()
    changed = Pipeline(operators(5000), store=store)
    report = changed.explain(data)
    assert ran() == ""
    result = changed.run(data)
    # The length of a text does not depend on the threshold.
    assert ran() == "3t45"
    assert [step.hit for step in result.steps] == [step.hit for step in report] == [True] * 3 + [False] * 4
    plain = plainly(data, 5000)
    assert result.dataset[:] == plain[:]
    assert report[3].changes == ["the parameter 'least' was 3000 and is now 5000"]
    assert "runs again" in report[4].changes[-1]
    assert all(explanation.hit for explanation in changed.explain(data))


def test_explain_tells_what_of_the_code_changed(
    store: Store, data: datasets.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pipeline([pipelines.lower], store=store).run(data)

    def lower(sample: dict[str, Any]) -> dict[str, Any]:
        return {"text": sample["text"].lower().strip()}

    lower.__qualname__, lower.__module__ = pipelines.lower.__qualname__, pipelines.lower.__module__
    (report,) = Pipeline([lower], store=store).explain(data)
    assert "the code of tests.adapters.datasets.pipelines.lower has changed" in report.changes
    (report,) = Pipeline([pipelines.lower], store=store).explain(data.select(range(10)))
    assert report.changes == ["the input dataset has changed"]
    (report,) = Pipeline([pipelines.strip_comments], store=store).explain(data)
    assert report.changes == ["the store has no result of this operator"]
    monkeypatch.setattr(pipelines, "re", "something else")
    report = Pipeline([pipelines.strip_comments, pipelines.lower], store=store).explain(data)[1]
    assert report.changes == ["its input changes, since 'strip_comments' runs again"]


def test_two_processes_at_once_run_each_row_of_each_step_once(
    store: Store, tmp_path: Path, ran: Any, warm_datasets: WarmPython
) -> None:
    both = [_start(warm_datasets, store, "cache", 0.0005, tmp_path / f"hf {n}") for n in range(2)]
    answers = [_finish(process) for process in both]
    assert answers[0]["digest"] == answers[1]["digest"]
    assert sorted(ran()) == sorted(ALL)


@pytest.mark.parametrize("mode", ["cache", "checkpoint"])
def test_a_run_that_was_killed_goes_on_behind_its_last_finished_step(
    mode: str, store: Store, data: datasets.Dataset, tmp_path: Path, ran: Any, warm_datasets: WarmPython
) -> None:
    plain = hashlib.sha256(repr(plainly(data)[:]).encode()).hexdigest()
    ran()
    chance = random.Random(mode)
    done: list[str] = []
    for _ in range(3):
        process = _start(warm_datasets, store, mode, 0.003, tmp_path / "hf")
        kept = _kept(store, mode)
        deadline = time.monotonic() + 300
        while _kept(store, mode) == kept and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
        done.append(ran())
    assert len(done[1]) <= len(ALL)
    assert "1" not in done[1] + done[2], "the first step was finished, and ran again"
    answer = _finish(_start(warm_datasets, store, mode, 0, tmp_path / "hf"))
    assert answer["digest"] == plain
    assert any(answer["hits"])
    last = _finish(_start(warm_datasets, store, mode, 0, tmp_path / "hf"))
    assert all(last["hits"])
    assert last["digest"] == plain
    assert [path for path in (store.path / "work").iterdir() if path.is_dir()] == []


def _kept(store: Store, mode: str) -> object:
    if mode == "cache":
        return sum(entry.name.endswith("state.json") for entry in store.entries("steps"))
    return [entry.metadata for entry in store.entries("checkpoints") if entry.name.endswith("state.json")]


def _start(warm_datasets: WarmPython, store: Store, mode: str, pause: float, home: Path) -> Started:
    words = ["-m", "tests.adapters.datasets.pipelines", store.path, mode, str(pause)]
    return warm_datasets.start(
        words, env={**os.environ, "HF_DATASETS_CACHE": str(home)}, stdout=PIPE, stderr=PIPE, text=True
    )


def _finish(process: Started) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return dict(json.loads(out))


def test_intermediate_steps_go_and_the_last_still_hits(
    store: Store, data: datasets.Dataset, ran: Any
) -> None:
    pipeline = Pipeline(operators(), store=store)
    first = pipeline.run(data)
    assert pipeline.drop_intermediate(older_than="1h") == []
    last = first.steps[-1]
    assert len(pipeline.drop_intermediate(budget=last.stored + first.steps[-2].stored + 1000)) == 5
    assert len(pipeline.drop_intermediate()) == 1
    ran()
    second = pipeline.run(data)
    assert ran() == ""
    assert second.dataset[:] == first.dataset[:]
    assert [(s.rows_in, s.rows_out) for s in second.steps] == [(s.rows_in, s.rows_out) for s in first.steps]
    assert [step.stored > 0 for step in second.steps] == [*[False] * 6, True]
    assert all(step.hit for step in pipeline.explain(data))


def test_a_damaged_step_runs_again_and_says_so(store: Store, data: datasets.Dataset, ran: Any) -> None:
    first = Pipeline(operators(), store=store).run(data)
    ran()
    last = first.steps[-1].key
    name = next(e.name for e in store.entries("steps") if last in e.name and e.name.endswith(".arrow"))
    path, offset, length = payload(store, name)
    flip(path, offset + length // 2)
    with pytest.warns(CacheWarning, match="damaged and runs again"):
        second = Pipeline(operators(), store=store).run(data)
    assert ran() == "5"
    assert second.dataset[:] == first.dataset[:]
    assert Pipeline(operators(), store=store).run(data).hits == 7


def test_a_step_that_fails_leaves_those_before_it(store: Store, data: datasets.Dataset, ran: Any) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError(f"cannot do {sample['name']}")

    broken = Pipeline([*operators()[:2], fails], store=store)
    with pytest.raises(RuntimeError, match="cannot do"):
        broken.run(data)
    assert ran() == "12"
    assert not list((store.path / "work").rglob("*.arrow"))
    Pipeline(operators(), store=store).run(data)
    assert ran() == "s3t45"


def test_without_a_cache_nothing_is_kept(store: Store, data: datasets.Dataset, ran: Any) -> None:
    for _ in range(2):
        result = Pipeline(operators(), store=store, use_cache=False).run(data)
        assert ran() == ALL
    assert result.dataset[:] == plainly(data)[:]
    assert not list(store.entries("steps"))
    assert {step.key for step in result.steps} == {""}


def test_a_checkpoint_excludes_the_cache_and_keeps_one_step(
    store: Store, data: datasets.Dataset, ran: Any
) -> None:
    pipeline = Pipeline(operators(), store=store, use_checkpoint=True)
    assert not pipeline.use_cache
    first = pipeline.run(data)
    assert sum(entry.name.endswith("state.json") for entry in store.entries()) == 1
    ran()
    second = pipeline.run(data)
    assert ran() == ""
    assert second.hits == 7
    assert second.dataset[:] == first.dataset[:] == plainly(data)[:]
    ran()
    with pytest.warns(CacheWarning, match="'LengthFilter.*least.*3000.*9"):
        Pipeline(operators(9), store=store, use_checkpoint=True).run(data)
    assert ran() == ALL


def test_processes_share_the_rows_and_change_nothing(store: Store, data: datasets.Dataset, ran: Any) -> None:
    first = Pipeline(operators(), store=store, num_proc=2).run(data)
    ran()
    second = Pipeline(operators(), store=store).run(data)
    assert ran() == ""
    assert first.dataset[:] == second.dataset[:] == plainly(data)[:]


def test_progress_tells_of_each_step_and_of_rows(store: Store, data: datasets.Dataset, ran: Any) -> None:
    report: list[Progress] = []
    result = Pipeline(operators(), store=store).run(data, progress=report.append)
    assert [event.report for event in report if event.report is not None] != []
    ends = [event for event in report if event.report is not None]
    assert [event.step for event in ends] == list(range(7))
    assert [event.report.rows_out for event in ends if event.report] == [
        step.rows_out for step in result.steps
    ]
    assert all(0 <= event.done <= event.total for event in report)
    again: list[Progress] = []
    Pipeline(operators(), store=store).run(data, progress=again.append)
    assert [event.report.hit for event in again if event.report] == [True] * 7


def test_uncompressed_files_go_with_the_run_but_for_the_result(store: Store, data: datasets.Dataset) -> None:
    result = Pipeline(operators(), store=store).run(data)
    used = {file["filename"] for file in result.dataset.cache_files}
    assert {str(path) for path in (store.path / "work").rglob("data*.arrow")} <= used


def test_space_is_estimated_by_the_formula_and_by_measure(store: Store, data: datasets.Dataset) -> None:
    pipeline = Pipeline(operators(), store=store)
    before = pipeline.estimate_space(data)
    assert before.formula == (1 + 2 + 2 + 1 + 1) * before.size
    assert before.measured == 0
    result = pipeline.run(data)
    after = pipeline.estimate_space(data)
    assert after.measured == 7
    assert after.store_needs == 0
    assert 0.3 < before.store_needs / sum(step.stored for step in result.steps) < 3


def test_what_will_not_fit_is_said_before_anything_runs(
    tmp_path: Path, data: datasets.Dataset, ran: Any
) -> None:
    store = Store(tmp_path / "small", max_size=600_000)
    seen: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = Pipeline(operators(), store=store).run(data, progress=lambda _: seen.append(len(caught)))
    assert "in a store that may hold" in str(caught[0].message)
    assert seen[0] == 1
    assert result.dataset[:] == plainly(data)[:]


def test_another_name_shares_what_is_kept(store: Store, data: datasets.Dataset, ran: Any) -> None:
    Pipeline(operators(), store=store, name="a").run(data)
    ran()
    assert Pipeline(operators(), store=store, name="b").run(data).hits == 7
    assert ran() == ""


def test_no_operators_give_the_input(store: Store, data: datasets.Dataset) -> None:
    for options in ({}, {"use_checkpoint": True}, {"use_cache": False}):
        result = Pipeline([], store=store, **options).run(data)  # type: ignore[arg-type]
        assert result.dataset[:] == data[:]
        assert result.steps == []


def test_no_rows_go_through_all_steps(store: Store, data: datasets.Dataset) -> None:
    for _ in range(2):
        assert len(Pipeline(operators(), store=store).run(data.select([])).dataset) == 0


def is_long(sample: Any) -> bool:
    return len(sample["text"]) > 3


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_proc": 2}], ids=str)
def test_a_function_that_is_a_filter_says_so(
    store: Store, data: datasets.Dataset, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidValueError, match="'is_long' returns True or False, as a filter does"):
        Pipeline([is_long], store=store, **options).run(data)


def test_bad_arguments_say_what_to_do(store: Store, data: datasets.Dataset) -> None:
    with pytest.raises(InvalidValueError, match="not an operator"):
        Pipeline([3], store=store)
    with pytest.raises(InvalidValueError, match=r"has no method process; add it$"):
        Pipeline([type("Half", (), {"compute_stats": lambda self, s: s})()], store=store)
    with pytest.raises(InvalidValueError, match="not an operator"):
        Pipeline([LengthFilter], store=store)
    with pytest.raises(InvalidValueError, match=r"castore\.recipes\.make\('text_length_filter'\)"):
        Pipeline(["text_length_filter"], store=store)
    with pytest.raises(InvalidValueError, match=r"Pipeline\(\[\.\.\.\]\)"):
        Pipeline(LengthFilter(3), store=store)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"store=Store\('cache'\)"):
        Pipeline([], store="cache")  # type: ignore[arg-type]
    for wrong in (0, True, 1.5, "4"):
        with pytest.raises(
            InvalidValueError, match="num_proc of a pipeline must be a whole number of at least 1, or None"
        ):
            Pipeline([], store=store, num_proc=wrong)  # type: ignore[arg-type]
    listing = type("Listing", (), {"compute_hash": lambda self, s: s, "process": lambda self, d: [1]})
    with pytest.raises(InvalidValueError, match="'Listing' must return the remaining dataset, not list"):
        Pipeline([listing()], store=store).run(data)
    with pytest.raises(InvalidValueError, match="each split"):
        Pipeline([], store=store).run(datasets.DatasetDict({"train": data}))
    stream = open("/proc/self/status", encoding="ascii")  # noqa: SIM115
    with stream, pytest.raises(UnhashableError, match=r"stream"):
        Pipeline([lambda sample: {"n": stream.readline()}], store=store).run(data)
