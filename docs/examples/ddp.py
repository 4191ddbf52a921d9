"""Several ranks: each reads its own shard, the ranks of a node share one cache, and a stopped run goes on.

    torchrun --nproc-per-node=2 docs/examples/ddp.py --cache /nvme/shards --checkpoint run.pt

Interrupt it and start it again, with another number of ranks if you like: no sample of the epoch comes twice.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from castore.adapters.torch import LazyShardDataset

BATCH = 16


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for files on a far file system: every sample takes 2 ms, wherever it is read."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 16, 16, generator=generator), index % 10


def main() -> None:
    """Trains, saves, and goes on with what was saved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", default="./castore-shards", help="a folder on a local disk")
    parser.add_argument("--checkpoint", default="ddp.pt")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")  # for training; the shards do not need it

    shard = LazyShardDataset(
        Pictures(),
        shuffle=True,
        memory_size="64MB",
        disk_size="64MB",
        disk_cache_path=args.cache,
        write_through=True,
    )
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10)))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        shard.load_state_dict(saved["shard"])

    # The shard brings its own order, so that it knows what was taken: the loader does not shuffle.
    loader = DataLoader(shard, batch_size=BATCH, num_workers=1, persistent_workers=True)
    for epoch in range(shard.epoch, args.epochs):
        shard.set_epoch(epoch)
        start, before, taken = time.perf_counter(), shard.stats().reads, 0
        with model.join():  # shards may differ by one sample, and so by one batch
            for pictures, labels in loader:
                loss = nn.functional.cross_entropy(model(pictures), labels)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                taken += len(labels)
                if dist.get_rank() == 0 and taken % (5 * BATCH) == 0:
                    save(args.checkpoint, model, shard.state_dict(consumed=taken))
        dist.barrier()
        if dist.get_rank() == 0:
            save(args.checkpoint, model, shard.state_dict(consumed=taken))
            reads = shard.stats().reads - before
            print(
                f"epoch {epoch}: {time.perf_counter() - start:.2f} s; "
                f"{reads} samples read by this node's ranks"
            )
    dist.destroy_process_group()


def save(path: str, model: nn.Module, shard: dict[str, object]) -> None:
    """Written aside and renamed: an interruption leaves the last checkpoint whole."""
    torch.save({"model": model.state_dict(), "shard": shard}, f"{path}.new")
    os.replace(f"{path}.new", path)


# The loader may start its workers by importing this file.
if __name__ == "__main__":
    main()
