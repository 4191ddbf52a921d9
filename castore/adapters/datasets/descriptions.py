"""Compares and copies what a dataset has beside its rows: its description, and its format.

Must never: read a row.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import datasets

#: The attributes that are a dataset's format. `set_format` would give it another fingerprint besides.
FORMAT = ("_format_columns", "_format_kwargs", "_format_type", "_output_all_columns")


def description_text(info: datasets.DatasetInfo) -> str:
    """A dataset's description, citation, licence and so on, as JSON; not its features."""
    return json.dumps({**dataclasses.asdict(info), "features": None}, sort_keys=True)


def other_fields(one: datasets.DatasetInfo, other: datasets.DatasetInfo) -> list[str]:
    """The names of the fields in which two descriptions differ, but for the features."""
    names = [field.name for field in dataclasses.fields(one) if field.name != "features"]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def describe_like(dataset: datasets.Dataset, info: datasets.DatasetInfo, own: Iterable[str]) -> None:
    """Describe a dataset as ``info`` does. Its features stay, and so do its ``own`` fields."""
    given, dataset._info = dataset._info, info.copy()
    for name in ("features", *own):
        setattr(dataset._info, name, getattr(given, name))


def shown_columns(dataset: datasets.Dataset, features: datasets.Features) -> list[str] | None:
    """The columns of those features that a dataset's format shows after a map, which shows new ones too."""
    if dataset._format_columns is None:
        return None
    hidden = set(dataset.column_names).difference(dataset._format_columns)
    return sorted(set(features) - hidden)


def copy_format(source: datasets.Dataset, target: datasets.Dataset) -> None:
    """Give a dataset the format of another."""
    for name in FORMAT:
        setattr(target, name, getattr(source, name))
