"""The layout of a table of embeddings in a store: columns, shards, and the manifest that lists the shards.

A column is a long array. The rows of a column are spread over files, one a shard, each a ``.npy`` whose
elements begin at a page boundary. Row numbers are addresses: a shard keeps its numbers as long as the table
lives, no number is given out twice, and there may be gaps. Elements of ragged leaves have numbers of their
own. A *space* is one such numbering, and space 0 is that of the items. The layout is specified in
docs/format.md.
"""

from __future__ import annotations

import io
import json
import math
import uuid
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy

from castore.adapters.embeddings.encoder_outputs import KINDS, Leaf, Schema, dtype_of
from castore.adapters.embeddings.mapped_region import PAGE
from castore.errors import CorruptError

#: The folder of all tables.
PREFIX = "embeddings"
#: The manifest's name below the table's.
MANIFEST = "table.json"
#: The name of the sorted keys below the table's.
SORTED_KEYS = "sorted-keys.npy"
_FORMAT = 1
# Types without a NumPy dtype are kept as unsigned integers of the same width.
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class TableColumn(NamedTuple):
    """One array of a table.

    Attributes:
        name: the folder of its files.
        dtype: of its elements, by torch's name.
        shape: of a row.
        space: number of the numbering of its rows.
        leaf: number of its leaf, or -1 for the keys.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    space: int
    leaf: int

    @property
    def row_bytes(self) -> int:
        """Bytes a row takes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Shard(NamedTuple):
    """A run of rows that was put at once.

    Attributes:
        extents: for each space the first row and the one after the last.
        digests: for each column the digest of its file, in hex.
        keys: how many rows are items; the rest are gaps.
    """

    extents: tuple[tuple[int, int], ...]
    digests: tuple[str, ...]
    keys: int

    def file(self, column: TableColumn) -> str:
        """The name of a column's file, below the table's."""
        start, end = self.extents[column.space]
        return f"{column.name}/{start:012}-{end:012}.npy"


class SortedKeys(NamedTuple):
    """The file of sorted keys: its digest in hex, and the row before which it has all keys."""

    digest: str
    until: int


class Manifest(NamedTuple):
    """The state of a table at one moment.

    Attributes:
        generation: differs for tables of one name of which the earlier was lost.
        schema: of its outputs.
        shards: in the order of their rows.
        ends: for each space the first number that was never given out.
        sorted_keys: or None.
    """

    generation: str
    schema: Schema
    shards: tuple[Shard, ...]
    ends: tuple[int, ...]
    sorted_keys: SortedKeys | None

    @classmethod
    def new(cls, schema: Schema) -> Manifest:
        """A table without rows."""
        spaces = 1 + sum(leaf.is_ragged for leaf in schema.leaves)
        return cls(uuid.uuid4().hex, schema, (), (0,) * spaces, None)

    def dump(self) -> bytes:
        """As JSON."""
        fields = {
            "format": _FORMAT,
            "generation": self.generation,
            "structure": self.schema.structure,
            "leaves": [leaf._asdict() for leaf in self.schema.leaves],
            "shards": [shard._asdict() for shard in self.shards],
            "ends": self.ends,
            "sorted_keys": self.sorted_keys,
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes, where: str) -> Manifest:
        """Parse the bytes that `dump` wrote.

        Raises:
            CorruptError: it is something else, or of a newer castore.
        """
        try:
            fields = json.loads(data)
            if fields["format"] != _FORMAT:
                raise ValueError(f"it is of format {fields['format']}, and this castore knows {_FORMAT}")
            leaves = tuple(Leaf(**{**leaf, "shape": _shape(leaf["shape"])}) for leaf in fields["leaves"])
            shards = tuple(
                Shard(_extents(shard["extents"]), tuple(map(str, shard["digests"])), int(shard["keys"]))
                for shard in fields["shards"]
            )
            kept = fields["sorted_keys"]
            manifest = cls(
                str(fields["generation"]),
                Schema(fields["structure"], leaves),
                shards,
                _shape(fields["ends"]),
                None if kept is None else SortedKeys(str(kept[0]), int(kept[1])),
            )
            _check(manifest)
            return manifest
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise CorruptError(f"{where} is no manifest of embeddings: {error}", where=where) from error


def _shape(sides: Any) -> tuple[int, ...]:
    shape = tuple(int(side) for side in sides)
    if any(side < 0 for side in shape):
        raise ValueError(f"a size of {min(shape)}")
    return shape


def _extents(pairs: Any) -> tuple[tuple[int, int], ...]:
    extents = tuple((int(start), int(end)) for start, end in pairs)
    if any(not 0 <= start <= end for start, end in extents):
        raise ValueError(f"rows {extents}")
    return extents


def _check(manifest: Manifest) -> None:
    """Check that no file would be mapped outside its rows."""
    leaves, ends = manifest.schema.leaves, manifest.ends
    if any(leaf.kind not in KINDS or 0 in leaf.shape for leaf in leaves):
        raise ValueError("a leaf is of no kind there is")
    for leaf in leaves:
        dtype_of(leaf.dtype), dtype_of(leaf.stored)
    manifest.schema.rebuild(leaves)
    columns = columns_of(manifest.schema)
    steps = alignments(columns)
    if len(ends) != len(steps):
        raise ValueError(f"it has {len(ends)} spaces, and its leaves {len(steps)}")
    for shard in manifest.shards:
        if len(shard.digests) != len(columns):
            raise ValueError(f"a shard has {len(shard.digests)} files for {len(columns)} columns")
        for (start, end), step, most in zip(shard.extents, steps, ends, strict=True):
            if end > most or start % step:
                raise ValueError(f"a shard has the rows {start} to {end}, of {most}, in steps of {step}")


def columns_of(schema: Schema) -> list[TableColumn]:
    """The arrays of a table: its keys, then those of each leaf."""
    columns = [TableColumn("keys", "int64", (2,), 0, -1)]
    space = 0
    for number, leaf in enumerate(schema.leaves):
        if leaf.is_ragged:
            space += 1
            columns.append(TableColumn(f"{leaf.name}/spans", "int64", (2,), 0, number))
            columns.append(TableColumn(f"{leaf.name}/values", leaf.stored, leaf.shape, space, number))
        else:
            columns.append(TableColumn(leaf.name, leaf.stored, leaf.shape, 0, number))
    return columns


def alignments(columns: list[TableColumn]) -> list[int]:
    """For each space, the multiple at which a shard's first row must be for all bytes to begin at a page."""
    spaces = 1 + max(column.space for column in columns)
    steps = [1] * spaces
    for column in columns:
        steps[column.space] = math.lcm(steps[column.space], PAGE // math.gcd(PAGE, column.row_bytes))
    return steps


def npy_file(array: np.ndarray[Any, Any]) -> bytearray:
    """A ``.npy`` file whose elements begin at the second page. Format version 1.0 allows a padded header."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(array))
    described = header.getvalue()[10:].rstrip()
    size = PAGE - 10
    start = b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + described.ljust(size - 1) + b"\n"
    file = bytearray(PAGE + array.nbytes)
    file[:PAGE] = start
    if array.nbytes:
        np.frombuffer(file, array.dtype, offset=PAGE).reshape(array.shape)[...] = array
    return file


def numpy_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as an array of the same bytes: unsigned integers where NumPy has no such dtype."""
    try:
        return tensor.numpy()
    except TypeError:
        unsigned = np.dtype(_UNSIGNED[tensor.dtype.itemsize])
        return tensor.contiguous().view(torch.uint8).numpy().view(unsigned).reshape(tensor.shape)


def numpy_name(dtype: str) -> str:
    """NumPy's name for the elements of a file that holds a torch dtype."""
    return str(numpy_view(torch.empty(0, dtype=dtype_of(dtype), device="cpu")).dtype.name)
