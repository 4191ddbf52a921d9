"""A store with a dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from castore import Store
from tests.objects.dictionaries.samples import NEW, SEEN


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Store]:
    """A store with a dictionary for `rec`, and blobs there that need it."""
    with Store(tmp_path / "store", memory=0) as store:
        store.train_dictionary("rec", SEEN)
        store.put_many((f"rec/{number}", data) for number, data in enumerate(NEW))
        yield store
