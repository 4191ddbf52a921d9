"""Two ranks whose devices hold half of the embeddings each: torchrun split_job.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from castore.adapters.embeddings import CacheConfig, CacheType, cache_embeddings
from tests.adapters.embeddings.models import Encoder, Model, data, features


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    sampler: Any = DistributedSampler(data(), shuffle=True)
    model = Model()
    config = CacheConfig(cache_type=CacheType.GPU, split=True, save_dir=Path(folder) / "store")
    # Ranks look up equal numbers of batches, of different sizes.
    batches = DataLoader(data(), batch_size=5 + dist.get_rank(), sampler=sampler)
    loader, _ = cache_embeddings(model, batches, config=config)
    expected = Encoder()(features())
    for keys, indices in list(zip(loader, batches.batch_sampler or (), strict=True))[:5]:
        found = model.encoder(torch.cat([keys[0], keys[0][:1]]))
        assert torch.allclose(found, expected[[*indices, indices[0]]], atol=1e-6)
    held = next(iter(model.encoder._tables.values()))
    assert len(held._rows) == len(data()) // 2
    Path(folder, f"done-{dist.get_rank()}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
