"""Statistics and hashes are a hit under another threshold, and a miss if a parameter that they may depend on
has changed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import Pipeline
from castore.adapters.datasets.unread_parameters import METHOD_OF_STATS, without_unread
from castore.recipes import registry
from tests.adapters.datasets.small_blocks import small_blocks

STATS = "__dj__stats__"


class Base:
    """Reads ``column`` to measure the text; ``least`` only decides."""

    def __init__(self, column: str = "text", least: int = 1) -> None:
        self.column = column
        self.least = least

    def compute_stats(self, sample: dict[str, Any]) -> dict[str, Any]:
        sample[STATS]["figure"] = self.measure(sample[self.column])
        return sample

    def measure(self, text: str) -> int:
        return len(text)

    def process(self, sample: dict[str, Any]) -> bool:
        return bool(sample[STATS]["figure"] >= self.least)


def twice(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: Any, text: str) -> Any:
        return 2 * method(self, text)

    return wrapper


def reads_least(operator: Any) -> int:
    return int(operator.least)


class Calls(Base):
    def measure(self, text: str) -> int:
        return len(text) + self.least


class HandsOn(Base):
    def measure(self, text: str) -> int:
        return reads_least(self)


class Closes(Base):
    def measure(self, text: str) -> int:
        return sum(self.least for _ in text)


class Renames(Base):
    def measure(self, text: str) -> int:
        me = self
        return me.least


class Writes(Base):
    def measure(self, text: str) -> int:
        self.least += 1
        return self.least


class LooksInto(Base):
    def measure(self, text: str) -> int:
        return int(self.__dict__["least"])


class LooksAround(Base):
    def measure(self, text: str) -> int:
        return int(locals()["self"].least)


class AsksSuper(Calls):
    def measure(self, text: str) -> int:
        return super().measure(text)


class Decorated(Base):
    @twice
    def measure(self, text: str) -> int:
        return self.least


class HasProperty(Base):
    @property
    def measure(self) -> Any:
        least = self.least
        return lambda text: least


class HasCached(Base):
    @functools.cached_property
    def table(self) -> int:
        return self.least

    def measure(self, text: str) -> int:
        return self.table


class HoldsItsMethod(Base):
    def __init__(self, column: str = "text", least: int = 1) -> None:
        super().__init__(column, least)
        self.measure = self.slowly  # type: ignore[method-assign]

    def slowly(self, text: str) -> int:
        return self.least


class Intercepts(Base):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # before Python 3.11 pickle looks up __getstate__ on every object
            raise AttributeError(name)
        return vars(self)["least"]

    def measure(self, text: str) -> int:
        return int(self.anything)


class HasSlots(Base):
    __slots__ = ("extra",)


class OfList(list, Base):  # type: ignore[type-arg]
    def __init__(self, column: str = "text", least: int = 1) -> None:
        Base.__init__(self, column, least)


class AskedInAnotherName(Base):
    def compute_stats(this, sample: dict[str, Any]) -> dict[str, Any]:  # noqa: N805
        sample[STATS]["figure"] = this.least
        return sample


READ = [
    Calls, HandsOn, Closes, Renames, Writes, LooksInto, LooksAround, AsksSuper, Decorated, HasProperty,
    HasCached,
    HoldsItsMethod, Intercepts, HasSlots, OfList, AskedInAnotherName,
]  # fmt: skip


def stats_key(operator: Any, store: Store) -> str:
    return Pipeline([operator], store=store)._plan(datasets.Dataset.from_dict({"text": ["a"]}))[0].key


@pytest.mark.parametrize("kind", READ)
def test_a_parameter_that_may_be_read_counts(kind: type[Base], store: Store) -> None:
    used = kind(least=2)
    if kind is HasCached:
        assert used.measure("") == 2  # a remembered value must not hide the value that it was computed from
    assert stats_key(kind(least=1), store) != stats_key(used, store)


def test_a_parameter_that_only_decides_does_not_count(store: Store) -> None:
    assert stats_key(Base(least=1), store) == stats_key(Base(least=2), store)
    assert stats_key(Base("text"), store) != stats_key(Base("other"), store)
    keys = [step.key for step in Pipeline([Base(least=1)], store=store)._plan(datasets.Dataset.from_dict({}))]
    others = [
        step.key for step in Pipeline([Base(least=2)], store=store)._plan(datasets.Dataset.from_dict({}))
    ]
    assert [a == b for a, b in zip(keys, others, strict=True)] == [True, False]


@dataclasses.dataclass
class OfFields(Base):
    column: str = "text"
    least: int = 1


def test_a_dataclass_counts_whole(store: Store) -> None:
    assert stats_key(OfFields(least=1), store) != stats_key(OfFields(least=2), store)
    assert stats_key(OfFields(least=1), store) == stats_key(OfFields(least=1), store)


def test_the_operator_itself_stays_as_it_is() -> None:
    operator = Base(least=3)
    assert vars(without_unread(operator, METHOD_OF_STATS)) == {"column": "text"}
    assert vars(operator) == {"column": "text", "least": 3}
    assert without_unread(len, METHOD_OF_STATS) is len


@pytest.mark.parametrize(
    ("name", "unread", "read"),
    [
        ("text_length_filter", {"min_len": 50}, {"text_key": "name"}),
        ("alphanumeric_filter", {"max_ratio": 0.9}, {"text_key": "name"}),
        ("character_repetition_filter", {"max_ratio": 0.9}, {"rep_len": 5}),
        ("word_repetition_filter", {"min_ratio": 0.1}, {"rep_len": 5}),
    ],
)
def test_statistics_of_our_own_filters_hit_under_another_threshold(
    store: Store, texts: datasets.Dataset, name: str, unread: dict[str, Any], read: dict[str, Any]
) -> None:
    few = texts.select(range(10))
    Pipeline([registry.make(name)], store=store).run(few)
    again = Pipeline([registry.make(name, unread)], store=store).run(few)
    assert [step.hit for step in again.steps] == [True, False]
    plain = Pipeline([registry.make(name, unread)], store=store, use_cache=False).run(few)
    assert again.dataset[:] == plain.dataset[:]
    other = Pipeline([registry.make(name, read)], store=store).run(few)
    assert [step.hit for step in other.steps] == [False, False]


@pytest.mark.parametrize(
    ("name", "unread", "read"),
    [
        ("document_minhash_deduplicator", {"jaccard_threshold": 0.3}, {"window_size": 2}),
        ("document_simhash_deduplicator", {"hamming_distance": 2}, {"window_size": 2}),
    ],
)
def test_hashes_of_our_own_deduplicators_stay_under_another_threshold(
    store: Store, name: str, unread: dict[str, Any], read: dict[str, Any]
) -> None:
    words = [f"word{number % 97} word{number % 89} word{number % 83}" for number in range(3000)]
    data = datasets.Dataset.from_dict({"text": [" ".join(words[at : at + 8]) for at in range(0, 3000, 2)]})
    with small_blocks(1 << 15, 10_000):
        Pipeline([registry.make(name)], store=store).run(data)
        for parameters, reused in ((unread, len(data)), (read, 0)):
            pipeline = Pipeline([registry.make(name, parameters)], store=store)
            assert pipeline.explain(data)[0].rows_reused == (reused or None)
            ran = pipeline.run(data)
            assert [(step.hit, step.rows_reused) for step in ran.steps] == [(False, reused)]
            plain = Pipeline([registry.make(name, parameters)], store=store, use_cache=False).run(data)
            assert ran.dataset[:] == plain.dataset[:]
