"""A process that reads epochs of a dataset through a `DataLoader`, on request.

    python -m tools.bench.epochs CONTESTANT SAMPLES WORKERS FOLDER

The process warms its dataset (in FOLDER, if the dataset lies on a disk), checks every sample, and writes the
line "ready" to standard output. Then it reads numbers from standard input: for each it reads that many
epochs, and answers with the seconds of one epoch. Contestants need different environments, so each contestant
imports its own libraries only, and all contestants run in such processes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

#: One sample: 12 KB.
SHAPE = (3, 64, 64)
_NUMEL = 3 * 64 * 64
BATCH = 64
_SEED = 20_26


class Source:
    """Makes the samples. Once `sealed`, it makes no more: every sample must come from the cache."""

    def __init__(self, samples: int) -> None:
        # Workers that were forked earlier see this event too.
        self.sealed = multiprocessing.get_context("fork").Event()
        generator = torch.Generator().manual_seed(_SEED)
        self._bytes = torch.randint(0, 256, (samples + _NUMEL,), dtype=torch.uint8, generator=generator)

    def __call__(self, index: int) -> torch.Tensor:
        if self.sealed.is_set():
            raise RuntimeError(f"sample {index} is not in the cache")
        # Samples overlap, but no two are the same, and making one costs next to nothing.
        return self._bytes[index : index + _NUMEL].reshape(SHAPE).clone()


class PerSample(Dataset[torch.Tensor]):
    """The loop of stocaching's README: ask the cache, else load and set.

    For any cache with that interface.
    """

    def __init__(self, cache: Any, source: Source, samples: int) -> None:
        self.cache, self.source, self.samples = cache, source, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        sample: torch.Tensor | None = self.cache.get_slot(index)
        if sample is None:
            sample = self.source(index)
            self.cache.set_slot(index, sample)
        return sample


class PerBatchOfSlots(PerSample):
    """The same with castore's `get_slots`: the loader passes the indices of a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        samples: list[torch.Tensor | None] = self.cache.get_slots(indices)
        return [
            self[index] if sample is None else sample for index, sample in zip(indices, samples, strict=True)
        ]


class PerBatch(PerSample):
    """The same with castore's `get_batch`, whose batches `collate` and `SharedBatches` leave as they are."""

    def __getitems__(self, indices: list[int]) -> Any:
        batch = self.cache.get_batch(indices)
        return [self[index] for index in indices] if batch is None else batch


class Computed(Dataset[torch.Tensor]):
    """The samples themselves, for caches that wrap a dataset."""

    def __init__(self, source: Source, samples: int) -> None:
        self.source, self.samples = source, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.source(index)


class Files(Computed):
    """One file per sample, with its bytes and nothing else; all are written at once."""

    def __init__(self, source: Source, samples: int, folder: Path) -> None:
        super().__init__(source, samples)
        self.paths = [str(folder / f"{index:06}.bin") for index in range(samples)]
        for index, path in enumerate(self.paths):
            Path(path).write_bytes(source(index).numpy().tobytes())

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.paths[index], "rb", buffering=0) as file:
            return _as_sample(file.read())


def _castore(source: Source, samples: int, _: Path) -> PerSample:
    return PerSample(_castore_cache(samples), source, samples)


def _castore_batched(source: Source, samples: int, _: Path) -> PerSample:
    return PerBatchOfSlots(_castore_cache(samples), source, samples)


def _castore_batch(source: Source, samples: int, _: Path) -> PerSample:
    return PerBatch(_castore_cache(samples), source, samples)


def _castore_levels(source: Source, samples: int, folder: Path) -> Any:
    """The dataset on disk alone, without the level in memory."""
    from castore.adapters.torch import BiLevelCachedDataset

    dataset = BiLevelCachedDataset(Computed(source, samples), 0, "4GB", folder, key="samples")
    dataset.fill(progress=False)
    return dataset


def _castore_cached(source: Source, samples: int, folder: Path) -> Any:
    from castore.adapters.torch import CachedDataset

    return CachedDataset(Computed(source, samples), folder, key="samples")


def _castore_cache(samples: int) -> Any:
    from castore.adapters.torch import SharedCache

    return SharedCache(_gib(samples), samples, SHAPE, torch.uint8)


def _stocaching(source: Source, samples: int, _: Path) -> PerSample:
    import stocaching  # type: ignore[import-not-found]

    return PerSample(stocaching.SharedCache(_gib(samples), samples, SHAPE, torch.uint8), source, samples)


def _tensors(source: Source, samples: int, _: Path) -> TensorDataset:
    return TensorDataset(torch.stack([source(index) for index in range(samples)]))


def _litdata(source: Source, samples: int, folder: Path) -> Any:
    """Chunks made by litdata's `optimize` with its defaults, and read where they lie."""
    # litdata's own working folders, which otherwise lie in the system's temporary folder.
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(folder / "work")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(folder / "work-data")
    import litdata

    chunks = str(folder / "chunks")
    litdata.optimize(
        partial(_compute, source),
        list(range(samples)),
        chunks,
        chunk_bytes="64MB",
        num_workers=1,
        start_method="fork",
    )
    return litdata.StreamingDataset(chunks, shuffle=True, seed=_SEED)


def _compute(source: Source, index: int) -> torch.Tensor:
    return source(index)


class Epochs:
    """A loader of another library's: `start` begins an epoch, given its number."""

    def __init__(self, start: Callable[[int], Iterable[torch.Tensor]]) -> None:
        self._start = start
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._start(next(self._numbers)))


def _grain(source: Source, samples: int, folder: Path, workers: int) -> Epochs:
    """An ArrayRecord file with a record a group, as Grain's documentation advises for random access."""
    import grain  # type: ignore[import-not-found]
    from array_record.python import array_record_module  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    path = str(folder / "samples.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for index in range(samples):
        writer.write(source(index).numpy().tobytes())
    writer.close()
    records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path)).seed(_SEED)
    epoch = records.shuffle().map(_as_sample).batch(BATCH, batch_fn=torch.stack)
    # One iterator over all epochs: with one for each, the workers would be started anew.
    batches = epoch.repeat().to_iter_dataset()
    if workers:
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    endless = iter(batches)
    return Epochs(lambda number: itertools.islice(endless, len(epoch)))


def _as_sample(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(SHAPE)


def _spdl(source: Source, samples: int, folder: Path, workers: int) -> Epochs:
    """Plain files, read by SPDL's threads; one if there are no workers."""
    from spdl.dataloader import DataLoader as Threads  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    files = Files(source, samples, folder)

    def start(epoch: int) -> Iterable[torch.Tensor]:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(_SEED + epoch)).tolist()
        found: Iterable[torch.Tensor] = Threads(
            order,
            preprocessor=files.__getitem__,
            batch_size=BATCH,
            aggregator=torch.stack,
            num_threads=max(1, workers),
        )
        return found

    return Epochs(start)


def _gib(samples: int) -> int:
    # stocaching takes whole GiB only; both caches use memory only for the samples they hold.
    return 1 + samples * _NUMEL // 2**30


CONTESTANTS: dict[str, Callable[[Source, int, Path], Any]] = {
    "castore": _castore,
    "castore-batched": _castore_batched,
    "castore-together": _castore_batch,
    "castore-levels": _castore_levels,
    "castore-cached": _castore_cached,
    "files": Files,
    "litdata": _litdata,
    "stocaching": _stocaching,
    "tensors": _tensors,
}
#: Loaders of their own, with so many workers.
LOADERS: dict[str, Callable[[Source, int, Path, int], Epochs]] = {"grain": _grain, "spdl": _spdl}


def main() -> None:
    contestant, samples, workers, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    # stocaching prints to standard output. Its lines go to standard error, so that standard output has the
    # answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    source = Source(samples)
    if contestant in LOADERS:
        loader: Any = LOADERS[contestant](source, samples, folder, workers)
    else:
        loader = _loader(contestant, CONTESTANTS[contestant](source, samples, folder), workers)
    expected = sum(_checksum(source(index)) for index in range(samples))
    _read(loader, 1)
    source.sealed.set()
    if sum(_checksum(sample) for batch in loader for sample in _images(batch)) != expected:
        raise RuntimeError(f"{contestant} gave other samples than it was given")
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(f"{_read(loader, int(line))}\n")


def _loader(contestant: str, dataset: Any, workers: int) -> Any:
    # Linux used fork until now, and stocaching needs it.
    options: dict[str, Any] = {"multiprocessing_context": "fork" if workers else None}
    options |= {"batch_size": BATCH, "num_workers": workers, "persistent_workers": workers > 0}
    if type(dataset).__name__ == "StreamingDataset":
        from litdata import StreamingDataLoader

        return StreamingDataLoader(dataset, **options)  # the dataset shuffles
    if contestant.startswith("castore"):
        from castore.adapters.torch import SharedBatches, collate

        options["collate_fn"] = SharedBatches() if workers else collate
    return DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(_SEED), **options)


def _images(batch: Any) -> torch.Tensor:
    # A TensorDataset's samples are tuples of one tensor.
    images: torch.Tensor = batch[0] if isinstance(batch, list) else batch
    return images


def _checksum(sample: torch.Tensor) -> int:
    # The sum of checksums does not depend on the order. torch's sum would widen each byte to eight first,
    # which stays in the heap.
    return zlib.crc32(sample.numpy().data)


def _read(loader: Any, epochs: int) -> float:
    """Read some epochs; returns the seconds of one."""
    start = time.perf_counter()
    for _ in range(epochs):
        for _ in loader:
            pass
    return (time.perf_counter() - start) / epochs


if __name__ == "__main__":
    main()
