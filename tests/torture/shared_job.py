"""A node's program: it asks for the results of one round after another, as other nodes do, and checks each.

It writes down what it computes itself, and each round that it has ended. Tests may kill it at any moment; the
next one goes on with the round that was not ended.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch.utils.data import Dataset

from castore import Store
from castore.adapters.datasets import cached_map
from castore.adapters.embeddings import EmbeddingCache
from castore.adapters.torch import CachedDataset
from tests.adapters.datasets.small_blocks import small_blocks
from tests.helpers import noise

#: Seconds that a computation of a round's slow keys takes, and an item of the other kinds.
SLOW, QUICK = 0.6, 0.002
#: Keys of a round, of each kind; rows of its step; items of its table; samples.
SLOW_KEYS, KEYS, ROWS, ITEMS, SAMPLES = 4, 20, 400, 256, 40
#: Sizes of results: in their records, in objects of their own, in parts.
_SIZES = [0, 20, 3_000, 70_000, 600_000, 5_000_000]


class Job:
    """The requests of one node.

    Args:
        folder: of the crowd; has the node's store, and its logs.
        number: of the node.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number

    def log(self, name: str, line: str) -> None:
        """Write down a line, which is whole or absent."""
        fd = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, f"{line}\n".encode())
        os.close(fd)

    def count(self, kind: str, number: int, seconds: float) -> None:
        """Note that this node computes something, and take that long."""
        self.log("computed", f"{kind} {number} {self._number}")
        time.sleep(seconds)

    def run(self, number: int, store: Store, chance: random.Random) -> None:
        """Ask for all results of a round."""
        kinds: list[Callable[[int, Store], None]] = [self._keys, self._step, self._embeddings, self._samples]
        chance.shuffle(kinds)
        for kind in kinds:
            kind(number, store)

    def _keys(self, number: int, store: Store) -> None:
        names = [("slow", one, SLOW) for one in range(SLOW_KEYS)] + [("key", one, 0) for one in range(KEYS)]
        random.Random(self._number).shuffle(names)
        for kind, one, seconds in names:
            value = {"of": [kind, number, one], "bytes": noise(_SIZES[one % len(_SIZES)], number)}

            def compute(
                kind: str = kind, one: int = one, seconds: float = seconds, value: Any = value
            ) -> Any:
                self.count(kind, 100 * number + one, seconds)
                return value

            found = store.get_or_compute(f"{kind}/{number}/{one}", compute)
            assert found == value, f"{kind} {number} {one} of node {self._number} is wrong"

    def _step(self, number: int, store: Store) -> None:
        numbers = list(range(number * ROWS, (number + 1) * ROWS))
        with small_blocks():
            rows = datasets.Dataset.from_dict({"n": numbers, "text": ["word " * 30] * ROWS})
            result = cached_map(rows, Measure(self), store=store)
            assert result["size"] == [n + 150 for n in numbers], f"step {number} of node {self._number}"

    def _embeddings(self, number: int, store: Store) -> None:
        keys = range(number * ITEMS, (number + 1) * ITEMS)
        with closing(EmbeddingCache("crowd", store)) as cache:
            cache.fill(keys, keys, partial(self._encode, number), batch_size=64)
            found = np.asarray(cache.get(keys))
        assert (found == embedding(keys)).all(), f"embeddings {number} of node {self._number} are wrong"

    def _encode(self, number: int, items: list[int]) -> Any:
        for item in items:
            self.count("item", item, 0)
        time.sleep(QUICK * len(items))
        return embedding(items)

    def _samples(self, number: int, store: Store) -> None:
        samples = CachedDataset(Samples(self, number), store)
        indices = list(range(SAMPLES))
        random.Random(self._number).shuffle(indices)
        for start in range(0, SAMPLES, 8):
            for index, sample in zip(
                indices[start : start + 8], samples.__getitems__(indices[start : start + 8]), strict=True
            ):
                assert sample == {"n": index, "bytes": noise(3000, number * SAMPLES + index)}
        samples.close()


class Measure:
    """A function of rows; who runs it does not count."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __castore_key__(self) -> str:
        return "Measure"

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self._job.count("row", row["n"], QUICK)
        return {"size": row["n"] + len(row["text"])}


class Samples(Dataset[Any]):
    """A source of samples."""

    def __init__(self, job: Job, number: int) -> None:
        self._job, self._round = job, number

    def __castore_key__(self) -> object:
        return ["Samples", self._round]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self._job.count("sample", self._round * SAMPLES + index, QUICK)
        return {"n": index, "bytes": noise(3000, self._round * SAMPLES + index)}


def embedding(items: Any) -> Any:
    """The embeddings of some items: float32, (items, 3)."""
    return np.asarray(items, np.float32)[:, None] * np.array([1, -1, 0.5], np.float32)


def main() -> None:
    """Do the rounds from that of the arguments on, until the file `over` names the last one."""
    importlib.import_module("tests.torture.wrong_clock.sitecustomize")
    request = json.loads(sys.argv[1])
    folder, node, number = Path(request["folder"]), int(request["node"]), int(request["round"])
    job, chance = Job(folder, node), random.Random(node)
    with Store(folder / f"node{node}", remote="team") as store:
        while not (folder / "over").exists() or number <= int((folder / "over").read_text()):
            began = time.monotonic()
            job.run(number, store, chance)
            job.log(f"ended{node}", f"{number} {time.monotonic() - began}")
            number += 1


if __name__ == "__main__":
    main()
