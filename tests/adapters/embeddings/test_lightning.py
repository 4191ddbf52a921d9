"""The callback for Lightning: encoders and loaders are replaced before a fit, and training gives the same
results.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from castore.adapters.embeddings import CachedEncoder
from castore.errors import InvalidValueError
from tests.adapters.embeddings.models import ITEMS, Encoder, data, loader

pytestmark = pytest.mark.filterwarnings("ignore:::lightning.*", "ignore:::torch.*")


@pytest.fixture
def pl() -> Any:
    """The module lightning_modules."""
    return importlib.import_module("tests.adapters.embeddings.lightning_modules")


def loaders() -> tuple[Any, Any]:
    return loader(), loader(data(20, seed=5), shuffle=False)


def test_a_fit_with_configure_caches_goes_as_without_and_encodes_once(pl: Any, tmp_path: Path) -> None:
    plain = pl.fit(pl.Plain(), tmp_path, *loaders(), cached=False)
    first, second = (pl.fit(pl.Caching(), tmp_path, *loaders()) for _ in range(2))
    assert first.losses == second.losses == plain.losses
    assert isinstance(first.encoder, CachedEncoder)
    assert (first.encoder.encoded, second.encoder.encoded) == (ITEMS + 20, 0)


def test_loaders_of_the_module_are_exchanged_too(pl: Any, tmp_path: Path) -> None:
    expected = pl.fit(pl.WithLoaders(), tmp_path, cached=False)
    module = pl.fit(pl.WithLoaders(), tmp_path)
    assert module.losses == expected.losses
    assert module.encoder.encoded == ITEMS + 30


def test_none_means_no_cache(pl: Any, tmp_path: Path) -> None:
    module = pl.fit(pl.Off(), tmp_path, *loaders())
    assert type(module.encoder) is Encoder


def test_a_module_without_the_method_is_told(pl: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="Plain has no configure_caches"):
        pl.fit(pl.Plain(), tmp_path, *loaders())


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_precision_that_converts_batches_is_refused(pl: Any, tmp_path: Path, precision: str) -> None:
    with pytest.raises(InvalidValueError, match=f'precision="{precision}" converts the batches'):
        pl.fit(pl.Caching(), tmp_path, *loaders(), precision=precision)
    assert pl.fit(pl.Caching(), tmp_path, *loaders(), precision="32-true").losses
