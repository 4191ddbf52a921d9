"""Which data a dataset stands for: a fingerprint that changes when its samples may have changed, and at no other time.

Covers the dataset's class by its code (followed through the user's own modules), and all that the object holds, as
pickle would see it: parameters by value, tensors and arrays by content, transforms by their code and parameters,
datasets inside by their own fingerprint. Files that it names, as path objects or as text with a "/" (in lists, arrays and
frames too), count by path, size and time of change, so that an edit is noticed; they are not read. Folders count by path alone.

Assumes that user code follows pickle's protocol: what `__getstate__` leaves out does not count. Must never give a
random answer, nor one that differs in another process or on another day: what has no stable hash is an
UnhashableError that names it. Sources of random numbers are such errors on purpose: samples drawn from one must not
be cached, and the state of one that is only left over would change the key with every use.
"""

from __future__ import annotations

import marshal
import mmap
import os
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from blake3 import blake3
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from castore.errors import UnhashableError
from castore.keys.doubts import Doubts
from castore.keys.encoder import KEY_DIGITS
from castore.keys.encoder import key as key_of_config
from castore.keys.objects import InstanceEncoder
from castore.keys.values import Kinds, random_rows, refuse_random
from castore.names import check_name

#: How the error of `dataset_key` ends.
ADVICE = "; or say what identifies the data with key=..."
#: The advice for a part that looks random.
RANDOM_ADVICE = (
    "if it does not count, leave it out in __getstate__, or say what identifies the data with key=..."
)
_VERSION = b"castore.dataset.1"
#: What marshal writes the same everywhere, and what a long list may hold to be hashed at once.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_LONG = 64
# Version 2 of the format has no references, which would tell how often a value is referred to.
_MARSHAL = 2
_CODE = (types.FunctionType, types.MethodType, types.ModuleType, type)
# Containers of data whose own version does not matter, so that an update of torch does not recompute all.
_CONTAINERS = (TensorDataset, Subset, ConcatDataset, StackDataset)


def dataset_key(dataset: Any, key: object = None) -> str:
    """The name under which what is made of a dataset belongs.

    Args:
        dataset: a map-style dataset, a list, an array: what a `torch.utils.data.DataLoader` takes.
        key: what identifies the data, where the fingerprint does not: a name, or a config for `castore.key`.

    Returns:
        40 hexadecimal digits, or the name that was given as ``key``.

    Raises:
        UnhashableError: a part of the dataset has no stable hash; the message has the path to it.
        InvalidNameError: ``key`` is a text and no valid name.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> first, again, other = (TensorDataset(torch.ones(n)) for n in (3, 3, 4))
    >>> dataset_key(first) == dataset_key(again), dataset_key(first) == dataset_key(other)
    (True, False)
    """
    return key_and_doubts(dataset, key)[0]


def key_and_doubts(dataset: Any, key: object = None) -> tuple[str, Doubts | None]:
    """See `dataset_key`; with what of the dataset looks random."""
    if isinstance(key, str):
        return check_name(key), None
    if key is not None:
        return key_of_config(key), None
    encoder = DatasetEncoder()
    try:
        code = encoder.encode(dataset, "dataset")
    except UnhashableError as error:
        raise type(error)(f"{error}{ADVICE}") from error.__cause__
    return str(blake3(_VERSION + code).hexdigest()[:KEY_DIGITS]), encoder.doubts(dataset)


class DatasetEncoder(InstanceEncoder):
    """An InstanceEncoder that also takes what datasets hold."""

    # Text is looked at: it may name a file.
    leaves = {kind: encode for kind, encode in InstanceEncoder.leaves.items() if kind is not str}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        # Inside code, text is a constant: only data names files.
        self._in_code = 0
        # Folder datasets hold their list of files under two names.
        self._lists: dict[int, tuple[bytes | None, Any]] = {}

    def part(self, value: Any, step: str = "") -> bytes:
        """As in InstanceEncoder, but text may name a file, and long lists are hashed at once."""
        kind = type(value)
        if kind is str and not self._in_code and "/" in value:
            return self._named_file(value, step)
        if (kind is list or kind is tuple) and len(value) >= _LONG and not self._in_code:
            if id(value) not in self._lists:
                self._lists[id(value)] = self._long(value), value
            code, _ = self._lists[id(value)]
            if code is not None:
                return code
        return super().part(value, step)

    def other(self, value: Any) -> bytes:
        """As in InstanceEncoder, with what datasets hold besides."""
        cls = type(value)
        count = _KINDS.of(cls)
        if count is not None:
            return self.tagged(*count(self, value))
        if issubclass(cls, os.PathLike):
            return self.tagged("path", super().other(value), *_stat(value))
        if not issubclass(cls, _CODE):
            code = super().other(value)
            texts = _TEXTS.of(cls) if not self._in_code else None
            files = [_stats(column) for column in texts(self, value)] if texts is not None else []
            return self.tagged("with files", code, files) if any(files) else code
        self._in_code += 1
        try:
            return super().other(value)
        finally:
            self._in_code -= 1

    def _long(self, values: list[Any] | tuple[Any, ...]) -> bytes | None:
        """A long list of plain values, or of tuples or lists of them, at once; None if it holds anything else."""
        kinds = set(map(type, values))
        if kinds in ({tuple}, {list}):
            kinds = set(map(type, chain.from_iterable(values)))
        if not kinds <= _PLAIN:
            return None
        digest = blake3(marshal.dumps(values, _MARSHAL)).digest()
        return self.tagged("long", len(values), digest, _stats(values))

    def _named_file(self, text: str, step: str) -> bytes:
        return self.tagged("text", super().part(text, step), *_stat(text))


def _stat(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Size and time of change of a file; nothing of a folder, or where there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # text that happens to look like a path may be no possible one
        return ()
    return () if _is_folder(found) else (found.st_size, found.st_mtime_ns)


def _is_folder(found: os.stat_result) -> bool:
    return found.st_mode & 0o170000 == 0o040000


def _stats(values: Iterable[Any]) -> bytes:
    """Of a list of paths, or of tuples that start with one, all files' sizes and times; if the first is there."""
    hasher = blake3()
    for place, value in enumerate(values):
        path = value[0] if type(value) in (tuple, list) and value else value
        if type(path) is not str or "/" not in path:
            return b""
        found = _stat(path)
        if not found and not place:
            return b""
        hasher.update(b"%d %d\n" % found if found else b"-\n")
    return hasher.digest()


# --- texts of arrays and frames: lists of them, each a column ----------------------------------------------------------


def _array_texts(encoder: DatasetEncoder, value: Any) -> Iterator[list[Any]]:
    if value.dtype.kind in "UT" and value.size and "/" in str(value.flat[0]):
        yield [str(text) for text in value.ravel().tolist() if isinstance(text, str)]


def _arrow_texts(encoder: DatasetEncoder, value: Any) -> Iterator[list[Any]]:
    # Tables and the frames of pandas are made of these.
    if str(value.type) in ("string", "large_string", "string_view"):
        yield [text for text in value.to_pylist() if text is not None]


def _series_texts(encoder: DatasetEncoder, value: Any) -> Iterator[list[Any]]:
    if str(value.dtype).startswith(("String", "Categorical", "Enum")):
        yield value.drop_nulls().to_list()


def _frame_texts(encoder: DatasetEncoder, value: Any) -> Iterator[list[Any]]:
    for column in value.get_columns():
        yield from _series_texts(encoder, column)


_TEXTS = Kinds(
    [
        ("numpy", ("ndarray",), _array_texts),
        ("pyarrow", ("Array",), _arrow_texts),
        ("polars", ("Series",), _series_texts),
        ("polars", ("DataFrame",), _frame_texts),
    ]
)


# --- what datasets hold -----------------------------------------------------------------------------------------


def _mapped(encoder: DatasetEncoder, value: Any) -> Iterator[Any]:
    # A view of a mapping does not say which part it is.
    if not isinstance(value.base, mmap.mmap) or value.filename is None:
        yield from ("mapped", encoder.part(np.asarray(value)))
        return
    where = os.path.abspath(value.filename)
    yield from (
        "mapped file",
        where,
        *_stat(where),
        value.offset,
        str(value.dtype),
        value.shape,
        value.strides,
    )


def _container(encoder: DatasetEncoder, value: Any) -> Iterator[Any]:
    yield type(value).__name__
    if type(value) not in _CONTAINERS:
        yield encoder.part(type(value))
    state = dict(vars(value))
    indices = state.get("indices")
    if isinstance(value, Subset) and not isinstance(indices, list):
        state["indices"] = [int(index) for index in value.indices]  # the same subset, whoever chose it
    yield from encoder.state(state)


def _hugging_face(encoder: DatasetEncoder, value: Any) -> Iterator[Any]:
    # 64 bits of what was done to the data since it was read; the rest is what can be asked at no cost.
    yield from (
        "datasets",
        value._fingerprint,
        len(value),
        str(value.features),
        encoder.part(value.format, ".format"),
    )


def _zarr_array(encoder: DatasetEncoder, value: Any) -> Iterator[Any]:
    import zarr

    yield from ("zarr", value.path, encoder.part(value.metadata.to_dict(), ".metadata"))
    store = value.store
    if isinstance(store, zarr.storage.LocalStore):
        folder = os.path.join(os.path.abspath(store.root), value.path)
        yield folder
        yield _folder_digest(folder)
    elif isinstance(store, zarr.storage.MemoryStore):
        yield encoder.part(np.asarray(value[...]))
    else:
        yield str(store)


def _folder_digest(folder: str) -> bytes:
    """Names, sizes and times of all files below a folder: of an array's chunks."""
    hasher = blake3()
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            hasher.update(repr((path, _stat(path))).encode("utf-8", "surrogatepass"))
    return hasher.digest()


def _refuse_random(encoder: DatasetEncoder, value: Any) -> Iterator[Any]:
    yield refuse_random(value)


def _plain(encoder: DatasetEncoder, value: Any) -> Iterator[Any]:
    yield from ("object", *encoder.object_(value))


_KINDS = Kinds(
    [
        ("numpy", ("memmap",), _mapped),
        *random_rows(_refuse_random),
        ("torch.utils.data", tuple(kind.__name__ for kind in _CONTAINERS), _container),
        ("torch", ("device", "dtype", "layout", "memory_format"), _plain),
        ("datasets", ("Dataset",), _hugging_face),
        ("zarr", ("Array",), _zarr_array),
    ]
)
