"""Modules that moved: keys name them as they did before, so that stores that were filled then still serve."""

from __future__ import annotations

import importlib.util

import pytest

from castore.adapters.embeddings.batch_places import PerItem
from castore.adapters.embeddings.encoder_inputs import Call
from castore.keys.encoder import key
from castore.keys.moved import _MOVED, name_in_keys


def test_values_of_classes_that_moved_have_the_keys_that_they_had() -> None:
    # Made when the classes were in castore.adapters.embeddings: in its modules inputs and batches.
    assert key({"c": Call((("x",),), ("a",))}) == "431fd17821c5c009ebd1e4c86c50f5db776dc2d0"
    assert key({"p": PerItem("tensor")}) == "9676a2eb4008a6201c2a2b4d17e86c16bcd38f65"


@pytest.mark.parametrize("now", _MOVED)
def test_what_moved_is_where_the_table_says(now: str) -> None:
    assert importlib.util.find_spec(now) is not None
    assert name_in_keys(now) == _MOVED[now]


def test_other_modules_keep_their_names() -> None:
    for module in (
        "castore.recipes",
        "castore.recipes.operators_of_mine",
        "my_castore.recipes.operators",
        "json",
    ):
        assert name_in_keys(module) == module
