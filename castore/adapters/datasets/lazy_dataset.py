"""A dataset known by its features and length. Rows are read at first use.

A run whose first step is kept never reads its input. Must behave as the dataset it stands for in everything
but the time of reading. Knows no store: the caller gives the function that loads the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
from datasets.arrow_dataset import DatasetInfoMixin
from datasets.search import IndexableMixin

from castore.adapters.datasets.descriptions import copy_format
from castore.adapters.datasets.named_files import may_name_files


class LazyDataset(datasets.Dataset):  # type: ignore[misc]
    """A dataset without a format that is not read yet.

    Args:
        info: the dataset's description, features included.
        split: the dataset's split.
        fingerprint: the dataset's fingerprint.
        rows: the number of rows; None to read the dataset for it.
        size: about how many bytes the dataset takes as Arrow files; None to read the dataset for it.
        load: returns the dataset.

    Attributes:
        pieces: the files that hold the rows, some of which may not be there yet, for forecasts; None where
            they are not known.
    """

    pieces: Sequence[Any] | None = None

    def __init__(
        self,
        info: datasets.DatasetInfo,
        split: datasets.NamedSplit | None,
        fingerprint: str,
        rows: int | None,
        size: int | None,
        load: Callable[[], datasets.Dataset],
    ) -> None:
        # Not `Dataset.__init__`, which reads the table.
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

    @_data.setter
    def _data(self, table: Any) -> None:  # of a private copy, whose rows nobody else has
        self._loaded = table

    @property
    def is_read(self) -> bool:
        """Whether the rows have been read."""
        return self._loaded is not None

    @property
    def may_name_files(self) -> bool:
        """Whether the rows may name files, as far as is known.

        False for an input whose features are not known yet, and for one that is only explained.
        """
        if self.is_read:
            return True
        features = self._info.features
        return features is not None and self.pieces is None and may_name_files(features)

    def read(self) -> datasets.Dataset:
        """The dataset itself."""
        return self._load()

    @property
    def size(self) -> int:
        """About how many bytes the dataset takes as Arrow files."""
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
        """Do nothing: the base class would read the table in order to release it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies, here and in other processes, are plain datasets.
        plain = datasets.Dataset(
            self._data, info=self._info, split=self._split, fingerprint=self._fingerprint
        )
        copy_format(self, plain)
        return _return_dataset, (plain,)


def _return_dataset(dataset: datasets.Dataset) -> datasets.Dataset:
    return dataset
