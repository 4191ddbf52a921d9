"""Hugging Face datasets: `map` and `filter` of `Dataset` and `DatasetDict` become castore's cached calls.

They become `cached_map` and `cached_filter`. Each test has a store of its own. Two kinds of calls go to the
original: those that `cached_map` itself makes, and those that datasets makes with a fingerprint of its own
cache. At a test's end everything must be in the store: a result that could not be stored fails the test.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, cached_filter, cached_map, wait

#: Calls a step. The plugin `for_datasets_kept` replaces it, so that every result comes from the store.
again: Callable[[Callable[[], Any]], Any] = lambda call: call()  # noqa: E731

_inside = threading.local()
_stores: list[Store] = []


def _replace(cls: type, kind: str, ours: Callable[..., Any]) -> None:
    original = getattr(cls, kind)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        if not _stores or getattr(_inside, "cached", False) or given.get("new_fingerprint") is not None:
            return original(self, *args, **kwargs)
        del given["self"]
        function = given.pop("function", None)
        _inside.cached = True
        try:
            return again(lambda: ours(self, function, store=_stores[-1], **given))
        finally:
            _inside.cached = False

    setattr(cls, kind, replaced)


for _cls in (datasets.Dataset, datasets.DatasetDict):
    _replace(_cls, "map", cached_map)
    _replace(_cls, "filter", cached_filter)


@pytest.fixture(autouse=True)
def castore_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A store for one test. At the test's end every result must be in it."""
    with Store(tmp_path_factory.mktemp("store")) as store:
        _stores.append(store)
        try:
            yield
        finally:
            _stores.remove(store)
            with warnings.catch_warnings():
                warnings.simplefilter("error", CacheWarning)
                wait()
