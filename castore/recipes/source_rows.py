"""The place of a row of a recipe's input: its file, the row in it, and the line of a file of JSON lines.

Reads files only to count lines. Must never claim a place that is not sure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import fsspec

from castore.adapters.datasets.blame import SourceRow
from castore.recipes.mixture import Mixture
from castore.recipes.noted_files import NotedFile
from castore.recipes.sources import SAVED, Source


def find_place(
    source: Source | Mixture, noted: Sequence[NotedFile] | None, rows: tuple[int, int] | None
) -> SourceRow:
    """The place of rows of the input.

    Args:
        source: the files.
        noted: the files with their rows; None where they were not noted.
        rows: the numbers of the first and the last row that are meant; None where none is known.
    """
    if rows is None:
        return SourceRow(None, None, None, "the row of the input is not known")
    if isinstance(source, Mixture) and source.limit is not None:
        return SourceRow(None, None, None, "the rows were drawn from several sources")
    if isinstance(source, Source) and source.kind == SAVED:
        row = rows[0] if rows[0] == rows[1] else None
        return SourceRow(os.path.abspath(source.path), row, None)
    files, counts = source.files, [file.rows for file in noted or ()]
    if len(files) == 1 and len(counts) != 1:
        counts = [None]
    if len(counts) != len(files) or (len(files) > 1 and None in counts):
        return SourceRow(None, None, None, "the files were read together, so their rows were not counted")
    first = 0
    for file, count in zip(files, counts, strict=True):
        if count is None or rows[0] < first + count:
            return _place_in(os.path.abspath(file), count, (rows[0] - first, rows[1] - first))
        first += count
    return SourceRow(None, None, None, "the files have fewer rows than the input had")


def _place_in(path: str, count: int | None, rows: tuple[int, int]) -> SourceRow:
    """The place of rows whose first lies in a file of so many rows."""
    if rows[0] == rows[1]:
        return SourceRow(path, rows[0], None if count is None else _find_line(path, rows[0], count))
    if count is None or rows[1] < count:
        return SourceRow(path, None, None, f"one of its rows {rows[0]:,} to {rows[1]:,}")
    return SourceRow(None, None, None, "the rows that it may be lie in several files")


def _find_line(path: str, row: int, rows: int) -> int | None:
    """The number of the line with a row, in a file with an object of JSON in each line; otherwise None."""
    found, count = None, 0
    with fsspec.open(path, "rb", compression="infer") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                continue
            if not text.startswith(b"{"):
                return None
            found = number if count == row else found
            count += 1
    return found if count == rows else None
