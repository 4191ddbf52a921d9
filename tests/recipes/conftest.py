"""Fixtures of the tests on recipes: those of the tests on datasets, and a folder with a recipe's files."""

from __future__ import annotations

from tests.adapters.datasets.conftest import (  # noqa: F401 - fixtures
    _own_hugging_face_cache,
    _same_blocks,
    cache,
    sources,
    texts,
)
from tests.recipes.recipes import castore, here, place  # noqa: F401 - fixtures
