"""The input files of a recipe: finds files of the usual kinds, identifies them, reads them to a dataset.

The digests of the files, in order, identify a source; the kind and the reader's version count too. So a copy
of a folder is the same source, and a changed byte makes another source. Must never change the files that it
reads.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import datasets
import fsspec

from castore.errors import CastoreError, FullError, InvalidValueError, NotFoundError
from castore.keys.encoder import key
from castore.recipes import file_reader
from castore.recipes.common_schema import OtherSchemaError
from castore.recipes.file_reader import COMPRESSED, READER_VERSIONS
from castore.recipes.registry import suggest_nearest
from castore.recipes.seen_files import SeenFiles
from castore.recipes.silence import silence
from castore.store import Store
from castore.system.sql_errors import is_full, no_space_in

#: Kinds of files by their endings.
KINDS = {
    ".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".txt": "text",
}  # fmt: skip
SAVED = "saved"
#: The identity of files: their content, their path with size and modification time, or both.
FileIdentity = Literal["content", "path", "combined"]


class Source(NamedTuple):
    """Files of one kind, in order.

    Attributes:
        path: the path as the user gave it.
        kind: ``"json"``, ``"csv"``, ``"tsv"``, ``"parquet"``, ``"text"`` or ``"saved"`` (a folder of
            `save_to_disk`).
        files: all files; for a saved folder, the files in it.
    """

    path: str
    kind: str
    files: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(os.stat(file).st_size for file in self.files)


def find(path: str | os.PathLike[str]) -> Source:
    """The files that a path stands for: one file, all files below a folder, or those that match a pattern.

    In a text that is no existing path, ``*`` and ``**`` are patterns. All other characters, and existing
    folders at the front, stand for themselves.

    Raises:
        NotFoundError: there are no such files.
        InvalidValueError: the files are of no known kind, or of several kinds.
    """
    text = os.fspath(path)
    if "://" in text:
        raise InvalidValueError(f"dataset_path {text!r} is not a local path; download the data first")
    if os.path.isdir(text):
        saved = _saved_folder(text)
        if saved is not None:
            return saved
        return _make_source(text, [file for file in _walk_files(text) if kind_of(file)])
    if os.path.exists(text):
        return _make_source(text, [text])
    if "*" in text:
        return _make_source(text, _match_pattern(text))
    folder, name = os.path.split(text)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    raise NotFoundError(f"there is no data at dataset_path {text!r}{suggest_nearest(name, beside)}")


def find_all(paths: str | Sequence[str]) -> Source:
    """The files that several paths stand for, in the order of the paths.

    Raises:
        NotFoundError, InvalidValueError: as for `find`; or the files are of different kinds.
    """
    if isinstance(paths, str):
        return find(paths)
    found = [find(path) for path in paths]
    if len(found) == 1:
        return found[0]
    if SAVED in {source.kind for source in found}:
        raise InvalidValueError(
            "a folder of save_to_disk cannot be one of several paths; load each by itself"
        )
    return _make_source(", ".join(paths), [file for source in found for file in source.files])


def kind_of(file: str) -> str | None:
    """The kind of a file, by its ending.

    >>> kind_of("a/b.JSONL.gz"), kind_of("README.md")
    ('json', None)
    """
    stem, ending = os.path.splitext(file.lower())
    return KINDS.get(os.path.splitext(stem)[1] if ending in COMPRESSED else ending)


def _match_pattern(pattern: str) -> list[str]:
    """The files that match a pattern of ``*`` and ``**``, in order."""
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    rest = pattern[len(folder) :].lstrip("/")
    before, *after = re.split(r"(?:^|(?<=/))\*\*(?=/|$)", rest, maxsplit=1)
    if not after or "/." in after[0]:  # hidden files are read where their names begin with a dot here, too
        return sorted(filter(os.path.isfile, _glob(rest, folder)))
    # `glob` follows a link to a folder that it lies in, forty times.
    matches = re.compile(_as_expression(f"**{after[0]}")).fullmatch
    tops = _glob(before, folder) if before else [folder]
    found = ((top, os.path.relpath(file, top or ".")) for top in tops for file in _walk_files(top or "."))
    return sorted(os.path.join(top, name) for top, name in found if matches(name))


def _glob(pattern: str, folder: str) -> list[str]:
    escaped = re.sub(r"[\[?]", r"[\g<0>]", pattern)
    found = glob.glob(escaped, root_dir=folder or None, recursive=True)
    return [os.path.join(folder, name) for name in {*found}]  # with two `**` it finds some twice


def _walk_files(folder: str) -> Iterator[str]:
    """The files below a folder, also behind links to folders, but no hidden ones."""
    above: dict[str, frozenset[str]] = {folder: frozenset()}
    for place, folders, files in os.walk(folder, followlinks=True):
        here = above.pop(place) | {os.path.realpath(place)}
        # A link to a folder that it lies in has no end.
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and os.path.realpath(os.path.join(place, name)) not in here
        )
        above |= {os.path.join(place, name): here for name in folders}
        yield from (os.path.join(place, name) for name in sorted(files) if not name.startswith("."))


# Patterns of several folders, as regular expressions. Hidden ones are left out, as `glob` does it.
_ANY = {"**/": "(?:[^/.][^/]*/)*", "**": "(?:[^/.][^/]*/)*[^/.][^/]*"}


def would_read(path: str, file: str) -> bool:
    """Whether the data at a path, a folder or a pattern, would have a file as well if the file were there.

    >>> would_read("data/**/*.jsonl", "data/a/b.jsonl"), would_read("data/*.jsonl", "data/a/b.jsonl")
    (True, False)
    """
    if os.path.isdir(path):
        place = os.path.relpath(os.path.realpath(file), os.path.realpath(path)).split(os.sep)
        is_there = not any(part.startswith(".") for part in place)  # "..", too
        return is_there and _saved_folder(path) is None
    if os.path.exists(path) or "*" not in path:
        return False
    return re.fullmatch(_as_expression(os.path.abspath(path)), os.path.abspath(file)) is not None


def _as_expression(pattern: str) -> str:
    # `**` among other characters is no more than `*`.
    parts = [part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.split("/")]
    pieces = re.split(r"(\*\*/|\*\*$|\*)", "/".join(parts))
    return "".join(_ANY.get(piece, "[^/]*" if "*" in piece else re.escape(piece)) for piece in pieces)


def _make_source(path: str, files: Sequence[str]) -> Source:
    if not files:
        raise NotFoundError(
            f"dataset_path {path!r} holds no data; give files of a known kind: {', '.join(KINDS)}"
        )
    for file in files:
        # Reading a pipe would wait for its writer, perhaps for ever.
        if not os.path.isfile(file):
            raise InvalidValueError(f"{file!r} is not a regular file; write its rows to one, and read that")
        _check_path(file)
    by_kind = {kind_of(file): file for file in reversed(files)}
    if None in by_kind:
        raise InvalidValueError(
            f"{by_kind[None]!r} has an unknown ending; give {', '.join(KINDS)} files, or a folder of "
            "save_to_disk"
        )
    if len(by_kind) > 1:
        first, second = sorted(by_kind.values())[:2]
        raise InvalidValueError(
            f"dataset_path {path!r} holds files of several kinds, such as {first!r} and {second!r}; choose "
            "with a pattern, "
            f"like {os.path.join(path, '*' + os.path.splitext(first)[1])!r}"
        )
    kind = kind_of(files[0])
    assert kind is not None
    return Source(path, kind, tuple(files))


def _check_path(path: str) -> None:
    # `datasets` and its libraries take the text after "::" for a file inside another file.
    if "::" in os.path.abspath(path):
        raise InvalidValueError(
            f"{os.path.abspath(path)!r} cannot be read, since it contains '::'; rename it"
        )


def _saved_folder(folder: str) -> Source | None:
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))
        raise InvalidValueError(
            f"dataset_path {folder!r} holds several splits; choose one, like "
            f"{os.path.join(folder, splits[0])!r}"
            if splits else f"dataset_path {folder!r} is a DatasetDict without splits"
        )  # fmt: skip
    if not os.path.isfile(os.path.join(folder, "state.json")):
        return None
    _check_path(folder)
    return Source(folder, SAVED, tuple(sorted(entry.path for entry in os.scandir(folder) if entry.is_file())))


def reader_identity(kind: str) -> list[Any]:
    """The values that the rows of files of a kind depend on beside the files, for `castore.key`."""
    versions = [READER_VERSIONS[kind]] if kind in READER_VERSIONS else []
    return [kind, f"datasets {datasets.__version__}", *versions]


def identify(
    source: Source,
    store: Store | None,
    identity: FileIdentity = "content",
    seen: SeenFiles | None = None,
) -> str:
    """A key for a source.

    Args:
        source: the files.
        store: remembers the digests of large files, so that the files are read once.
        identity: the identity of files: their content, their path with size and modification time, or both.
        seen: the files as the run has seen them.

    Raises:
        UnhashableError, OSError: a file cannot be read.
    """
    seen = SeenFiles(store) if seen is None else seen
    counted = reader_identity(source.kind)
    if identity != "path":
        counted.append([seen.digest(file) for file in source.files])
    if identity != "content":
        stats = [seen.state(file) for file in source.files]
        counted.append([os.path.abspath(file) for file in source.files])
        counted.append([(found.st_size, found.st_mtime_ns) for found in stats])
    # The names of a saved folder's files decide their meaning.
    names = [os.path.basename(file) for file in source.files] if source.kind == SAVED else []
    return key([identity, counted, names])


def may_name_files(source: Source) -> bool:
    """Whether rows may name files, such as images: of single files, those of Parquet alone can say so."""
    return source.kind == SAVED or (source.kind == "parquet" and file_reader.may_name_files(source.files[0]))


def read(source: Source, folder: str | os.PathLike[str]) -> datasets.Dataset:
    """The dataset of a source.

    Args:
        source: the files.
        folder: the folder for Arrow files that are written on the way and that the dataset maps.

    Raises:
        InvalidValueError: a file's content does not match its ending, or the files have different columns.
        FullError: the disk is full.
    """
    with silence():
        try:
            return _read(source, os.fspath(folder))
        except CastoreError:
            raise
        except OSError as error:
            raise error if error.filename else _unreadable_error(source, error, folder) from error
        except Exception as error:  # from a dozen libraries: pandas, pyarrow, codecs, datasets' own
            raise _unreadable_error(source, error, folder) from error


def _read(source: Source, folder: str) -> datasets.Dataset:
    if source.kind == SAVED:
        loaded = datasets.load_from_disk(os.path.dirname(source.files[0]))
        assert isinstance(loaded, datasets.Dataset)
        return loaded
    return file_reader.read_dataset(source.kind, source.files, folder)


def _unreadable_error(source: Source, error: Exception, folder: str | os.PathLike[str]) -> CastoreError:
    causes = [error]
    while (
        causes[-1].__cause__ is not None and len(causes) < 10 and not isinstance(causes[-1], OtherSchemaError)
    ):
        causes.append(causes[-1].__cause__)  # type: ignore[arg-type]
    full = next((cause for cause in causes if is_full(cause)), None)
    if full is not None:
        return FullError(f"{no_space_in(os.fspath(folder), full)}; free some space there, or use --temp-dir")
    bad_line = None if source.kind in (SAVED, "parquet") else _describe_bad_line(source)
    if bad_line is not None:
        text = bad_line
    elif file_reader.tells_no_rows(causes[-1]) or not source.size:
        text = "it has no rows; check that the program that writes it has ended"
    else:
        text = " ".join(str(causes[-1]).split()) or type(causes[-1]).__name__
    file: str | None = None
    if bad_line is None and source.kind != SAVED:
        file = source.files[0]
        if len(source.files) > 1:
            file = file_reader.find_unreadable(source.kind, source.files, os.fspath(folder))
    where = "" if file is None or file == source.path else f"in {file!r}: "
    return InvalidValueError(
        f"cannot read dataset_path {source.path!r} as {source.kind}: {where}{text[:400]}"
    )


def _describe_bad_line(source: Source) -> str | None:
    """A sentence about the first line that is not UTF-8, or no JSON object in a file of such lines; None if
    there is none.
    """
    for path in source.files:
        try:
            with fsspec.open(path, "rb", compression="infer") as file:
                # Without an object in its first line a file may be one array, or one object.
                is_lines, has_objects = source.kind == "json", False
                for number, line in enumerate(file, 1):
                    found = _not_utf8(line)
                    if found is None and is_lines and line.strip():
                        found = _no_object(line)
                        has_objects = has_objects or found is None
                        is_lines = has_objects
                        found = found if is_lines else None
                    if found is not None:
                        return f"line {number} of {path!r} is {found}"
        except Exception:  # noqa: BLE001 - of a codec: the file's first reader has raised more of it
            return None
    return None


def _not_utf8(line: bytes) -> str | None:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        guess = "UTF-16" if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        return (
            f"not UTF-8 (byte 0x{line[error.start]:02x} at {error.start}); convert the file, for example "
            f"with `iconv -f {guess} -t UTF-8`"
        )
    return None


def _no_object(line: bytes) -> str | None:
    try:
        if isinstance(json.loads(line), dict):
            return None
    except json.JSONDecodeError as error:
        ends_early = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        if ends_early and not line.endswith(b"\n"):
            return "cut off; check that the program that writes the file has ended"
    except (ValueError, RecursionError):  # digits by the thousand, or lists in lists
        pass
    return f"no JSON object ({line[:60].decode(errors='replace').strip()!r}); mend the line, or leave it out"
