"""The script of test_torchrun.py: jobs of two epochs of a lazy shard, with a record of all that happens.

A job needs no process group unless told to make one, which then is there for the jobs behind it, too. The
argument is a JSON list with the options of each job. A job writes into its ``out``. A rank that hangs says
where.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from castore.adapters.torch.lazy import LazyShardDataset


class Recorded(Dataset[tuple[torch.Tensor, int]]):
    """Writes down every read, one line a read, one file a process."""

    def __init__(self, n: int, log: str) -> None:
        self.n = n
        self.log = log

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(f"{self.log}/{os.getpid()}", "a") as file:
            file.write(f"{index}\n")
        return torch.full((256,), float(index)), index


def wait_for_all(out: Path, what: str) -> None:
    """A barrier of files: all ranks are through with `what`."""
    world = int(os.environ["WORLD_SIZE"])
    (out / f"{what}-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + 200
    while len(list(out.glob(f"{what}-*"))) < world:
        if time.monotonic() > deadline:
            raise TimeoutError(f"some ranks did not come to {what}")
        time.sleep(0.02)


def do(options: dict[str, Any]) -> None:
    out = Path(options["out"])
    (out / "reads" / str(os.getpid())).touch()
    rank = int(os.environ["RANK"])
    # A second group of one run would find the addresses of the first in torchrun's store.
    if options.get("group") and not dist.is_initialized():
        dist.init_process_group("gloo")
    shard = LazyShardDataset(
        Recorded(options["n"], str(out / "reads")),
        shuffle=True,
        memory_size=options["memory"][int(os.environ["GROUP_RANK"])],
        disk_size="10MB",
        disk_cache_path=options["cache"] + os.environ["GROUP_RANK"],
        mode=options["mode"],
        balance=options.get("balance", "equal"),
        # Within one run of torchrun two folders are two caches.
        key=f"recorded for {options['cache']}",
    )
    sampler: DistributedSampler[Any] | None = None
    if options["mode"] != "rank":
        ranks = shard.ranks
        sampler = DistributedSampler(shard, ranks.local_world_size, ranks.local_rank, shuffle=False)
    loader = DataLoader(
        shard,
        batch_size=8,
        sampler=sampler,
        num_workers=options["workers"],
        persistent_workers=options["workers"] > 0,
    )
    wait_for_all(out, "made")
    for epoch in range(2):
        shard.set_epoch(epoch)
        visited: list[int] = []
        for values, labels in loader:
            assert (values == labels[:, None]).all()
            visited += labels.tolist()
            if options.get("kill") == [rank, epoch]:
                os.kill(os.getpid(), signal.SIGKILL)
        (out / f"epoch{epoch}-{rank}.json").write_text(json.dumps(visited))
        # Ranks of a node swap samples between epochs: the next one must find what this one read.
        wait_for_all(out, f"visited{epoch}")
    stats = shard.stats()
    counted = {
        "reads": stats.reads,
        "memory": [stats.memory.hits, stats.memory.misses] if stats.memory else None,
        "disk": [stats.disk.hits, stats.disk.misses] if stats.disk else None,
    }
    (out / f"stats-{rank}.json").write_text(json.dumps(counted))
    wait_for_all(out, "counted")


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        faulthandler.dump_traceback_later(150)  # before the others give up
        do(job)
        faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized():
        dist.destroy_process_group()
