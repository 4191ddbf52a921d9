"""Safetensors files: the header, and the files of the serializer of that name.

A header lists the tensors of a file and their places, and has under ``castore`` what the tensors make. The
records of samples (`castore.adapters.torch.samples`) have such headers too. Headers depend on names, types
and shapes, not on values. So they recur, and both directions remember them.

Bytes to load may be hostile: every place is checked against the length of the file before anything is read.
Must never: return another dtype, shape or kind than was put in.
"""

from __future__ import annotations

import json
import struct
import sys
from math import prod
from typing import Any, NamedTuple, TypeAlias

from castore.errors import SerializationError
from castore.serialize import leaves
from castore.serialize.bounded_dict import BoundedDict
from castore.serialize.kinds import MisfitError, tensor_problem
from castore.serialize.npy import is_array
from castore.serialize.number_types import NUMBER_TYPES, SIZES
from castore.serialize.problems import corrupt, refuse

#: The longest header that safetensors accepts.
_LONGEST_HEADER = 100_000_000
_SIZE = struct.Struct("<Q")
#: Bounds the time to multiply a hostile shape.
_MOST_DIMENSIONS = 1024


# --- headers ------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How values of one description lie in a file."""

    header: bytes
    order: list[int]

    def file(self, payloads: leaves.Payloads) -> bytes:
        """The file of these tensors."""
        return b"".join([self.header, *[payloads[place] for place in self.order]])


#: Where a tensor starts and stops in a file, the code of its elements, and its shape there.
Place: TypeAlias = "tuple[int, int, str, tuple[int, ...]]"


def lay_out(
    about: str, tensors: list[tuple[str, str, tuple[int, ...]]], order: list[int], *, ascii_names: bool
) -> Layout:
    """Make the header of a file.

    Args:
        about: the text under ``castore``.
        tensors: name, code and shape of each tensor.
        order: places in ``tensors``, in the order in which the file has them.
        ascii_names: whether names are escaped to ASCII.

    Raises:
        SerializationError: the header would be longer than safetensors accepts.
    """
    header: dict[str, Any] = {"__metadata__": {"castore": about}}
    end = 0
    for place in order:
        name, code, shape = tensors[place]
        start, end = end, end + prod(shape) * SIZES[code]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=ascii_names).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise SerializationError(
            f"the value has {len(tensors)} parts, too many for one file; make tensors of them"
        )
    return Layout(_SIZE.pack(len(text)) + text, order)


def header_of(file: bytes | bytearray | memoryview) -> bytes:
    """The start of a file, up to the bytes of its first tensor, as the file states its length."""
    return bytes(file[: 8 + _SIZE.unpack_from(file)[0]])


def read_header(header: bytes) -> tuple[Any, dict[str, Place], int]:
    """The JSON under ``castore``, the tensors by name, and the length of the file.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: it is no header, or it contradicts itself.
    """
    if len(header) != 8 + _SIZE.unpack_from(header)[0]:
        raise ValueError("it is shorter than its header")
    tensors = json.loads(header[8:].decode())
    about = json.loads(tensors.pop("__metadata__")["castore"])
    end = len(header)
    places = {name: _placed(entry, end) for name, entry in tensors.items()}
    for start, stop, _, _ in sorted(places.values()):
        if start != end:
            raise ValueError("its tensors overlap or leave gaps")
        end = stop
    return about, places, end


def _placed(entry: Any, offset: int) -> Place:
    code, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if len(shape) > _MOST_DIMENSIONS or not all(type(side) is int and 0 <= side < 1 << 63 for side in shape):
        raise ValueError("a tensor has an impossible shape")
    if type(first) is not int or type(last) is not int or not 0 <= first <= last:
        raise ValueError("a tensor has impossible offsets")
    if last - first != prod(shape) * SIZES[code]:
        raise ValueError(f"a tensor of {code} and shape {shape} claims {last - first} bytes")
    return offset + first, offset + last, code, tuple(shape)


# --- saved tensors ------------------------------------------------------------------------------------------

#: Code and last dimensions of saved tensors where they differ from those of a record. The safetensors library
#: wrote such files first, and it has codes that only its newer versions read.
_SAVED: dict[str, tuple[str, tuple[int, ...]]] = {
    "complex64": ("C64", ()),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", ()),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", ()),
    "float8_e8m0fnu": ("U8", (1,)),
    "float4_e2m1fn_x2": ("U8", (1,)),
}
#: Types that the code of a saved tensor does not give: the file names them.
_NAMED = frozenset({"complex32", "complex128", "float8_e8m0fnu", "float4_e2m1fn_x2"})
#: The type that a code stands for.
_OF_CODE = {
    _SAVED.get(name, (row.code, ()))[0]: name for name, row in NUMBER_TYPES.items() if name not in _NAMED
}
#: NumPy dtypes that a saved file holds unchanged.
_SAFE_ARRAYS = {
    f"{'<' if SIZES[row.code] > 1 else '|'}{'b1' if row.numpy == '?' else row.numpy}"
    for row in NUMBER_TYPES.values()
    if row.carrier is None and row.name not in _NAMED
}
_CODE_ORDER = {code: place for place, code in enumerate(SIZES)}


class _Plan(NamedTuple):
    """The compiled way to read files with one header."""

    length: int  # of the file
    parts: list[tuple[str, int, int, leaves.Build, bool]]  # name, start, stop, build, requires grad
    is_bare: bool


_layouts: BoundedDict[Layout] = BoundedDict(1 << 20)
_plans: BoundedDict[_Plan] = BoundedDict(1 << 20)


def is_tensor(obj: Any) -> bool:
    """Whether `obj` is a dense torch tensor of numbers. Subclasses, such as Parameter, do not count."""
    torch = sys.modules.get("torch")
    return torch is not None and type(obj) is torch.Tensor and tensor_problem(obj) is None


def _is_safe_array(obj: Any) -> bool:
    # Arrays in Fortran order would come back in C order.
    if not is_array(obj) or (obj.flags.f_contiguous and not obj.flags.c_contiguous):
        return False
    return obj.dtype.str in _SAFE_ARRAYS


def _is_name(name: Any) -> bool:
    if type(name) is not str or name == "__metadata__":
        return False
    return name.isascii() or not any("\ud800" <= char <= "\udfff" for char in name)


def fits_safetensors(obj: Any) -> bool:
    """Whether `obj` is a tensor, or a dict of str to only tensors or only plain arrays."""
    if type(obj) is not dict:
        return is_tensor(obj)
    named = bool(obj) and all(map(_is_name, obj))
    return named and any(all(map(fits, obj.values())) for fits in (is_tensor, _is_safe_array))


def dump_safetensors(obj: Any) -> bytes:
    """Return a safetensors file. Keeps `requires_grad`, but not autograd graph, device or shared memory."""
    if not fits_safetensors(obj):
        refuse(f"{type(obj)} (it takes a tensor, or a dict of str to tensors or arrays)", "safetensors")
    tensors = obj if type(obj) is dict else {"tensor": obj}
    is_torch = not is_array(next(iter(tensors.values())))
    payloads: leaves.Payloads = []
    if is_torch:
        leaves.know_torch()
        try:
            marks = tuple(
                (name, leaves.take_tensor(tensor.detach(), payloads), tensor.requires_grad)
                for name, tensor in tensors.items()
            )
        except MisfitError as error:
            raise SerializationError(f"value: {error.problem}") from error
    else:
        leaves.know_numpy()
        marks = tuple((name, leaves.take_array(array, payloads), False) for name, array in tensors.items())
    description = obj is not tensors, marks
    layout = _layouts.get(description)
    if layout is None:
        layout = _lay_out(*description)
        _layouts.remember(description, layout, len(layout.header))
    return layout.file(payloads)


def require_no_graph(obj: Any) -> None:
    """Check that no tensor has an autograd graph, which a safetensors file lacks: a loaded object would train
    less than the object itself. The other serializers refuse such tensors.

    Raises:
        SerializationError: one has; the message names it.
    """
    if "torch" in sys.modules and fits_safetensors(obj):
        for name, tensor in obj.items() if type(obj) is dict else [(None, obj)]:
            if getattr(tensor, "grad_fn", None) is not None:
                raise SerializationError(
                    f"value{'' if name is None else f'[{name!r}]'}: is a tensor with a graph, which would be "
                    "lost; convert it with detach()"
                )


def _lay_out(is_bare: bool, marks: tuple[tuple[str, leaves.Mark, bool], ...]) -> Layout:
    about: dict[str, Any] = {"kind": "numpy", "bare": is_bare, "order": [name for name, *_ in marks]}
    types = {name: leaves.number_type(mark) for name, mark, _ in marks}
    if marks[0][1][0] == "tensor":
        about |= {"kind": "torch", "grad": [name for name, _, has_grad in marks if has_grad]}
        named = {name: kind for name, kind in types.items() if kind in _NAMED}
        if named:
            about["types"] = named
    written = []
    for name, (_, _, shape), _ in marks:
        code, tail = _written(types[name])
        written.append((name, code, (*map(int, shape), *tail)))
    order = sorted(range(len(marks)), key=lambda place: (_CODE_ORDER[written[place][1]], written[place][0]))
    # One key: the library wrote several in random order, and equal objects must give equal bytes.
    return lay_out(json.dumps(about), written, order, ascii_names=False)


def _written(kind: str) -> tuple[str, tuple[int, ...]]:
    """The code of a saved tensor of this type, and the dimensions that the file has beyond the tensor's."""
    row = NUMBER_TYPES[kind]
    return _SAVED.get(kind, (row.code, row.tail))


def load_safetensors(data: bytes) -> Any:
    """Return the tensor, or the dict in its order, that `dump_safetensors` stored.

    Each tensor has memory of its own, so that one of them does not keep the others' memory.
    """
    try:
        header = header_of(data)
        plan = _plans.get(header)
        if plan is None:
            plan = _plan(header)
            _plans.remember(header, plan, len(header))
        if plan.length != len(data):
            raise ValueError(f"it has {len(data)} bytes, and its header is about {plan.length}")
        view = memoryview(data)
        tensors = {}
        for name, start, stop, build, requires_grad in plan.parts:
            tensor = build(bytearray(view[start:stop]))
            tensors[name] = tensor.requires_grad_() if requires_grad else tensor
        return tensors["tensor"] if plan.is_bare else tensors
    except (
        ValueError, KeyError, TypeError, RuntimeError, struct.error, RecursionError, MemoryError,
    ) as error:  # fmt: skip
        raise corrupt("safetensors", error) from error


def _plan(header: bytes) -> _Plan:
    about, places, length = read_header(header)
    if about["kind"] == "torch":
        leaves.know_torch()
        build = leaves.tensor_at
    else:
        leaves.know_numpy()
        build = leaves.array_at
    types, grad = about.get("types", {}), about.get("grad", [])
    parts = []
    for name in about["order"]:
        start, stop, code, shape = places[name]
        kind = types[name] if name in types else _OF_CODE[code]
        expected, tail = _written(kind)
        rank = len(shape) - len(tail)
        if code != expected or shape[rank:] != tail:
            raise ValueError(f"a tensor of {kind} is written as {code} of shape {shape}")
        parts.append((name, start, stop, build(kind, shape[:rank], 0, stop - start), name in grad))
    return _Plan(length, parts, bool(about["bare"]))
