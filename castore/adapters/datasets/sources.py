"""Where a recipe's data comes from: files of the usual kinds, found, told apart, and read into a dataset.

Files are known by their digests, in order; the kind and the reader's version count too. So a copy of a folder
is the same source, and a changed byte makes another. Must never change what it reads.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import datasets

from castore.adapters.datasets.inputs import file_digest
from castore.adapters.datasets.quiet import quiet
from castore.adapters.datasets.registry import nearest
from castore.errors import CastoreError, InvalidValueError, NotFoundError
from castore.keys import key
from castore.store import Store

#: Kinds of files by their endings.
KINDS = {
    ".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".txt": "text",
}  # fmt: skip
#: Compressed files that are read as they are.
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
SAVED = "saved"


class Source(NamedTuple):
    """Files of one kind, in order.

    Attributes:
        path: what the user called it.
        kind: ``"json"``, ``"csv"``, ``"tsv"``, ``"parquet"``, ``"text"`` or ``"saved"`` (a folder of
            `save_to_disk`).
        files: all of them; of a saved folder, those in it.
    """

    path: str
    kind: str
    files: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(os.stat(file).st_size for file in self.files)


def find(path: str | os.PathLike[str]) -> Source:
    """The files that a path means: one, all below a folder, or those that fit a pattern (with ``**``, too).

    Raises:
        NotFoundError: there are none.
        InvalidValueError: they are of no known kind, or of several.
    """
    text = os.fspath(path)
    if os.path.isdir(text):
        saved = _saved_folder(text)
        if saved is not None:
            return saved
        return _of_one_kind(text, [file for file in _below(text) if kind_of(file)])
    if os.path.exists(text):
        return _of_one_kind(text, [text])
    if glob.has_magic(text):
        return _of_one_kind(text, sorted(filter(os.path.isfile, glob.glob(text, recursive=True))))
    folder, name = os.path.split(text)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    raise NotFoundError(f"there is no data at dataset_path {text!r}{nearest(name, beside)}")


def find_all(paths: str | Sequence[str]) -> Source:
    """The files that several paths mean, in their order.

    Raises:
        NotFoundError, InvalidValueError: as for `find`; or they are of different kinds.
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
    return _of_one_kind(", ".join(paths), [file for source in found for file in source.files])


def kind_of(file: str) -> str | None:
    """The kind of a file, by its ending.

    >>> kind_of("a/b.JSONL.gz"), kind_of("README.md")
    ('json', None)
    """
    stem, ending = os.path.splitext(file.lower())
    return KINDS.get(os.path.splitext(stem)[1] if ending in COMPRESSED else ending)


def _below(folder: str) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(place, name) for name in sorted(files) if not name.startswith("."))


def _of_one_kind(path: str, files: Sequence[str]) -> Source:
    if not files:
        raise NotFoundError(f"dataset_path {path!r} holds no data: {', '.join(KINDS)} files are read")
    by_kind = {kind_of(file): file for file in reversed(files)}
    if None in by_kind:
        raise InvalidValueError(
            f"{by_kind[None]!r} is of no kind that can be read; {', '.join(KINDS)} files, and folders of save_to_disk, are"
        )
    if len(by_kind) > 1:
        first, second = sorted(by_kind.values())[:2]
        raise InvalidValueError(
            f"dataset_path {path!r} holds files of several kinds, such as {first!r} and {second!r}; choose with a pattern, "
            f"like {os.path.join(path, '*' + os.path.splitext(first)[1])!r}"
        )
    kind = kind_of(files[0])
    assert kind is not None
    return Source(path, kind, tuple(files))


def _saved_folder(folder: str) -> Source | None:
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))
        raise InvalidValueError(
            f"dataset_path {folder!r} holds several splits; choose one, like {os.path.join(folder, splits[0])!r}"
            if splits else f"dataset_path {folder!r} is a DatasetDict without splits"
        )  # fmt: skip
    if not os.path.isfile(os.path.join(folder, "state.json")):
        return None
    return Source(folder, SAVED, tuple(sorted(entry.path for entry in os.scandir(folder) if entry.is_file())))


def identify(
    source: Source, store: Store | None, telling: Literal["content", "path", "combined"] = "content"
) -> str:
    """A key for a source.

    Args:
        source: the files.
        store: remembers the digests of large files, so that they are read once.
        telling: what tells files from others: their content, their path with size and time of change, or
            both.

    Raises:
        UnhashableError, OSError: a file cannot be read.
    """
    told: list[Any] = [source.kind, f"datasets {datasets.__version__}"]
    if telling != "path":
        told.append([file_digest(file, store) for file in source.files])
    if telling != "content":
        stats = [os.stat(file) for file in source.files]
        told.append([os.path.abspath(file) for file in source.files])
        told.append([(found.st_size, found.st_mtime_ns) for found in stats])
    # A saved folder's files have their meaning by their names.
    names = [os.path.basename(file) for file in source.files] if source.kind == SAVED else []
    return key([telling, told, names])


def read(source: Source, folder: str | os.PathLike[str]) -> datasets.Dataset:
    """The dataset of a source.

    Args:
        source: the files.
        folder: for the Arrow files that are written on the way, which the dataset is mapped from.

    Raises:
        InvalidValueError: a file is not what its ending says, or the files have different columns.
        FullError: the disk is full.
    """
    with quiet():
        try:
            return _read(source, os.fspath(folder))
        except CastoreError:
            raise
        except OSError as error:
            raise error if error.filename else _unreadable(source, error) from error
        except Exception as error:  # of a dozen libraries: pandas, pyarrow, codecs, datasets' own
            raise _unreadable(source, error) from error


def _read(source: Source, folder: str) -> datasets.Dataset:
    files = list(source.files)
    # One value for all files, or `datasets` would name the split, and with it the fingerprint, by chance.
    common: dict[str, Any] = {"cache_dir": folder, "split": datasets.Split.TRAIN}
    if source.kind == SAVED:
        loaded = datasets.load_from_disk(os.path.dirname(files[0]))
        assert isinstance(loaded, datasets.Dataset)
        return loaded
    if source.kind == "json":
        return datasets.Dataset.from_json(files, **common)
    if source.kind == "parquet":
        return datasets.Dataset.from_parquet(files, **common)
    if source.kind == "text":
        return datasets.Dataset.from_text(files, sample_by="document", **common)
    return datasets.Dataset.from_csv(files, sep="\t" if source.kind == "tsv" else ",", **common)


def _unreadable(source: Source, error: Exception) -> InvalidValueError:
    causes = [error]
    while causes[-1].__cause__ is not None and len(causes) < 10:
        causes.append(causes[-1].__cause__)  # type: ignore[arg-type]
    text = " ".join(str(causes[-1]).split()) or type(causes[-1]).__name__
    return InvalidValueError(f"cannot read dataset_path {source.path!r} as {source.kind}: {text[:300]}")
