"""Writes a dataset to a place of the user's: a jsonl, json, csv or parquet file, or a `save_to_disk` folder.

An export is whole or absent: it is written beside its place and renamed. Columns of statistics and hashes are
left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from castore.errors import CastoreError, FullError, InvalidValueError
from castore.recipes.silence import silence
from castore.recipes.sources import would_read
from castore.system.exchange import UNSUPPORTED, exchange
from castore.system.sql_errors import is_full, no_space_in
from castore.system.temporary import sync_folder

_OWN_COLUMNS = "__dj__"
_STATISTICS = ("__dj__stats__", "__dj__meta__")
_BATCH_ROWS = 1000
# Rows that hold the bytes of images or sounds, of megabytes each.
_ROWS_WITH_FILES = 100
_DATASET_FILES = ("state.json", "dataset_dict.json")
# All files that `save_to_disk` makes in a folder, and those in which `datasets` caches what was made of them.
_SAVED = re.compile(
    r"data-\d+-of-\d+\.arrow|state\.json|dataset_info\.json|dataset_dict\.json|cache-\w+\.arrow"
).fullmatch


def check_path(path: str | os.PathLike[str], *, keep_stats: bool = False) -> None:
    """Check that a dataset, perhaps with statistics, can be written there, before hours are spent on it.

    Raises:
        InvalidValueError: the ending is not that of a supported format, the folder there holds other things,
            a special file is there, or there can be no folder for it.
    """
    if "://" in os.fspath(path):
        raise InvalidValueError(
            f"export_path {os.fspath(path)!r} is not a local path; export to a file, and upload that file"
        )
    place = Path(path)
    if place.suffix.lower() not in _WRITERS:
        raise InvalidValueError(
            f"export_path {os.fspath(path)!r} has the unknown ending {place.suffix!r}; use "
            f"{', '.join(filter(None, _WRITERS))}, or a folder (no ending)"
        )
    if keep_stats and place.suffix.lower() == ".csv":
        raise InvalidValueError(
            "keep_stats_in_res_ds: true is not supported for .csv, which cannot hold maps; use .jsonl"
        )
    _check_place(place, path)
    if not place.suffix and place.exists():
        _check_replaceable(place, path)


def _check_place(place: Path, path: str | os.PathLike[str]) -> None:
    """Check that a file can be there, and replaces none of another kind.

    Raises:
        InvalidValueError: it cannot.
    """
    if place.suffix and place.is_dir():
        raise InvalidValueError(
            f"export_path {os.fspath(path)!r} is a folder; remove it, or choose another name"
        )
    if place.suffix and place.exists() and not place.is_file():
        raise InvalidValueError(
            f"export_path {os.fspath(path)!r} is no regular file, and would be replaced by one; choose"
            " another name"
        )
    above = next((one for one in place.absolute().parents if os.path.lexists(one)), None)
    if above is not None and not above.is_dir():
        raise InvalidValueError(
            f"export_path {os.fspath(path)!r} cannot be made, since {os.fspath(above)!r} is not a folder;"
            " choose another place"
        )


def check_apart(path: str | os.PathLike[str], files: Iterable[str], sources: Iterable[str]) -> None:
    """Check that an export replaces none of the files that it is made from, and comes not among them.

    Args:
        path: the path of the export.
        files: the files that are read; each of them exists.
        sources: the paths that stand for these files.

    Raises:
        InvalidValueError: one of the files is at ``path``, or in the folder there, under whatever name; or a
            file at ``path`` would be one of them in the next run.
    """
    _check_replaces_none(path, files)
    for source in sources:
        if would_read(source, os.fspath(path)):
            raise InvalidValueError(
                f"the next run would read export_path {os.fspath(path)!r}, since it lies in dataset_path"
                f" {source!r}; choose a place outside"
            )


def _check_replaces_none(path: str | os.PathLike[str], files: Iterable[str]) -> None:
    try:
        place = os.stat(path)
    except OSError:
        return  # the export replaces nothing
    outside: set[Path] = set()
    for file in files:
        found = Path(os.path.realpath(file))
        # An export replaces a folder as a whole, with everything below it.
        above = {*found.parents} - outside if stat.S_ISDIR(place.st_mode) else {found}
        outside |= above
        if any(os.path.samestat(place, one.stat()) for one in above):
            raise InvalidValueError(
                f"export_path {os.fspath(path)!r} would replace {file!r}, which this recipe reads; choose "
                "another name"
            )


def _check_replaceable(folder: Path, path: str | os.PathLike[str]) -> None:
    """Check that a folder is empty, or has what `save_to_disk` makes and nothing else.

    Raises:
        InvalidValueError: it is neither, or no folder.
    """
    if not folder.is_dir() or (
        any(folder.iterdir()) and not any((folder / name).is_file() for name in _DATASET_FILES)
    ):
        raise InvalidValueError(
            f"export_path {os.fspath(path)!r} exists and is not a folder of save_to_disk; choose another name"
        )
    if (other := next(_others(folder), None)) is not None:
        raise InvalidValueError(
            f"export_path {os.fspath(path)!r} has {os.fspath(other.relative_to(folder))!r} beside the files"
            " of save_to_disk, and the export would remove it; move it elsewhere, or choose another name"
        )


def _others(folder: Path) -> Iterator[Path]:
    """All in a folder of `save_to_disk` that it did not make. A dict of datasets has a folder for each."""
    for one in sorted(folder.iterdir()):
        if one.is_dir() and not one.is_symlink() and (one / "state.json").is_file():
            yield from _others(one)
        elif not (one.is_file() and _SAVED(one.name)):
            yield one


def export(
    dataset: datasets.Dataset,
    path: str | os.PathLike[str],
    progress: Callable[[int], object] | None = None,
    *,
    keep_stats: bool = False,
) -> int:
    """Write a dataset; a file or folder at ``path`` is replaced once everything is written.

    Args:
        dataset: the dataset; its columns of statistics and hashes are left out.
        path: the path of the export; its ending decides the format.
        progress: a function called with the number of rows of each written piece.
        keep_stats: write the columns of statistics and tags, too.

    Returns:
        Bytes written.

    Raises:
        InvalidValueError: see `check_path`; or a value has no JSON form, or nothing can be written there.
        FullError: the disk is full.
    """
    check_path(path, keep_stats=keep_stats)
    place = Path(os.path.realpath(path))  # a link at the path stays, and leads to the new file
    kept = _STATISTICS if keep_stats else ()
    plain = dataset.remove_columns(
        [name for name in dataset.column_names if name.startswith(_OWN_COLUMNS) and name not in kept]
    )
    with silence(), _reporting_system_errors(path, place):
        place.parent.mkdir(parents=True, exist_ok=True)
        # The name is hidden and unique, so that two exports to one place do not write into one another.
        temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex[:12]}.part")
        try:
            with _reporting_failures(path):
                _WRITERS[Path(path).suffix.lower()](plain, temporary, progress or _ignore_rows)
            size = _sync(temporary)
            if place.is_dir():  # somebody may have put something there meanwhile
                _check_replaceable(place, path)
            _replace(temporary, place)
        except BaseException:
            _remove(temporary)
            raise
    return size


def _ignore_rows(rows: int) -> None:
    pass


@contextlib.contextmanager
def _reporting_failures(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make a writer's errors name the export as what failed, and not a step."""
    try:
        yield
    except (CastoreError, OSError):
        raise
    except Exception as error:  # Arrow and the datasets library raise many types
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidValueError(
            f"the result cannot be written to export_path {os.fspath(path)!r}: {what[:300]}; export "
            "in another format: the results of all steps are in the store"
        ) from error


@contextlib.contextmanager
def _reporting_system_errors(path: str | os.PathLike[str], place: Path) -> Iterator[None]:
    """Have the system's errors about the export name it, and not the temporary file.

    Errors about other files, such as an image that a row names, stay as they are.
    """
    try:
        yield
    except CastoreError:
        raise
    except OSError as error:
        if is_full(error):
            raise FullError(
                f"{no_space_in(place, error)}; free some space, or choose another export_path"
            ) from error
        if not _is_of_export(error, place):
            raise
        raise InvalidValueError(
            f"export_path {os.fspath(path)!r} cannot be written ({error.strerror or error}); choose another "
            "one: the results of all steps are in the store"
        ) from error


def _is_of_export(error: OSError, place: Path) -> bool:
    """Whether an error names the export, its temporary file, or a folder above; or no file at all."""
    if not isinstance(error.filename, str | bytes):
        return True
    named = Path(os.fsdecode(error.filename))
    if named == place or named in place.parents:
        return True
    beside = (one for one in (named, *named.parents) if one.parent == place.parent)
    return any(one.name.startswith(f".{place.name}.") for one in beside)


def _replace(temporary: Path, place: Path) -> None:
    if not place.is_dir():
        temporary.rename(place)
        sync_folder(place.parent)
        return
    # A folder cannot be renamed over another.
    try:
        exchange(temporary, place)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        # A crash in between leaves the old folder beside its place.
        old = place.with_name(f".{place.name}.{uuid.uuid4().hex[:12]}.old")
        place.rename(old)
        try:
            temporary.rename(place)
        except BaseException:
            old.rename(place)
            raise
        temporary = old
    sync_folder(place.parent)
    shutil.rmtree(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> int:
    """Sync a file, or a folder with all in it: after a power cut there is the old export or the new
    one. Returns the bytes of the files.
    """
    size = 0
    for one in [path, *path.rglob("*")]:
        fd = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            size += os.fstat(fd).st_size if one.is_file() else 0
        finally:
            os.close(fd)
    return size


def _read_rows(dataset: datasets.Dataset, done: Callable[[int], object]) -> Iterator[dict[str, Any]]:
    # Read from Arrow, not through pandas, which turns integers with a gap among them into floats.
    if not len(dataset):
        return
    decode = _with_exact_json(dataset.features).decode_example
    for table in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        # Arrow holds JSON without a fixed type as text.
        yield from map(decode, table.to_pylist())
        done(table.num_rows)


def _with_exact_json(feature: Any) -> Any:
    """Features, or one of them, that decode JSON of any form with all digits: the parser of `datasets` keeps
    15 of a float. Its older releases lack the class `Json`.
    """
    kind: Any = type(feature)
    if kind.__name__ == "Json":
        return _exact(kind)(decode=feature.decode)
    if isinstance(feature, list):
        return [_with_exact_json(one) for one in feature]
    if isinstance(feature, dict):
        inner = {name: _with_exact_json(one) for name, one in feature.items()}
        return datasets.Features(inner) if isinstance(feature, datasets.Features) else inner
    if hasattr(feature, "feature"):  # of a list, in several classes
        return dataclasses.replace(feature, feature=_with_exact_json(feature.feature))
    return feature


@functools.cache
def _exact(kind: Any) -> Any:
    def decode_example(self: Any, data: str | None, token_per_repo_id: Any = None) -> Any:
        return None if data is None else json.loads(data)

    return type(kind.__name__, (kind,), {"decode_example": decode_example})


def _to_json(value: object) -> object:
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    raise InvalidValueError(
        f"JSON has no form for a value of type {type(value).__name__}; export to .parquet or to a folder"
    )


def _to_line(row: dict[str, Any]) -> bytes:
    # Half of a surrogate pair has no UTF-8; its escape comes back unchanged.
    text = json.dumps(row, ensure_ascii=False, default=_to_json)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(row, default=_to_json).encode()


def _write_jsonl(dataset: datasets.Dataset, path: Path, done: Callable[[int], object]) -> None:
    with path.open("wb") as file:
        for row in _read_rows(dataset, done):
            file.write(_to_line(row) + b"\n")


def _write_json(dataset: datasets.Dataset, path: Path, done: Callable[[int], object]) -> None:
    with path.open("wb") as file:
        before = b"[\n"
        for row in _read_rows(dataset, done):
            file.write(before + _to_line(row))
            before = b",\n"
        file.write((b"[" if before == b"[\n" else b"\n") + b"]\n")


def _write_csv(dataset: datasets.Dataset, path: Path, done: Callable[[int], object]) -> None:
    import pyarrow.csv

    for column in dataset.features.arrow_schema:
        if pa.types.is_nested(column.type):
            raise InvalidValueError(
                f"column {column.name!r} is of type {column.type}, which .csv cannot hold; export to .jsonl, "
                ".parquet or a folder, or convert the column to text in a step"
            )
    # Use a file of Python's: a CSVWriter's own file stays open if closing it failed, as on a full disk.
    with open(path, "wb") as file, pyarrow.csv.CSVWriter(file, dataset.features.arrow_schema) as writer:
        if len(dataset):
            for table in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
                writer.write_table(table)
                done(table.num_rows)


def _write_parquet(dataset: datasets.Dataset, path: Path, done: Callable[[int], object]) -> None:
    import pyarrow.parquet
    from datasets.features.features import require_storage_embed
    from datasets.table import embed_table_storage

    holds_files = any(map(require_storage_embed, dataset.features.values()))
    # Pass a path: Arrow 26 ends the process if a Python file raises while it is closed.
    with pyarrow.parquet.ParquetWriter(
        str(path), dataset.features.arrow_schema, compression="zstd"
    ) as writer:
        if len(dataset):
            for table in dataset.with_format("arrow").iter(_ROWS_WITH_FILES if holds_files else _BATCH_ROWS):
                writer.write_table(embed_table_storage(table.cast(dataset.features.arrow_schema)))
                done(table.num_rows)


def _write_folder(dataset: datasets.Dataset, path: Path, done: Callable[[int], object]) -> None:
    # Of no rows `datasets` may write no file, and reads no folder without one.
    dataset.save_to_disk(str(path), num_shards=None if len(dataset) else 1)
    done(len(dataset))


_WRITERS: dict[str, Callable[[datasets.Dataset, Path, Callable[[int], object]], None]] = {
    ".jsonl": _write_jsonl,
    ".json": _write_json,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    "": _write_folder,
}
