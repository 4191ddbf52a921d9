"""The files of a source as units that are read by themselves: large files alone, small neighbours together.

A unit's key has the digests of its files, the reader, and what all files have in common (`file_reader`). So a
new file costs itself, unless it changes what they have in common: a type in a column, or, in JSON files, the
columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from castore.adapters.datasets.file_digests import remembered
from castore.adapters.datasets.source_units import DependentFileError, FeaturesChangedError, Unit, Units
from castore.keys.encoder import key
from castore.recipes import file_reader
from castore.recipes.common_schema import Neighbours, OtherSchemaError, WiderSchemaError, join_schemas
from castore.recipes.csv_reader import ColumnTypes, join_types
from castore.recipes.file_reader import JOINED, TYPED_BY_ALL_ROWS, Common, is_caused_by
from castore.recipes.mixture import Mixture
from castore.recipes.seen_files import SeenFiles
from castore.recipes.sources import SAVED, Source, reader_identity
from castore.store import Store

_VERSION = 1
#: Bytes of a unit of small files, about, and of the smallest file that is a unit of its own: reading a file
#: takes milliseconds, and so does keeping what was read.
UNIT_BYTES = 1 << 21


def find_units(source: Source | Mixture, seen: SeenFiles, store: Store, folder: Path | None) -> Units:
    """The units of a source, or of several that are read one after the other.

    Args:
        source: the files.
        seen: the files as the run has seen them.
        store: remembers what files have in common.
        folder: a folder for temporary files; None to read nothing but for the digests of files. Where the
            first file was never the first one before, what all have in common is then a guess.

    Raises:
        DependentFileError: only all files together decide about the rows; or, without a folder, what they
            have in common is not known.
        UnhashableError, OSError: a file cannot be read.
    """
    if isinstance(source, Source):
        return _units_of(source, seen, store, folder)
    if source.limit is not None:
        raise DependentFileError
    found = [_units_of(part, seen, store, folder) for part in source.parts]
    if any(list(part.features.items()) != list(found[0].features.items()) for part in found):
        raise DependentFileError
    # The result of `concatenate_datasets` has no split.
    return Units(found[0].features, [unit for part in found for unit in part.units], None)


def _units_of(source: Source, seen: SeenFiles, store: Store, folder: Path | None) -> Units:
    if source.kind == SAVED:
        raise DependentFileError
    groups = list(group_files(source.files, seen))
    identity = reader_identity(source.kind)
    types = [_find_types(source.kind, files, identity, seen, store, folder) for files in groups]
    common = _find_common(source, join_types(filter(None, types)), identity, seen, store, folder)
    common, around = _join_known(source.kind, groups, common, identity, seen, store)

    def read(number: int) -> Iterator[tuple[int, pa.Table]]:
        files = groups[number]
        try:
            yield from file_reader.read_tables(source.kind, files, common, str(folder), around(number))
        except DependentFileError as error:
            if source.kind != JOINED or not is_caused_by(error, WiderSchemaError):
                raise
            _find_schema(files, identity, seen, store, folder)
            for group in groups:
                # The fault of another file is no fault of this one: it is raised when that file is read.
                with suppress(DependentFileError):
                    _find_schema(group, identity, seen, store, folder)
            raise FeaturesChangedError from error
        seen.check(files)

    units = []
    for number, (files, own) in enumerate(zip(groups, types, strict=True)):
        digests = [seen.digest(file) for file in files]
        counted = {"version": _VERSION, "reader": identity, "common": common.counted(own)}
        size = sum(seen.state(file).st_size for file in files)
        units.append(Unit(key({**counted, "files": digests}), len(files), size, partial(read, number)))
    return Units(common.features, units)


def group_files(files: Sequence[str], seen: SeenFiles) -> Iterator[list[str]]:
    """Files in order, as units: small ones together, up to one whose digest ends the unit.

    Which files are together depends on their content alone: what follows a new file, or a changed one, stays.
    """
    group: list[str] = []
    size = 0
    for file in files:
        own = seen.state(file).st_size
        if own >= UNIT_BYTES and group:
            yield group
            group, size = [], 0
        group.append(file)
        size += own
        chance = int(seen.digest(file)[:8], 16) * UNIT_BYTES
        if chance < own << 32 or size >= 4 * UNIT_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _find_types(
    kind: str,
    files: Sequence[str],
    identity: list[Any],
    seen: SeenFiles,
    store: Store,
    folder: Path | None,
) -> ColumnTypes | None:
    """The types in the columns of some files; None for kinds of files that need none."""
    if kind not in TYPED_BY_ALL_ROWS:
        return None
    cache_key = ["types", _VERSION, identity, [seen.digest(file) for file in files]]

    def find(folder: Path) -> Any:
        found = file_reader.find_types(kind, files, str(folder))
        seen.check(files)
        return found

    found: ColumnTypes = _remembered(store, cache_key, find, folder)
    return found


def _find_schema(
    files: Sequence[str], identity: list[Any], seen: SeenFiles, store: Store, folder: Path | None
) -> pa.Schema | None:
    """The schema of the rows of some JSON files; None if there are none."""
    cache_key = ["schema", _VERSION, identity, [seen.digest(file) for file in files]]

    def find(folder: Path) -> Any:
        found = file_reader.find_schema(JOINED, files, str(folder))
        seen.check(files)
        return None if found is None else datasets.Features.from_arrow_schema(found).to_dict()

    features = _remembered(store, cache_key, find, folder)
    return None if features is None else datasets.Features.from_dict(features).arrow_schema


def _join_known(
    kind: str, groups: Sequence[list[str]], common: Common, identity: list[Any], seen: SeenFiles, store: Store
) -> tuple[Common, Callable[[int], Neighbours | None]]:
    """The properties that all files have in common, with the schemas that are known of some of them.

    Most files fit the schema of the first file. To find a file's schema takes about as long as to read the
    file, so schemas were found only in sources in which a file did not fit.

    Returns:
        The properties, and a function of the number of a unit that gives the rows around it; None if it fits.

    Raises:
        DependentFileError: rows do not fit each other.
    """
    schemas: list[pa.Schema | None] = []
    for files in groups:
        try:
            schemas.append(_find_schema(files, identity, seen, store, None) if kind == JOINED else None)
        except DependentFileError:  # not known
            schemas.append(None)
    if not any(schemas):
        return common, lambda _: None
    before = [common.features.arrow_schema]
    try:
        for schema in schemas:
            before.append(before[-1] if schema is None else join_schemas([before[-1], schema]))
    except OtherSchemaError as error:
        raise DependentFileError from error
    joined = before[-1]

    def around(number: int) -> Neighbours | None:
        if schemas[number] is not None:
            return None
        # All units behind count, for columns keep the order in which rows have them.
        return Neighbours(joined, before[number], filter(None, schemas[number + 1 :]))

    return common._replace(features=datasets.Features.from_arrow_schema(joined)), around


def _find_common(
    source: Source,
    types: ColumnTypes,
    identity: list[Any],
    seen: SeenFiles,
    store: Store,
    folder: Path | None,
) -> Common:
    # All empty files but the first are alike: the first file is read in a way of its own.
    count = next((number for number, file in enumerate(source.files, 1) if seen.state(file).st_size), 1)
    files = [*source.files[:1], *source.files[count - 1 : count]] if count > 1 else source.files[:1]
    known = types if source.kind in TYPED_BY_ALL_ROWS else None

    def cache_key(files: Sequence[str]) -> list[Any]:
        return ["common", _VERSION, identity, [seen.digest(file) for file in files], known]

    def find(folder: Path) -> Any:
        found = file_reader.find_common(source.kind, files, known, str(folder))
        seen.check(files)
        return [found.features.to_dict(), found.is_known_first]

    try:
        features, is_known_first = _remembered(store, cache_key(files), find, folder)
    except DependentFileError:
        if folder is not None:
            raise
        features, is_known_first = _guess_common(source, cache_key, store)
    return Common(datasets.Features.from_dict(features), is_known_first, known)


def _guess_common(source: Source, cache_key: Callable[[list[str]], Any], store: Store) -> Any:
    """The properties in common as they were for another first file, which an earlier run has read.

    Raises:
        DependentFileError: no such file is there any more.
    """
    for file in source.files:
        with suppress(DependentFileError):
            return _remembered(store, cache_key([file]), lambda _: None, None)
    raise DependentFileError


def _remembered(store: Store, cache_key: Any, find: Callable[[Path], Any], folder: Path | None) -> Any:
    """The result of ``find``, as JSON, which the store remembers by ``cache_key``."""

    def compute() -> str:
        if folder is None:
            raise DependentFileError
        return json.dumps(find(folder))

    return json.loads(remembered(store, cache_key, compute))
