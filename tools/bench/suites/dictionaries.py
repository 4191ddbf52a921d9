"""The gain of zstd dictionaries on small similar samples: bytes on disk, time to put and get.

The dictionaries are trained per prefix.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path

import castore
from tools.bench import corpus, samples
from tools.bench.harness import Bench, Contestant, Goal, Row, Study, microseconds_each, verdict

TITLE = "Dictionaries"
ABOUT = (
    "JSON records (an id, a source, a split, a language, a number and a piece of text) and sequences of "
    "token ids (a vocabulary of 50 000 pieces), cut from the texts that are installed on the machine. "
    "`castore train-dict` learns from the samples of every other document; what is measured are samples of "
    "the others. Both stores are alike but for the dictionary, and times are CPU time. Ratios are "
    "uncompressed by stored bytes; `with, and the dictionary` counts both of its copies too, over as many "
    "samples as stand in the table."
)
_WITHOUT, _WITH = "without", "with a dictionary"
#: Label, a function from bytes of text to samples, whether they are timed, and the gain they should reach.
_KINDS: list[tuple[str, Callable[[int], tuple[list[bytes], list[bytes]]], bool, float]] = [
    ("JSON, 300 characters of text", lambda size: samples.records(size, 300), True, 1.5),
    ("JSON, 1 800 characters of text", lambda size: samples.records(size, 1800), True, 1.2),
    ("JSON, 8 000 characters of text", lambda size: samples.records(size, 8000), False, 1.05),
    ("256 token ids, uint16", lambda size: samples.token_ids(size, 256, "uint16"), False, 1.15),
    ("512 token ids, uint16", lambda size: samples.token_ids(size, 512, "uint16"), True, 1.1),
    ("512 token ids, int32", lambda size: samples.token_ids(size, 512, "int32"), True, 1.1),
    ("1 024 token ids, uint16", lambda size: samples.token_ids(size, 1024, "uint16"), False, 1.05),
]


def rows(bench: Bench) -> Iterator[Row | Study]:
    size, calls = bench.size(75_000_000, 15_000_000), bench.size(400, 80)
    lines, goals = [], []
    for label, make, timed, least in _KINDS:
        learn, fresh = make(size)
        with ExitStack() as stack:
            stores = _stores(bench.work / label.replace(" ", ""), stack)
            started = time.thread_time()
            trained = stores[_WITH].train_dictionary("samples", learn)
            seconds = time.thread_time() - started
            if timed:
                yield from _timed(stores, label, fresh, calls)
            taken = fresh[: 20 * calls]
            plain, before, after = _ratios(stores, taken)
            whole = plain / (plain / after + 2 * trained.size)
        lines.append(
            [
                label,
                f"{len(taken):,}".replace(",", " "),
                f"{plain / len(taken):.0f}",
                f"{before:.2f}",
                f"**{after:.2f}**",
                f"{whole:.2f}",
                f"{1 - before / after:.0%}",
                f"{trained.size / 1000:.0f}",
                f"{seconds:.1f}",
            ]
        )
        reached = verdict(
            after >= least * before, f"{label}: {least:g} times the ratio without: {after / before:.2f} times"
        )
        goals.append(reached)
    header = [
        "samples", "how many", "bytes each", "ratio without", "with", "with, and the dictionary",
        "fewer bytes", "KB", "CPU s to train",
    ]  # fmt: skip
    yield Study("Ratios, uncompressed by stored", header, lines, goals=goals)


def _stores(folder: Path, stack: ExitStack) -> dict[str, castore.Store]:
    return {
        name: stack.enter_context(closing(castore.Store(folder / name.split()[0], memory=0)))
        for name in (_WITHOUT, _WITH)
    }


def _ratios(stores: dict[str, castore.Store], taken: list[bytes]) -> tuple[int, float, float]:
    plain = sum(map(len, taken))
    found = []
    for name in (_WITHOUT, _WITH):
        store = stores[name]
        before = store.index.totals().stored
        store.put_many((f"samples/all/{number:06}", data) for number, data in enumerate(taken))
        found.append(plain / (store.index.totals().stored - before))
    return plain, found[0], found[1]


def _timed(stores: dict[str, castore.Store], label: str, fresh: list[bytes], calls: int) -> Iterator[Row]:
    # The samples at the beginning are for the ratios, and must be new then; these are from the end.
    pool = {name: iter(fresh[20 * calls :]) for name in stores}
    turns = count()
    batches: dict[str, list[tuple[str, bytes]]] = {}

    def anew(name: str) -> None:
        turn = next(turns)
        data = [sample for _, sample in zip(range(calls), pool[name], strict=False)]
        if len(data) < calls:
            raise RuntimeError(f"too few samples of {label}")
        batches[name] = [(f"samples/{turn}/{number:05}", sample) for number, sample in enumerate(data)]

    def as_it_is(name: str) -> None:
        """Prepare nothing: reads need no new samples."""

    def contestants(work: Callable[[str], float], prepare: Callable[[str], None]) -> list[Contestant]:
        return [Contestant(name, partial(work, name), partial(prepare, name), ours=True) for name in stores]

    def put(name: str) -> float:
        started = time.process_time()
        for key, data in batches[name]:
            stores[name].put(key, data)
        return time.process_time() - started

    def put_many(name: str) -> float:
        started = time.process_time()
        stores[name].put_many(batches[name])
        return time.process_time() - started

    def get(name: str) -> float:
        started = time.process_time()
        for key in orders[name]:
            stores[name].get(key)
        return time.process_time() - started

    unit = microseconds_each(calls)
    # A single put finds a dictionary's tables in no cache.
    alone, goal = [Goal(_WITH, 0.85, _WITHOUT)], [Goal(_WITH, 0.9, _WITHOUT)]
    yield Row(f"put, {label}", unit, contestants(put, anew), _WITHOUT, goals=alone)
    yield Row(f"put_many, {label}", unit, contestants(put_many, anew), _WITHOUT, goals=goal)
    orders = {}
    for name, batch in batches.items():
        keys = [key for key, _ in batch]
        random.Random(corpus.SEED).shuffle(keys)
        orders[name] = keys
        if any(stores[name].get(key) != data for key, data in batch):
            raise RuntimeError(f"{name}: other bytes came back than were put")
    yield Row(f"get, {label}", unit, contestants(get, as_it_is), _WITHOUT, goals=goal)
