"""A program that trains on names of a remote: `python -m tests.remote.loading FOLDER URL`.

It needs one because a DataLoader forks. The process pushes, pulls and reads before its workers start, and the
workers of each start method fetch what they read. The program prints `good` when every sample was right.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import TypeAlias

import torch.utils.data

from castore import Store
from castore.adapters.torch import WindowSampler
from tests.helpers import noise, text

#: In packs, of their own, and in parts.
CONTENTS = {
    **{f"small/{number:02}": text(2_000, number) for number in range(24)},
    **{f"large/{number}": noise(1_200_000, number) for number in range(2)},
    "huge": noise((5 << 20) + 1, 9),
}
METHODS = ("fork", "forkserver", "spawn")

_Sample: TypeAlias = tuple[str, bytes, int]


class OfStore(torch.utils.data.Dataset[_Sample]):
    """The values of a store, which goes to each worker with the dataset."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.names = sorted(CONTENTS)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> _Sample:
        name = self.names[index]
        if index == 0:  # a call in a process of its own
            assert len(self.store.remote("team").log()) == 1
        data = self.store.get(name)
        assert data is not None
        return name, data, os.getpid()


def _read(dataset: OfStore, method: str) -> None:
    """Read all in workers that start so, and compare. A spawned worker imports torch, so there is one."""
    workers = 1 if method == "spawn" else 2
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=multiprocessing.get_context(method),
    )
    samples = list(loader)
    assert {name: data for name, data, _ in samples} == CONTENTS, method
    processes = {pid for _, _, pid in samples}
    assert len(processes) == workers, method
    assert os.getpid() not in processes


def _read_behind_a_pull(path: Path, url: str, method: str) -> None:
    """Read an epoch on a new node, in workers that start while a pull is under way."""
    with Store(path, memory=0) as store:
        pull = store.add_remote("team", url, read_only=True).begin_pull()
        dataset = OfStore(store)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            sampler=WindowSampler(store, dataset.names, window=5, pull=pull),
            num_workers=1 if method == "spawn" else 2,
            multiprocessing_context=multiprocessing.get_context(method),
        )
        assert {name: data for name, data, _ in loader} == CONTENTS, method
        assert pull.result(60).added == len(CONTENTS)


def main(folder: Path, url: str) -> None:
    """Use the remote in every way, then train."""
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    with Store(folder / "one", memory=0) as one, Store(folder / "two", memory=0) as two:
        one.put_many(CONTENTS.items())
        one.add_remote("team", url).push()
        two.add_remote("team", url, read_only=True).pull(lazy=True)
        assert two.get("small/00") == CONTENTS["small/00"]
        for method in METHODS:
            two.gc(max_size=0, grace=0)
            assert two.entry("huge").away  # type: ignore[union-attr]
            before = two.stat().remotes.received
            _read(OfStore(two), method)
            assert two.stat().remotes.received > before, "the workers have fetched nothing"
        for method in METHODS:
            _read_behind_a_pull(folder / f"three {method}", url, method)
        one.put("after", b"1")
        assert one.push(to="team").added == 1
    assert "obstore" not in sys.modules


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    print("good")
