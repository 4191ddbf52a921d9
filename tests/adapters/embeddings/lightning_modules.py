"""Modules of Lightning for test_lightning.py, which imports this module late: Lightning takes two seconds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from castore.adapters.embeddings import CacheConfig
from tests.adapters.embeddings.models import BATCH, Encoder, data, loader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of Lightning about itself
    import lightning.pytorch as pl

    from castore.adapters.embeddings.lightning import EmbeddingCacheCallback


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


def fit(module: Plain, folder: Path, *loaders: Any, cached: bool = True, **options: Any) -> Plain:
    torch.manual_seed(9)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
        callbacks=[EmbeddingCacheCallback(store=folder / "store")] if cached else [], **options,
    )  # fmt: skip
    trainer.fit(module, *loaders)
    return module
