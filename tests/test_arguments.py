"""Arguments that make no sense: one sentence of castore, and never the words of Python or SQLite."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castore import CastoreError, Store
from castore.adapters.tree import DiskCache, MemoryCache, TreeCacheManager

_NO_NUMBERS = ["3", "zz", "5%", math.nan, b"x", [], object()]
_NO_COUNTS = [*_NO_NUMBERS, None, -1, 0, 1.5, math.inf, 10**30]
_NO_LEVELS = [*_NO_NUMBERS, 1.5, 10**30]
_NO_DIGESTS = ["zz", "abc", None, -1, 1.5, [], object()]
_NO_RECORDS: list[Any] = ["zz", None, 1, []]
_NO_FLAGS: list[Any] = ["no", None, math.nan, [], 10**30]
_NOT_SEVERAL = ["a", b"a", None, 3, object()]


def _create(store: Store, **options: Any) -> None:
    with store.create("n", **options) as file:
        file.write(b"x")


def _in_batch(store: Store, **options: Any) -> None:
    with store.batch() as batch:
        batch.put("n", b"x", **options)


def _link(store: Store, digest: Any) -> None:
    with store.batch() as batch:
        batch.link("n", digest)


def _read(store: Store, offset: Any, size: Any) -> None:
    with store.open_blob(store.put("blob", b"bytes").digest) as blob:
        blob.read(offset, size)


_Call = Callable[[Store, Any], object]
#: Puts that take a level, a codec, and perhaps a pin.
_PUTS: dict[str, Callable[..., object]] = {
    "put": lambda store, **options: store.put("n", b"x", **options),
    "put_file": lambda store, **options: store.put_file("n", __file__, **options),
    "put_stream": lambda store, **options: store.put_stream("n", io.BytesIO(b"x"), **options),
    "create": _create,
    "put_many": lambda store, **options: store.put_many([("n", b"x")], **options),
    "save": lambda store, **options: store.save("n", "x", **options),
    "Batch.put": _in_batch,
}
_WITHOUT_PIN: dict[str, Callable[..., object]] = {
    "Store": lambda store, **options: Store(store.path.with_name("other"), **options),
    "batch": lambda store, **options: store.batch(**options),
    "put_if": lambda store, **options: store.put_if(("n", None), [("n", b"x")], **options),
}


def _with(put: Callable[..., object], option: str) -> _Call:
    return lambda store, value: put(store, **{option: value})


_CALLS: dict[str, tuple[_Call, list[Any]]] = {
    **{f"{name}(level=)": (_with(put, "level"), _NO_LEVELS) for name, put in (_PUTS | _WITHOUT_PIN).items()},
    **{
        f"{name}(codec=)": (_with(put, "codec"), ["zip", b"zstd", 3, []])
        for name, put in (_PUTS | _WITHOUT_PIN).items()
    },
    **{f"{name}(pin=)": (_with(put, "pin"), _NO_FLAGS) for name, put in _PUTS.items()},
    "Store(durable=)": (_with(_WITHOUT_PIN["Store"], "durable"), _NO_FLAGS),
    "Store(allow_pickle=)": (_with(_WITHOUT_PIN["Store"], "allow_pickle"), [*_NO_FLAGS, "false", "", (), {}]),
    "MemoryCache(allow_pickle=)": (lambda store, flag: MemoryCache(10, allow_pickle=flag), _NO_FLAGS),
    "DiskCache(allow_pickle=)": (
        lambda store, flag: DiskCache(store.path.with_name("other"), allow_pickle=flag),
        _NO_FLAGS,
    ),
    "TreeCacheManager(allow_pickle=)": (
        lambda store, flag: TreeCacheManager(store.path.with_name("other"), allow_pickle=flag),
        _NO_FLAGS,
    ),
    "put(serializer=)": (
        lambda store, name: store.put("n", b"x", serializer=name),
        ["zz", None, b"text", []],
    ),
    "put_file": (lambda store, path: store.put_file("n", path), [None, 3, [], "a\0b"]),
    "put_many": (lambda store, items: store.put_many(items), [None, 3, "ab", ["a"]]),
    "put_if(items)": (lambda store, items: store.put_if(("n", None), items), [None, 3, "ab", ["a"]]),
    "put_if(drop=)": (lambda store, drop: store.put_if(("n", None), [], drop=drop), _NOT_SEVERAL),
    "get": (lambda store, name: store.get(name), [None, b"a", ["a"], {}]),
    "load": (lambda store, name: store.load(name), [None, b"a", ["a"], {}]),
    "get_many": (lambda store, names: store.get_many(names), [*_NOT_SEVERAL, [["a"]], [{}]]),
    "find_many": (lambda store, names: store.find_many(names), _NOT_SEVERAL),
    "delete_many": (lambda store, names: store.delete_many(names), _NOT_SEVERAL),
    "blob": (lambda store, digest: store.blob(digest), _NO_DIGESTS),
    "open_blob": (lambda store, digest: store.open_blob(digest), _NO_DIGESTS),
    "names_of": (lambda store, digest: store.names_of(digest), _NO_DIGESTS),
    "remove_blobs": (lambda store, digest: store.remove_blobs([digest]), _NO_DIGESTS),
    "Batch.link": (_link, _NO_DIGESTS),
    "get_blob": (lambda store, blob: store.get_blob(blob), _NO_RECORDS),
    "bring": (lambda store, blob: store.bring(blob), _NO_RECORDS),
    "path_of": (lambda store, blob: store.path_of(blob), _NO_RECORDS),
    "delete_unchanged": (lambda store, entry: store.delete_unchanged(entry), _NO_RECORDS),
    "OpenBlob.read(offset)": (lambda store, offset: _read(store, offset, 1), [*_NO_NUMBERS, None, -1, 1.5]),
    "OpenBlob.read(size)": (lambda store, size: _read(store, 0, size), [*_NO_NUMBERS, None, -1, 1.5]),
    "blobs_starting_with": (
        lambda store, digits: store.blobs_starting_with(digits),
        ["zz", "A", b"a", None, 3],
    ),
    "blobs_starting_with(limit=)": (lambda store, limit: store.blobs_starting_with("a", limit), _NO_COUNTS),
    "get_or_compute": (lambda store, value: store.get_or_compute("n", value), [None, b"x", 3]),
    "get_or_compute(validate=)": (
        lambda store, value: store.get_or_compute("n", list, validate=value),
        [b"x", 3, "yes"],
    ),
    "train_dictionary(samples=)": (
        lambda store, count: store.train_dictionary("", samples=count),
        _NO_COUNTS,
    ),
    "train_dictionary(data)": (
        lambda store, data: store.train_dictionary("", data),
        ["text", b"x", [None], [3]],
    ),
    "add_remote(name)": (lambda store, name: store.add_remote(name, "file:///x/y"), [None, 3, b"a", "a/b"]),
    "add_remote(url)": (lambda store, url: store.add_remote("r", url), [None, 3, b"s3://b", "zz"]),
    "add_remote(requests=)": (
        lambda store, count: store.add_remote("r", "file:///x/y", requests=count),
        [count for count in _NO_COUNTS if count is not None],
    ),
    "flush(seconds=)": (lambda store, seconds: store.flush(seconds=seconds), ["zz", math.nan, -1, b"x", []]),
    "verify(sample=)": (lambda store, sample: store.verify(sample=sample), [*_NO_NUMBERS, None, -1, 0, 1.5]),
}


@pytest.mark.parametrize(("call", "values"), _CALLS.values(), ids=_CALLS)
def test_an_argument_that_makes_no_sense_gets_a_sentence(
    tmp_path: Path, call: _Call, values: list[Any]
) -> None:
    with Store(tmp_path / "store", memory=0) as store:
        for value in values:
            print(repr(value))  # which one it was, should it fail
            with pytest.raises(CastoreError) as caught:
                call(store, value)
            assert isinstance(caught.value, (ValueError, TypeError))
            assert list(store) in ([], ["blob"])
