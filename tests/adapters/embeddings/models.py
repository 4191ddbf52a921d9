"""Small models and data for several tests: an encoder that counts, a head, a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from castore.adapters.embeddings import CacheConfig, cache_embeddings

ITEMS, WIDTH, BATCH = 60, 8, 10


class Encoder(nn.Module):
    """Encodes vectors, and counts them."""

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, width)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            self.layer.weight.copy_(torch.randn(width, WIDTH, generator=generator))
            self.layer.bias.zero_()
        self.encoded = 0
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.encoded += len(x)
        return torch.tanh(self.layer(x))


class Model(nn.Module):
    """A head on a frozen encoder."""

    encoder: Any

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = encoder if encoder is not None else Encoder()
        generator = torch.Generator().manual_seed(1)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(3, 4, generator=generator))
            self.head.bias.zero_()

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


def features(count: int = ITEMS, seed: int = 2) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def data(count: int = ITEMS, seed: int = 2) -> TensorDataset:
    return TensorDataset(features(count, seed), torch.arange(count) % 3)


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    """A shuffling loader."""
    return DataLoader(
        data() if dataset is None else dataset, **{"batch_size": BATCH, "shuffle": True} | options
    )


def in_batches(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A model's outputs for inputs in batches of `BATCH`: the last bit of a row may depend on the size of the
    batch.
    """
    return torch.cat([model(batch) for batch in torch.split(inputs, BATCH)])


def losses(model: nn.Module, batches: Iterable[Any], epochs: int = 2) -> list[float]:
    """Train from a seed; return the loss of each step."""
    torch.manual_seed(7)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)
    out = []
    for _ in range(epochs):
        model.train()
        for x, labels, *_ in batches:
            loss = nn.functional.cross_entropy(model(x), torch.as_tensor(labels))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            out.append(loss.item())
    return out


def fill(
    dataset: Any, store: Any, config: CacheConfig | None = None, encoder: nn.Module | None = None
) -> int:
    """The number of items that a new model's encoder encoded for a dataset."""
    model = Model(encoder)
    before = model.encoder.encoded
    cache_embeddings(model, loader(dataset), config=config or CacheConfig(batch_size=BATCH), store=store)
    encoded: int = model.encoder.encoded - before
    return encoded


class Made(Dataset[Any]):
    """Samples that a function makes."""

    def __init__(self, make: Callable[[int], Any], count: int = 20) -> None:
        self.make = make
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


CONFIG = CacheConfig(batch_size=BATCH)


def cached(
    model: nn.Module, batches: DataLoader[Any], store: Any, config: CacheConfig = CONFIG, **more: Any
) -> Any:
    return cache_embeddings(model, batches, config=config, store=store, **more)[0]
