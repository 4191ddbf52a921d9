"""Five steps over text, and three ways to run them: plain `datasets`, castore's cached calls, its Pipeline.

Two recipes share their first two steps: one yields text, the other token ids (int32). The third step has a
parameter that can be changed. Operators are written once; no way of running gets an easier task than another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from blake3 import blake3

from castore.adapters.datasets import Pipeline, cached_filter, cached_map, wait
from castore.store import Store

#: Data-Juicer's column for what filters measure.
_STATS = "__dj__stats__"
# The lookbehind keeps the expression from trying every end of every word.
_LINK = re.compile(r"https?://\S+|(?<![\w.+-])[\w.+-]{1,64}@[\w-]+\.[\w.]+")
_PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+")
#: Number of single-byte tokens, as in a byte-pair vocabulary.
_BYTES = 256

Sample = dict[str, Any]


def strip_lines(sample: Sample) -> Sample:
    """Remove white space from the ends of lines."""
    return {"text": "\n".join(line.rstrip() for line in sample["text"].splitlines())}


def mask_links(sample: Sample) -> Sample:
    """Replace links and addresses by a word."""
    return {"text": _LINK.sub("<link>", sample["text"])}


@dataclasses.dataclass(frozen=True)
class CutLines:
    """Cut lines to a number of characters."""

    width: int

    def __call__(self, sample: Sample) -> Sample:
        return {"text": "\n".join(line[: self.width] for line in sample["text"].split("\n"))}


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Replace the text by token ids: rank for pieces in the vocabulary, bytes for the others."""

    vocabulary: dict[str, int]
    most: int

    def __call__(self, sample: Sample) -> Sample:
        known, ids = self.vocabulary, []
        for piece in _PIECE.findall(sample["text"]):
            number = known.get(piece)
            if number is None:
                ids += piece.encode()
            else:
                ids.append(number)
        del sample["text"]
        return {"ids": np.array(ids[: self.most], dtype=np.int32)}


@dataclasses.dataclass(frozen=True)
class Letters:
    """Keep samples with at least this part of letters."""

    least: float

    def compute_stats(self, sample: Sample) -> Sample:
        text = sample["text"]
        share = sum(map(str.isalpha, text)) / max(1, len(text))
        sample[_STATS] = dict(sample.get(_STATS) or {}) | {"letters": share}
        return sample

    def process(self, sample: Sample) -> bool:
        return bool(sample[_STATS]["letters"] >= self.least)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Keep samples with at least this many tokens."""

    least: int

    def compute_stats(self, sample: Sample) -> Sample:
        sample[_STATS] = dict(sample.get(_STATS) or {}) | {"tokens": len(sample["ids"])}
        return sample

    def process(self, sample: Sample) -> bool:
        return bool(sample[_STATS]["tokens"] >= self.least)


def _count_row(file: str) -> None:
    os.write(_open_counter(file), b".")


@functools.cache  # a dict of one's own would be memory of rows, and no block would be kept
def _open_counter(file: str) -> int:
    return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@dataclasses.dataclass(frozen=True)
class CountedMap:
    """An operator that adds a byte to a file for each row."""

    operator: Callable[[Sample], Sample]
    file: str

    def __call__(self, sample: Sample) -> Sample:
        _count_row(self.file)
        return self.operator(sample)


@dataclasses.dataclass(frozen=True)
class CountedFilter:
    """A filter that adds a byte to a file for each row that it measures or decides about."""

    operator: Any
    file: str

    def compute_stats(self, sample: Sample) -> Sample:
        _count_row(self.file)
        return self.operator.compute_stats(sample)  # type: ignore[no-any-return]

    def process(self, sample: Sample) -> bool:
        _count_row(self.file)
        return bool(self.operator.process(sample))


def counted(chain: Sequence[Any], file: str) -> list[Any]:
    """The same operators, which count the rows that run in the size of a file."""
    return [
        CountedFilter(operator, file) if hasattr(operator, "compute_stats") else CountedMap(operator, file)
        for operator in chain
    ]


def vocabulary(texts: Sequence[str], words: int) -> dict[str, int]:
    """The most frequent pieces, numbered by rank behind the bytes."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_PIECE.findall(text))
    return {piece: _BYTES + rank for rank, (piece, _) in enumerate(counts.most_common(words))}


def operators(name: str, third: int, texts: Callable[[], Sequence[str]]) -> list[Any]:
    """The operators of a recipe; the last one is a filter, which makes two steps.

    Args:
        name: ``"text"`` or ``"tokens"``.
        third: parameter of the third step: the width of a line, or the most tokens kept of a document.
        texts: some documents, to make the vocabulary from.
    """
    if name == "text":
        return [strip_lines, mask_links, CutLines(third), Letters(0.4)]
    return [strip_lines, mask_links, Tokenize(vocabulary(texts(), 50_000 - _BYTES), third), Tokens(100)]


#: The third step's parameter, and a second value for it.
THIRD = {"text": (100, 80), "tokens": (1_000_000, 500_000)}


def plain(dataset: datasets.Dataset, chain: Sequence[Any], num_proc: int | None = None) -> datasets.Dataset:
    """Run the steps with `Dataset.map` and `Dataset.filter`, cached by `datasets`."""
    for operator in chain:
        if hasattr(operator, "compute_stats"):
            dataset = dataset.map(operator.compute_stats, num_proc=num_proc)
            dataset = dataset.filter(operator.process, num_proc=num_proc)
        else:
            dataset = dataset.map(operator, num_proc=num_proc)
    return dataset


def calls(dataset: datasets.Dataset, chain: Sequence[Any], store: Store) -> datasets.Dataset:
    """Run the steps with `cached_map` and `cached_filter`. The results are in the store when this returns."""
    for operator in chain:
        if hasattr(operator, "compute_stats"):
            dataset = cached_map(dataset, operator.compute_stats, store=store)
            dataset = cached_filter(dataset, operator.process, store=store)
        else:
            dataset = cached_map(dataset, operator, store=store)
    wait()
    return dataset


def pipeline(
    chain: Sequence[Any], store: Store, *, checkpoint: bool = False, num_proc: int | None = None
) -> Pipeline:
    """The same steps as a `Pipeline`."""
    return Pipeline(
        chain,
        store=store,
        name="recipe",
        use_cache=not checkpoint,
        use_checkpoint=checkpoint,
        num_proc=num_proc,
    )


def digest(dataset: datasets.Dataset) -> str:
    """Digest of the features and of all rows in order, however they are stored."""
    hasher = blake3(str(dataset.features).encode())
    for batch in dataset.with_format("arrow").iter(1000):
        for column in batch.columns:
            hasher.update(repr(column.to_pylist()).encode())
    return hasher.hexdigest()


def size_on_disk(folder: Path, pattern: str = "*") -> int:
    """Bytes that the files below a folder take on its disk.

    A file counts once, however many links it has. Files that are removed meanwhile do not count.
    """
    found: dict[int, int] = {}
    for where, _, names in os.walk(folder):
        for name in fnmatch.filter(names, pattern):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(where, name))
                found[status.st_ino] = 512 * status.st_blocks
    return sum(found.values())
