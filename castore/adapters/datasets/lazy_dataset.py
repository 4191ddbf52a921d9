"""A dataset known by its features and length. Rows are read at first use.

A run whose first step is kept never looks at its input. Must behave as what it stands for in everything but
when it is read. Knows no store: where the rows come from is said by who makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
from datasets.arrow_dataset import DatasetInfoMixin
from datasets.search import IndexableMixin


class LateDataset(datasets.Dataset):  # type: ignore[misc]
    """A dataset without a format, yet to be read.

    Args:
        info: its description, features included.
        split: of the dataset.
        fingerprint: of the dataset.
        rows: how many it has; None to look for them.
        size: about how many bytes it takes as Arrow files; None to look.
        load: gives the dataset.
    """

    def __init__(
        self,
        info: datasets.DatasetInfo,
        split: datasets.NamedSplit | None,
        fingerprint: str,
        rows: int | None,
        size: int | None,
        load: Callable[[], datasets.Dataset],
    ) -> None:
        # Not `Dataset.__init__`, which looks at the table.
        DatasetInfoMixin.__init__(self, info=info, split=split)
        IndexableMixin.__init__(self)
        self._indices = None
        self._format_type: str | None = None
        self._format_kwargs: dict[str, Any] = {}
        self._format_columns: list[str] | None = None
        self._output_all_columns = False
        self._fingerprint = fingerprint
        self._rows = rows
        self._size = size
        self._load = load
        self._loaded: Any = None

    @property
    def _data(self) -> Any:
        if self._loaded is None:
            self._loaded = self.read()._data
        return self._loaded

    @property
    def is_read(self) -> bool:
        """Whether somebody has looked."""
        return self._loaded is not None

    def read(self) -> datasets.Dataset:
        """The dataset itself."""
        return self._load()

    @property
    def size(self) -> int:
        """About how many bytes it takes as Arrow files."""
        return int(self._data.nbytes) if self._size is None else self._size

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return len(self._data) if self._rows is None else self._rows

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return [*self.features]

    def __len__(self) -> int:
        return self.num_rows

    def __del__(self) -> None:
        """Nothing to do; the base class would look at the table to let go of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies, here and in other processes, are plain datasets.
        plain = datasets.Dataset(
            self._data, info=self._info, split=self._split, fingerprint=self._fingerprint
        )
        for name in ("_format_type", "_format_kwargs", "_format_columns", "_output_all_columns"):
            setattr(plain, name, getattr(self, name))
        return _itself, (plain,)


def _itself(dataset: datasets.Dataset) -> datasets.Dataset:
    return dataset
