"""Keeps a dataset as hard links to its own Arrow files, with its selection beside them; copies no byte.

For datasets kept a short while: the files become raw objects of the store by hard links, so they take space
once. A dataset that consists of whole files has the layout of `save_to_disk`. A dataset may also be a part of
its files: rows that a filter left, columns without hashes. The state of such a dataset has ``_parts`` in the
place of ``_data_files``, since a program that does not support parts must fail to open the dataset, rather
than show rows that are not in it.

Must never link a user's file, since the user may write to it: only files that `scratch` named, and objects.
"""

from __future__ import annotations

import errno
import json
import math
import os
from functools import partial
from typing import Any

import datasets
import pyarrow as pa
from datasets.table import Table

from castore.adapters.datasets import dataset_entries, scratch
from castore.adapters.datasets.stored_table import SMALL_BYTES, load_table
from castore.adapters.datasets.tables import (
    INFO_FILE,
    STATE_FILE,
    assemble,
    data_file_name,
    make_part,
    mapped_blocks,
    table_files,
)
from castore.errors import NotFoundError
from castore.names import check_name
from castore.objects.encode import HashingFrames, raw_checksums
from castore.records import LOOSE, Blob, EntrySpec
from castore.store import Store
from castore.write.batch import add_staged
from castore.write.staging import LargeBlob, Staged
from castore.write.writer import open_source

_PARTS, _INDICES = "_parts", "indices.arrow"
# Operations on a table after which the file still has all of its rows and columns. The features decide which
# columns the dataset shows; a deduplicator that found nothing leaves a slice.
_ALLOWED_OPERATIONS = frozenset({"replace_schema_metadata", "drop", "select", "remove_column", "slice"})
# Another file system, or one without links; another user's file; too many links.
_NO_LINK_ERRNOS = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK}


class _Unlinkable(Exception):
    """The file system, or its rules, forbid a link to the file."""


def put(
    store: Store, name: str, dataset: datasets.Dataset, metadata: dict[str, Any]
) -> dataset_entries.DatasetSize | None:
    """Keep a dataset below ``name``, pinned, in one commit; other entries there stay.

    Returns:
        The dataset's size; None if its rows are not in files that can be linked: then nothing is kept.

    Raises:
        FullError, TooLargeError: the dataset does not fit into the budget.
        SerializationError: the dataset's format cannot be kept.
    """
    blocks = mapped_blocks(dataset._data, _ALLOWED_OPERATIONS)
    if blocks is None or not all(_may_link(store, block.path) for block in blocks):
        return None
    files = [data_file_name(at, len(blocks)) for at in range(len(blocks))]
    digests = []
    batch = store.batch(codec="zstd", ttl=math.inf)
    try:
        for file, block in zip(files, blocks, strict=True):
            spec = EntrySpec(check_name(f"{name}/{file}"), "bytes", None, None, True)
            digests.append(add_staged(batch, partial(_stage_entry, store, block.path, spec)))
        state, info = make_part(dataset, embed=False).describe([bytes.fromhex(digest) for digest in digests])
        if dataset._indices is not None or table_files(dataset._data) is None:
            state = _with_parts(
                state, [[file, *_row_range(block)] for file, block in zip(files, blocks, strict=True)]
            )
            batch.put(f"{name}/{_INDICES}", memoryview(_indices_stream(dataset._indices)), pin=True)
        batch.put(f"{name}/{INFO_FILE}", info, pin=True)
        batch.put(f"{name}/{STATE_FILE}", state, metadata=metadata, pin=True)
        entries = batch.commit()
    except _Unlinkable:
        return None
    finally:
        batch.discard()
    return dataset_entries.DatasetSize(
        sum(entry.size for entry in entries), sum(entry.stored for entry in entries)
    )


def _stage_entry(store: Store, path: str, spec: EntrySpec, reuse: bool) -> tuple[EntrySpec, Staged]:
    return spec, _stage_link(store, path)


def _may_link(store: Store, path: str) -> bool:
    objects = os.path.realpath(store.objects.loose.objects)
    return scratch.is_ours(path) or os.path.realpath(path).startswith(f"{objects}/")


def _stage_link(store: Store, path: str) -> Staged:
    """A staged raw object of a file, hashed and with its checksums, under a second name."""
    fd = open_source(path)
    try:
        size = os.fstat(fd).st_size
        if size <= SMALL_BYTES:
            return store.writer.stage(os.pread(fd, size, 0), "zstd", None, reuse=False)
        frames = HashingFrames(fd)
        checksums = raw_checksums(frames)
        store.objects.loose.seal(fd, durable=store.objects.durable)
        waiting, temporary = store.objects.loose.create()
        os.close(waiting)
        temporary.unlink()
        # Paths in datasets' own cache are symbolic links to objects: link the objects.
        os.link(os.path.realpath(path), temporary)
    except OSError as error:
        if error.errno in _NO_LINK_ERRNOS:
            raise _Unlinkable from error
        raise
    finally:
        os.close(fd)
    return LargeBlob(store.objects, Blob(frames.digest, size, size, "none", LOOSE, 0), temporary, checksums)


def _row_range(block: Any) -> tuple[int, int]:
    """The row of its file at which a mapped table begins, and the number of its rows."""
    return sum(arguments[0] for what, arguments, _ in block.replays if what == "slice"), len(block)


def _indices_stream(indices: Table | None) -> pa.Buffer:
    """A selection as an Arrow stream, 8 bytes a row; a stream without columns stands for all rows."""
    table = pa.table({}) if indices is None else indices.table
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _with_parts(state: bytes, parts: list[list[Any]]) -> bytes:
    described = json.loads(state)
    del described["_data_files"]
    return json.dumps({**described, _PARTS: parts}, indent=2, sort_keys=True).encode()


def load(store: Store, name: str) -> datasets.Dataset:
    """The dataset that `put`, or `dataset_entries.put_parts`, has kept below ``name``, mapped.

    Assumes that nobody puts anything there at the same time.

    Raises:
        NotFoundError: there is no dataset, or a part of it is gone.
        CorruptError: a part of the dataset is damaged.
    """
    state, info = (dataset_entries.read_file(store, f"{name}/{file}") for file in (STATE_FILE, INFO_FILE))
    described = json.loads(state)
    if _PARTS not in described:
        files = [item["filename"] for item in described["_data_files"]]
        return assemble(state, info, [_load_table(store, f"{name}/{file}") for file in files])
    shown = list(datasets.DatasetInfo.from_dict(json.loads(info)).features or ())
    tables = [
        _load_table(store, f"{name}/{file}").select(shown).slice(*rows) for file, *rows in described[_PARTS]
    ]
    dataset = assemble(state, info, tables)
    indices = _load_table(store, f"{name}/{_INDICES}")
    dataset._indices = indices if indices.column_names else None
    return dataset


def _load_table(store: Store, name: str) -> Table:
    found = store.find(name)
    if found is None:
        raise NotFoundError(
            f"{name!r}, a part of a dataset, is missing in {store.path}; put the dataset again"
        )
    return load_table(store, name, found.blob)


def entry_names(store: Store, name: str) -> set[str]:
    """The names of the entries of the dataset below ``name``; empty if there is none."""
    state = store.get(f"{name}/{STATE_FILE}")
    if state is None:
        return set()
    described = json.loads(state)
    parts = described.get(_PARTS)
    files = (
        [item["filename"] for item in described["_data_files"]]
        if parts is None
        else [part[0] for part in parts]
    )
    return {
        f"{name}/{file}" for file in [*files, INFO_FILE, STATE_FILE] + ([] if parts is None else [_INDICES])
    }


def compress(store: Store, name: str, codec: str) -> None:
    """Compress the uncompressed objects of the dataset below ``name``: a blob has only one object."""
    for file in sorted(entry_names(store, name)) if codec != "none" else ():
        found = store.find(file)
        if found is not None and found.blob.codec == "none" and found.blob.pack == LOOSE:
            _compress_blob(store, found.blob, codec)


def _compress_blob(store: Store, blob: Blob, codec: str) -> None:
    raw = store.path_of(blob)
    fd = open_source(raw)
    try:
        staged = store.writer.stage_file(fd, codec, None, reuse=False)
    finally:
        os.close(fd)
    try:
        with store.index.write() as txn:
            if txn.blob(blob.digest) == blob and staged.stored < blob.stored:
                txn.mark_lost(blob)  # the store would leave an existing blob as it is
                staged.place(txn)
    finally:
        staged.discard()
    with store.index.write() as txn:
        if txn.blob(blob.digest) != blob:
            store.objects.remove_loose(blob.digest, "none")
