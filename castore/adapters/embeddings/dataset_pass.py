"""One pass over a dataset, which fills the tables of all its encoders and of its labels at once.

The pass reads only samples of which something is missing. Ranks of a node that fill at the same time begin at
different places, and share the work through the tables' claims. Must leave the random numbers of the training
run as they were (see `frozen_encoders`), and never touch its loader: the pass has one of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm.auto import tqdm

from castore.adapters.embeddings.batch_places import RestOfBatch
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.adapters.embeddings.devices import concatenate
from castore.adapters.embeddings.encoder_inputs import Call, EncoderCalls
from castore.adapters.embeddings.frozen_encoders import RANDOM_ADVICE, refuse_random_numbers
from castore.adapters.embeddings.key_table import key_digests
from castore.adapters.embeddings.shard_commit import NewRows
from castore.adapters.embeddings.shared_blocks import SharedBlocks, block_items, block_name
from castore.adapters.embeddings.table_fill import Filling
from castore.adapters.embeddings.table_identity import extracted_key
from castore.errors import InvalidValueError
from castore.store import Store

Extractors = Mapping[int, Callable[[Any], Any]]
RunEncoder = Callable[[Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True)
class BatchItem:
    """One of a batch's items, for one call of an encoder."""

    batch: Any
    call: int
    position: int
    size: int


class _Work(NamedTuple):
    """The fills of one pass, of encoders and of labels, the keys that it saw if they count, and its bar."""

    fillings: list[Filling]
    kept: Filling | None
    seen: list[dict[Any, None]] | None
    bar: tqdm[Any]

    @property
    def all_fillings(self) -> list[Filling]:
        """The fills of all tables, that of labels last."""
        return [*self.fillings, *([] if self.kept is None else [self.kept])]


class DatasetPass:
    """A pass over one loader's dataset, and its tables.

    Args:
        loader: the loader of the training run.
        encoders: their inputs.
        extractors: key extractors, by the encoder's number.
        tables: of the encoders, by number.
        index: the table of labels and extracted keys, by sample; None if there is nothing to keep in it.
        rest: the labels' part of a batch; None if labels are not kept.
        layout: of a batch, from `learn_layout`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        encoders: list[EncoderCalls],
        extractors: Extractors,
        tables: list[EmbeddingCache],
        index: EmbeddingCache | None,
        rest: RestOfBatch | None,
        layout: Any,
    ) -> None:
        self.loader = loader
        self.encoders = encoders
        self.extractors = extractors
        self.tables = tables
        self.index = index
        self.rest = rest
        self._layout = layout

    # Contents

    def rows(self) -> torch.Tensor:
        """The rows of each sample's embeddings: int64 (n, calls of all encoders); -1 for missing ones."""
        count = len(self.loader.dataset)  # type: ignore[arg-type]
        columns = []
        kept = None if self.index is None else self.index.find(range(count))
        for source, table in zip(self.encoders, self.tables, strict=True):
            for number in range(len(source.calls)):
                if source.number not in self.extractors:
                    columns.append(table.find(range(number, count * len(source.calls), len(source.calls))))
                    continue
                assert self.index is not None
                assert kept is not None
                found = torch.full((count,), -1, device="cpu")
                there = (kept >= 0).nonzero().flatten()
                if len(there):
                    keys = self.index.take(kept[there])[key_leaf_name(source.number, number)]
                    found[there] = table.find(keys)
                columns.append(found)
        rows = torch.stack(columns, 1)
        if kept is not None:
            rows[kept < 0] = -1
        return rows

    # Filling

    def fill(
        self,
        encode: list[RunEncoder],
        *,
        batch_size: int,
        num_workers: int,
        start: float,
        label: str,
        progress: bool | None,
    ) -> list[list[Any]]:
        """Encode the samples of which something is missing.

        Args:
            encode: for each encoder, a function that runs it on arguments.
            batch_size, num_workers: of the pass's loader.
            start: the part of the samples at which to begin, from 0 to 1.
            label: of the bar.
            progress: show it; None: on a terminal.

        Returns:
            The keys of each encoder's items that were seen; for an iterable dataset these are all its keys.
        """
        dataset = self.loader.dataset
        total, todo = None, None
        if not isinstance(dataset, IterableDataset):
            total = len(dataset)  # type: ignore[arg-type]
            missing = (self.rows() < 0).any(1).nonzero().flatten().tolist()
            begin = int(start * total)
            todo = [*(i for i in missing if i >= begin), *(i for i in missing if i < begin)]
            if not todo:
                return []
        seen: list[dict[Any, None]] = [{} for _ in self.encoders]
        # None for tqdm's `disable` shows the bar on a terminal only.
        with (
            ExitStack() as stack,
            tqdm(
                total=total,
                initial=0 if todo is None or total is None else total - len(todo),
                desc=f"encoding {label}",
                unit=" samples",
                disable=None if progress is None else not progress,
            ) as bar,
        ):
            fillings = [
                stack.enter_context(
                    table.filling(_ItemEncoder(source, run, self._layout), batch_size=batch_size)
                )
                for source, table, run in zip(self.encoders, self.tables, encode, strict=True)
            ]
            index = None
            if self.index is not None:
                index = stack.enter_context(self.index.filling(_select_values, batch_size=batch_size))
            work = _Work(fillings, index, seen if todo is None else None, bar)
            if todo is not None and self.is_shared:
                self._fill_shared(work, todo, batch_size, num_workers)
            else:
                batches = None if todo is None else _chunks(todo, batch_size)
                for batch in self._read_batches(batches, batch_size, num_workers):
                    self._add(work, *batch)
        return [list(found) for found in seen]

    def _add(
        self, work: _Work, numbers: list[int], batch: Any, keys: Mapping[tuple[int, int], list[Any]]
    ) -> None:
        size = len(numbers)
        for source, filling in zip(self.encoders, work.fillings, strict=True):
            for call in range(len(source.calls)):
                # Without a key extractor, indices are the keys; an encoder with several calls has a
                # number for each call.
                own = keys.get((source.number, call)) or [n * len(source.calls) + call for n in numbers]
                filling.add(own, [BatchItem(batch, call, position, size) for position in range(size)])
                if work.seen is not None:
                    work.seen[source.number].update(dict.fromkeys(own))
        kept = self._index_values(batch, size, keys)  # also checks what is the same in every batch
        if work.kept is not None:
            work.kept.add(numbers, [BatchItem(kept, 0, position, size) for position in range(size)])
        work.bar.update(size)

    # Blocks that nodes share

    def _fill_shared(self, work: _Work, todo: list[int], batch_size: int, num_workers: int) -> None:
        """Fill block by block, with those that other nodes have encoded. A block is a range of samples."""
        spans: dict[range, list[int]] = {}
        total = len(self.loader.dataset)  # type: ignore[arg-type]
        items = block_items(total, batch_size)
        for number in todo:
            start = number // items * items
            spans.setdefault(range(start, min(start + items, total)), []).append(number)

        def add(span: range, tables: list[NewRows]) -> bool:
            fillings = work.all_fillings
            if len(tables) != len(fillings):
                return False
            if not all(filling._receive(rows) for filling, rows in zip(fillings, tables, strict=True)):
                return False
            if self._export(work, span) is None:
                return False
            work.bar.update(len(spans[span]))
            return True

        names = [table.name for table in self._all_tables]
        blocks = SharedBlocks(self._store, lambda span: block_name(names, span.start, span.stop), add)
        with closing(blocks):
            for mine in blocks.rounds(spans):
                # Workers start for the sake of a block only, and not to find that there is none.
                if first := next(mine, None):
                    self._fill_blocks(work, blocks, spans, chain([first], mine), batch_size, num_workers)

    def _fill_blocks(
        self,
        work: _Work,
        blocks: SharedBlocks[range],
        spans: Mapping[range, list[int]],
        mine: Iterable[range],
        batch_size: int,
        num_workers: int,
    ) -> None:
        """Fill blocks that are claimed as their batches are asked for, some batches ahead."""
        begun: deque[tuple[range, int]] = deque()

        def batches() -> Iterator[list[int]]:
            for span in mine:
                chunks = list(_chunks(spans[span], batch_size))
                begun.append((span, len(chunks)))
                yield from chunks

        left = 0
        for batch in self._read_batches(batches(), batch_size, num_workers):
            self._add(work, *batch)
            left = (left or begun[0][1]) - 1
            if not left:
                self._finish(work, blocks, begun.popleft()[0])

    def _finish(self, work: _Work, blocks: SharedBlocks[range], span: range) -> None:
        for filling in work.all_fillings:
            filling._encode_all()
        blocks.finish(span, self._export(work, span))

    def _export(self, work: _Work, span: range) -> list[NewRows] | None:
        """The rows of some samples in all tables, put or not; None if some are missing."""
        if work.kept is not None:
            work.kept.put()  # small rows, which hold the keys of the others
        found = []
        for keys, filling in zip(self._keys_of(span), work.all_fillings, strict=True):
            digests = np.unique(key_digests(keys), axis=0)
            if not filling._has(digests).all():
                return None
            found.append(filling._export(digests))
        return found

    def _keys_of(self, span: range) -> Iterator[Any]:
        """The keys of some samples, for each table. Those of samples without a row are left out."""
        kept = None
        if self.extractors and self.index is not None:
            rows = self.index.find(span)
            kept = self.index.take(rows[rows >= 0])
        for source in self.encoders:
            calls = len(source.calls)
            if source.number not in self.extractors:
                yield range(span.start * calls, span.stop * calls)
            else:
                assert kept is not None
                yield [key for call in range(calls) for key in kept[key_leaf_name(source.number, call)]]
        if self.index is not None:
            yield span

    @property
    def is_shared(self) -> bool:
        """Whether nodes share the blocks of the pass. Samples of a stream have no numbers that agree."""
        return self._store.is_shared and not isinstance(self.loader.dataset, IterableDataset)

    @property
    def _store(self) -> Store:
        return self.tables[0].store

    @property
    def _all_tables(self) -> list[EmbeddingCache]:
        return [*self.tables, *([] if self.index is None else [self.index])]

    def _index_values(
        self, batch: Any, size: int, keys: Mapping[tuple[int, int], list[bytes]]
    ) -> dict[str, Any]:
        values = {} if self.rest is None else self.rest.take(batch, size)
        return values | {key_leaf_name(*place): found for place, found in keys.items()}

    def _read_batches(
        self, batches: Iterable[list[int]] | None, batch_size: int, num_workers: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Batches of the samples of some numbers each; of a stream all, ``batch_size`` at a time."""
        loader = self.loader
        gather = KeyedCollate(loader.collate_fn, self.encoders, self.extractors)
        options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": gather}
        if num_workers:
            options |= {
                "worker_init_fn": loader.worker_init_fn,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        # A generator of its own, so that starting workers draws nothing from that of the training run.
        options["generator"] = torch.Generator(torch.get_default_device())
        if batches is None:
            return iter(DataLoader(loader.dataset, batch_size=batch_size, **options))
        return iter(DataLoader(_SteadyDataset(loader.dataset), batch_sampler=batches, **options))


class NumberedSample(NamedTuple):
    """A sample of a map-style dataset, and its index."""

    number: int
    value: Any


class NumberedDataset(Dataset[Any]):
    """Samples with their indices; reads as many at once as the dataset can."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> NumberedSample:
        return NumberedSample(index, self.dataset[index])

    def __getitems__(self, indices: list[int]) -> list[NumberedSample]:
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch else [self.dataset[index] for index in indices]
        return list(map(NumberedSample, indices, samples))


class _SteadyDataset(NumberedDataset):
    """Samples that must draw no random numbers: they are read once, and stand for all epochs."""

    def __getitems__(self, indices: list[int]) -> list[NumberedSample]:
        with refuse_random_numbers("the dataset", RANDOM_ADVICE):
            return super().__getitems__(indices)


class KeyedCollate:
    """Collates samples in the loader's worker, and returns their indices and keys too.

    Samples of map-style datasets come with their indices; those of others are known by their keys.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], encoders: list[EncoderCalls], extractors: Extractors
    ) -> None:
        self._collate = collate
        self._calls: list[tuple[int, int, Call]] = [
            (source.number, number, call)
            for source in encoders
            if source.number in extractors
            for number, call in enumerate(source.calls)
        ]
        self._extractors = extractors

    def __call__(self, samples: list[Any]) -> tuple[list[int], Any, dict[tuple[int, int], list[bytes]]]:
        """Indices (or places in the batch), the batch, and extracted keys by encoder and call."""
        numbers = list(range(len(samples)))
        if isinstance(samples[0], NumberedSample):
            numbers, samples = [sample.number for sample in samples], [sample.value for sample in samples]
        return numbers, self._collate(samples), self.keys(samples)

    def keys(self, samples: list[Any]) -> dict[tuple[int, int], list[bytes]]:
        """Extracted keys, by encoder and call."""
        return {
            (encoder, number): [
                extracted_key(self._extractors[encoder], call.feature(sample), number) for sample in samples
            ]
            for encoder, number, call in self._calls
        }


class _ItemEncoder:
    """Runs an encoder on single items; a whole batch is run at once if its items come together."""

    def __init__(self, source: EncoderCalls, run: RunEncoder, layout: Any) -> None:
        self._source = source
        self._run = run
        self._layout = layout

    def __call__(self, parts: list[BatchItem]) -> Any:
        outputs = []
        for group in _group_items(parts):
            first = group[0]
            call = self._source.calls[first.call]
            positions = [part.position for part in group]
            whole = positions == list(range(first.size))
            args, kwargs = (
                call.read(first.batch) if whole else call.read_items(first.batch, self._layout, positions)
            )
            try:
                outputs.append(self._run(args, kwargs))
            except torch.OutOfMemoryError:  # a RuntimeError that does not depend on the place of the input
                raise
            except (TypeError, AttributeError, LookupError, RuntimeError) as error:
                raise InvalidValueError(
                    f"the encoder {self._source.name!r} failed on its input, "
                    f"{_describe_arguments(args, kwargs)} ({type(error).__name__}: {error}); name the place "
                    f"of its input with encoders={{{self._source.name!r}: ...}}"
                ) from error
        return concatenate(outputs) if len(outputs) > 1 else outputs[0]


def _chunks(numbers: list[int], size: int) -> Iterator[list[int]]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))


def _group_items(parts: list[BatchItem]) -> Iterator[list[BatchItem]]:
    """Runs of items of one batch and one call."""
    group: list[BatchItem] = []
    for part in parts:
        if group and (part.batch is not group[0].batch or part.call != group[0].call):
            yield group
            group = []
        group.append(part)
    yield group


def _describe_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    shown = [type(value).__name__ for value in args] + [
        f"{name}={type(v).__name__}" for name, v in kwargs.items()
    ]
    return ", ".join(shown)


def key_leaf_name(encoder: int, call: int) -> str:
    """The name under which the index keeps an encoder's extracted keys."""
    return f"key.{encoder}.{call}"


def _select_values(parts: list[BatchItem]) -> dict[str, Any]:
    """The values of items, from those of their batches."""
    picked = []
    for group in _group_items(parts):
        positions = [part.position for part in group]
        picked.append(
            {
                name: value[positions]
                if isinstance(value, torch.Tensor)
                else [value[place] for place in positions]
                for name, value in group[0].batch.items()
            }
        )
    return concatenate(picked)  # type: ignore[no-any-return]
