"""Fingerprints of datasets: a fingerprint changes when the samples may have changed, and at no other time.

The fingerprint covers the code of the dataset's class, followed through the user's own modules. The
fingerprint also covers all that pickle would see of the object: parameters by value, tensors and arrays by
content, transforms by their code and parameters, inner datasets by their own fingerprint. Files that the
dataset or a variable of its code names, as path objects or as text with a "/" (in lists, arrays and frames
too), count by path, size and modification time, so that an edit is noticed; the files are not read. Folders
count by path alone.

Assumes that user code follows pickle's protocol: attributes that `__getstate__` leaves out do not count. Must
never give a random answer, nor one that differs in another process or on another day: a value without a
stable hash is an UnhashableError that names it. Sources of random numbers are such errors on purpose: samples
drawn from them must not be cached, and the state of a leftover generator would change the key with every use.
"""

from __future__ import annotations

import marshal
import mmap
import os
import stat
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from blake3 import blake3
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from castore.errors import UnhashableError
from castore.keys.doubts import Doubts
from castore.keys.encoder import KEY_DIGITS, Encoder, UnencodableError
from castore.keys.encoder import key as key_of_config
from castore.keys.functions import orders
from castore.keys.objects import OBJECTS
from castore.keys.pickled import object_parts, state_parts
from castore.keys.registry import Rules, Table
from castore.keys.torch_modules import order_of_parts
from castore.keys.tracing import encode
from castore.keys.values import random_rows, refuse_random
from castore.names import check_name
from castore.system.mappings import Mappings

#: The end of the error of `dataset_key`.
ADVICE = "; or say what identifies the data with key=..."
#: The advice for a part that looks random.
RANDOM_ADVICE = (
    "if it does not count, leave it out in __getstate__, or say what identifies the data with key=..."
)
_VERSION = b"castore.dataset.1"
#: Types that marshal writes the same everywhere, and that a long list may hold to be hashed at once.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_LONG = 64
# Version 2 of the format has no references: references would depend on how often a value is shared.
_MARSHAL = 2
_CODE = (types.FunctionType, types.MethodType, types.ModuleType, type)
# The kernel's own files change their times by themselves.
_OF_KERNEL = ("/proc/", "/sys/")
# Bytes of a path, at most: a longer text names no file.
_LONGEST_PATH = 4096
# Containers of data whose own code does not count, so that an update of torch does not recompute all.
_CONTAINERS = (TensorDataset, Subset, ConcatDataset, StackDataset)


def dataset_key(dataset: Any, key: object = None) -> str:
    """The name under which results made from a dataset are stored.

    Args:
        dataset: a map-style dataset, a list, an array: anything that a `torch.utils.data.DataLoader` takes.
        key: what identifies the data, for a dataset without a fingerprint: a name, or a config for
            `castore.key`.

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
    """The key of `dataset_key`, and the parts of the dataset that look random."""
    if isinstance(key, str):
        return check_name(key), None
    if key is not None:
        return key_of_config(key), None
    try:
        encoded = encode(DATASETS, dataset, "dataset")
    except UnhashableError as error:
        raise type(error)(f"{error}{ADVICE}") from error.__cause__
    return str(blake3(_VERSION + encoded.code).hexdigest()[:KEY_DIGITS]), encoded.doubts()


class _Memory:
    """The memory of the rules for datasets about the parts of one encoder.

    Attributes:
        in_code: how many functions, classes and modules are around the part. In code, a text counts as a
            file only if there is such a file.
        lists: the canonical bytes of long lists by id, with the list, which must live as long. Folder
            datasets hold their list of files under two names.
    """

    def __init__(self) -> None:
        self.in_code = 0
        self.lists: dict[int, tuple[bytes | None, Any]] = {}


def _text(encoder: Encoder, value: str, step: str) -> bytes | None:
    """A text that may name a file."""
    if "/" not in value:
        return None
    found = _stat(value)
    if encoder.memory.in_code and not found:
        return None
    return encoder.tagged("text", encoder.watched(value, step), *found)


def _long(encoder: Encoder, values: list[Any] | tuple[Any, ...], step: str) -> bytes | None:
    """A long list of plain values, or of tuples or lists of them, hashed at once."""
    if len(values) < _LONG or encoder.memory.in_code:
        return None
    lists: dict[int, tuple[bytes | None, Any]] = encoder.memory.lists
    if id(values) not in lists:
        lists[id(values)] = _at_once(encoder, values), values
    code, _ = lists[id(values)]
    return code


def _at_once(encoder: Encoder, values: list[Any] | tuple[Any, ...]) -> bytes | None:
    kinds = set(map(type, values))
    if kinds in ({tuple}, {list}):
        kinds = set(map(type, chain.from_iterable(values)))
    if not kinds <= _PLAIN:
        return None
    digest = blake3(marshal.dumps(values, _MARSHAL)).digest()
    return encoder.tagged("long", len(values), digest, _stats(values))


def _with_files(encoder: Encoder, value: Any) -> bytes | None:
    """Any other value: a path with its file, code, and texts in arrays with the files that they name."""
    cls = type(value)
    if issubclass(cls, os.PathLike):
        return encoder.tagged("path", OBJECTS(encoder, value), *_stat(value))
    memory = encoder.memory
    if issubclass(cls, _CODE):
        memory.in_code += 1
        try:
            return OBJECTS(encoder, value)
        finally:
            memory.in_code -= 1
    code = OBJECTS(encoder, value)
    texts = _TEXTS.of(cls)
    files = [_stats(column) for column in texts(encoder, value)] if texts is not None else []
    return encoder.tagged("with files", code, files) if any(files) else code


def _stat(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Size and modification time of a file; nothing for anything else, or a missing path."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # text that looks like a path may be no possible path
        return ()
    if not stat.S_ISREG(found.st_mode) or os.fsdecode(path).startswith(_OF_KERNEL):
        return ()
    return found.st_size, found.st_mtime_ns


def _stats(values: Iterable[Any]) -> bytes:
    """Sizes and times of all files that a list, or tuples or lists in it, name; nothing if there is none."""
    hasher, is_any = blake3(), False
    for value in values:
        for text in value if type(value) in (tuple, list) else (value,):
            if type(text) is str and "/" in text and len(text) <= _LONGEST_PATH:
                found = _stat(text)
                is_any = is_any or bool(found)
                hasher.update(b"%d %d\n" % found if found else b"-\n")
    return hasher.digest() if is_any else b""


# --- texts of arrays and frames: lists of them, each a column
# -------------------------------------------------


def _scalar_texts(encoder: Encoder, value: Any) -> Iterator[list[Any]]:
    yield from _array_texts(encoder, np.asarray(value))


def _array_texts(encoder: Encoder, value: Any) -> Iterator[list[Any]]:
    for name in value.dtype.names or ():
        yield from _array_texts(encoder, value[name])
    if value.dtype.kind == "T":
        yield [text for text in value.ravel().tolist() if isinstance(text, str)]
    elif value.dtype.kind in "SU" and value.size and value.dtype.itemsize:
        # Without a slash no Python object is made: there are arrays of a hundred million single bytes.
        letters = np.dtype(np.uint8 if value.dtype.kind == "S" else np.uint32).newbyteorder(
            value.dtype.byteorder
        )
        texts = np.ascontiguousarray(value).ravel()
        has_slash = (texts.view(letters).reshape(texts.size, -1) == ord("/")).any(axis=1)
        yield [*map(os.fsdecode, texts[has_slash].tolist())]


def _chunks_texts(encoder: Encoder, value: Any) -> Iterator[list[Any]]:
    for chunk in value.chunks:
        yield from _arrow_texts(encoder, chunk)


def _table_texts(encoder: Encoder, value: Any) -> Iterator[list[Any]]:
    for column in value.columns:
        yield from (_chunks_texts if hasattr(column, "chunks") else _arrow_texts)(encoder, column)


def _arrow_texts(encoder: Encoder, value: Any) -> Iterator[list[Any]]:
    kind = str(value.type)
    if kind in ("string", "large_string", "string_view"):
        yield [text for text in value.to_pylist() if text is not None]
    elif kind.startswith("dictionary"):
        yield from _arrow_texts(encoder, value.dictionary)
    elif kind.startswith("run_end_encoded"):
        yield from _arrow_texts(encoder, value.values)
    elif kind.startswith(("list", "large_list", "fixed_size_list", "map")):
        yield from _arrow_texts(encoder, value.flatten())
    elif kind.startswith("struct"):
        for part in value.flatten():
            yield from _arrow_texts(encoder, part)


def _series_texts(encoder: Encoder, value: Any) -> Iterator[list[Any]]:
    kind = str(value.dtype)
    if kind.startswith(("String", "Categorical", "Enum")):
        yield value.drop_nulls().to_list()
    elif kind.startswith(("List", "Array")):
        yield from _series_texts(encoder, value.explode())
    elif kind.startswith("Struct"):
        yield from _frame_texts(encoder, value.struct.unnest())


def _frame_texts(encoder: Encoder, value: Any) -> Iterator[list[Any]]:
    for column in value.get_columns():
        yield from _series_texts(encoder, column)


_TEXTS = Table(
    [
        ("numpy", ("str_", "bytes_", "void"), _scalar_texts),
        ("numpy", ("ndarray",), _array_texts),
        ("pyarrow", ("Array",), _arrow_texts),
        ("pyarrow", ("ChunkedArray",), _chunks_texts),
        ("pyarrow", ("Table", "RecordBatch"), _table_texts),
        ("polars", ("Series",), _series_texts),
        ("polars", ("DataFrame",), _frame_texts),
    ]
)


# --- what datasets hold -------------------------------------------------------------------------------------


def _mapped(encoder: Encoder, value: Any) -> Iterator[Any]:
    # A view of a memory map has no record of the part of the file that it shows, and a private map may show
    # other values than the file.
    if not isinstance(value.base, mmap.mmap) or value.filename is None or value.mode == "c":
        yield from ("mapped", encoder.part(np.asarray(value)))
        return
    if value.mode != "r":
        # Else the kernel gives the file no new time when a page is written to that nobody has written back.
        value.flush()
    where = os.path.abspath(value.filename)
    mapping = Mappings().find(value.ctypes.data)
    if value.size and (mapping is None or not mapping.is_at(where)):  # another file lies there by now
        yield from ("mapped", encoder.part(np.asarray(value)))
        return
    yield from (
        "mapped file",
        where,
        *_stat(where),
        value.offset,
        str(value.dtype),
        value.shape,
        value.strides,
    )


def _container(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield type(value).__name__
    if type(value) not in _CONTAINERS:
        yield encoder.part(type(value))
    state = dict(vars(value))
    indices = state.get("indices")
    if isinstance(value, Subset) and not isinstance(indices, list):
        state["indices"] = [int(index) for index in value.indices]  # the same subset, however it was chosen
    yield from state_parts(encoder, state)
    order = order_of_parts(value, encoder.marks)
    if order is not None:
        yield "order", order


def _hugging_face(encoder: Encoder, value: Any) -> Iterator[Any]:
    # The fingerprint: 64 bits of all operations since the data was read. The rest costs nothing to ask for.
    yield from (
        "datasets",
        value._fingerprint,
        len(value),
        str(value.features),
        encoder.part(value.format, ".format"),
    )


def _zarr(encoder: Encoder, value: Any) -> Iterator[Any]:
    import zarr

    yield from ("zarr", value.path, encoder.part(value.metadata.to_dict(), ".metadata"))
    store = value.store
    if isinstance(store, zarr.storage.LocalStore):
        folder = os.path.join(os.path.abspath(store.root), value.path)
        yield folder
        yield _folder_digest(folder)
    elif isinstance(store, zarr.storage.ZipStore):
        yield str(store)
        yield from _stat(store.path)
    elif isinstance(value, zarr.Array):
        yield str(store) if not isinstance(store, zarr.storage.MemoryStore) else encoder.part(value[...])
    else:
        yield [(name, encoder.part(array, f"[{name!r}]")) for name, array in sorted(value.arrays())]
        yield [(name, encoder.part(group, f"[{name!r}]")) for name, group in sorted(value.groups())]


def _folder_digest(folder: str) -> bytes:
    """The digest of the names, sizes and times of all files below a folder: an array's chunks."""
    hasher = blake3()
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            hasher.update(repr((path, _stat(path))).encode("utf-8", "surrogatepass"))
    return hasher.digest()


def _refuse_random(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield refuse_random(value)


def _plain(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("object", *object_parts(encoder, value))


def _lazy_frame(encoder: Encoder, value: Any) -> Iterator[Any]:
    if " SCAN " in value.explain(optimized=False):
        raise UnencodableError("is a LazyFrame that will read files, which may change before; collect() it")
    yield from _plain(encoder, value)


_HELD = Table(
    [
        ("numpy", ("memmap",), _mapped),
        *random_rows(_refuse_random),
        ("torch.utils.data", tuple(kind.__name__ for kind in _CONTAINERS), _container),
        ("torch", ("device", "dtype", "layout", "memory_format"), _plain),
        ("datasets", ("Dataset",), _hugging_face),
        ("zarr", ("Array", "Group"), _zarr),
        ("polars", ("LazyFrame",), _lazy_frame),
    ]
)

#: The rules for datasets.
DATASETS = Rules(
    _HELD,
    _with_files,
    first={str: _text, list: _long, tuple: _long},
    orders=orders,
    memory=_Memory,
)
#: The same for what lies outside of a dataset, with files by their paths alone.
BY_PATH = Rules(_HELD, OBJECTS, orders=orders)
