"""As for_datasets, but blocks have a few rows, so the inputs of tests have several blocks."""

from __future__ import annotations

from typing import Any

from castore.adapters.datasets import cutting, dataset_entries, source_blocks, stored_table
from tools.strangers.for_datasets import castore_store

__all__ = ["castore_store"]

_ROWS, _BYTES = 4, 512

_changed: tuple[tuple[Any, str, int], ...] = (
    (cutting, "TARGET_ROWS", _ROWS),
    (cutting, "TARGET_BYTES", _BYTES),
    (source_blocks, "_SMALLEST_FILE", _BYTES),
    (stored_table, "SMALL_BYTES", 0),
    (dataset_entries, "SMALL_BYTES", 0),
)
for _module, _name, _value in _changed:
    setattr(_module, _name, _value)
