"""Operations of the suites that work within one process: stream, scale, torch, datasets, embeddings.

They are for `operations`, which has those of `kv` itself. torch and `datasets` are imported when an operation
that needs them is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import castore
from tools.bench import corpus
from tools.bench.growing import Growing

Work = Callable[[int], object]

#: Bytes of a large file, and of the text of the five steps.
FILE, TEXT = 32_000_000, 10_000_000
_SAMPLES = 1000
_VECTORS, _WIDTH, _BATCH = 20_000, 384, 256


class Operation(NamedTuple):
    """An operation that can be repeated.

    Attributes:
        prepare: makes the operation's data in a folder, for a number of calls; returns the function to call
            with 0, 1, 2 …
        weight: the number of gets of a small value that take as long.
        stages: functions that a profile shows with all their callees, where time is spread over very many;
            empty for none.
    """

    prepare: Callable[[Path, int], Work]
    weight: float = 1
    stages: tuple[str, ...] = ()

    def calls(self, gets: int) -> int:
        """The number of calls that take about as long as ``gets`` gets; a few at the least."""
        return max(10, round(gets / self.weight))


# --- stream -------------------------------------------------------------------------------------------------


def _put_file(folder: Path, _: int) -> Work:
    source, store = corpus.archive(folder, FILE), castore.Store(folder / "store", memory=0)

    def work(number: int) -> None:
        with source.open("r+b") as file:
            file.write(b"%08d" % number)  # new content to the store
        store.put_file(f"files/{number}", source)

    return work


def _put_again(folder: Path, _: int) -> Work:
    source, store = corpus.archive(folder, FILE), castore.Store(folder / "store", memory=0)
    store.put_file("files/first", source)
    return lambda number: store.put_file(f"files/{number}", source)


def _read_file(folder: Path, _: int) -> Work:
    source, store = corpus.archive(folder, FILE), castore.Store(folder / "store", memory=0)
    store.put_file("file", source)
    return lambda number: store.get("file")


# --- scale --------------------------------------------------------------------------------------------------


def _collect(folder: Path, calls: int) -> Work:
    """Collect all expired entries with the first call."""
    grown = Growing(folder / "store")
    grown.grow(calls)
    grown.add_expired(calls)
    store = castore.Store(grown.path, memory=0)
    return lambda number: store.gc() if number == 0 else None


# --- torch --------------------------------------------------------------------------------------------------


def _dataset(contestant: str, folder: Path) -> Any:
    import torch

    from tools.bench import epochs

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    dataset = epochs.CONTESTANTS[contestant](epochs.Source(_SAMPLES), _SAMPLES, folder)
    for index in range(_SAMPLES):
        dataset[index]
    return dataset


def _sample(contestant: str, folder: Path, _: int) -> Work:
    dataset = _dataset(contestant, folder)
    return lambda number: dataset[_scattered(number, _SAMPLES)]


def _samples(contestant: str, folder: Path, _: int) -> Work:
    dataset = _dataset(contestant, folder)
    batch = [_scattered(number, _SAMPLES) for number in range(64)]
    return lambda number: dataset.__getitems__(batch)


def _scattered(number: int, count: int) -> int:
    return number * 7919 % count


# --- datasets -----------------------------------------------------------------------------------------------


_CASTORES_STAGES = (
    "load_from_disk (datasets/load.py)",
    "Store.__init__ (castore/store.py)",
    "describe (castore/adapters/datasets/operator_description.py)",
    "load_step (castore/adapters/datasets/step_runner.py)",
    "PipelineRun._report_hits (castore/adapters/datasets/pipeline_run.py)",
    "Dataset.__getitem__ (datasets/arrow_dataset.py)",
    "Store.close (castore/store.py)",
)
_THEIR_STAGES = (
    "load_from_disk (datasets/load.py)",
    "update_fingerprint (datasets/fingerprint.py)",
    "Dataset.from_file (datasets/arrow_dataset.py)",
    "Dataset.__getitem__ (datasets/arrow_dataset.py)",
)


def _rerun(way: str, folder: Path, _: int) -> Work:
    import datasets

    from tools.bench import recipe, textrun, texts

    datasets.disable_progress_bars()
    source = texts.copy(texts.saved(folder / "corpus", TEXT), folder / "input")
    chain = recipe.operators("text", recipe.THIRD["text"][0], list)
    textrun.run(way, chain, source, folder / "store", check=False, last=True)
    return lambda number: textrun.run(way, chain, source, folder / "store", check=False)


# --- embeddings ---------------------------------------------------------------------------------------------


def _embeddings(folder: Path) -> Any:
    import torch

    from castore.adapters.embeddings import EmbeddingCache

    torch.set_num_threads(1)
    vectors = torch.rand(_VECTORS, _WIDTH, generator=torch.Generator().manual_seed(corpus.SEED))
    cache = EmbeddingCache("profiled", folder)
    cache.fill(range(_VECTORS), range(_VECTORS), lambda items: vectors[items])
    return cache


def _take(folder: Path, _: int) -> Work:
    cache = _embeddings(folder)
    rows = cache.rows(_keys())
    return lambda number: cache.take(rows)


def _look_up(folder: Path, _: int) -> Work:
    cache, keys = _embeddings(folder), _keys()
    return lambda number: cache.get(keys)


def _open(folder: Path, _: int) -> Work:
    from castore.adapters.embeddings import EmbeddingCache

    _embeddings(folder).close()
    store = castore.Store(folder)
    return lambda number: EmbeddingCache("profiled", store).close()


def _keys() -> list[int]:
    return [_scattered(number, _VECTORS) for number in range(_BATCH)]


OPERATIONS: dict[str, Operation] = {
    "castore put_file, 32 MB": Operation(_put_file, 5000),
    "castore put_file of a known file, 32 MB": Operation(_put_again, 500),
    "castore get, 32 MB": Operation(_read_file, 2000),
    "castore gc, an expired entry": Operation(_collect, 5),
    "castore SharedCache.get_slot": Operation(partial(_sample, "castore"), 0.5),
    "castore SharedCache.get_batch of 64": Operation(partial(_samples, "castore-together"), 10),
    "castore BiLevelCachedDataset, a sample on disk": Operation(partial(_sample, "castore-levels"), 3),
    "castore CachedDataset, a sample": Operation(partial(_sample, "castore-cached"), 3),
    "castore Pipeline, all-hit rerun of text": Operation(partial(_rerun, "cache"), 1500, _CASTORES_STAGES),
    "castore cached_map, cached_filter, all-hit rerun of text": Operation(
        partial(_rerun, "calls"), 2000, _CASTORES_STAGES
    ),
    "datasets, all-hit rerun of text": Operation(partial(_rerun, "datasets"), 1500, _THEIR_STAGES),
    "castore EmbeddingCache.take of 256 rows": Operation(_take, 5),
    "castore EmbeddingCache.get of 256 keys": Operation(_look_up, 10),
    "castore EmbeddingCache, opening": Operation(_open, 100),
}
