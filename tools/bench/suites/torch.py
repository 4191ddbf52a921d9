"""Samples for training: castore's datasets beside stocaching, plain tensors and plain files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from castore.adapters.torch import BiLevelCachedDataset
from castore.adapters.torch.samples import pack
from tools.bench import corpus, photos, plots
from tools.bench.epochs import SHAPE
from tools.bench.harness import (
    Bench,
    Contestant,
    Goal,
    Result,
    Row,
    Study,
    microseconds_each,
    per_second,
    seconds,
    verdict,
)
from tools.bench.peers import OURS, PEERS, Reader

TITLE = "Samples for training"
ABOUT = (
    "Through a `DataLoader`: samples of 12 KB (3 x 64 x 64 bytes), shuffled, in batches of 64, all of them "
    "in memory. A figure is the mean of 5 epochs in a process of its own; workers persist and are forked. "
    "Both caches are asked one sample at a time with `get_slot`, as stocaching's README has it; with "
    "`get_slots` castore answers a whole batch (`__getitems__`), with `get_batch` and `collate` as the batch "
    "that the loader is asked for. castore's workers hand their batches on with `SharedBatches`, the others' "
    "as PyTorch does. stocaching and `TensorDataset` hand out views of their memory, which a "
    "transform in place changes; castore hands out copies. stocaching runs with NumPy 1, which it needs. "
    "Samples on disk are in the page cache; litdata reads them from the 64 MB chunks of its `optimize`, "
    "which nobody checks, with its own `StreamingDataLoader`, and shuffles the chunks and the samples of "
    "each, where castore and the plain files take any sample after any other. Google Grain reads an "
    "ArrayRecord file with one record a group, in processes of its own if there are workers, and SPDL the "
    "plain files, in so many threads (in one for 0 workers); both shuffle all samples. (FFCV cannot be "
    "installed without compiling it against OpenCV and TurboJPEG.) `BiLevelCachedDataset` is read "
    "in the process itself, with one thread, a sample being 12 KB of random bytes as an image and its label; "
    "what comes from its disk level is checked, the plain files are not. The JPEG photographs are 500 x 375; "
    "when one is read, Pillow decodes it and makes it 224 x 224."
)
_ONE, _MANY = "castore SharedCache, get_slot", "castore SharedCache, get_slots"
_WHOLE = "castore SharedCache, get_batch"
_STOCACHING, _TENSORS = "stocaching, get_slot", "TensorDataset"
_LITDATA = "litdata StreamingDataset"
_GRAIN, _SPDL = "Google Grain, ArrayRecord", "SPDL over the plain files"
_LEVELS, _BATCHES = "castore BiLevelCachedDataset", "castore BiLevelCachedDataset, 64 at a time"
_FILES = "plain files: open, read, close"
_PLAIN = "the dataset itself"
_PARTS = (0.25, 0.5, 0.75, 1.0)
_BATCH = 64
# Epochs of a run: one epoch alone is over in a tenth of a second.
_EPOCHS = 5


def rows(bench: Bench) -> Iterator[Row | Study]:
    # One thread, as in a DataLoader's worker, for the samples that this process reads itself.
    torch.set_num_threads(1)
    samples = bench.size(20_000, 2000)
    for workers in (0, 2):
        with ExitStack() as stack:
            yield _loaders(bench.work, samples, workers, stack)
    for workers in (0, 2):
        with ExitStack() as stack:
            yield _from_disk(bench.work / f"disk-{workers}", samples, workers, stack)
    count = bench.size(4000, 1000)
    with ExitStack() as stack:
        yield _memory_hits(count, stack)
    with ExitStack() as stack:
        yield _disk_hits(bench.work, count, stack)
    with ExitStack() as stack:
        yield _epoch_two(bench, bench.size(1000, 200), stack)
    yield _memory_of_workers(bench.work, bench.size(100_000, 60_000))


def _loaders(work: Path, samples: int, workers: int, stack: ExitStack) -> Row:
    def reader(contestant: str, environment: str = OURS) -> Callable[[], float]:
        made = Reader(contestant, samples, workers, work / "unused", environment)
        return partial(stack.enter_context(made).read, _EPOCHS)

    return Row(
        f"DataLoader, {workers} workers",
        per_second(samples, "samples/s"),
        [
            Contestant(_STOCACHING, reader("stocaching", PEERS)),
            Contestant(_TENSORS, reader("tensors")),
            Contestant(_ONE, reader("castore"), ours=True),
            Contestant(_MANY, reader("castore-batched"), ours=True),
            Contestant(_WHOLE, reader("castore-together"), ours=True),
        ],
        reference=_STOCACHING,
        goals=[Goal(ours, 1.0, peer) for ours in (_ONE, _MANY, _WHOLE) for peer in (_STOCACHING, _TENSORS)],
    )


def _from_disk(work: Path, samples: int, workers: int, stack: ExitStack) -> Row:
    def reader(contestant: str, environment: str = OURS) -> Callable[[], float]:
        made = Reader(contestant, samples, workers, work / contestant, environment)
        return partial(stack.enter_context(made).read, _EPOCHS)

    return Row(
        f"DataLoader, samples on disk, {workers} workers",
        per_second(samples, "samples/s"),
        [
            Contestant(_LITDATA, reader("litdata", PEERS)),
            Contestant(_GRAIN, reader("grain", PEERS)),
            Contestant(_SPDL, reader("spdl", PEERS)),
            Contestant(_FILES, reader("files")),
            Contestant("castore BiLevelCachedDataset, disk level", reader("castore-levels"), ours=True),
            Contestant("castore CachedDataset", reader("castore-cached"), ours=True),
        ],
        reference=_LITDATA,
    )


# --- the two levels -----------------------------------------------------------------------------------------


def _images(count: int) -> TensorDataset:
    """Images and labels; random bytes, which no codec makes smaller."""
    generator = torch.Generator().manual_seed(corpus.SEED)
    images = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.arange(count))


def _shuffled(count: int) -> list[int]:
    return random.Random(corpus.SEED).sample(range(count), count)


def _each(dataset: Any, order: list[int]) -> Callable[[], None]:
    def work() -> None:
        for index in order:
            dataset[index]

    return work


def _in_batches(dataset: Any, order: list[int]) -> Callable[[], None]:
    batches = [order[start : start + _BATCH] for start in range(0, len(order), _BATCH)]

    def work() -> None:
        for batch in batches:
            dataset.__getitems__(batch)

    return work


def _filled(dataset: BiLevelCachedDataset, data: TensorDataset, stack: ExitStack) -> BiLevelCachedDataset:
    """The dataset with all samples in its levels.

    Checks every sample, and that all are cached: a wrong answer is not fast, nor one that is not cached.
    """
    stack.callback(dataset.close)
    dataset.fill(progress=False)
    for index in range(len(data)):
        for got, put in zip(dataset[index], data[index], strict=True):
            if not torch.equal(got, put):
                raise RuntimeError(f"{dataset} gave sample {index} as another")
    if dataset.misses:
        raise RuntimeError(f"{dataset.misses} samples were not cached")
    return dataset


def _memory_hits(count: int, stack: ExitStack) -> Row:
    data, order = _images(count), _shuffled(count)
    cached = _filled(BiLevelCachedDataset(data, "256MB"), data, stack)
    return Row(
        "12 KB sample from memory",
        microseconds_each(count),
        [
            Contestant(_TENSORS, _each(data, order)),
            Contestant(_LEVELS, _each(cached, order), ours=True),
            Contestant(_BATCHES, _in_batches(cached, order), ours=True),
        ],
        reference=_TENSORS,
        goals=[Goal(_LEVELS, at_most=20)],
    )


def _disk_hits(work: Path, count: int, stack: ExitStack) -> Row:
    data, order = _images(count), _shuffled(count)
    cached = _filled(BiLevelCachedDataset(data, 0, "1GB", work / "levels"), data, stack)
    folder = work / "files"
    folder.mkdir()
    labels = data.tensors[1]
    paths = [folder / f"{index:06}.bin" for index in range(count)]
    for path, image in zip(paths, data.tensors[0], strict=True):
        path.write_bytes(image.numpy().tobytes())

    def files() -> None:
        for index in order:
            with open(paths[index], "rb", buffering=0) as file:
                image = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(SHAPE)
            _ = image, labels[index]

    return Row(
        "12 KB sample from disk, in the page cache",
        microseconds_each(count),
        [
            Contestant(_FILES, files),
            Contestant(_LEVELS, _each(cached, order), ours=True),
            Contestant(_BATCHES, _in_batches(cached, order), ours=True),
        ],
        reference=_FILES,
        goals=[Goal(_LEVELS, 0.5, _FILES)],
    )


# --- a dataset that takes its time --------------------------------------------------------------------------


def _epoch_two(bench: Bench, count: int, stack: ExitStack) -> Row:
    data = photos.make(bench.work / "photos", count)
    cached = [_holding(data, part, stack) for part in _PARTS]
    contestants = [
        Contestant(f"castore, {part:.0%} cached", partial(_epoch, dataset), ours=True)
        for part, dataset in zip(_PARTS, cached, strict=True)
    ]
    return Row(
        f"epoch of {count} JPEG photographs",
        seconds(),
        [Contestant(_PLAIN, partial(_epoch, data)), *contestants],
        reference=_PLAIN,
        conclude=partial(_straightness, bench.pictures / "epoch2.png"),
    )


def _holding(data: photos.Photos, part: float, stack: ExitStack) -> BiLevelCachedDataset:
    """The dataset with room for a part of its samples in memory, after its first epoch."""
    record = -(-len(pack(data[0])) // 64) * 64
    # The tables beside the samples count too; a trial gives their size.
    with BiLevelCachedDataset(data, 64 * 2**20) as trial:
        stats = trial.stats().memory
        assert stats is not None
        tables = 64 * 2**20 - stats.limit
    places = round(part * len(data))
    dataset = BiLevelCachedDataset(data, tables + places * record)
    stack.callback(dataset.close)
    _epoch(dataset)
    stats = dataset.stats().memory
    held = stats.samples if stats else 0
    if held != places:
        raise RuntimeError(f"{held} samples are held, not {places}")
    return dataset


def _epoch(dataset: Dataset[torch.Tensor]) -> None:
    for _ in DataLoader(dataset, _BATCH, shuffle=True):
        pass


def _straightness(picture: Path, result: Result) -> Study:
    """The distance of an epoch's times from the straight line between no cache and all cached."""
    parts, timings = (0.0, *_PARTS), result.timings
    times = [timing.median for timing in timings]
    line = [times[0] + part * (times[-1] - times[0]) for part in parts]
    off = [time / expected - 1 for time, expected in zip(times, line, strict=True)]
    plots.against_line(
        picture, parts, times, [(min(timing.figures), max(timing.figures)) for timing in timings]
    )
    worst = max(off, key=abs)
    return Study(
        "Epoch 2 of a dataset that decodes JPEG files, by the part of it "
        "that BiLevelCachedDataset has in memory",
        ["cached", "time of epoch 2", "times as fast as without", "on the straight line", "off by"],
        [
            [
                f"{part:.0%}",
                f"{time:.3f} s",
                f"{result.ratio(timing.name, _PLAIN):.2f}",
                f"{expected:.3f} s",
                f"{deviation:+.1%}",
            ]
            for part, timing, time, expected, deviation in zip(parts, timings, times, line, off, strict=True)
        ],
        note="At 0 % there is no cache around the dataset. The straight line "
        "runs from there to the time with all cached.",
        goals=[
            verdict(
                abs(worst) <= 0.1,
                "the time of epoch 2 falls linearly with the cached part, "
                f"within 10 %: off by {worst:+.1%} at most",
            )
        ],
        picture=picture.name,
    )


# --- memory -------------------------------------------------------------------------------------------------


def _memory_of_workers(work: Path, samples: int) -> Study:
    """Memory of a process with 1 and with 4 workers, each page counted once: PSS."""
    found = {}
    for workers in (1, 4):
        with Reader("castore", samples, workers, work / "unused") as reader:
            reader.read(2)
            found[workers] = _pss(reader.pid)
    (total, cache), (total_4, cache_4) = found[1], found[4]
    growth = [total_4 / total - 1, cache_4 / cache - 1]
    size = samples * torch.Size(SHAPE).numel()
    return Study(
        f"Memory of a SharedCache of {size / 1e6:.0f} MB with its `DataLoader`'s workers",
        ["", "1 worker", "4 workers", "growth"],
        [
            ["all processes", f"{total / 1e6:.0f} MB", f"{total_4 / 1e6:.0f} MB", f"{growth[0]:+.1%}"],
            ["of which the cache", f"{cache / 1e6:.0f} MB", f"{cache_4 / 1e6:.0f} MB", f"{growth[1]:+.1%}"],
        ],
        note="Figures are PSS: a page that n processes share counts 1/n in each. "
        "Beside the cache, each worker's own "
        "Python grows, and the batches that the worker has ready.",
        goals=[
            verdict(
                growth[0] < 0.05,
                f"4 workers over one cache take less than 5 % more memory than 1: {growth[0]:+.1%}",
            )
        ],
    )


def _pss(pid: int) -> tuple[int, int]:
    """PSS of a process and its children: all bytes, and those of castore's segments."""
    reader = psutil.Process(pid)
    total = cache = 0
    for process in (reader, *reader.children(recursive=True)):
        total += process.memory_full_info().pss
        cache += sum(
            place.pss for place in process.memory_maps() if place.path.startswith("/dev/shm/castore-")
        )
    return total, cache
