"""A function that remembers rows gives what one pass gives, now and after a change of the input."""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import pathlib
import random
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import Pipeline, cached_filter, cached_map, wait
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.adapters.datasets.block_parts import PARTS_FOLDER
from castore.errors import CacheWarning, InvalidValueError
from tests.adapters.datasets.small_blocks import slow_blocks, small_blocks, told

#: Rows of the input; every text is there four times.
COUNT, DIFFERENT = 1200, 300

Row = dict[str, Any]


def rows(count: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"text {number % DIFFERENT}" for number in range(count)]})


def is_first_in_closure() -> Callable[[Row], bool]:
    seen = set()

    def is_first(row: Row) -> bool:
        if row["text"] in seen:
            return False
        seen.add(row["text"])
        return True

    return is_first


def counts_in_closure() -> Callable[[Row], Row]:
    count = 0

    def counts(row: Row) -> Row:
        nonlocal count
        count += 1
        return {"count": count}

    return counts


class Vocabulary:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, row: Row) -> Row:
        return {"id": self.ids.setdefault(row["text"], len(self.ids))}


class OfFirst:
    """Remembers its first row where None was."""

    def __init__(self) -> None:
        self.first: str | None = None

    def __call__(self, row: Row) -> Row:
        self.first = self.first or row["text"]
        return {"first": self.first}


def draws() -> Callable[[Row], Row]:
    source = random.Random(0)
    return lambda row: {"drawn": source.random()}


def remembers_in_default() -> Callable[[Row], Row]:
    def remembers(row: Row, memory: list[str] = []) -> Row:  # noqa: B006
        memory.append(row["text"])
        return {"number": len(memory)}

    return remembers


def counts_on_itself() -> Callable[[Row], Row]:
    def counts(row: Row) -> Row:
        counts.n = getattr(counts, "n", 0) + 1  # type: ignore[attr-defined]
        return {"count": counts.n}  # type: ignore[attr-defined]

    return counts


def begins_late() -> Callable[[Row], Row]:
    """Remembers nothing of the first blocks."""
    seen: list[str] = []

    def begins(row: Row) -> Row:
        if row["text"] == f"text {DIFFERENT - 1}":
            seen.append(row["text"])
        return {"count": len(seen)}

    return begins


MAPS: dict[str, Callable[[], Any]] = {
    "counter": counts_in_closure,
    "vocabulary": Vocabulary,
    "first row": OfFirst,
    "source of random numbers": draws,
    "default": remembers_in_default,
    "attribute of the function": counts_on_itself,
    "late": begins_late,
}


def cached(kind: str, data: datasets.Dataset, function: Any, store: Store, **options: Any) -> Any:
    """The result, once it is kept. A warning about the blocks is expected, if any comes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*remembers rows that it has seen", CacheWarning)
        made = {"map": cached_map, "filter": cached_filter}[kind](data, function, store=store, **options)
        wait()
    return made


@pytest.mark.parametrize(
    ("case", "is_slow"),
    [
        pytest.param(case, is_slow, marks=[pytest.mark.matrix] * (is_slow and case != "counter"))
        for case in MAPS
        for is_slow in (False, True)
    ],
)
def test_results_are_those_of_one_pass(store: Store, case: str, is_slow: bool) -> None:
    """Regression: a row more, and the function saw it with an empty memory; slow rows ran twice."""
    with small_blocks(), slow_blocks(7) if is_slow else nullcontext():
        for count in (COUNT, COUNT + 1, COUNT - 1, COUNT):
            made = cached("map", rows(count), MAPS[case](), store)
            assert told(made) == told(rows(count).map(MAPS[case]())), count
        assert [name for name in store if name.startswith((BLOCKS_FOLDER, PARTS_FOLDER))] == []


@pytest.mark.parametrize(
    ("num_proc", "is_slow"),
    [(None, False), (None, True), pytest.param(2, False, marks=pytest.mark.matrix), (2, True)],
)
def test_rows_that_a_filter_has_seen_are_dropped(store: Store, num_proc: int | None, is_slow: bool) -> None:
    with small_blocks(), slow_blocks(7) if is_slow else nullcontext():
        for count in (COUNT, COUNT + 1):
            made = cached("filter", rows(count), is_first_in_closure(), store, num_proc=num_proc)
            assert told(made) == told(rows(count).filter(is_first_in_closure()))
            assert len(made) == DIFFERENT


def test_arguments_and_named_functions_may_remember_too(store: Store) -> None:
    def is_first(row: Row, seen: set[str]) -> bool:
        return not (row["text"] in seen or seen.add(row["text"]))  # type: ignore[func-returns-value]

    with small_blocks():
        for count in (COUNT, COUNT + 1):
            made = cached("filter", rows(count), is_first, store, fn_kwargs={"seen": set()})
            assert len(made) == DIFFERENT
            made = cached("filter", rows(count), is_first_in_closure(), store, fingerprint="first")
            assert len(made) == DIFFERENT


def test_operators_of_a_pipeline_may_remember(store: Store) -> None:
    class Numbers:
        def __init__(self) -> None:
            self.ids: dict[str, int] = {}

        def process(self, row: Row) -> Row:
            return {**row, "id": self.ids.setdefault(row["text"], len(self.ids))}

    with small_blocks():
        for count in (COUNT, COUNT + 1):
            with pytest.warns(CacheWarning, match=r"results of the step 'Numbers' are not kept"):
                made = Pipeline([Numbers()], store=store).run(rows(count))
            assert made.dataset["id"] == [number % DIFFERENT for number in range(count)]


@functools.cache
def load() -> sqlite3.Connection:
    return sqlite3.connect(":memory:")


class Loads:
    """Has a connection from its first row on."""

    def __init__(self) -> None:
        self.connection: Any = None

    def __call__(self, row: Row) -> Row:
        self.connection = self.connection or load()
        return {"size": len(row["text"])}


def test_what_the_first_row_loads_is_no_memory(store: Store) -> None:
    with small_blocks():
        cached_map(rows(COUNT), Loads(), store=store)
        wait()
        kept = {name for name in store if name.startswith(BLOCKS_FOLDER)}
        cached_map(rows(COUNT + 1), Loads(), store=store)
        wait()
        assert len(kept) > 3
        assert kept < {name for name in store if name.startswith(BLOCKS_FOLDER)}


def _padded(text: str, *, width: int = 9) -> str:
    return text.rjust(width)


class Lengths:
    """Has None at the beginning where another object has a model of a library, which was there before."""

    def __init__(self) -> None:
        self.parts = [Holder(None), Holder(pathlib.PurePosixPath("there"))]

    def __call__(self, row: Row) -> Row:
        return {"length": len(_padded(row["text"])), "parts": len(self.parts)}


class Holder:
    def __init__(self, model: Any) -> None:
        self.model = model


def test_a_function_that_remembers_nothing_is_kept_in_blocks(store: Store) -> None:
    """Regression: a default of a keyword, or None in another object's attribute, counted as memory."""
    with small_blocks(), warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        for count in (COUNT, COUNT + 1):
            made = cached("map", rows(count), Lengths(), store)
            assert told(made) == told(rows(count).map(Lengths()))
        assert [name for name in store if name.startswith(BLOCKS_FOLDER)] != []


def test_a_step_that_would_have_to_begin_anew_is_an_error(store: Store) -> None:
    """The function gives None for some rows: the result then depends on all rows, but some have been seen."""

    class Mixed(Vocabulary):
        def __call__(self, row: Row) -> Any:
            found = super().__call__(row)
            return found if found["id"] < DIFFERENT - 1 else None

    with (
        small_blocks(),
        pytest.warns(CacheWarning),
        pytest.raises(
            ValueError,
            match=r"the function 'Mixed' remembers rows that it has seen, and some would have to run twice",
        ),
    ):
        cached_map(rows(COUNT), Mixed(), store=store)


class Relative:
    """Keeps texts of at least half the length of the longest, which `compute_stats` has seen."""

    def __init__(self) -> None:
        self.longest = 0

    def compute_stats(self, sample: Row) -> Row:
        self.longest = max(self.longest, len(sample["text"]))
        sample["__dj__stats__"]["length"] = len(sample["text"])
        return sample

    def process(self, sample: Row) -> bool:
        return bool(sample["__dj__stats__"]["length"] >= self.longest / 2)


@pytest.mark.parametrize(("count", "is_cut"), [(40, False), (40, True), (COUNT, True)])
@pytest.mark.parametrize("num_proc", [None, 2])
def test_what_the_statistics_of_a_filter_have_left_is_there_for_its_filter(
    store: Store, count: int, is_cut: bool, num_proc: int | None
) -> None:
    data = datasets.Dataset.from_dict({"text": ["x" * (n % 50) for n in range(count)]})
    wanted = [text for text in data["text"] if len(text) >= max(map(len, data["text"])) / 2]
    with small_blocks() if is_cut else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for _ in range(3):
            made = Pipeline([Relative()], store=store, num_proc=num_proc).run(data)
            assert made.dataset["text"][:] == wanted
            made = Pipeline([Relative()], store=store).run(data)
            assert [step.hit for step in made.steps] == [True, True]
            last = made.steps[-1].key  # as a kill between the two would have it
            assert store.delete_many([name for name in store if last in name or BLOCKS_FOLDER in name])


@pytest.mark.parametrize("num_proc", [None, 1])
@pytest.mark.parametrize("keeps", ["use_checkpoint", "nothing"])
def test_without_blocks_an_operator_in_one_process_remembers_too(
    store: Store, keeps: str, num_proc: int | None
) -> None:
    data = datasets.Dataset.from_dict({"text": ["x" * (n % 50) for n in range(40)]})
    mode: dict[str, Any] = {"use_checkpoint": True} if keeps == "use_checkpoint" else {"use_cache": False}
    operators = [counts_in_closure(), Relative()]
    made = Pipeline(operators, store=store, num_proc=num_proc, **mode).run(data).dataset
    assert [len(text) for text in made["text"]] == list(range(20, 40))
    assert made["count"][:] == list(range(21, 41))


class Interrupted(Relative):
    """Ends with an error in its filter, while the file is there."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def process(self, sample: Row) -> bool:
        if pathlib.Path(self.file).exists():
            raise OSError("interrupted")
        return super().process(sample)


def test_a_checkpoint_ends_before_statistics_that_leave_something_for_their_filter(
    store: Store, tmp_path: pathlib.Path
) -> None:
    data = datasets.Dataset.from_dict({"text": ["x" * (n % 50) for n in range(40)]})
    file = tmp_path / "interrupts"
    file.touch()

    def run() -> Any:
        return Pipeline([len_of, Interrupted(str(file))], store=store, use_checkpoint=True).run(data)

    with pytest.raises(OSError, match="interrupted"):
        run()
    file.unlink()
    made = run()
    assert [step.hit for step in made.steps] == [True, False, False]
    assert made.dataset["length"][:] == list(range(20, 40))
    assert [step.hit for step in run().steps] == [True, True, True]


def len_of(row: Row) -> Row:
    return {"length": len(row["text"])}


@pytest.mark.parametrize("num_proc", [None, 2])
def test_blocks_of_a_filter_count_by_what_its_statistics_have_left(
    store: Store, num_proc: int | None
) -> None:
    texts = ["x" * (n % 50) for n in range(COUNT)]
    with small_blocks(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for more in ([], ["y" * 200], ["y" * 200, "z" * 500], []):
            data = datasets.Dataset.from_dict({"text": [*texts, *more]})
            made = Pipeline([Relative()], store=store, num_proc=num_proc).run(data).dataset
            longest = max(map(len, data["text"]))
            assert made["text"][:] == [text for text in data["text"] if len(text) >= longest / 2]


def test_a_step_counts_by_what_an_earlier_one_has_left_in_what_both_have(store: Store) -> None:
    def run(texts: list[str]) -> list[int]:
        words: dict[str, int] = {}

        def number(row: Row) -> Row:
            return {"number": words.setdefault(row["text"], len(words))}

        def rest(row: Row) -> Row:
            return {"rest": len(words) - row["number"]}

        data = datasets.Dataset.from_dict({"text": texts})
        return list(Pipeline([number, rest], store=store).run(data).dataset["rest"])

    with small_blocks(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for count in (COUNT, COUNT + 100):
            texts = [f"text {n}" for n in range(count)]
            assert run(texts) == [count - n for n in range(count)]


@pytest.mark.parametrize("count", [40, COUNT])
def test_the_number_of_processes_changes_no_result_of_a_function_that_remembers(
    store: Store, count: int
) -> None:
    with small_blocks(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        one_pass = told(rows(count).filter(is_first_in_closure()))
        for num_proc in (3, 2, None):
            made = cached("filter", rows(count), is_first_in_closure(), store, num_proc=num_proc)
            assert told(made) == one_pass


# --- objects that the first call makes ----------------------------------------------------------------------


class Made:
    """A map that makes an object of a library at its first call, and shows it to each row."""

    def __init__(self, make: Callable[[Row], Any], show: Callable[[Any, Row], Any]) -> None:
        self.make, self.show = make, show
        self.object: Any = None
        self.ran = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "ran"}

    def __call__(self, row: Row) -> Row:
        self.ran += 1
        if self.object is None:
            self.object = self.make(row)
        return {"shown": self.show(self.object, row)}


def counts(_: Row) -> Any:
    return itertools.count()


def number(counter: Any, _: Row) -> int:
    return int(next(counter))


def digests(_: Row) -> Any:
    return hashlib.sha256()


def digest_so_far(hasher: Any, row: Row) -> str:
    hasher.update(row["text"].encode())
    return str(hasher.hexdigest())


def fraction_of(row: Row) -> Any:
    return Fraction(row["number"] + 1, 7)


def model_of(row: Row) -> Any:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, row["number"])
    return model


def as_text(made: Any, _: Row) -> str:
    return str(made)


def predict(model: Any, row: Row) -> float:
    torch = pytest.importorskip("torch")
    return float(model(torch.tensor([float(row["number"] % 7)])).detach())


def numbered(numbers: list[int]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"number": numbers, "text": [f"text {n}" for n in numbers]})


FROM_ROWS = {
    "counter": (counts, number),
    "hasher": (digests, digest_so_far),
    "fraction": (fraction_of, as_text),
    "model": (model_of, predict),
}


@pytest.mark.parametrize("num_proc", [None, 2])
@pytest.mark.parametrize("case", FROM_ROWS)
def test_an_object_that_is_made_from_rows_is_a_memory_of_them(
    case: str, num_proc: int | None, store: Store
) -> None:
    """Regression: whatever of a library took the place of None passed for a model, and blocks were kept."""
    whole = list(range(COUNT))
    with small_blocks():
        for edits, numbers in enumerate((whole, whole[1:], [*whole[:600], *whole[601:]])):
            expected = told(numbered(numbers).map(Made(*FROM_ROWS[case])))
            # In one process it shows when a block runs beside others that are kept. The next run knows.
            is_refused = num_proc is None and edits == 1 and case in ("fraction", "model")
            words = "depends on the rows of that call"
            with pytest.raises(InvalidValueError, match=words) if is_refused else nullcontext():
                made = cached("map", numbered(numbers), Made(*FROM_ROWS[case]), store, num_proc=num_proc)
            if is_refused:
                function = Made(*FROM_ROWS[case])
                made = cached("map", numbered(numbers), function, store)
                assert function.ran == len(numbers)
            assert told(made) == expected


@pytest.mark.parametrize("num_proc", [None, 2])
def test_a_model_that_is_loaded_alike_each_time_is_no_memory(num_proc: int | None, store: Store) -> None:
    def load(_: Row) -> Any:
        torch = pytest.importorskip("torch")
        torch.manual_seed(0)
        return torch.nn.Linear(1, 1)

    whole = list(range(COUNT))
    with small_blocks(), warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        cached_map(numbered(whole), Made(load, predict), store=store, num_proc=num_proc)
        function = Made(load, predict)
        made = cached_map(numbered([*whole, COUNT]), function, store=store)
        assert function.ran < COUNT // 4
        assert told(made) == told(numbered([*whole, COUNT]).map(Made(load, predict)))


class KeepsUnique:
    """A deduplicator whose hashes fill a memory that its decision reads."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def compute_hash(self, row: Row) -> Row:
        self.count[row["text"]] = self.count.get(row["text"], 0) + 1
        return {**row, "hash": row["text"]}

    def process(self, data: datasets.Dataset) -> datasets.Dataset:
        keep = [place for place, text in enumerate(data["hash"]) if self.count[text] == 1]
        return data.select(keep).remove_columns("hash")


@pytest.mark.filterwarnings("ignore:.*remembers rows that it has seen:castore.errors.CacheWarning")
@pytest.mark.parametrize("num_proc", [None, 2])
@pytest.mark.parametrize("is_small", [True, False])
def test_hashes_may_fill_a_memory(is_small: bool, num_proc: int | None, store: Store) -> None:
    data = rows(DIFFERENT + 100)
    with nullcontext() if is_small else small_blocks():
        for _ in range(2):
            made = Pipeline([KeepsUnique()], store=store, num_proc=num_proc).run(data).dataset
            assert len(made) == DIFFERENT - 100
            wait()
            store.delete_many([entry.name for entry in store.entries("")])


def doubles(row: Row) -> Row:
    return {"twice": row["text"] * 2}


def run_in_worker(folder: str) -> Any:
    with small_blocks(), Store(folder) as store:
        made = cached_map(rows(COUNT), doubles, store=store, num_proc=2)
        kept = Pipeline([doubles], store=store, num_proc=2).run(rows(COUNT)).dataset
        return told(made), told(kept)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_may_have_no_children_runs_the_blocks_itself(
    method: str, tmp_path: pathlib.Path
) -> None:
    with multiprocessing.get_context(method).Pool(1) as pool:
        one, other = pool.apply(run_in_worker, (str(tmp_path / "store"),))
    assert one == other == told(rows(COUNT).map(doubles))
