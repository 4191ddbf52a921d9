"""What an operator computes, as a fingerprint: its code, followed through the user's own modules, and its state.

Builds on `castore.instances`: functions by their code, libraries by name and version. Objects count by their class
and by what pickle would keep of them; models and arrays by content; tokenizers by their rules, not by what using
them leaves behind. What cannot change a result (locks, loggers, streams of a GPU, opaque handles) counts by its kind.
The state of a source of random numbers counts: equal seeds are equal, and one that was used has moved on.

Assumes that what an object leaves out of its pickle does not count, and that nobody changes an operator while it is
hashed. Must never give a random answer: what has no stable hash is an UnhashableError that names where it hangs.
Nothing is remembered by identity from one call to the next, since an array or a model can be changed in place.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from blake3 import blake3

from castore.errors import UnhashableError
from castore.instances import InstanceEncoder
from castore.keys import UnencodableError

_VERSION = b"castore.operator.1"
# Nobody's results depend on who holds one of these, or on whether anybody does.
_SYNCHRONISERS = (
    threading.Condition, threading.Semaphore, threading.Event, threading.Barrier, threading.local, Executor,
    queue.SimpleQueue,
)  # fmt: skip
_CODE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    functools.partial,
)
_LARGE = 1 << 20


def operator_fingerprint(operator: Any, name: str = "operator") -> str:
    """64 hexadecimal digits that change when what an operator computes may have changed.

    Args:
        operator: a function, a method, an object: whatever can be called or has methods to call.
        name: what to call it in the message of an error.

    Raises:
        UnhashableError: a part of it has no stable hash; the message has the path to it.

    >>> operator_fingerprint(len) == operator_fingerprint(len), operator_fingerprint(len) == operator_fingerprint(max)
    (True, False)
    """
    return str(blake3(_VERSION + encode(operator, name)).hexdigest())


def encode(operator: Any, name: str, encoder: OperatorEncoder | None = None) -> bytes:
    """The canonical bytes of an operator; see `operator_fingerprint`."""
    try:
        return (encoder or OperatorEncoder()).encode(operator, name)
    except UnhashableError as error:
        raise UnhashableError(
            f"{error}; or leave that part out with __getstate__, or say what identifies the operator with fingerprint=..."
        ) from None


class OperatorEncoder(InstanceEncoder):
    """An InstanceEncoder that also takes what operators hold.

    Attributes:
        code: digests of the user's functions and classes that were met, by qualified name: for telling what changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.code: dict[str, str] = {}
        self._around: list[int] = []

    def _nested(self, value: Any) -> bytes:
        # A registry holds functions that look things up in it: the way back, counted in levels, is all there is to say.
        if id(value) in self._around:
            return self.tagged("around", len(self._around) - self._around.index(id(value)))
        self._around.append(id(value))
        try:
            return super()._nested(value)
        finally:
            self._around.pop()

    def other(self, value: Any) -> bytes:
        """As in InstanceEncoder, with what operators hold besides."""
        kind = _kind_of(value)
        if kind is not None:
            return self.tagged(*kind(self, value))
        return super().other(value)

    def member(self, item: Any) -> bytes:
        """As in InstanceEncoder, with what is around the set, and what is noted in it."""
        alone = type(self)()
        alone._open, alone._around = self._open, self._around
        code = alone.part(item, "{...}")
        self.code |= alone.code
        return code

    def function(self, function: types.FunctionType) -> Iterator[Any]:
        """As in InstanceEncoder, and a note of the user's functions: their own code, without what they refer to."""
        dispatch = _dispatch_registry(function)
        if dispatch is not None:
            yield "singledispatch", sorted((self.part(kind), self.part(f)) for kind, f in dispatch.items())
            return
        parts = list(super().function(function))
        # Plain bytes are the instructions and defaults; tuples lead elsewhere.
        own = [part for part in parts if type(part) is not tuple]
        self.code[f"{function.__module__}.{function.__qualname__}"] = _short(self.tagged("own", *own))
        yield from parts

    def numpy(self, value: Any) -> bytes:
        """As in InstanceEncoder, with arrays of any kind, and large ones quickly."""
        if isinstance(value, sys.modules["numpy"].ndarray):
            return self.tagged(*_array(self, value))
        return super().numpy(value)


def _short(code: bytes) -> str:
    return str(blake3(code).hexdigest()[:32])


def _dispatch_registry(function: types.FunctionType) -> dict[type, Any] | None:
    """The implementations behind a `functools.singledispatch` function, whose cache fills with use; else None."""
    registry = function.__dict__.get("registry")
    if isinstance(registry, types.MappingProxyType) and callable(function.__dict__.get("dispatch")):
        return dict(registry)
    return None


# --- what operators hold ------------------------------------------------------------------------------------------

_Encode = Callable[[OperatorEncoder, Any], Iterator[Any]]


def _kind_of(value: Any) -> _Encode | None:
    for kinds, encode_kind in _KINDS:
        if isinstance(value, kinds):
            return encode_kind
    for kinds, encode_kind in _kinds_of_libraries():
        if isinstance(value, kinds):
            return encode_kind
    return None


def _by_type(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    yield from ("harmless", f"{type(value).__module__}.{type(value).__qualname__}")


def _match(encoder: OperatorEncoder, value: re.Match[Any]) -> Iterator[Any]:
    yield from ("match", encoder.part(value.re), value.string, value.pos, value.endpos, value.span())


def _proxy(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    yield from ("mapping", encoder.part(dict(value)))


def _class_method_in_c(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    yield from ("class method", value.__name__, encoder.part(value.__objclass__))


def _weak(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    raise UnencodableError(f"cannot hash {type(value)}: what it refers to may be gone by the time it is used")


def _stream(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    raise UnencodableError(f"cannot hash {type(value)}: what is read from it depends on where it stands")


def _generator(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    raise UnencodableError(
        f"cannot hash a {type(value).__name__}: what it yields depends on how far it has run"
    )


def _opaque(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    # A handle of a C library is an address, different in each process.
    pointee = getattr(type(value), "_type_", None)
    if isinstance(value, ctypes.c_void_p) or not getattr(pointee, "_fields_", None):
        yield from _by_type(encoder, value)
        return
    yield from ("pointer", encoder.part(value.contents if value else None, ".contents"))


def _array(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    np = sys.modules["numpy"]
    if value.dtype.hasobject:
        yield from ("objects", value.shape, encoder.part(value.ravel().tolist()))
        return
    plain = np.asarray(value)
    if value.nbytes < _LARGE or value.dtype.names is not None or plain.dtype.itemsize == 0:
        yield from ("array", InstanceEncoder.numpy(encoder, plain))
        return
    hasher = blake3(max_threads=blake3.AUTO)
    # By rows: an array that does not lie in order is not copied whole.
    rows = len(plain) if plain.flags.c_contiguous else max(1, len(plain) * _LARGE * 64 // plain.nbytes)
    for start in range(0, len(plain), rows):
        hasher.update(np.ascontiguousarray(plain[start : start + rows]).reshape(-1).view(np.uint8).data)
    yield from ("large array", encoder.part(plain.dtype), plain.shape, hasher.digest())


def _tensor(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    torch = sys.modules["torch"]
    plain = value.detach().as_subclass(torch.Tensor)
    if plain.is_quantized or plain.layout != torch.strided or plain.device.type == "meta":
        raise UnencodableError(
            f"cannot hash a tensor that is quantised, sparse or without data ({plain.layout})"
        )
    plain = plain.resolve_conj().resolve_neg()
    flat = plain.cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    yield from ("tensor", str(value.dtype), tuple(value.shape))
    yield blake3(data, max_threads=blake3.AUTO).digest()
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        yield encoder.part(type(value))


def _torch_word(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    yield from ("torch", str(value))


def _torch_generator(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    yield from ("torch generator", encoder.part(value.get_state()))


def _script_module(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    yield from ("script", str(value.code) if hasattr(value, "code") else "", bool(value.training))
    yield [(name, encoder.part(tensor)) for name, tensor in sorted(value.state_dict().items())]


def _arrow(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    from castore.adapters.datasets.inputs import table_digest

    pa = sys.modules["pyarrow"]
    if isinstance(value, pa.Buffer):
        yield from ("buffer", blake3(value, max_threads=blake3.AUTO).digest())
        return
    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    if not isinstance(value, pa.Table):
        value = pa.table({"": value})
    yield from ("arrow", table_digest(value))


def _dataset(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    from castore.adapters.datasets.inputs import dataset_fingerprint

    yield from ("dataset", dataset_fingerprint(value))


_KINDS: list[tuple[Any, _Encode]] = [
    (_SYNCHRONISERS, _by_type),
    ((weakref.ref, weakref.ProxyType, weakref.CallableProxyType), _weak),
    (types.GeneratorType, _generator),
    (re.Match, _match),
    (types.MappingProxyType, _proxy),
    (types.ClassMethodDescriptorType, _class_method_in_c),
    ((ctypes.c_void_p, ctypes._Pointer, ctypes._CFuncPtr), _opaque),  # type: ignore[attr-defined]
]
#: Names of types in libraries that somebody may have imported; never imported for this.
_LIBRARIES: list[tuple[str, tuple[str, ...], _Encode]] = [
    ("multiprocessing.synchronize", ("SemLock",), _by_type),
    ("multiprocess.synchronize", ("SemLock",), _by_type),
    ("asyncio", ("Lock", "Event", "Semaphore", "Condition"), _by_type),
    ("io", ("IOBase",), _stream),
    ("torch.jit", ("ScriptModule", "ScriptFunction"), _script_module),
    ("torch", ("Tensor",), _tensor),
    ("torch", ("device", "dtype", "layout", "memory_format"), _torch_word),
    ("torch", ("Generator",), _torch_generator),
    ("torch.cuda", ("Stream", "Event", "CUDAGraph"), _by_type),
    ("cupy.cuda", ("Stream", "Event", "Device"), _by_type),
    ("pyarrow", ("Table", "RecordBatch", "Array", "ChunkedArray", "Buffer"), _arrow),
    ("datasets", ("Dataset", "DatasetDict"), _dataset),
]


def _kinds_of_libraries() -> Iterator[tuple[tuple[type, ...], _Encode]]:
    for module, names, encode_kind in _LIBRARIES:
        loaded = sys.modules.get(module)
        if loaded is not None:
            yield (
                tuple(kind for name in names if isinstance(kind := getattr(loaded, name, None), type)),
                encode_kind,
            )
