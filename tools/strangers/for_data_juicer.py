"""Data-Juicer: each operator that castore has under the same name is castore's, made as a recipe makes it.

Only the tests of such operators are collected. The stand-in classes have the attributes that Data-Juicer's
own `map`, `filter` and `process` read from an operator, and no more. The datasets, and everything else, are
Data-Juicer's from the checkout.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from castore.recipes.registry import BUILT_IN, make

# Parameters of Data-Juicer's `map`: they decide how the work is done, not its result.
_HOW = {"batch_size": 1, "num_proc": None}


class StandIn:
    """The attributes that Data-Juicer reads from every operator, around one of castore's operators."""

    name: str
    # Data-Juicer's `map` reads this: samples come one at a time.
    turbo = True

    def __init__(self, **parameters: Any) -> None:
        for key, default in _HOW.items():
            setattr(self, key, parameters.pop(key, default))
        self._name = self.name
        self._ours = make(self.name, parameters)
        if not type(self._ours).__module__.startswith("castore."):
            raise AssertionError(f"castore has {self.name} made by {type(self._ours).__module__}")

    def is_batched_op(self) -> bool:
        return False

    def use_cuda(self) -> bool:
        return False


class Mapper(StandIn):
    """A mapper of castore."""

    def process(self, sample: Any) -> Any:
        return self._ours.process(sample)

    def run(self, dataset: Any, **_: Any) -> Any:
        return dataset.map(self.process)


class Filter(StandIn):
    """A filter of castore."""

    def compute_stats(self, sample: Any, context: bool = False) -> Any:
        return self._ours.compute_stats(sample)

    def process(self, sample: Any) -> Any:
        return self._ours.process(sample)

    def run(self, dataset: Any, **_: Any) -> Any:
        return dataset.map(self.compute_stats).filter(self.process)


class Deduplicator(StandIn):
    """A deduplicator of castore. It reports no pairs of duplicates, so their dict is always empty."""

    def compute_hash(self, sample: Any) -> Any:
        return self._ours.compute_hash(sample)

    def process(self, dataset: Any, show_num: int = 0) -> tuple[Any, dict[str, Any]]:
        return self._ours.process(dataset), {}

    def run(self, dataset: Any, **_: Any) -> Any:
        return self.process(dataset.map(self.compute_hash))[0]


_KINDS = {"mapper": Mapper, "filter": Filter, "deduplicator": Deduplicator}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore tests of operators that castore does not have."""
    name = collection_path.stem.removeprefix("test_")
    return True if collection_path.suffix == ".py" and name not in BUILT_IN and name != "__init__" else None


def _replace(name: str) -> None:
    kind = name.rpartition("_")[2]
    try:
        module = importlib.import_module(f"data_juicer.ops.{kind}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"data_juicer.ops.{kind}.{name}":
            raise
        return  # only castore has this operator
    theirs = importlib.import_module("data_juicer.ops.base_op").OPERATORS.modules[name]
    setattr(module, theirs.__name__, type(theirs.__name__, (_KINDS[kind],), {"name": name}))


for _name in BUILT_IN:
    _replace(_name)
