"""Converts a sample to one record of bytes and back, without pickle: all values that `torch.utils.data`
collates.

A record is a valid safetensors file. Every value that holds bytes is a tensor of the file, named by its place
in the sample (``image``, ``boxes.0``; ``sample`` if the sample is one value): ints as I64, floats as F64,
text and bytes as U8. The header's ``__metadata__`` describes the nesting and the types, as JSON under
``castore``. So the header contains no values, samples of one shape share one header, and both sides remember
what they derived from it.

Version 1 has tensors, arrays, numbers, text, images, lists, tuples and dicts. A record that holds more, a
*form* of `castore.serialize.kinds` or a dict with keys of other types, is of version 2; all others stay of
version 1, byte for byte.

Assumes that records may be hostile: a record's claims are checked against its length before memory is
allocated for them. Must never pickle, nor change a value silently: a value that would not come back with the
same type and value is a SerializationError with the path to it. Some conveniences are intended: a tensor from
a GPU comes back on the CPU, any memory layout comes back in C order, a memory-mapped array comes back as an
array. For images see `castore.serialize.kinds.images`.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from castore.errors import CastoreError, CorruptError, SerializationError
from castore.serialize.bounded_dict import BoundedDict
from castore.serialize.kinds import (
    MisfitError,
    is_registered,
    put_together,
    take_apart,
    way_out,
)
from castore.serialize.kinds.images import extras_of, is_image, with_extras
from castore.serialize.leaves import (
    BUILDERS,
    NUMBERS,
    TAKERS,
    Build,
    Leaf,
    Mark,
    NoLeafError,
    Payloads,
    know_torch,
    leaf_of,
    take_numbers,
    take_pixels,
)
from castore.serialize.misfits import find_misfit
from castore.serialize.number_types import SIZES
from castore.serialize.safetensors_files import Layout, Place, header_of, lay_out, read_header

know_torch()

#: Stands for a sample that a cache does not have: a sample may itself be None.
MISSING = object()

_log = logging.getLogger(__name__)
#: The version of records without forms, and of records with forms.
_PLAIN, _FORMED = 1, 2
_BUCKET = 1000
# Far beyond any real sample; each level of nesting takes a few Python frames.
_DEEPEST = 64
_LONGEST_KEY = 2000  # bits; Python writes 640 digits whatever its limit is set to
_KEYS = frozenset({str, int, bool, type(None)})


# --- packing ------------------------------------------------------------------------------------------------


# With a header of 250 bytes, as for an image and its label, 4000 kinds of samples; the memory is ten times as
# much.
_layouts: BoundedDict[Layout] = BoundedDict(1 << 20)
_plans: BoundedDict[_Plan] = BoundedDict(1 << 20)


def record_name(folder: str, index: int) -> str:
    """The name of a sample's entry in a store: a thousand to a folder, which any file browser can show.

    >>> record_name("cifar", 1234)
    'cifar/000001/000001234.safetensors'
    """
    return f"{folder}/{index // _BUCKET:06d}/{index:09d}.safetensors"


def pack(sample: Any) -> bytes:
    """The record of a sample.

    Args:
        sample: torch tensors of any dtype, NumPy arrays and scalars, PIL images, None, bool, int, float,
            complex, str, bytes, bytearray, types that `castore.serialize.kinds` takes apart, and tuples,
            lists and dicts of these.

    Returns:
        a safetensors file; equal samples give equal bytes.

    Raises:
        SerializationError: a part would not come back unchanged; the message has the path to it and a remedy.

    >>> import torch
    >>> unpack(pack({"image": torch.zeros(2, dtype=torch.uint8), "label": (3, "cat")}))
    {'image': tensor([0, 0], dtype=torch.uint8), 'label': (3, 'cat')}
    >>> pack({"x": [1, iter([2])]})
    Traceback (most recent call last):
    castore.errors.SerializationError: sample['x'][1]: <class 'list_iterator'> has no serializer; convert it
    with list(...), ...
    """
    payloads: Payloads = []
    try:
        mark = _take(sample, payloads, 0)
    except MisfitError as error:
        path, problem = find_misfit(sample, "sample", _is_leaf) or ("sample", error.problem)
        raise SerializationError(f"{path}: {problem}") from None
    layout = _layouts.get(mark)
    if layout is None:
        layout = _lay_out(mark)
        _layouts.remember(mark, layout, len(layout.header))
    return layout.file(payloads)


def _is_leaf(value: Any) -> bool:
    take = TAKERS.get(type(value))
    if take is None:
        return value is None
    try:
        take(value, [])
    except MisfitError:
        return False
    return True


def _take(value: Any, payloads: Payloads, depth: int) -> Mark:
    take = TAKERS.get(type(value))
    if take is not None:
        try:
            return take(value, payloads)
        except NoLeafError:
            return _take_form(value, payloads, depth)
    if value is None:
        return None
    if depth > _DEEPEST:
        raise MisfitError(f"is nested more than {_DEEPEST} levels deep, or contains itself")
    nested = _CONTAINERS.get(type(value))
    if nested is not None:
        return nested(value, payloads, depth)
    return _take_form(value, payloads, depth)


def _take_form(value: Any, payloads: Payloads, depth: int) -> Mark:
    if depth > _DEEPEST:
        raise MisfitError(f"is nested more than {_DEEPEST} levels deep, or contains itself")
    if is_image(value) and not is_registered(type(value)):
        pixels = take_pixels(value, payloads)
        parts = [_take(part, payloads, depth + 1) for part in extras_of(value)]
        return "image", (pixels, *parts)
    form = take_apart(value)
    if form is None:
        raise MisfitError(f"{type(value)} has no serializer; {way_out(value)}")
    return "form", (form.kind, form.detail, _take(form.parts, payloads, depth + 1))


def _take_sequence(value: list[Any] | tuple[Any, ...], payloads: Payloads, depth: int) -> Mark:
    if value and type(value[0]) in NUMBERS:
        numbers = take_numbers(value, payloads)
        if numbers is not None:
            return numbers
    return type(value).__name__, tuple([_take(item, payloads, depth + 1) for item in value])


def _take_dict(value: dict[Any, Any], payloads: Payloads, depth: int) -> Mark:
    depth += 1
    kinds = set(map(type, value))
    if kinds <= _KEYS and not (int in kinds and any(map(_is_long, value))):
        # The type belongs to the mark: 1 and True are equal and hash alike.
        marks = [(type(key), key, _take(item, payloads, depth)) for key, item in value.items()]
        return "dict", tuple(marks)
    pairs = [(_take(key, payloads, depth), _take(item, payloads, depth)) for key, item in value.items()]
    return "pairs", tuple(pairs)


def _is_long(key: Any) -> bool:
    """Whether a key is an integer that Python may refuse to write in decimal digits."""
    return type(key) is int and key.bit_length() > _LONGEST_KEY


_CONTAINERS: dict[type, Callable[[Any, Payloads, int], Mark]] = {
    list: _take_sequence,
    tuple: _take_sequence,
    dict: _take_dict,
}


def _lay_out(mark: Mark) -> Layout:
    leaves: list[tuple[str, Leaf]] = []
    tree = _describe(mark, "", leaves, set())
    # Larger elements first: every tensor starts at a multiple of its element's size.
    order = sorted(range(len(leaves)), key=lambda place: -SIZES[leaves[place][1].code])
    version = _FORMED if _has_forms(mark) else _PLAIN
    about = json.dumps({"version": version, "sample": tree}, separators=(",", ":"))
    tensors = [(name, leaf.code, leaf.shape) for name, leaf in leaves]
    return lay_out(about, tensors, order, ascii_names=True)


def _has_forms(mark: Mark) -> bool:
    """Whether a reader of version 1 would not understand the tree."""
    if type(mark) is not tuple or mark[0] not in ("list", "tuple", "dict", "form", "pairs"):
        return False
    return mark[0] in ("form", "pairs") or any(
        _has_forms(part[-1] if mark[0] == "dict" else part) for part in mark[1]
    )


def _describe(mark: Mark, path: str, leaves: list[tuple[str, Leaf]], names: set[str]) -> Any:
    """The JSON for a mark; appends its leaves with the names of their tensors, in the order of payloads."""

    def inner(step: object, part: Mark) -> Any:
        return _describe(part, f"{path}.{step}" if path else str(step), leaves, names)

    if mark is None:
        return None
    kind = mark if type(mark) is str else mark[0]
    if kind in ("list", "tuple"):
        return [kind, [inner(place, part) for place, part in enumerate(mark[1])]]
    if kind == "dict":
        return [kind, [[key, inner(key, part)] for _, key, part in mark[1]]]
    if kind == "pairs":
        return [
            kind,
            [[inner(f"{place}.key", key), inner(place, part)] for place, (key, part) in enumerate(mark[1])],
        ]
    if kind == "form":
        name, detail, parts = mark[1]
        return [kind, name, detail, _describe(parts, path, leaves, names)]
    if kind == "image":
        pixels, palette, transparency = mark[1]
        steps = (("palette", palette), ("transparency", transparency))
        return [
            kind,
            [_describe(pixels, path, leaves, names), *(inner(step, part) for step, part in steps)],
        ]
    leaf = leaf_of(mark)
    name = _new_name(path, names)
    leaves.append((name, leaf))
    return [kind, name] if leaf.detail is None else [kind, name, leaf.detail]


def _new_name(path: str, names: set[str]) -> str:
    """A tensor name that no other has: {"a": {"b": x}, "a.b": y} has two at the path a.b."""
    plain = path.encode("utf-8", "backslashreplace").decode() or "sample"
    name, count = plain, 1
    while name in names or name == "__metadata__":
        count += 1
        name = f"{plain}~{count}"
    names.add(name)
    return name


# --- unpacking ----------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """The compiled way to read records with one header."""

    length: int  # of the record
    build: Build


def unpack(record: bytes | bytearray | memoryview) -> Any:
    """The sample of a record.

    Args:
        record: a result of `pack`. If it is writable, the tensors and arrays of the sample are views of it,
            and the caller must not change it from then on; bytes are copied once, and the sample owns its
            memory.

    Raises:
        CorruptError: the bytes are no record, or only a part of one.
        SerializationError: the record holds a type that this process lacks; the message names the import.
    """
    if type(record) is not bytearray:
        record = _private(record)
    try:
        header = header_of(record)
        plan = _plans.get(header)
        if plan is None:
            plan = _plan(header)
            _plans.remember(header, plan, len(header))
        if plan.length != len(record):
            raise ValueError(f"it has {len(record)} bytes, and its header is about {plan.length}")
        return plan.build(record)
    except SerializationError as error:
        raise SerializationError(f"sample: {error}") from error
    except (
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, struct.error,
        RuntimeError, MemoryError,
    ) as error:  # fmt: skip
        raise CorruptError(
            f"the bytes are no sample: {str(error) or type(error).__name__}", where="sample"
        ) from error


def tell_no_sample(name: str, error: CastoreError) -> None:
    """Log that an intact entry of this name holds no sample for this process, and that it is replaced: the
    entry belongs to somebody else, or has a type that this process does not know.
    """
    _log.warning("%s is read from the dataset again, and replaced: %s", name, error)


def _private(record: bytes | bytearray | memoryview) -> bytearray | memoryview:
    view = memoryview(record)
    return bytearray(view) if view.readonly else view.cast("B")


def _plan(header: bytes) -> _Plan:
    """Parse and check a header; raises the errors that `unpack` catches."""
    about, places, length = read_header(header)
    if about["version"] not in (_PLAIN, _FORMED):
        raise ValueError(f"it is of version {about['version']!r}, which this castore does not know")
    build = _compile(about["sample"], places, 0)
    if places:
        raise ValueError(f"it has tensors that are not part of the sample: {next(iter(places))!r}")
    return _Plan(length, build)


def _compile(node: Any, places: dict[str, Place], depth: int) -> Build:
    """The function that builds the value of a tree's node; removes the places that it uses from `places`."""
    if node is None:
        return lambda _: None
    if depth > 2 * _DEEPEST:
        raise ValueError("it is nested too deep")
    kind, about, *rest = node
    if kind in ("list", "tuple", "image"):
        parts = tuple(_compile(part, places, depth + 1) for part in about)
        return _CONTAINER_BUILDERS[kind](parts)
    if kind == "dict":
        keys = [key for key, _ in about]
        if not all(type(key) in _KEYS for key in keys):
            raise ValueError("a dict has a key of another type")
        return _build_dict(
            list(zip(keys, (_compile(part, places, depth + 1) for _, part in about), strict=True))
        )
    if kind == "pairs":
        return _build_pairs(
            [(_compile(key, places, depth + 1), _compile(part, places, depth + 1)) for key, part in about]
        )
    if kind == "form":
        detail, parts = rest
        return _build_form(about, detail, _compile(parts, places, depth + 1))
    start, stop, code, shape = places.pop(about)
    return BUILDERS[kind](Leaf(kind, rest[0] if rest else None, code, shape), start, stop)


def _build_list(parts: tuple[Build, ...]) -> Build:
    return lambda record: [build(record) for build in parts]


def _build_tuple(parts: tuple[Build, ...]) -> Build:
    return lambda record: tuple([build(record) for build in parts])


def _build_image(parts: tuple[Build, ...]) -> Build:
    pixels, palette, info = parts
    return lambda record: with_extras(pixels(record), palette(record), info(record))


def _build_dict(parts: list[tuple[Any, Build]]) -> Build:
    return lambda record: {key: build(record) for key, build in parts}


def _build_pairs(parts: list[tuple[Build, Build]]) -> Build:
    return lambda record: {key(record): build(record) for key, build in parts}


def _build_form(kind: Any, detail: Any, parts: Build) -> Build:
    return lambda record: put_together(kind, detail, parts(record))


_CONTAINER_BUILDERS = {"list": _build_list, "tuple": _build_tuple, "image": _build_image}
