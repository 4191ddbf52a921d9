"""Embeddings of a frozen encoder: look them up, open them, store them, train on them."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from castore import Store
from castore.adapters.embeddings import CacheConfig, CacheType, EmbeddingCache, cache_embeddings
from castore.units import format_size
from tools.bench import corpus
from tools.bench.harness import (
    Bench,
    Contestant,
    Goal,
    Row,
    Study,
    microseconds_each,
    milliseconds,
    seconds,
    verdict,
)

TITLE = "Embeddings"
ABOUT = (
    "Vectors of 384 float32, found in batches of 256 in shuffled order, with one thread, all pages warm. The "
    "seed keeps a dictionary of offsets into one tensor in memory and asks it for every key of every batch; "
    "castore's batches hold row numbers, found once. The seed's file is a pickle. An epoch trains a linear "
    "head with Adam on the batches of a DataLoader (for castore, of the one that `cache_embeddings` gives "
    "back); the encoder is a transformer of two layers with fixed weights over 32 tokens."
)
_WIDTH, _BATCH = 384, 256
_TENSOR, _SEED, _STACK = (
    "a tensor in memory, indexed",
    "the seed: dictionary of offsets, then index",
    "torch.stack, one key at a time",
)
_DISK, _CPU, _KEYS = "castore, DISK: rows", "castore, CPU: rows", "castore, DISK: keys"
_PICKLE, _OPEN = "the seed: pickle.load", "castore: open"


def rows(bench: Bench) -> Iterator[Row | Study]:
    torch.set_num_threads(1)
    count = bench.size(1_000_000, 100_000)
    vectors = torch.rand(count, _WIDTH, generator=torch.Generator().manual_seed(corpus.SEED))
    with Store(bench.work / "store", memory=0) as store:
        cache = EmbeddingCache("bench", store)
        cache.fill(range(count), range(count), lambda items: vectors[items], batch_size=8192)
        seed = {key: offset for offset, key in enumerate(range(count))}
        file = bench.work / "seed.pickle"
        file.write_bytes(pickle.dumps((seed, vectors), protocol=5))
        yield _look_ups(store, cache, vectors, seed)
        yield _opening(store, file)
        yield _on_disk(store, bench.work, vectors, file)
        yield _memory(store, file, count)
    yield _epochs(bench)


# --- looking up ---------------------------------------------------------------------------------------------


def _look_ups(store: Store, cache: EmbeddingCache, vectors: torch.Tensor, seed: dict[int, int]) -> Row:
    resident = EmbeddingCache("bench", store, resident=True)
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(corpus.SEED))
    indices = torch.split(order, _BATCH)[:400]
    keys = [batch.tolist() for batch in indices]
    numbers = [cache.rows(batch) for batch in keys]
    for batch, index in zip(numbers, indices, strict=True):
        if not torch.equal(cache.take(batch), vectors[index]):
            raise RuntimeError("the cache gave other vectors than were put")

    def by_dictionary(batch: list[int]) -> torch.Tensor:
        return vectors[[seed[key] for key in batch]]

    def by_stack(batch: list[int]) -> torch.Tensor:
        return torch.stack([vectors[seed[key]] for key in batch])

    return Row(
        f"{_BATCH} of {len(vectors):,} x {_WIDTH} float32",
        microseconds_each(len(keys)),
        [
            Contestant(_TENSOR, _each(vectors.__getitem__, indices)),
            Contestant("a tensor in memory, index_select", _each(partial(vectors.index_select, 0), indices)),
            Contestant(_SEED, _each(by_dictionary, keys)),
            Contestant(_STACK, _each(by_stack, keys)),
            Contestant(_DISK, _each(cache.take, numbers), ours=True),
            Contestant(_CPU, _each(resident.take, numbers), ours=True),
            Contestant(_KEYS, _each(cache.get, keys), ours=True),
        ],
        reference=_TENSOR,
        goals=[
            Goal(ours, factor, peer)
            for ours in (_DISK, _CPU)
            for factor, peer in ((0.9, _TENSOR), (2.5, _SEED))
        ],
    )


def _each(look_up: Callable[[Any], object], batches: Sequence[Any]) -> Callable[[], None]:
    def work() -> None:
        for batch in batches:
            look_up(batch)

    return work


# --- opening ------------------------------------------------------------------------------------------------


def _open(store: Store) -> EmbeddingCache:
    return EmbeddingCache("bench", store)


def _load(file: Path) -> tuple[dict[int, int], torch.Tensor]:
    with file.open("rb") as source:
        loaded: tuple[dict[int, int], torch.Tensor] = pickle.load(source)
    return loaded


def _opening(store: Store, file: Path) -> Row:
    def load() -> None:
        _load(file)

    def opened() -> None:
        _open(store)

    return Row(
        "opening the cache",
        milliseconds(),
        [Contestant(_PICKLE, load), Contestant(_OPEN, opened, ours=True)],
        reference=_PICKLE,
        goals=[Goal(_OPEN, 10.0, _PICKLE)],
    )


def _memory(store: Store, file: Path, count: int) -> Study:
    """Memory of two processes that have opened the cache and read all of it."""
    seed = _in_two(partial(_use_seed, file))
    ours = _in_two(partial(_use_cache, str(store.path), count))
    private = max(one.uss for one in ours)
    lines = [
        [name, *(format_size(round(sum(values))) for values in zip(*found, strict=True))]
        for name, found in ((_PICKLE, seed), (_OPEN, ours))
    ]
    small = 32e6
    return Study(
        "two processes that look at every vector",
        ["", "private, both", "PSS, both"],
        lines,
        note="More than there was before opening. PSS counts a page that processes share once in all.",
        goals=[
            verdict(
                private < small,
                f"{format_size(round(private))} private to a process, at most {format_size(round(small))}",
            )
        ],
    )


class _Memory(NamedTuple):
    uss: float
    pss: float


def _now() -> tuple[float, float]:
    gc.collect()
    info = psutil.Process().memory_full_info()
    return float(info.uss), float(info.pss)


def _use_seed(file: Path) -> object:
    seed, vectors = _load(file)
    vectors.sum()
    return seed, vectors


def _use_cache(path: str, count: int) -> object:
    cache = EmbeddingCache("bench", path)
    for batch in torch.split(torch.arange(count), _BATCH):
        cache.take(cache.rows(batch))
    return cache


def _measured(use: Callable[[], object], barrier: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    (torch.arange(10).view(5, 2)[:, 0] + torch.rand(5)).sum()
    before = _now()
    held = use()
    barrier.wait()
    after = _now()
    barrier.wait()
    answers.put(tuple(now - then for now, then in zip(after, before, strict=True)))
    del held


def _in_two(use: Callable[[], object]) -> list[_Memory]:
    """Memory that each of two processes needs to do this at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    children = [context.Process(target=_measured, args=(use, barrier, answers)) for _ in range(2)]
    for child in children:
        child.start()
    found = [_Memory(*answers.get()) for _ in children]
    for child in children:
        child.join()
    return found


def _on_disk(store: Store, work: Path, vectors: torch.Tensor, file: Path) -> Study:
    half = EmbeddingCache("half", store, dtype=torch.float16)
    count = len(vectors)
    half.fill(range(count), range(count), lambda items: vectors[items], batch_size=8192)
    sizes = {
        "the vectors alone, float32": vectors.nbytes,
        _PICKLE.removesuffix(".load"): file.stat().st_size,
        "castore, float32": sum(entry.stored for entry in store.entries("embeddings/bench")),
        "castore, float16": sum(entry.stored for entry in store.entries("embeddings/half")),
    }
    half.close()
    return Study("bytes on disk", ["", "size"], [[name, format_size(size)] for name, size in sizes.items()])


# --- training -----------------------------------------------------------------------------------------------


class _Encoder(nn.Module):
    """Tokens (B, L) to the means of their states."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 6, 2 * _WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(1000, _WIDTH)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.layers(self.embedding(tokens))
        return states.mean(1)


class _BySeed(nn.Module):
    """The seed's lookup in the place of an encoder: keys to offsets, one by one."""

    def __init__(self, vectors: torch.Tensor) -> None:
        super().__init__()
        self._vectors = vectors
        self._offsets = {key: key for key in range(len(vectors))}

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return self._vectors[[self._offsets[key] for key in keys.tolist()]]


class _Model(nn.Module):
    """A frozen encoder and a head."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(corpus.SEED)
        self.encoder = (encoder or _Encoder()).requires_grad_(False).eval()
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x))
        return out


def _loader(features: torch.Tensor) -> DataLoader[Any]:
    labels = torch.arange(len(features)) % 10
    return DataLoader(TensorDataset(features, labels), batch_size=64, shuffle=True)


def _epochs(bench: Bench) -> Row:
    model, count = _Model(), bench.size(4096, 512)
    tokens = torch.randint(0, 1000, (count, 32), generator=torch.Generator().manual_seed(corpus.SEED))
    config = CacheConfig(cache_type=CacheType.DISK, batch_size=64, save_dir=bench.work / "epochs")
    plain, cached = _loader(tokens), _Model()
    kept, _ = cache_embeddings(cached, plain, config=config)
    with torch.no_grad():
        vectors = torch.cat([model.encoder(batch) for batch in torch.split(tokens, 64)])
    by_seed = _Model(_BySeed(vectors))
    seeds = _loader(torch.arange(count))

    def epoch(model: _Model, loader: DataLoader[Any]) -> None:
        optimizer = torch.optim.Adam(model.head.parameters())
        for x, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    uncached = "uncached: the encoder runs"
    return Row(
        f"epoch of {count:,} items, with a DataLoader",
        seconds(),
        [
            Contestant(uncached, partial(epoch, model, plain)),
            Contestant(_SEED, partial(epoch, by_seed, seeds)),
            Contestant("castore, DISK", partial(epoch, cached, kept), ours=True),
        ],
        reference=uncached,
        goals=[Goal("castore, DISK", 1.0, _SEED)],
    )
