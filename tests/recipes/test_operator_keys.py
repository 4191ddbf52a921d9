"""Keys of castore's operators: results that were stored before the operators moved to `castore.recipes` are
still hits.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from castore.adapters import datasets as adapter
from castore.adapters.datasets.operator_description import describe
from castore.keys import libraries
from castore.recipes import pipeline_config, registry

# Made by castore 0.1.0 when the operators were modules of castore.adapters.datasets.ops.
KEYS: dict[str, str] = json.loads(Path(__file__).with_name("operator_keys.json").read_text("utf-8"))
NEEDED: dict[str, dict[str, Any]] = {"replace_content_mapper": {"pattern": "a+"}}
# The parameters of these are folders, whose files count.
WITH_LISTS = {"stopwords_filter", "flagged_words_filter"}


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    """The release and the Python that made the keys: later ones make others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
        python = SimpleNamespace(major=3, minor=11)
        patch.setattr(libraries, "sys", SimpleNamespace(version_info=python, modules=sys.modules))
        libraries._find_library.cache_clear()
        yield
    libraries._find_library.cache_clear()


def test_the_list_of_keys_has_every_operator() -> None:
    assert KEYS.keys() == registry.BUILT_IN.keys() - WITH_LISTS


@pytest.mark.parametrize("name", KEYS)
def test_an_operator_has_the_key_that_stores_hold_its_results_under(name: str) -> None:
    assert describe(registry.make(name, NEEDED.get(name)), name).fingerprint == KEYS[name]


@pytest.mark.parametrize("path", [path.partition(".")[0] for path in registry.BUILT_IN.values()])
def test_a_module_of_operators_counts_by_its_name_of_then(path: str) -> None:
    now = f"castore.recipes.operators.{path}"
    then = {"cleaners": "cleaning", "unicode_repair": "repairing"}.get(path, path)
    assert libraries.library_of(now) == f"castore.adapters.datasets.ops.{then} of castore 0.1.0"


def test_modules_that_stayed_count_by_the_names_they_have() -> None:
    for module in ("castore.recipes", "castore.recipes.operators_of_mine", "castore.store"):
        assert libraries.library_of(module) == f"{module} of castore 0.1.0"


def test_the_adapter_gives_the_settings_at_first_use_and_imports_no_recipes_before() -> None:
    program = """
import sys
import castore.adapters.datasets as adapter
print(sorted(name for name in sys.modules if name.startswith("castore.recipes")))
print(adapter.PipelineConfig.__module__)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["[]", "castore.recipes.pipeline_config"]


def test_every_public_name_of_the_adapter_is_there() -> None:
    assert {name for name in adapter.__all__ if not hasattr(adapter, name)} == set()
    assert set(adapter.__all__) <= set(dir(adapter))
    assert adapter.PipelineConfig is pipeline_config.PipelineConfig
    with pytest.raises(AttributeError, match="has no attribute 'PipelineConfigs'"):
        adapter.PipelineConfigs  # type: ignore[attr-defined]  # noqa: B018 - to be looked up
