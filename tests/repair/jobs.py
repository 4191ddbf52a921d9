"""Jobs that use a store beside repair commands: ``python -m tests.repair.jobs JOB STORE PLACE``.

Each job makes a file ``PLACE/JOB.begun`` in the middle of its work, continues until the file ``PLACE/enough``
is there, checks its results, and ends with 0 only if all were right. Bytes come from seeds.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from castore import Store
from tests.helpers import mixed, noise, text

#: Seconds between two turns of a job that goes on until ``enough``: the commands need processors too.
PAUSE = 0.4
ROWS = 60
ITEMS = 96


def wait(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody made {path}"
        time.sleep(0.02)


def pipeline(store: Path, place: Path) -> None:
    """Steps over a dataset, each in two processes. The second step pauses until ``enough`` is there."""
    import datasets

    from castore.adapters.datasets import Pipeline, cached_filter, cached_map

    datasets.disable_progress_bars()

    def upper(row: dict[str, Any]) -> dict[str, Any]:
        return {"text": row["text"].upper()}

    def lower(row: dict[str, Any]) -> dict[str, Any]:
        return {"text": row["text"].lower()}

    def slowly(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == ROWS // 2:
            (place / "pipeline.begun").touch()
            wait(place / "enough")
        return {"length": len(row["text"])}

    def plain() -> datasets.Dataset:
        return datasets.Dataset.from_dict(
            {"n": range(ROWS), "text": [text(30_000, n).decode() for n in range(ROWS)]}
        )

    def even(row: dict[str, Any]) -> bool:
        return bool(row["n"] % 2 == 0)

    with Store(store, memory=0) as opened:
        made = cached_map(plain(), upper, store=opened, num_proc=2)
        made = cached_map(made, slowly, store=opened, num_proc=2)
        made = cached_filter(made, even, store=opened, num_proc=2)
        assert made["length"][:] == [30_000] * (ROWS // 2)
        assert made["text"][:] == [text(30_000, n).decode().upper() for n in range(0, ROWS, 2)]
        again = Pipeline([upper, lower], store=opened, use_checkpoint=True).run(plain())
        assert again.dataset["text"][:] == plain()["text"][:]


def steps(store: Path, place: Path) -> None:
    """New steps all the time, each stored in the background and mapped again."""
    import datasets

    from castore.adapters.datasets import cached_map
    from castore.adapters.datasets.background import wait as stored

    datasets.disable_progress_bars()
    turn = 0
    while not (place / "enough").exists() or not turn:
        words = [text(3_000, 1000 * turn + n).decode() for n in range(20)]

        def lengths(row: dict[str, Any], turn: int = turn) -> dict[str, Any]:
            return {"length": len(row["text"]) + turn, "again": row["text"]}

        for _ in range(2):
            with Store(store, memory=0) as opened:
                made = cached_map(datasets.Dataset.from_dict({"text": words}), lengths, store=opened)
                assert made["length"][:] == [3_000 + turn] * 20
                assert made["again"][:] == words
                stored()
        (place / "steps.begun").touch()
        turn += 1
        time.sleep(PAUSE)


def fill(store: Path, place: Path) -> None:
    """A frozen encoder over a loader; it pauses in the middle of the fill, when a part has been put."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from castore.adapters.embeddings import CacheConfig, cache_embeddings, table_fill

    table_fill.PUT_SECONDS = 0.1

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            if ITEMS // 2 in x.flatten().tolist():
                (place / "fill.begun").touch()
                wait(place / "enough")
            return x * x * self.weight

    data = TensorDataset(torch.arange(ITEMS).float().unsqueeze(1), torch.arange(ITEMS))
    model = nn.Sequential(Squares(), nn.Linear(1, 1))
    config = CacheConfig(batch_size=8, save_dir=store, fingerprints={"0": "squares"})
    loader, _ = cache_embeddings(model, DataLoader(data, batch_size=12, shuffle=True), config=config)
    seen: list[int] = []
    for keys, labels in loader:
        assert torch.equal(model[0](keys).flatten(), labels.float() ** 2)
        seen += labels.tolist()
    assert sorted(seen) == list(range(ITEMS))


def training(store: Path, place: Path) -> None:
    """Epochs over samples that two workers keep in the store."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    from castore.adapters.torch import CachedDataset

    class Samples(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((5_000,), float(index))

    cached = CachedDataset(Samples(), Store(store, memory=0), key="samples")
    epochs = 0
    while not (place / "enough").exists() or not epochs:
        total = 0.0
        for batch in DataLoader(cached, batch_size=4, num_workers=2, shuffle=True):
            assert (batch == batch[:, :1]).all()
            total += float(batch[:, 0].sum())
        assert total == sum(range(40))
        (place / "training.begun").touch()
        epochs += 1
        time.sleep(PAUSE)


def reading(mountpoint: Path, place: Path) -> None:
    """Files of a mount: some are open and mapped all the time, others are opened anew."""
    names = sorted(path for path in (mountpoint / "shelf").iterdir())
    want = {path: wanted(path.name) for path in names}
    held = [path.open("rb") for path in names]
    maps = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in held]
    turns = 0
    while not (place / "enough").exists() or not turns:
        for path, file, mapped in zip(names, held, maps, strict=True):
            file.seek(0)
            assert file.read() == want[path], path
            assert mapped[:] == want[path], path
            with suppress(FileNotFoundError):  # gc may remove a name; open files stay
                assert path.read_bytes() == want[path], path
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        (place / "reading.begun").touch()
        turns += 1
        time.sleep(PAUSE)
    for mapped, file in zip(maps, held, strict=True):
        mapped.close()
        file.close()


SHELF = {"small": (text, 2_000), "large": (mixed, 900_000), "raw": (noise, 700_000), "one": (noise, 40_000)}


def wanted(name: str) -> bytes:
    """The bytes of a file on the shelf."""
    make, size = SHELF[name]
    return make(size)


def writing(store: Path, place: Path) -> None:
    """Puts, reads and deletes, large and small, and values that are computed once."""
    turn = 0
    with Store(store, memory=0) as opened:
        while not (place / "enough").exists() or turn < 20:
            name = f"written/{turn % 50}"
            data = (text, mixed, noise)[turn % 3]((500, 30_000, 400_000)[turn % 7 % 3], turn)
            opened.put(name, data)
            assert opened.get(name) == data
            opened.put_many(
                (f"records/{turn % 20}/{n}", json.dumps({"n": n, "turn": turn}).encode() * 8)
                for n in range(20)
            )
            assert opened.get_or_compute(f"computed/{turn}", partial(int, turn)) == turn
            with opened.open(name) as file:
                opened.delete(name)
                assert file.read() == data
            turn += 1
            if turn == 20:
                (place / "writing.begun").touch()
            if turn > 20:
                time.sleep(PAUSE)


JOBS: dict[str, Callable[[Path, Path], None]] = {
    "pipeline": pipeline, "steps": steps, "fill": fill, "training": training, "reading": reading,
    "writing": writing,
}  # fmt: skip

if __name__ == "__main__":
    JOBS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
