"""The callback for Lightning: encoders and loaders are replaced before a fit, and training gives the same
results.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from castore.adapters.embeddings import CacheConfig, CachedEncoder
from castore.errors import InvalidValueError
from tests.adapters.embeddings.models import (
    BATCH,
    ITEMS,
    Encoder,
    data,
    loader,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of Lightning about itself
    import lightning.pytorch as pl

    from castore.adapters.embeddings.lightning import EmbeddingCacheCallback

pytestmark = pytest.mark.filterwarnings("ignore:::lightning.*", "ignore:::torch.*")


class Plain(pl.LightningModule):
    """A head on a frozen encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        torch.manual_seed(1)
        self.head = nn.Linear(4, 3)
        self.losses: list[float] = []

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.losses.append(self(batch[0]).sum().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), 0.1)


class Caching(Plain):
    """Has the method of Quaterion's page."""

    def configure_caches(self) -> CacheConfig | None:
        return CacheConfig(batch_size=BATCH)


class WithLoaders(Caching):
    """Has data of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [loader(data(20, seed=5), shuffle=False), loader(data(10, seed=6), shuffle=False)]

    def validation_step(self, batch: Any, number: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, number)


class Off(Caching):
    """Returns no config, so nothing is cached."""

    def configure_caches(self) -> None:
        return None


def fit(module: Plain, folder: Path, *loaders: Any, cached: bool = True) -> Plain:
    torch.manual_seed(9)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
        callbacks=[EmbeddingCacheCallback(store=folder / "store")] if cached else [],
    )  # fmt: skip
    trainer.fit(module, *loaders)
    return module


def loaders() -> tuple[Any, Any]:
    return loader(), loader(data(20, seed=5), shuffle=False)


def test_a_fit_with_configure_caches_goes_as_without_and_encodes_once(tmp_path: Path) -> None:
    plain = fit(Plain(), tmp_path, *loaders(), cached=False)
    first, second = (fit(Caching(), tmp_path, *loaders()) for _ in range(2))
    assert first.losses == second.losses == plain.losses
    assert isinstance(first.encoder, CachedEncoder)
    assert (first.encoder.encoded, second.encoder.encoded) == (ITEMS + 20, 0)


def test_loaders_of_the_module_are_exchanged_too(tmp_path: Path) -> None:
    expected = fit(WithLoaders(), tmp_path, cached=False)
    module = fit(WithLoaders(), tmp_path)
    assert module.losses == expected.losses
    assert module.encoder.encoded == ITEMS + 30


def test_none_means_no_cache(tmp_path: Path) -> None:
    module = fit(Off(), tmp_path, *loaders())
    assert type(module.encoder) is Encoder


def test_a_module_without_the_method_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="Plain has no configure_caches"):
        fit(Plain(), tmp_path, *loaders())
