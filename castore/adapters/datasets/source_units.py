"""The input of a pipeline from files that are read one by one: each once, ever.

A unit is a file, or some small neighbouring files. The rows of a unit are cut into blocks by content, each an
Arrow file and the entry `BLOCKS_FOLDER`/<its digest>; the entry `UNITS_FOLDER`/<key> lists them. The input as
a step names the blocks of all units once more, as the files of its folder: they take their space once. So a
new file costs itself, a file that is renamed or moved costs nothing, and the steps behind find the blocks of
all files that have stayed.

For code that can read its files, and can distinguish them (`castore.recipes`). Must never keep a unit before
all of its rows are written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from datasets.table import InMemoryTable

from castore.adapters.datasets import dataset_entries, scratch, step_runner
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER, NotInBlocksError, check_room, write_result
from castore.adapters.datasets.cutting import Cut, cut
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.forecast import Piece
from castore.adapters.datasets.mapped_files import store_locks
from castore.adapters.datasets.tables import (
    DatasetPart,
    KeptFile,
    batches_of,
    describe_dataset,
    fingerprint_of_key,
)
from castore.adapters.mapped_check import file_time, note_new
from castore.errors import CacheWarning, FullError, NotFoundError, TooLargeError, warn
from castore.records import LOST, Entry, Found, has_expired
from castore.store import Store
from castore.write.batch import Batch

#: The folder of the lists of blocks of units.
UNITS_FOLDER = ".datasets/units"
# Runs in which gc takes blocks before they have the step's name, or the notes of the files' features.
_ATTEMPTS = 3
# For so long a unit is not tried again that could not be read by itself.
_REMEMBERED_SECONDS = 30 * 86400.0
_SMALLEST_TABLE = 1 << 20


class DependentFileError(Exception):
    """Files cannot be read by themselves: all of them together decide about their rows, or about an error."""


class FeaturesChangedError(Exception):
    """Rows of a unit show that the features of all rows are others: the units have to be found again."""


class Unit(NamedTuple):
    """Input files that are read together.

    Attributes:
        key: 40 hexadecimal digits of the files' content and of all else that decides about their rows.
        files: the number of files.
        size: bytes of the files.
        read: yields the rows: the number of a file in the unit, and a table of rows of it.
    """

    key: str
    files: int
    size: int
    read: Callable[[], Iterator[tuple[int, pa.Table]]]


class Units(NamedTuple):
    """The units of an input.

    Attributes:
        features: the features of all rows.
        units: the units, in order.
        split: the split of the dataset.
    """

    features: datasets.Features
    units: Sequence[Unit]
    split: datasets.NamedSplit | None = datasets.Split.TRAIN


class KeptUnit(NamedTuple):
    """A unit in a store.

    Attributes:
        blocks: digests of its blocks, in order, and the rows in each.
        rows: rows of each of its files.
        stored: bytes of its blocks in the store.
        seconds: time that it took to read the files and to keep the rows.
        new: names of entries that were put for it now, and were not there before; None if it was kept.
    """

    blocks: Sequence[tuple[str, int]]
    rows: Sequence[int]
    stored: int
    seconds: float
    new: Sequence[str] | None


#: Finds the units of an input, given a folder for temporary files; raises DependentFileError if it has none.
FindUnits = Callable[[Path], Units]
#: Receives the units of an input, in order, once all of them are kept.
NoteUnits = Callable[[Sequence[KeptUnit]], object]


def run_by_units(
    store: Store,
    name: str,
    find_units: FindUnits,
    record: dict[str, Any],
    options: StorageOptions,
    temp_dir: str | os.PathLike[str] | None,
    note_units: NoteUnits,
) -> datasets.Dataset | None:
    """The input as a step, from the units that are kept and those that are read now.

    Args:
        store, name: the store, and the step's name in it.
        find_units: finds the units.
        record: metadata to keep with the step; ``rows_in``, ``rows_out`` and ``seconds`` are added.
        options: the storage options.
        temp_dir: the folder of uncompressed files; by default below the store.
        note_units: receives the units, before the step is kept.

    Returns:
        None if the input has to be read as a whole: a file cannot be read by itself, or there is no room,
        which a `CacheWarning` reports.
    """
    why = f"gc has taken parts of it {_ATTEMPTS} times"
    with store_locks(store).hold(name):
        if (hit := step_runner.load_step(store, name)) is not None:
            return hit.dataset
        for _ in range(_ATTEMPTS):
            work = scratch.new_file(store, temp_dir)
            began = time.perf_counter()
            try:
                found = find_units(work.parent)
                kept = _keep_units(store, found, options, work)
                rows = sum(count for unit in kept for count in unit.rows)
                if not rows:
                    return None
                note_units(kept)
                measured = {"rows_in": 0, "rows_out": rows, "seconds": round(time.perf_counter() - began, 6)}
                part = _part(found, kept, fingerprint_of_key(name.rpartition("_")[2]))
                dataset_entries.put_parts(store, name, {"": part}, options, {**record, **measured})
            except FeaturesChangedError:
                continue  # the features of all files are noted now: the next attempt knows them
            except NotFoundError:
                continue  # gc took a block meanwhile
            except DependentFileError:
                return None
            except (NotInBlocksError, FullError, TooLargeError):
                why = "the store has no room for all of them"
                break
            finally:
                scratch.remove(work)
            if (outcome := step_runner.load_step(store, name)) is not None:
                return outcome.dataset
    warn(
        f"the files of the input {name!r} are read together, so a change of one reads all of them again: "
        f"{why}; make room, or set a larger max_size",
        CacheWarning,
    )
    return None


def _part(found: Units, kept: Sequence[KeptUnit], fingerprint: str) -> DatasetPart:
    """The input, for the store that has its blocks."""
    empty = InMemoryTable(pa.Table.from_batches([], found.features.arrow_schema))
    info = datasets.DatasetInfo(features=found.features)
    template = datasets.Dataset(empty, info=info, split=found.split, fingerprint=fingerprint)
    blocks = [block for unit in kept for block in unit.blocks]
    rows = sum(count for _, count in blocks)
    return DatasetPart(
        lambda: [KeptFile(digest) for digest, _ in blocks],
        lambda digests: describe_dataset(template, len(digests), rows),
    )


def _keep_units(store: Store, found: Units, options: StorageOptions, work: Path) -> list[KeptUnit]:
    """All units, those that are not kept yet read now, in order.

    Raises:
        DependentFileError: a file cannot be read by itself.
        NotInBlocksError: the store has no room for all of them.
        FullError, TooLargeError: as for `Store.put`.
    """
    total = sum(unit.size for unit in found.units)
    size = stored = 0
    kept = [find_unit(store, unit.key) for unit in found.units]
    try:
        for number, unit in enumerate(found.units):
            result = kept[number]
            if result is None:
                with store_locks(store).hold(f"{UNITS_FOLDER}/{unit.key}"):
                    result = find_unit(store, unit.key)
                    result = result or _read_unit(store, unit, found.features, options, work)
            kept[number] = result
            size, stored = size + unit.size, stored + result.stored
            check_room(store, size, total, stored)
    except (DependentFileError, FeaturesChangedError, NotInBlocksError, FullError, TooLargeError):
        # The input is kept as a whole then, or with other features, and those rows would be there twice.
        store.delete_many([name for unit in kept if unit is not None for name in unit.new or ()])
        raise
    return [unit for unit in kept if unit is not None]


def find_unit(store: Store, key: str) -> KeptUnit | None:
    """The unit of a key, if all of it is kept.

    Raises:
        DependentFileError: it cannot be read by itself, as was found before.
    """
    text = store.get(f"{UNITS_FOLDER}/{key}")
    if text is None:
        return None
    record = json.loads(text)
    if record is None:
        raise DependentFileError
    names = [f"{BLOCKS_FOLDER}/{digest}" for digest, _ in record["blocks"]]
    found = store.find_many(names)
    stored = 0
    for block in names:
        if not _is_there(found.get(block)):
            return None
        stored += found[block].blob.stored
        store.count_use(block)
    blocks = [(digest, rows) for digest, rows in record["blocks"]]
    return KeptUnit(blocks, record["rows"], stored, record["seconds"], None)


def pieces_of(store: Store, found: Units) -> list[Piece]:
    """The files of an input, for a forecast: blocks of units that are kept, and one for each other unit."""
    pieces: list[Piece] = []
    for unit in found.units:
        kept = find_unit(store, unit.key)
        if kept is None:
            pieces.append(Piece(None, None, unit.size))
            continue
        for digest, rows in kept.blocks:
            blob = store.blob(digest)
            pieces.append(Piece(digest, rows, unit.size if blob is None else blob.size))
    return pieces


def _is_there(found: Found | None) -> bool:
    return found is not None and found.blob.pack != LOST and not has_expired(found.expires, time.time())


def _read_unit(
    store: Store, unit: Unit, features: datasets.Features, options: StorageOptions, work: Path
) -> KeptUnit:
    """Read the files of a unit, and keep their rows."""
    started, began = file_time(), time.perf_counter()
    batch = store.batch(codec=options.codec, level=options.level, ttl=options.seconds_to_live)
    blocks: list[tuple[str, int]] = []
    rows: list[int] = []
    new: list[str] = []

    def put() -> None:
        blocks[:], rows[:] = [], [0] * unit.files
        blocks.extend(_put_blocks(batch, _counted(unit.read(), rows), features, work))
        new[:] = _missing(store, [f"{BLOCKS_FOLDER}/{digest}" for digest, _ in blocks])
        seconds = round(time.perf_counter() - began, 6)
        record = {"blocks": blocks, "rows": rows, "seconds": seconds}
        batch.put(f"{UNITS_FOLDER}/{unit.key}", json.dumps(record).encode(), codec="zstd")

    try:
        entries = batch.run(put)
    except DependentFileError as error:
        # Another reading would end like this one, unless the disk or the memory has failed.
        if not isinstance(error.__cause__, OSError | MemoryError):
            store.put(f"{UNITS_FOLDER}/{unit.key}", b"null", ttl=_REMEMBERED_SECONDS)
        raise
    _note_as_good(store, entries, started)
    stored = sum(entry.stored for entry in entries)
    seconds = time.perf_counter() - began
    return KeptUnit(blocks, rows, stored, seconds, [*new, f"{UNITS_FOLDER}/{unit.key}"])


def _missing(store: Store, names: list[str]) -> list[str]:
    found = store.find_many(names)
    return [name for name in names if name not in found]


def _counted(tables: Iterator[tuple[int, pa.Table]], rows: list[int]) -> Iterator[pa.Table]:
    """Tables, with their rows counted by file. Small tables are joined: cutting takes its time for each."""
    waiting: list[pa.Table] = []
    size = 0
    for file, table in tables:
        rows[file] += len(table)
        waiting.append(table)
        size += table.nbytes
        if size >= _SMALLEST_TABLE:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


def _put_blocks(
    batch: Batch, tables: Iterator[pa.Table], features: datasets.Features, work: Path
) -> Iterator[tuple[str, int]]:
    """Put rows as blocks; yields their digests and rows."""
    done: set[str] = set()
    for number, block in enumerate(cut(tables, Cut())):
        # Joined, so that the file's bytes do not depend on how the rows came.
        path = write_result(batches_of(block.combine_chunks()), features, str(work))
        name = f"{UNITS_FOLDER}/{number}"
        digest = batch.put_file(name, path)
        os.unlink(path)
        if digest in done:
            batch.delete(name)
        else:
            batch.rename({name: f"{BLOCKS_FOLDER}/{digest}"})
        done.add(digest)
        yield digest, len(block)


def _note_as_good(store: Store, entries: Sequence[Entry], started: float) -> None:
    found = [store.blob(entry.digest) for entry in entries]
    note_new(store, [blob for blob in found if blob is not None], started)
