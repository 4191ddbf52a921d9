"""The input of a pipeline as a step: read once, kept compressed, and read back only if a step needs the rows.

A kept input is a `LazyDataset`, whose objects are not even opened: as a lazy table it would be checked first,
and the first rerun of a recipe over 137 MB took 530 ms in place of 300 ms.

For code that reads data into a `datasets.Dataset` itself, and has a key that identifies the data. Must never
interpret the key.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets

from castore.adapters.datasets import dataset_entries, scratch, step_runner
from castore.adapters.datasets.explain import INPUT_CHANGED, Explanation, FileChanges, find_records
from castore.adapters.datasets.lazy_dataset import LazyDataset
from castore.adapters.datasets.source_units import FindUnits, NoteUnits, Units, pieces_of, run_by_units
from castore.adapters.datasets.tables import fingerprint_of_key
from castore.errors import CastoreError
from castore.store import Store


def open_input(
    key: str,
    read: Callable[[Path], datasets.Dataset],
    store: Store,
    *,
    cached: bool,
    codec: str,
    temp_dir: str | os.PathLike[str] | None = None,
    lazy: bool = False,
    find_units: FindUnits | None = None,
    note_units: NoteUnits = lambda kept: None,
) -> datasets.Dataset:
    """The dataset of a key: from the store, or read.

    Args:
        key: 40 hexadecimal digits that distinguish the data from all other data.
        read: reads the data, given a folder for the files that it writes on the way.
        store: the store that keeps the dataset.
        cached: whether to keep the dataset. A kept dataset is read from the store at first use.
        codec: the codec of the kept dataset.
        temp_dir: the folder of the uncompressed dataset while it is used; by default below the store.
        lazy: call ``read`` at first use too, for a run that may never use the rows.
        find_units: finds the units of the data, for a dataset that is kept; where it has some, ``read`` is
            not called.
        note_units: receives the units, where they had to be determined.

    Raises:
        FullError, OSError: the disk is full, or the files cannot be written.
        Exception: an exception of ``read``.
    """
    if not cached:
        fingerprint = fingerprint_of_key(key)

        def run() -> datasets.Dataset:
            file = scratch.new_file(store, temp_dir)
            return step_runner.run_step(lambda file: read(file.parent), file, fingerprint)

        return dataset_of_key(key, run) if lazy else run()
    name = step_runner.step_name("source", key)

    record = {"step": "source", "kind": "source", "key": key, "input": "", "operator": "", "parts": {}}
    options = dataset_entries.StorageOptions(codec, None, store.settings.ttl)

    def load() -> datasets.Dataset:
        if find_units is not None:
            found = run_by_units(store, name, find_units, record, options, temp_dir, note_units)
            if found is not None:
                return found
        return step_runner.run_or_load(
            store,
            name,
            lambda file, *_, **__: read(file.parent),
            record,
            options,
            rows_in=0,
            temp_dir=temp_dir,
        ).dataset

    return _find_kept(store, name, load) or load()


def identify_by(key: str, dataset: datasets.Dataset) -> datasets.Dataset:
    """That dataset, which counts in keys of steps by the given key and no longer by its rows."""
    dataset._fingerprint = fingerprint_of_key(key)
    return dataset


def dataset_of_key(key: str, load: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    """The dataset of a key, which ``load`` reads at first use; until then only the key is known."""
    return LazyDataset(datasets.DatasetInfo(), None, fingerprint_of_key(key), None, None, load)


def input_of_units(key: str, found: Units, store: Store, load: Callable[[], datasets.Dataset]) -> LazyDataset:
    """The dataset of a key that has units, for explanations: it shows which of them are kept."""
    info = datasets.DatasetInfo(features=found.features)
    dataset = LazyDataset(info, found.split, fingerprint_of_key(key), None, None, load)
    dataset.pieces = pieces_of(store, found)
    return dataset


def last_input_keys(store: Store, pipeline: str) -> list[str]:
    """The keys of inputs over which a pipeline's first step is kept, the latest first."""
    records = [record for record in find_records(store, pipeline) if record.get("pipeline") == pipeline]
    inputs = [str(record["input"]) for record in records if record["number"] == 0]
    return [given.removeprefix(fingerprint_of_key("")) for given in dict.fromkeys(inputs)]


def with_files(explanations: list[Explanation], changes: FileChanges) -> list[Explanation]:
    """The explanations, with how the files of the input have changed, where the first step reports that."""
    if not explanations or INPUT_CHANGED not in explanations[0].changes:
        return explanations
    described = [str(changes) if change == INPUT_CHANGED else change for change in explanations[0].changes]
    return [dataclasses.replace(explanations[0], changes=described, files=changes), *explanations[1:]]


def find_kept_input(store: Store, key: str, load: Callable[[], datasets.Dataset]) -> datasets.Dataset | None:
    """The dataset of a key, if it is kept; ``load`` reads it at first use."""
    return _find_kept(store, step_runner.step_name("source", key), load)


def _find_kept(store: Store, name: str, load: Callable[[], datasets.Dataset]) -> datasets.Dataset | None:
    """The dataset kept under a name, which ``load`` reads at first use; None if a part of it is missing."""
    try:
        files = dataset_entries.find_files(store, name)
    except CastoreError:
        return None  # `load` reports the damaged part
    state, info = json.loads(files.state), datasets.DatasetInfo.from_dict(json.loads(files.info))
    record = dataset_entries.metadata_of(store, name)
    if record is None:
        return None
    split = None if state["_split"] is None else datasets.Split(state["_split"])
    size = sum(blob.size for _, blob in files.data)
    return LazyDataset(info, split, state["_fingerprint"], record["rows_out"], size, load)
