"""Estimates the disk space of a run beforehand: by Data-Juicer's formula, and by measured sizes.

The formula counts full copies: ``(1 + M + F + [F > 0] + D) x S`` for an input of S bytes with M mappers, F
filters and D deduplicators. Each step leaves a copy, and the first filter's statistics leave another. A
checkpoint needs 3 x S whatever the steps, since a checkpoint is a second name of the file that a step reads
(`hardlinks`). A cached run really takes less: a step that runs block by block leaves few blocks uncompressed
at a time, and any other step is compressed once the next one has its input. Knows sizes and disks; runs
nothing.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import datasets

from castore.adapters.datasets.lazy_dataset import LazyDataset
from castore.adapters.datasets.lazy_table import LazyTable
from castore.adapters.datasets.tables import arrow_streams, rows_size
from castore.objects.encode import encode_small, slices
from castore.settings import Settings
from castore.units import format_size

_SAMPLES, _SAMPLE_ROWS, _SAMPLE_BYTES = 8, 256, 4 << 20


@dataclasses.dataclass(frozen=True)
class KnownSize:
    """The known size of a step's result.

    Attributes:
        kind: as in `StepReport`.
        logical: bytes of the result, uncompressed; None if the step was never run.
        stored: bytes of the result in the store.
        kept: whether the result is in the store already, and so will take no more.
        at_once: the most bytes of the result that lie uncompressed at one time; None if that is all of it.
    """

    kind: str
    logical: int | None = None
    stored: int | None = None
    kept: bool = False
    at_once: int | None = None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The disk space that a run will take; sizes in bytes.

    Attributes:
        size: bytes of the input, uncompressed: S.
        mappers, filters, deduplicators: the numbers of such operators: M, F and D.
        formula: the peak by the formula, or 3 x S with a checkpoint, or 2 x S with neither.
        store_needs: bytes that the run will add to the store.
        work_needs: bytes of uncompressed files at one time: input and output of the largest step that runs
            as one piece, or the blocks of a step that are being made.
        peak: bytes of all steps' data on disk at the worst moment: kept results, results to come, and the
            working files.
        store_free, work_free: free bytes on the disks of the store and of the temporary files.
        one_disk: whether these two disks are the same.
        budget: the store's size limit, or None.
        measured: how many steps were measured; each other step is assumed to return as much as it gets.
    """

    size: int
    mappers: int
    filters: int
    deduplicators: int
    formula: int
    store_needs: int
    work_needs: int
    peak: int
    store_free: int
    work_free: int
    one_disk: bool
    budget: int | None
    measured: int

    @property
    def problems(self) -> list[str]:
        """A sentence for each thing that will not fit."""
        found = []
        if self.one_disk and self.store_needs + self.work_needs > self.store_free:
            found.append(
                f"this run needs about {format_size(self.store_needs + self.work_needs)} of disk, and "
                f"{format_size(self.store_free)} are free: compress (cache_compress: zstd), keep the latest "
                "step only "
                "(use_checkpoint: true), or use a larger disk (ds_cache_dir, temp_dir)"
            )
        elif not self.one_disk:
            found += [
                f"{what} needs about {format_size(needs)}, and {format_size(free)} are free: use a larger "
                f"disk ({key})"
                for what, needs, free, key in (
                    ("the store", self.store_needs, self.store_free, "ds_cache_dir"),
                    ("the folder of temporary files", self.work_needs, self.work_free, "temp_dir"),
                )
                if needs > free
            ]
        if self.budget is not None and self.store_needs > self.budget:
            found.append(
                f"the steps take about {format_size(self.store_needs)} in a store that may hold "
                f"{format_size(self.budget)}: "
                "the first ones will be gone when the last one is done (`castore init --max-size` raises the "
                "budget)"
            )
        return found

    def to_dict(self) -> dict[str, object]:
        """The same as a dictionary, for JSON."""
        return {**dataclasses.asdict(self), "problems": self.problems}


def estimate_by_formula(size: int, mappers: int, filters: int, deduplicators: int) -> int:
    """Data-Juicer's peak for a cached run over ``size`` bytes.

    >>> estimate_by_formula(10, mappers=3, filters=4, deduplicators=1)
    100
    """
    return (1 + mappers + filters + (filters > 0) + deduplicators) * size


def estimate_space(
    size: int,
    steps: Sequence[KnownSize],
    *,
    ratio: float,
    mode: str,
    store: Path,
    settings: Settings,
    temp_dir: str | os.PathLike[str] | None = None,
) -> Estimate:
    """Estimate the disk space of a run.

    Args:
        size: bytes of the input, uncompressed.
        steps: the known sizes of each step, in order.
        ratio: stored bytes for each byte, for steps that were never run (`measure_ratio`).
        mode: ``"cache"``, ``"checkpoint"`` or ``"none"``.
        store: the store's folder.
        settings: the store's settings.
        temp_dir: the folder of temporary files; None for one in the store.
    """
    mappers, filters, deduplicators = (
        sum(step.kind == kind for step in steps) for kind in ("map", "filter", "deduplicate")
    )
    sizes, stored = [size], []
    for step in steps:
        sizes.append(sizes[-1] if step.logical is None else step.logical)
        stored.append(round(sizes[-1] * ratio) if step.stored is None else step.stored)
    to_run = [number for number, step in enumerate(steps) if not step.kept]
    work_needs = 0
    for number in to_run:
        whole, at_once = sizes[number] + sizes[number + 1], steps[number].at_once
        work_needs = max(work_needs, whole if at_once is None else min(whole, at_once))
    store_place, temp_place = (
        _nearest_existing(store),
        _nearest_existing(store if temp_dir is None else Path(temp_dir)),
    )
    one_disk = store_place.stat().st_dev == temp_place.stat().st_dev
    by_formula, store_needs = {
        "cache": (
            estimate_by_formula(size, mappers, filters, deduplicators),
            sum(stored[number] for number in to_run),
        ),
        "checkpoint": (3 * size, _checkpoint_needs(sizes, stored, work_needs, one_disk) if to_run else 0),
        "none": (2 * size, 0),
    }[mode]
    kept = sum(stored[number] for number, step in enumerate(steps) if step.kept)
    return Estimate(
        size=size,
        mappers=mappers,
        filters=filters,
        deduplicators=deduplicators,
        formula=by_formula,
        store_needs=store_needs,
        work_needs=work_needs,
        peak=kept + store_needs + work_needs,
        store_free=shutil.disk_usage(store_place).free,
        work_free=shutil.disk_usage(temp_place).free,
        one_disk=one_disk,
        budget=settings.max_size,
        measured=sum(step.logical is not None for step in steps),
    )


def _checkpoint_needs(sizes: Sequence[int], stored: Sequence[int], work_needs: int, one_disk: bool) -> int:
    """The space of a checkpoint in addition to the working files."""
    if one_disk:  # the checkpoint is a working file until the end, when only the result remains to compress
        return max(0, sizes[-1] + stored[-1] - work_needs)
    # No link crosses disks: the space holds a compressed copy, and the previous one until the copy is whole.
    return max(sum(stored[max(0, at - 1) : at + 1]) for at in range(len(stored)))


def _nearest_existing(folder: Path) -> Path:
    folder = Path(os.path.abspath(folder))
    while not folder.exists():
        folder = folder.parent
    return folder


def logical_size(dataset: datasets.Dataset) -> int:
    """About how many bytes a dataset takes as Arrow files."""
    if isinstance(dataset, LazyDataset):
        return dataset.size
    return rows_size(dataset)


def measure_ratio(dataset: datasets.Dataset, codec: str, level: int | None = None) -> float:
    """Stored bytes for each byte of a dataset: a measurement on rows from all over the dataset.

    A dataset that lies compressed in a store and has not been read counts with its stored size there, even
    under another codec: reading it would cost more than the answer is worth.

    Returns:
        a ratio above 0; 1 for an empty dataset.
    """
    table, rows = dataset._data, len(dataset)
    if isinstance(table, LazyTable) and table.blobs and codec != "none":
        return sum(blob.stored for blob in table.blobs) / sum(blob.size for blob in table.blobs)
    starts = sorted({rows * number // _SAMPLES for number in range(_SAMPLES)})
    plain = packed = 0
    for start in starts:
        block = dataset.select(range(start, min(rows, start + _SAMPLE_ROWS)))
        for stream in arrow_streams(block, embed=False) if len(block) else ():
            for piece in slices(memoryview(stream)[: _SAMPLE_BYTES // _SAMPLES]):
                plain += len(piece)
                packed += len(encode_small(bytes(piece), codec, level)[1])
    return packed / plain if plain else 1.0
