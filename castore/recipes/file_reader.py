"""Reads files of one kind to tables: all of them, or some of them as if all were read.

The rows of a file depend on the other files in two ways. The first rows of all decide the features; in JSON
files later rows add columns, and widen types. In CSV files all rows decide the types of the columns.
`find_common` finds the features from the first file, and from the types that `find_types` finds in each CSV
file; the schemas that `find_schema` finds in JSON files widen them. Given those, `read_tables` reads any of
the files by themselves, to the same rows.

Must never change the files that it reads, nor give rows that differ from those of reading all files at once:
a file whose rows depend on the others in a third way is a DependentFileError.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet
from datasets.builder import Key
from datasets.data_files import DataFilesDict, DataFilesList
from datasets.features.features import require_storage_embed
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.text.text import Text
from datasets.table import table_cast

from castore.adapters.datasets.source_units import DependentFileError
from castore.recipes.common_schema import Neighbours, OtherSchemaError, WiderSchemaError, join_schemas
from castore.recipes.csv_reader import ColumnTypes, CsvReader, join_types
from castore.recipes.json_reader import JsonReader
from castore.recipes.silence import silence

#: Endings of compressed files that can be read.
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
#: A reader's version increases when it reads the same bytes as other values.
READER_VERSIONS = {"json": 4, "csv": 3, "tsv": 3}
#: Kinds of files whose columns get their types from all rows.
TYPED_BY_ALL_ROWS = ("csv", "tsv")
#: The kind of files whose columns are those of all rows.
JOINED = "json"
# One split for all files, or `datasets` would choose its name, and with it the fingerprint, by chance.
_SPLIT = datasets.Split.TRAIN


class Common(NamedTuple):
    """The properties that the files of a source have in common.

    Attributes:
        features: the features of all rows.
        is_known_first: whether the reader knows the features before it reads; else the features are those of
            its first table, and the later tables are cast to them.
        types: the types in the columns of CSV files; None for other kinds.
    """

    features: datasets.Features
    is_known_first: bool
    types: ColumnTypes | None = None

    def counted(self, types: ColumnTypes | None) -> list[Any]:
        """The values that rows of some files depend on beside their bytes, given their columns' own types."""
        columns = None if types is None else {name: (self.types or {})[name] for name in sorted(types)}
        return [json.dumps(self.features.to_dict()), self.is_known_first, columns]


def read_dataset(kind: str, files: Sequence[str], folder: str) -> datasets.Dataset:
    """The dataset of all files of a source, which maps Arrow files in a folder.

    Raises:
        Exception: the files cannot be read; of one of a dozen libraries.
    """
    os.makedirs(folder, exist_ok=True)
    try:
        return _read_dataset(kind, files, folder, None)
    except Exception as error:
        if kind != JOINED or not is_caused_by(error, WiderSchemaError):
            raise
    # Once more, for no first rows have the columns and types of all.
    schema = _join_tables(kind, files, folder, refuses_mixed=False)
    return _read_dataset(kind, files, folder, Neighbours(schema))


def _read_dataset(
    kind: str, files: Sequence[str], folder: str, around: Neighbours | None
) -> datasets.Dataset:
    with tempfile.TemporaryDirectory(dir=folder) as links:
        reader = _make_reader(kind, files, folder, links)
        if around is not None:
            reader.around = around
        reader.download_and_prepare()
        rows = reader.as_dataset(split=_SPLIT)
    assert isinstance(rows, datasets.Dataset)
    if kind == "json":
        for batch in rows.data.table.to_batches():
            batch.validate(full=True)  # the reader accepts any bytes as text
    return rows


def find_types(kind: str, files: Sequence[str], folder: str) -> ColumnTypes:
    """The types in the columns of files of one of the kinds `TYPED_BY_ALL_ROWS`.

    Raises:
        DependentFileError: a file cannot be read.
    """
    with silence(), tempfile.TemporaryDirectory(dir=folder) as links:
        try:
            reader = _make_reader(kind, files, folder, links)
            assert isinstance(reader, CsvReader)
            given = _arguments(reader, folder)
            return reader.find_types(file for paths in given["files_iterables"] for file in paths)
        except Exception as error:  # of pandas and codecs: reading all files raises it again
            raise DependentFileError from error


def find_schema(kind: str, files: Sequence[str], folder: str) -> pa.Schema | None:
    """The schema of all rows of files of the kind `JOINED`; None if they have none.

    Raises:
        DependentFileError: the files cannot be read, or their rows do not fit each other.
    """
    try:
        with silence():
            return _join_tables(kind, files, folder, refuses_mixed=True)
    except Exception as error:  # from a dozen libraries: reading all files raises it again
        if tells_no_rows(error):
            return None
        raise DependentFileError from error


def _join_tables(kind: str, files: Sequence[str], folder: str, *, refuses_mixed: bool) -> pa.Schema:
    with tempfile.TemporaryDirectory(dir=folder) as links:
        reader = _make_reader(kind, files, folder, links)
        assert isinstance(reader, JsonReader)
        reader.refuses_mixed = refuses_mixed
        given = _arguments(reader, folder)
        reader.info.features = None
        return join_schemas(_distinct(table.schema for _, table in reader.read_uncast(**given)))


def _distinct(schemas: Iterator[pa.Schema]) -> Iterator[pa.Schema]:
    last: pa.Schema | None = None
    for schema in schemas:
        if last is None or not schema.equals(last):
            yield schema
            last = schema


def find_common(kind: str, files: Sequence[str], types: ColumnTypes | None, folder: str) -> Common:
    """The properties that all files of a source have in common, from the first of them.

    Args:
        kind: of the files.
        files: the first files, up to one that has rows.
        types: the types in the columns of all files of the source, for the kinds `TYPED_BY_ALL_ROWS`.
        folder: a folder for temporary files.

    Raises:
        DependentFileError: the files cannot be read, or have no rows, or rows that name other files.
    """
    with silence(), tempfile.TemporaryDirectory(dir=folder) as links:
        try:
            reader = _make_reader(kind, files, folder, links)
            given = _arguments(reader, folder)
            features = reader.info.features
            is_known_first = features is not None
            if not is_known_first:
                if isinstance(reader, CsvReader):
                    reader.types = types
                table = next(iter(reader._generate_tables(**given)))[1]
                features = datasets.Features.from_arrow_schema(table.schema)
        except Exception as error:  # from a dozen libraries: reading all files raises it again
            raise DependentFileError from error
    if not features or any(map(require_storage_embed, features.values())):
        raise DependentFileError
    return Common(features, is_known_first, types)


def read_tables(
    kind: str, files: Sequence[str], common: Common, folder: str, around: Neighbours | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """The rows of some files of a source: the number of the file among them, and a table.

    Args:
        kind: of the files.
        files: the files.
        common: the properties of all files of the source.
        folder: a folder for temporary files.
        around: the rows around those of the files; by default all other rows have all columns.

    Raises:
        DependentFileError: the files cannot be read by themselves.
    """
    with silence(), tempfile.TemporaryDirectory(dir=folder) as links:
        try:
            reader = _make_reader(kind, files, folder, links)
            # Given now, or the reader would search these files for them.
            reader.info.features = common.features
            given = _arguments(reader, folder)
            reader.info.features = common.features if common.is_known_first else None
            schema = common.features.arrow_schema
            if isinstance(reader, CsvReader):
                reader.types, reader.around = common.types, Neighbours(schema)
            elif isinstance(reader, JsonReader):
                reader.refuses_mixed, reader.around = True, around or Neighbours(schema)
            for place, table in reader._generate_tables(**given):
                assert isinstance(place, Key)
                yield place.original_shard_id, _as_written(kind, table, schema)
        except DependentFileError:
            raise
        except Exception as error:  # from a dozen libraries: reading all files raises it again
            raise DependentFileError from error


def find_unreadable(kind: str, files: Sequence[str], folder: str) -> str | None:
    """The first of some files that cannot be read behind the first of them; None if there is none."""
    file = _find_dependent(kind, files, folder)
    if file is None or kind != JOINED:
        return file
    # Values of several kinds are no error in the file that has them. Those of a later file may be one then.
    place = bisect_left(
        range(len(files)),
        True,
        lo=files.index(file),
        key=lambda last: not _can_be_read(kind, files[: last + 1], folder),
    )
    return files[place] if place < len(files) else None


def _can_be_read(kind: str, files: Sequence[str], folder: str) -> bool:
    with silence(), tempfile.TemporaryDirectory(dir=folder) as place:
        try:
            read_dataset(kind, files, place)
        except Exception as error:  # noqa: BLE001 (of a dozen libraries)
            return tells_no_rows(error)
        return True


def _find_dependent(kind: str, files: Sequence[str], folder: str) -> str | None:
    """The first of some files whose rows cannot be read to tables by themselves; None if there is none."""
    types: list[ColumnTypes] = []
    common: Common | None = None
    file = files[0]
    try:
        for file in files if kind in TYPED_BY_ALL_ROWS else ():
            types += [find_types(kind, [file], folder)]
        for file in files:
            try:
                common = common or find_common(kind, [file], join_types(types) if types else None, folder)
            except DependentFileError as error:
                if error.__cause__ is not None and tells_no_rows(error.__cause__):
                    continue  # an empty file is no error beside files with rows
                raise
            common = _widen(kind, file, common, folder)
            for _ in read_tables(kind, [file], common, folder):
                pass
    except DependentFileError as error:
        return None if error.__cause__ is None else file
    except OtherSchemaError:
        return file
    return None


def _widen(kind: str, file: str, common: Common, folder: str) -> Common:
    """The properties of some files with another one behind them."""
    schema = find_schema(kind, [file], folder) if kind == JOINED else None
    if schema is None:
        return common
    joined = join_schemas([common.features.arrow_schema, schema])
    return common._replace(features=datasets.Features.from_arrow_schema(joined))


def is_caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether an error, or one that it was raised from, is of a kind."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error is not None


def tells_no_rows(error: BaseException) -> bool:
    """Whether the only fault of what was read is that it has no rows."""
    # The datasets library asks for the first of no tables, or raises the second text.
    return isinstance(error, StopIteration) or "corresponds to no data" in str(error)


def _as_written(kind: str, table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table as `datasets` writes it behind those of other files."""
    table = table_cast(table.combine_chunks(), schema)
    if kind == "json":
        table.validate(full=True)  # the reader accepts any bytes as text
    return table


def _arguments(reader: Any, folder: str) -> dict[str, Any]:
    """The arguments with which a reader reads its files; finds its features, where it does that first."""
    manager = datasets.DownloadManager(
        dataset_name=reader.dataset_name,
        download_config=datasets.DownloadConfig(cache_dir=os.path.join(folder, "extracted")),
        record_checksums=False,
    )
    [split] = reader._split_generators(manager)
    return dict(split.gen_kwargs)


class _ParquetReader(Parquet):  # type: ignore[misc]
    """The Parquet builder of `datasets`, without its error at a row group that has no rows."""

    def _generate_tables(
        self, files: list[str], row_groups_list: list[Any]
    ) -> Iterator[tuple[Key, pa.Table]]:
        chosen = [
            given or _groups_with_rows(file) for file, given in zip(files, row_groups_list, strict=True)
        ]
        yield from super()._generate_tables(files, chosen)


def may_name_files(file: str) -> bool:
    """Whether the rows of a Parquet file, and of those behind it, may name files. False if nobody can say."""
    try:
        features = datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(file))
    except (OSError, ValueError, TypeError, NotImplementedError):  # whoever reads the rows reports it
        return False
    return any(map(require_storage_embed, features.values()))


def _groups_with_rows(file: str) -> tuple[int, ...] | None:
    """The row groups of a Parquet file that have rows; None if all have some, or the reader is to report."""
    try:
        with open(file, "rb") as data:
            found = pyarrow.parquet.read_metadata(data)
    except (OSError, pa.ArrowInvalid):
        return None
    groups = tuple(place for place in range(found.num_row_groups) if found.row_group(place).num_rows)
    return None if len(groups) == found.num_row_groups else groups


def _make_reader(kind: str, files: Sequence[str], folder: str, links: str) -> Any:
    """The builder of `datasets` for files of a kind; ``links`` is a folder for links to them."""
    paths = [_plain_path(file, links) for file in files]
    # Make the list here, since `datasets` takes every given path for a pattern.
    given = DataFilesDict({str(_SPLIT): DataFilesList(paths, [_file_state(path) for path in paths])})
    if kind == "json":
        return JsonReader(given, folder)
    if kind == "parquet":
        return _ParquetReader(cache_dir=folder, data_files=given)
    if kind == "text":
        return Text(cache_dir=folder, data_files=given, sample_by="document")
    return CsvReader(given, folder, "\t" if kind == "tsv" else ",")


def _plain_path(file: str, links: str) -> str:
    """A full path that `datasets` understands: it makes a URL of the name of a compressed file."""
    path = os.path.abspath(file)
    if not path.lower().endswith(COMPRESSED) or re.fullmatch(r"[\w.-]+", os.path.basename(path)):
        return path
    stem, ending = os.path.splitext(path)
    link = os.path.join(links, f"{len(os.listdir(links))}{os.path.splitext(stem)[1]}{ending}")
    os.symlink(path, link)
    return link


def _file_state(path: str) -> tuple[str, ...]:
    found = os.stat(path)
    return path, str(found.st_mtime_ns), str(found.st_size), str(found.st_ino)
