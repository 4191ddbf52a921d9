"""Samples and embeddings on their way to a CUDA device.

Only for machines with such a device; on others the suite says so and leaves the page of an earlier run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from castore import Store
from castore.adapters.embeddings import CacheConfig, CacheType, EmbeddingCache, cache_embeddings
from castore.adapters.embeddings.devices import DeviceLookup, MappedLookup
from castore.adapters.torch import SharedCache, collate
from castore.units import format_size
from tools.bench import corpus
from tools.bench.harness import (
    Bench,
    Contestant,
    Goal,
    Row,
    Study,
    microseconds_each,
    per_second,
    seconds,
)

TITLE = "Samples and embeddings on a GPU"
ABOUT = (
    "Each contestant ends when the device has all of its batches (`torch.cuda.synchronize`). Samples are "
    "images of 3 x 224 x 224 bytes (151 KB), shuffled, in batches of 256, all in memory: those of castore in "
    "a `SharedCache`, whose `get_batch` a `DataLoader` of 4 workers asks for (`collate`); those of "
    "`TensorDataset` in one tensor, which the loader stacks; the third has them in one tensor too, and "
    "indexes it once a batch, in `__getitems__`. With pinned memory, a thread of the loader copies each "
    "batch into page-locked memory, from which the device takes it while the program goes on. The last two "
    "use no loader: the program itself gathers each batch into one of two page-locked tensors, and the "
    "device has all samples. Embeddings are vectors of 384 float32, found in batches of 256 in shuffled "
    "order. An epoch trains a linear head with Adam, through a `DataLoader` without workers; the encoder is "
    "a transformer of 12 layers, width 768 (as BERT base), with fixed weights over 128 tokens, in float32. "
    "The second contestant has the embeddings in a `TensorDataset`."
)
_SHAPE, _BATCH, _WORKERS = (3, 224, 224), 256, 4
_TENSORS, _INDEXED = "TensorDataset, pinned", "one tensor, indexed by batch, pinned"
_OURS, _UNPINNED = "castore SharedCache, pinned", "castore SharedCache, not pinned"
_OWN, _RESIDENT = "castore SharedCache, no loader, out=", "all samples on the device, indexed"
_WIDTH = 384
_ON_DEVICE, _ON_CPU = "a tensor on the device, index_select", "a tensor in memory, indexed, then copied"
_GPU, _CPU = "castore, GPU: rows", "castore, DISK: rows, then copied"
_ENCODER, _PLAIN = "uncached: the encoder runs", "TensorDataset of the embeddings"
_STATES = 768
_CASTORE_GPU, _CASTORE_DISK = "castore, GPU", "castore, DISK"


def why_not() -> str:
    """Why this machine cannot run the suite; empty if it can."""
    return "" if torch.cuda.is_available() else "there is no CUDA device here"


def rows(bench: Bench) -> Iterator[Row | Study]:
    yield _loaders(bench.size(10_000, 2048))
    with Store(bench.work / "store", memory=0) as store:
        yield from _look_ups(store, bench.size(1_000_000, 100_000))
    yield _epochs(bench)


# --- samples ------------------------------------------------------------------------------------------------


class _Batches(Dataset[Any]):
    """Whole batches, from a function of their indices."""

    def __init__(self, count: int, batch: Callable[[list[int]], torch.Tensor]) -> None:
        self._count, self._batch = count, batch

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self._batch(indices)


def _loaders(count: int) -> Row:
    generator = torch.Generator().manual_seed(corpus.SEED)
    images = torch.randint(0, 256, (count, *_SHAPE), dtype=torch.uint8, generator=generator)
    expected = int(images.sum(dtype=torch.int64))
    cache = SharedCache(1 + images.nbytes / 2**30, count, _SHAPE)
    for part in torch.split(torch.arange(count), 512):
        cache.set_slots(part.tolist(), list(images[part[0] : part[-1] + 1]))
    resident = images.cuda()

    def loader(dataset: Dataset[Any], *, pin: bool = True, **options: Any) -> Callable[[], None]:
        made = DataLoader(
            dataset, _BATCH, shuffle=True, num_workers=_WORKERS, pin_memory=pin, persistent_workers=True,
            multiprocessing_context="fork", **options,
        )  # fmt: skip

        def moved() -> Iterator[torch.Tensor]:
            for batch in made:
                images = batch[0] if isinstance(batch, list) else batch
                yield images.to("cuda", non_blocking=True)

        return partial(_check, moved, expected, count)

    def own() -> Iterator[torch.Tensor]:
        # Two page-locked tensors: the device takes one while the program fills the other.
        pinned = [torch.empty((_BATCH, *_SHAPE), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        taken = [torch.cuda.Event() for _ in pinned]  # type: ignore[no-untyped-call]
        for number, chosen in enumerate(torch.split(torch.randperm(count), _BATCH)):
            place, event = pinned[number % 2][: len(chosen)], taken[number % 2]
            event.synchronize()
            cache.get_batch(chosen.tolist(), out=place)
            yield place.to("cuda", non_blocking=True)
            event.record()

    def indexed() -> Iterator[torch.Tensor]:
        for chosen in torch.split(torch.randperm(count, device="cuda"), _BATCH):
            yield resident[chosen]

    return Row(
        f"{count:,} samples to the device",
        per_second(count, "samples/s"),
        [
            Contestant(_TENSORS, loader(TensorDataset(images))),
            Contestant(_INDEXED, loader(_Batches(count, images.__getitem__), collate_fn=collate)),
            Contestant(_OURS, loader(_Batches(count, cache.get_batch), collate_fn=collate), ours=True),
            Contestant(
                _UNPINNED, loader(_Batches(count, cache.get_batch), pin=False, collate_fn=collate), ours=True
            ),
            Contestant(_OWN, partial(_check, own, expected, count), ours=True),
            Contestant(_RESIDENT, partial(_check, indexed, expected, count)),
        ],
        reference=_TENSORS,
        goals=[Goal(_OURS, 1.0, _TENSORS), Goal(_OURS, 0.9, _INDEXED)],
    )


def _check(batches: Callable[[], Iterator[torch.Tensor]], expected: int, count: int) -> None:
    """Read an epoch, and check that the device has every sample once."""
    total, seen = torch.zeros((), dtype=torch.int64, device="cuda"), 0
    for batch in batches():
        total += batch.sum(dtype=torch.int64)
        seen += len(batch)
    if seen != count or int(total) != expected:
        raise RuntimeError(f"the device has {seen} samples with the sum {int(total)}, not {expected}")


# --- embeddings ---------------------------------------------------------------------------------------------


def _look_ups(store: Store, count: int) -> Iterator[Row | Study]:
    vectors = torch.rand(count, _WIDTH, generator=torch.Generator().manual_seed(corpus.SEED))
    cache = EmbeddingCache("bench", store)
    cache.fill(range(count), range(count), lambda items: vectors[items], batch_size=8192)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(corpus.SEED))
    batches = torch.split(order, _BATCH)[:400]
    numbers = [cache.rows(batch.tolist()) for batch in batches]
    device = torch.device("cuda")
    free = torch.cuda.mem_get_info()[0]
    copied, mapped = DeviceLookup(cache, torch.arange(count)), MappedLookup(cache)
    for batch, rows in zip(batches, numbers, strict=True):
        for lookup in (copied, mapped):
            if not torch.equal(lookup.take(rows, device).cpu(), vectors[batch]):
                raise RuntimeError("the cache gave other vectors than were put")
    taken = free - torch.cuda.mem_get_info()[0]
    resident = vectors.cuda()

    def each(look_up: Callable[[Any], object], chosen: Sequence[Any]) -> Callable[[], None]:
        def work() -> None:
            for rows in chosen:
                look_up(rows)
            torch.cuda.synchronize()

        return work

    yield Row(
        f"{_BATCH} of {count:,} x {_WIDTH} float32 on the device",
        microseconds_each(len(batches)),
        [
            Contestant(_ON_DEVICE, each(lambda rows: resident.index_select(0, rows.cuda()), batches)),
            Contestant(_ON_CPU, each(lambda rows: vectors[rows].cuda(), batches)),
            Contestant(_GPU, each(lambda rows: copied.take(rows, device), numbers), ours=True),
            Contestant(_CPU, each(lambda rows: mapped.take(rows, device), numbers), ours=True),
        ],
        reference=_ON_DEVICE,
        goals=[Goal(_GPU, 0.9, _ON_DEVICE), Goal(_CPU, 0.9, _ON_CPU)],
    )
    yield Study(
        "memory of the device",
        ["", "size"],
        [["the vectors alone", format_size(vectors.nbytes)], ["castore, GPU", format_size(taken)]],
        note="The memory that the device had less after the first look-ups.",
    )


class _Encoder(nn.Module):
    """Tokens (B, L) to the means of their states."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_STATES, 12, 4 * _STATES, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(30_000, _STATES)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.layers(self.embedding(tokens))
        return states.mean(1)


class _Model(nn.Module):
    """A frozen encoder, or none, and a head."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(corpus.SEED)
        self.encoder: Any = (encoder or _Encoder()).requires_grad_(False).eval()
        self.head = nn.Linear(_STATES, 10)

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


def _epochs(bench: Bench) -> Row:
    count = bench.size(8192, 1024)
    tokens = torch.randint(0, 30_000, (count, 128), generator=torch.Generator().manual_seed(corpus.SEED))

    def loader(features: torch.Tensor) -> DataLoader[Any]:
        data = TensorDataset(features, torch.arange(count) % 10)
        return DataLoader(data, batch_size=64, shuffle=True, pin_memory=True)

    plain = loader(tokens)

    def epoch(model: _Model, loader: DataLoader[Any]) -> None:
        optimizer = torch.optim.Adam(model.head.parameters())
        for x, labels in loader:
            features = x.to("cuda", non_blocking=True)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), labels.to("cuda", non_blocking=True))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.cuda.synchronize()

    def cached(kind: CacheType) -> Callable[[], None]:
        model = _Model().cuda()
        config = CacheConfig(cache_type=kind, batch_size=64, save_dir=bench.work / "epochs")
        kept, _ = cache_embeddings(model, plain, config=config, progress=False)
        return partial(epoch, model, kept)

    return Row(
        f"epoch of {count:,} items, with a DataLoader",
        seconds(),
        [
            Contestant(_ENCODER, partial(epoch, _Model().cuda(), plain)),
            Contestant(
                _PLAIN, partial(epoch, _Model(nn.Identity()).cuda(), loader(torch.rand(count, _STATES)))
            ),
            Contestant(_CASTORE_GPU, cached(CacheType.GPU), ours=True),
            Contestant(_CASTORE_DISK, cached(CacheType.DISK), ours=True),
        ],
        reference=_ENCODER,
        goals=[Goal(_CASTORE_GPU, 5.0, _ENCODER), Goal(_CASTORE_GPU, 0.9, _PLAIN)],
    )
