"""Encodings of types that pickle's protocol describes badly, in one table for all adapters.

A handle (a lock, a pool, a counter shared between processes, a thread) cannot change what a function returns,
and counts by its type. A stream, or a reference to an object that may be gone, has no stable hash. A compiled
function counts by its Python function. The rules for objects ask this table before pickle's protocol. An
adapter may have a table of its own before this one.

Only types are inspected: some objects raise errors when an attribute is read, even `__class__`. Must never:
import a library. A value can have a type only if the type's library is imported.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from blake3 import blake3

from castore.keys import images, pandas_tables
from castore.keys.beside_code import ANNOTATIONS
from castore.keys.classes import full_name
from castore.keys.compiled import digest_of_loaded
from castore.keys.encoder import AnyOrder, Encoder, UnencodableError
from castore.keys.functions import code_parts
from castore.keys.libraries import library_object, library_of, library_of_class
from castore.keys.pickled import lasting, object_parts, state_parts
from castore.keys.registry import Count, Row, Table
from castore.system.cpus import hash_threads
from castore.system.mappings import Mappings

if sys.version_info >= (3, 14):
    import string.templatelib  # noqa: F401 - a template string is made without it, and the table looks in it

#: Prefixes of attributes that torch.compile and transformers set on tensors.
LEFT_ON_TENSORS = ("_dynamo_", "_is_hf_initialized")


def by_type(encoder: Encoder, value: Any) -> Iterator[Any]:
    """Count a handle by its type only, whatever its state. For a user's class, its code counts too."""
    cls = type(value)
    yield from ("harmless", full_name(cls))
    if not library_of_class(cls):
        yield encoder.part(cls)


def refuse_random(value: Any) -> NoReturn:
    """Raise the error for a random generator: results drawn from it must not be stored."""
    raise UnencodableError(
        f"is a random generator, {full_name(type(value))}; what is drawn from it must not be cached, "
        "so cache what comes before it and draw behind the cache; "
        "where nothing that is cached is drawn from it, leave it out in __getstate__"
    )


def random_rows(count: Count) -> list[Row]:
    """Rows for the random generators of all libraries."""
    return [
        ("random", ("Random",), count),
        ("numpy.random", ("Generator", "BitGenerator", "RandomState"), count),
        ("torch", ("Generator",), count),
    ]


def _refusing(reason: str) -> Count:
    def refuse(encoder: Encoder, value: Any) -> Iterator[Any]:
        raise UnencodableError(f"cannot hash {type(value)}: {reason}")

    return refuse


def _running(encoder: Encoder, value: Any) -> Iterator[Any]:
    raise UnencodableError(
        f"cannot hash a {type(value).__name__}: what it yields depends on how far it has run"
    )


def _match(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("match", encoder.part(value.re), value.string, value.pos, value.endpos, value.span())


def _pattern(encoder: Encoder, value: Any) -> Iterator[Any]:
    # The pickled state of a regex pattern is compiled, with alternatives in an order that differs between
    # processes.
    yield from ("regex", value.pattern, value.flags, encoder.part(dict(value.named_lists)))


def _proxy(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("mapping", encoder.part(dict(value)))


def _class_method_in_c(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("class method", value.__name__, encoder.part(value.__objclass__))


def _code(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("code", *code_parts(value))


def _cell(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield "cell"
    try:
        yield encoder.part(value.cell_contents, ".cell_contents")
    except ValueError:
        yield "empty"


def _pointer(encoder: Encoder, value: Any) -> Iterator[Any]:
    # A handle of a C library is an address, which differs in each process.
    pointee = getattr(type(value), "_type_", None)
    if isinstance(value, sys.modules["ctypes"].c_void_p) or not getattr(pointee, "_fields_", None):
        yield from by_type(encoder, value)
        return
    yield from ("pointer", encoder.part(value.contents if value else None, ".contents"))


def _c_function(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("function of C", getattr(value, "__name__", None))
    yield encoder.part((value.restype, value.argtypes, getattr(value, "errcheck", None)))
    for held in (value._objects or {}).values():
        if isinstance(held, sys.modules["ctypes"].CDLL):
            yield encoder.part(held)
        elif type(held).__name__ == "CThunkObject":  # a callback, whose function only gc can find
            yield [encoder.part(function) for function in gc.get_referents(held) if callable(function)]


def _c_library(encoder: Encoder, value: Any) -> Iterator[Any]:
    name = value._name
    yield from ("library of C", full_name(type(value)), name)
    file = _file_of_library(value)
    # A name without a folder is a system library, but for one that a variable of the environment leads to.
    if file is not None and ("/" in str(name) or not file.startswith(_OF_SYSTEM)):
        yield digest_of_loaded(file, f"the library {name!r}")


def _file_of_library(value: Any) -> str | None:
    """The path of a library of C, as the kernel knows it: a relative name may lead elsewhere by now."""
    ctypes = sys.modules["ctypes"]
    if value._name is None or not value._handle:  # the program itself
        return None
    # A handle of glibc is the address of a record that begins with the address of the library.
    start = ctypes.c_void_p.from_address(value._handle).value
    mapping = Mappings().find(start) if start else None
    if mapping is not None:
        return os.fsdecode(mapping.path.removesuffix(b" (deleted)"))
    return value._name if "/" in value._name else None


def _shared_memory(encoder: Encoder, value: Any) -> Iterator[Any]:
    # The name does not count: it is random in every run.
    if value.buf is None:
        raise UnencodableError("is a SharedMemory that was closed; hold one that is open")
    yield from ("shared memory", len(value.buf), blake3(value.buf, max_threads=hash_threads()).digest())


def _c_data(encoder: Encoder, value: Any) -> Iterator[Any]:
    # multiprocessing's RawValue and RawArray are ctypes values in shared memory: handles.
    if "_wrapper" in getattr(value, "__dict__", ()):
        yield from by_type(encoder, value)
        return
    yield from ("object", *object_parts(encoder, value))


def _archive(encoder: Encoder, value: Any) -> Iterator[Any]:
    if value.zip is None:
        raise UnencodableError(
            "is an NpzFile that was closed; hold its arrays instead: dict(numpy.load(...))"
        )
    yield "npz"
    yield [(name, encoder.part(value[name], f"[{name!r}]")) for name in sorted(value.files)]


def _vectorized(encoder: Encoder, value: Any) -> Iterator[Any]:
    # The first call stores a ufunc, which has nothing but its name.
    state = {name: item for name, item in vars(value).items() if name not in ("_ufunc", "_doc")}
    yield from ("vectorize", *state_parts(encoder, state))


# --- compiled code ------------------------------------------------------------------------------------------


# The versions that numba has compiled of a function, and a digest of all that the function referred to when
# they were first seen.
_seen_compiled: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], bytes]] = weakref.WeakKeyDictionary()
# A mark: the functions further inside were looked at, or will be, for themselves.
_LOOKED_AT = "compiled"


def _require_as_compiled(encoder: Encoder, dispatcher: Any) -> None:
    """Refuse a function of numba that was compiled with other values of its globals than they have now."""
    compiled = tuple(map(id, dispatcher.overloads.values()))
    if not compiled or _LOOKED_AT in encoder.marks:
        return
    alone = encoder.beside()
    alone.marks = encoder.marks | {_LOOKED_AT}
    now = compiled, blake3(alone.part(dispatcher.py_func)).digest()
    seen = _seen_compiled.setdefault(dispatcher, now)
    if seen[1] != now[1] and not set(seen[0]).isdisjoint(compiled):
        raise UnencodableError(
            f"cannot hash {dispatcher.py_func.__qualname__!r}, which numba has compiled with other values "
            "than those that it refers to now; define it anew, or call its recompile()"
        )
    _seen_compiled[dispatcher] = now


def _jitted(encoder: Encoder, value: Any) -> Iterator[Any]:
    _require_as_compiled(encoder, value)
    # numba stores with a function a uuid and the versions compiled so far; these do not count.
    yield from (
        "numba",
        encoder.part(value.py_func),
        encoder.part(dict(value.targetoptions), ".targetoptions"),
    )


def _universal(encoder: Encoder, value: Any) -> Iterator[Any]:
    maker = getattr(value, "_dispatcher", None) or value.gufunc_builder
    if hasattr(maker, "overloads"):
        _require_as_compiled(encoder, maker)
    options = {**getattr(value, "targetoptions", {})}
    # Types that were compiled on creation. Later calls add more types, and do not change results.
    types = tuple(value.types) if getattr(value, "_frozen", False) else ()
    yield from (
        "numba",
        full_name(type(value)),
        encoder.part(maker.py_func),
        getattr(value, "signature", None),
    )
    yield (value.identity, types, encoder.part(options, ".targetoptions"))


def _jitted_class(encoder: Encoder, value: Any) -> Iterator[Any]:
    made = value.class_type
    yield from ("numba", value.__qualname__, [(name, str(kind)) for name, kind in made.struct.items()])
    for table in (made.jit_methods, made.jit_props, made.jit_static_methods):
        yield [(name, encoder.part(function, f".{name}")) for name, function in sorted(table.items())]


def _ufunc(encoder: Encoder, value: Any) -> Iterator[Any]:
    library = library_object(value)
    if library is not None:
        yield from ("library", library)
        return
    name = value.__name__
    module = pickle.whichmodule(value, name)  # type: ignore[attr-defined]
    found = library_of(module)
    if found is None or getattr(sys.modules[module], name, None) is not value:
        raise UnencodableError(
            f"cannot hash the ufunc {name!r}, which does not tell what it was made of; "
            "hold the function that it was made of"
        )
    yield from ("ufunc", name, found.rpartition(" of ")[2])


def _callback(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("numba", encoder.part(value.__wrapped__), str(value._sig))


def _scripted(encoder: Encoder, value: Any) -> Iterator[Any]:
    # The Python function too, if it is known: the compiled code does not contain the functions that it calls.
    # And the code, which has the values of its globals when it was traced.
    known = vars(value).get("_torchdynamo_inline")
    yield from ("script", None if known is None else encoder.part(known), *_archive_of(encoder, value))


def scripted_module(encoder: Encoder, value: Any, without: frozenset[str] = frozenset()) -> Iterator[Any]:
    """Count a module compiled by torch.jit by code, attributes (not ``without``), weights and constants."""
    yield from ("script", *_archive_of(encoder, value._c, without))


def _archive_of(encoder: Encoder, value: Any, without: frozenset[str] = frozenset()) -> Iterator[Any]:
    from castore.keys.torchscript import archive_parts  # imported here because it imports zipfile

    yield from archive_parts(encoder, value.save_to_buffer(), without)


# --- libraries ----------------------------------------------------------------------------------------------


def _image(encoder: Encoder, value: Any) -> Iterator[Any]:
    # Pickle keeps pixels of the present frame, `info`, and the name of the file.
    yield from ("object", *object_parts(encoder, value))
    try:
        frames = images.further_frames(value)
    except ValueError:
        raise UnencodableError(
            f"cannot hash {type(value)} of several frames: its file is closed; pass the bytes of the file"
        ) from None
    if frames is not None:
        yield "frames", *frames
    for name, facts in images.further_facts(value).items():
        yield name, encoder.part(facts, f".{name}")


def _exact(encoder: Encoder, value: Any) -> Iterator[Any]:
    # A value that never changes: one in two places is as two.
    yield full_name(type(value)), repr(value)


def _arrow(encoder: Encoder, value: Any) -> Iterator[Any]:
    from castore.keys.table_digest import table_digest

    pa = sys.modules["pyarrow"]
    if isinstance(value, pa.Buffer):
        yield from ("buffer", blake3(value, max_threads=hash_threads()).digest())
        return
    kinds = {"table": pa.Table, "batch": pa.RecordBatch, "chunks": pa.ChunkedArray, "array": pa.Array}
    yield from ("arrow", next(name for name, kind in kinds.items() if isinstance(value, kind)), len(value))
    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    if not isinstance(value, pa.Table):
        value = pa.table({"": value})
    yield table_digest(value)
    metadata = [value.schema.metadata, *(field.metadata for field in value.schema)]
    if any(metadata):
        yield encoder.part(metadata, ".schema.metadata")


def _sparse_matrix(encoder: Encoder, value: Any) -> Iterator[Any]:
    # SciPy notes how the entries lie once a method has asked.
    notes = {"_has_sorted_indices", "_has_canonical_format", "has_canonical_format"}
    state = {name: item for name, item in vars(value).items() if name not in notes}
    yield from ("sparse matrix", encoder.part(type(value)), *state_parts(encoder, state))


def _stream_of_rows(encoder: Encoder, value: Any) -> Iterator[Any]:
    # Iterating leaves these. A state that was loaded, and says where the stream goes on, counts.
    left = {"_state_dict", "_IterableDataset__hffs_cache"}
    state = {name: item for name, item in vars(value).items() if name not in left}
    yield from ("stream of rows", encoder.part(type(value)), *state_parts(encoder, state))


def tensor(encoder: Encoder, value: Any) -> Iterator[Any]:
    """Count a tensor by its values, and by its other properties that a function can observe.

    Device, strides, gradient and autograd graph do not count.
    """
    is_parameter = type(value) is sys.modules["torch"].nn.Parameter
    if is_parameter:
        encoder.number_parameter(value)
    yield from tensor_values(encoder, value)
    if is_parameter:
        yield "parameter"
    if value.requires_grad:
        yield "requires grad"
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(value, name, None):
            yield name, [encoder.part(hook, f".{name}") for hook in hooks.values()]


def tensor_values(encoder: Encoder, value: Any) -> Iterator[Any]:
    """Like `tensor`, but whether it is a Parameter or requires grad does not count."""
    torch = sys.modules["torch"]
    plain = value.detach()
    if type(plain) is not torch.Tensor and not plain.is_nested:
        plain = plain.as_subclass(torch.Tensor)
    if plain.is_nested:
        yield "nested tensor"
        yield [encoder.part(item, f"[{place}]") for place, item in enumerate(plain.unbind())]
    elif plain.device.type == "meta":
        yield from ("meta tensor", str(plain.dtype), str(plain.layout), tuple(plain.shape))
    elif plain.is_quantized:
        yield from _quantized(encoder, plain)
    elif plain.layout != torch.strided:
        yield from _sparse(encoder, plain)
    else:
        flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        # The last dimension is new because a single element may keep an odd stride, which `view` would
        # reject.
        data = flat.unsqueeze(-1).view(torch.uint8).numpy().data if flat.numel() else b""
        # For small tensors threads cost more than they save.
        threads = hash_threads() if len(data) > 1 << 20 else 1
        yield from ("tensor", str(plain.dtype), tuple(plain.shape))
        yield blake3(data, max_threads=threads).digest()
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        yield encoder.part(type(value))
    held = {name: item for name, item in vars(value).items() if not name.startswith(LEFT_ON_TENSORS)}
    held = lasting(encoder, value, held)
    if held:
        yield "attributes"
        yield from state_parts(encoder, held)


def _sparse(encoder: Encoder, plain: Any) -> Iterator[Any]:
    torch = sys.modules["torch"]
    if plain.layout == torch.sparse_coo:
        joined = plain.coalesce()
        if not torch.equal(joined.indices(), plain._indices()):
            yield from ("not coalesced", encoder.part(plain._indices()), encoder.part(plain._values()))
        elif not plain.is_coalesced():  # `.indices()` refuses it
            yield "not marked as coalesced"
        plain = joined
        places = [plain.indices()]
    elif plain.layout in (torch.sparse_csr, torch.sparse_bsr):
        places = [plain.crow_indices(), plain.col_indices()]
    elif plain.layout in (torch.sparse_csc, torch.sparse_bsc):
        places = [plain.ccol_indices(), plain.row_indices()]
    else:
        raise UnencodableError(
            f"cannot hash a tensor of layout {plain.layout}; "
            "hold a dense one, or leave it out in __getstate__"
        )
    yield from ("sparse tensor", str(plain.layout), tuple(plain.shape))
    yield from (encoder.part(part) for part in (*places, plain.values()))


def _quantized(encoder: Encoder, plain: Any) -> Iterator[Any]:
    torch = sys.modules["torch"]
    yield from ("quantised tensor", str(plain.dtype), str(plain.qscheme()), encoder.part(plain.int_repr()))
    if plain.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield from (plain.q_scale(), plain.q_zero_point())
    else:
        yield plain.q_per_channel_axis()
        yield from map(encoder.part, (plain.q_per_channel_scales(), plain.q_per_channel_zero_points()))


def _storage(encoder: Encoder, value: Any) -> Iterator[Any]:
    # Its pickled bytes have its address in them.
    torch = sys.modules["torch"]
    plain = value.untyped() if hasattr(value, "untyped") else value
    flat = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(plain)
    yield from ("storage", encoder.part(type(value)), encoder.part(getattr(value, "dtype", None)))
    yield encoder.part(flat)


def _word(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("torch", str(value))


def _torch_generator(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("torch generator", encoder.part(value.get_state()))


def _language(encoder: Encoder, value: Any) -> Iterator[Any]:
    # The vocabulary also collects strings during use; these do not change results.
    sorted_ones = {name: _with_sorted_sets(component) for name, component in value.components}
    sorted_parts = {name: item for name, item in sorted_ones.items() if item is not None}
    yield from ("spaCy", encoder.part(type(value)), value.to_bytes(exclude=["vocab", *sorted_parts]))
    yield encoder.part(value.vocab, ".vocab")
    if sorted_parts:
        yield encoder.part(sorted_parts)
    for name, component in value.pipeline:
        own = component if hasattr(component, "__code__") else type(component)
        yield name, encoder.part(own, f".get_pipe({name!r})")


def _with_sorted_sets(component: Any) -> dict[str, Any] | None:
    """The parts that a spaCy component's `to_bytes` writes, sets in sorted order; None if it writes no set.

    The sentencizer writes a set of characters as a list, in an order that differs between processes.
    """
    held = [item for item in getattr(component, "__dict__", {}).values() if type(item) in (set, frozenset)]
    texts = [item for item in held if len(item) > 1 and {*map(type, item)} == {str}]
    if not texts or not hasattr(component, "to_bytes"):
        return None
    state = sys.modules["srsly"].msgpack_loads(component.to_bytes(exclude=["vocab"]))
    sets = {
        name: sorted(item)
        for name, item in state.items()
        if type(item) is list and {*map(type, item)} == {str} and {*item} in texts
    }
    return {**state, **sets} if sets else None


def _document(encoder: Encoder, value: Any) -> Iterator[Any]:
    # Its pickled bytes have its strings in the order of a set.
    state = value.to_dict(exclude=["vocab", "user_data"])
    yield from ("spaCy", encoder.part(type(value)), encoder.part(value.vocab, ".vocab"))
    yield encoder.part({**state, "strings": sorted(state["strings"])})
    yield encoder.part(dict(value.user_data), ".user_data")
    yield [
        encoder.part(dict(hooks))
        for hooks in (value.user_hooks, value.user_token_hooks, value.user_span_hooks)
    ]


def _rules(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("spaCy", encoder.part(type(value)), value.to_bytes(exclude=["vocab"]))


def _vocabulary(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("spaCy", encoder.part(type(value)), value.to_bytes(exclude=["strings"]))


def _stream(encoder: Encoder, value: Any) -> Iterator[Any]:
    if any(value is stream for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        yield from by_type(encoder, value)
        return
    yield from _refusing("what is read from it depends on where it stands")(encoder, value)


def _packing(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield "struct", value.format


def _view_of_dict(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield type(value).__name__, encoder.part(list(value))


def _hash_so_far(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield "hash", value.name, value.digest() if value.digest_size else None


def _by_attributes(*names: str) -> Count:
    def count(encoder: Encoder, value: Any) -> Iterator[Any]:
        yield (
            full_name(type(value)),
            [(name, encoder.part(getattr(value, name), f".{name}")) for name in names],
        )

    return count


def _operator_of_torch(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("operator", value._qualname)
    for name in ("_init_fn", "_abstract_fn", "_setup_context_fn", "_backward_fn"):
        yield name, encoder.part(getattr(value, name, None), f".{name}")
    # torch wraps each kernel, and the first call adds to the wrappers. The kernel for all devices is
    # `_init_fn`, which counts already.
    kernels = {str(device): _innermost(kernel) for device, kernel in value._backend_fns.items() if device}
    yield encoder.part(AnyOrder(kernels), "._backend_fns")


def _innermost(function: Any) -> Any:
    """The function behind torch's wrappers, which call what they name ``fn``."""
    while True:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if "fn" not in names or library_of(function.__globals__.get("__name__")) is None:
            return function
        function = function.__closure__[names.index("fn")].cell_contents


def _adapter_of_pydantic(encoder: Encoder, value: Any) -> Iterator[Any]:
    # All else of an adapter follows from these, and may have addresses in it.
    yield from ("adapter", *_with_annotations(encoder, value._type, value._config))


def _validated_call(encoder: Encoder, value: Any) -> Iterator[Any]:
    config = AnyOrder(value.config_wrapper.config_dict)
    yield from ("validated call", *_with_annotations(encoder, value.function, config))
    yield value.validate_return


def _with_annotations(encoder: Encoder, *parts: Any) -> list[bytes]:
    """Parts whose annotations pydantic reads."""
    around = encoder.marks
    encoder.marks = around | {ANNOTATIONS}
    try:
        return [encoder.part(part) for part in parts]
    finally:
        encoder.marks = around


def _font(encoder: Encoder, value: Any) -> Iterator[Any]:
    # A font is a file, which somebody may replace, or the bytes of one.
    hasher = blake3(max_threads=1)
    if hasattr(value.path, "getvalue"):
        hasher.update(value.path.getvalue())
    else:
        hasher.update_mmap(value.path)
    yield from ("font", hasher.digest(), value.size, value.index, value.encoding, int(value.layout_engine))


def _automaton(encoder: Encoder, value: Any) -> Iterator[Any]:
    # Its pickle has bytes that nobody has set.
    pairs = sorted(value.items()) if len(value) else []
    yield from ("automaton", value.kind, value.store, encoder.part(pairs))


def _neighbours(encoder: Encoder, value: Any) -> Iterator[Any]:
    # Four of its numbers count queries.
    state = value.__getstate__()
    yield from ("tree", encoder.part(type(value)), encoder.part((*state[:7], *state[11:])))


def _context(encoder: Encoder, value: Any) -> Iterator[Any]:
    # Its flags say what has happened in computations so far.
    traps = sorted(signal.__name__ for signal, is_on in value.traps.items() if is_on)
    yield from ("context", value.prec, value.rounding, value.Emin, value.Emax, value.capitals, value.clamp)
    yield traps


def _scanner(encoder: Encoder, value: Any) -> Iterator[Any]:
    # While it runs it keeps the last match.
    yield from ("scanner", encoder.part(value.lexicon, ".lexicon"), value.scanner.flags)


def _wrapper_of_wrapt(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield "wrapper"
    for name in ("__wrapped__", "_self_wrapper", "_self_enabled", "_self_instance"):
        yield encoder.part(getattr(value, name), f".{name}")


def _proxy_of_wrapt(encoder: Encoder, value: Any) -> Iterator[Any]:
    # All attributes are those of the object behind it, but for those whose names begin with ``_self_``.
    cls = type(value)
    yield from ("proxy", encoder.part(value.__wrapped__, ".__wrapped__"))
    if library_of_class(cls) is None and cls.__module__ not in ("_wrappers", "wrapt._wrappers"):
        yield encoder.part(cls)
        members = (item for base in cls.__mro__ for item in vars(base).values())
        codes = (item.__code__ for item in members if isinstance(item, types.FunctionType))
        own = sorted({name for code in codes for name in code.co_names if name.startswith("_self_")})
        yield [(name, encoder.part(getattr(value, name, None), f".{name}")) for name in own]


_MSGSPEC_ENCODER = ("enc_hook", "decimal_format", "uuid_format", "order")
_OF_SYSTEM = ("/lib", "/usr/lib", sys.base_prefix, sys.prefix)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def _modules_and_names(prefix: str) -> list[Row]:
    """Rows for handles of `multiprocessing`, or of `multiprocess`, its replacement that uses dill."""
    return [
        (f"{prefix}.synchronize", ("SemLock", "Condition", "Event", "Barrier"), by_type),
        (f"{prefix}.sharedctypes", ("SynchronizedBase",), by_type),
        (f"{prefix}.queues", ("Queue", "SimpleQueue"), by_type),
        (f"{prefix}.connection", ("_ConnectionBase", "Listener"), by_type),
        (f"{prefix}.pool", ("Pool",), by_type),
        (f"{prefix}.process", ("BaseProcess",), by_type),
        (f"{prefix}.managers", ("BaseManager", "BaseProxy"), by_type),
    ]


#: The table that all adapters share. docs/datasets.md describes it for users.
SHARED = Table(
    [
        ("threading", ("Condition", "Semaphore", "Event", "Barrier", "local", "Thread"), by_type),
        ("_thread", ("_local",), by_type),
        ("concurrent.futures._base", ("Executor",), by_type),
        ("queue", ("SimpleQueue", "Queue"), by_type),
        ("_queue", ("SimpleQueue",), by_type),
        ("logging", ("Handler",), by_type),
        ("contextlib", ("_GeneratorContextManager", "_AsyncGeneratorContextManager"), _by_attributes(
            "func", "args", "kwds")),
        ("asyncio.locks", ("Lock", "Event", "Semaphore", "Condition", "Barrier"), by_type),
        ("asyncio.queues", ("Queue",), by_type),
        ("asyncio.events", ("AbstractEventLoop",), by_type),
        *_modules_and_names("multiprocessing"),
        *_modules_and_names("multiprocess"),
        ("filelock", ("BaseFileLock",), by_type),
        ("filelock._read_write", ("ReadWriteLock",), by_type),
        ("filelock._soft_rw", ("SoftReadWriteLock",), by_type),
        ("torch.cuda", ("Stream", "Event", "CUDAGraph"), by_type),
        ("cupy.cuda", ("Stream", "Event", "Device"), by_type),
        ("weakref", ("ReferenceType", "ProxyType", "CallableProxyType"),
            _refusing("what it refers to may be gone by the time it is used")),
        ("types", ("GeneratorType", "CoroutineType", "AsyncGeneratorType"), _running),
        ("io", ("IOBase",), _stream),
        ("_io", ("_IOBase",), _stream),
        ("os", ("_Environ",), by_type),
        ("_struct", ("Struct",), _packing),
        ("_hashlib", ("HASH",), _hash_so_far),
        ("_json", ("make_scanner",), _by_attributes(
            "strict", "object_hook", "object_pairs_hook", "parse_float", "parse_int", "parse_constant")),
        ("msgspec.json", ("Decoder",), _by_attributes("type", "strict", "dec_hook", "float_hook")),
        ("msgspec.json", ("Encoder",), _by_attributes(*_MSGSPEC_ENCODER)),
        ("msgspec.msgpack", ("Decoder",), _by_attributes("type", "strict", "dec_hook", "ext_hook")),
        ("msgspec.msgpack", ("Encoder",), _by_attributes(*_MSGSPEC_ENCODER)),
        ("msgspec", ("Meta",), _by_attributes(
            "gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz", "title",
            "description", "examples", "extra_json_schema", "extra")),
        ("pydantic.type_adapter", ("TypeAdapter",), _adapter_of_pydantic),
        ("pydantic._internal._validate_call", ("ValidateCallWrapper",), _validated_call),
        ("IPython.core.interactiveshell", ("InteractiveShell",), _refusing(
            "a line with `!` or `%` depends on more than the code; call subprocess.run, or plain Python")),
        ("builtins", ("memoryview",), _refusing("pass bytes(...) of it")),
        ("_contextvars", ("ContextVar",), _refusing("pass the value that it has, its .get()")),
        ("subprocess", ("Popen",), _refusing("it is another process, with a number of its own in every run")),
        ("types", ("MappingProxyType",), _proxy),
        ("types", ("ClassMethodDescriptorType",), _class_method_in_c),
        ("types", ("CodeType",), _code),
        ("types", ("CellType",), _cell),
        ("string.templatelib", ("Template",), _by_attributes("strings", "interpolations")),
        ("string.templatelib", ("Interpolation",), _by_attributes(
            "value", "expression", "conversion", "format_spec")),
        ("re", ("Match",), _match),
        ("re", ("Scanner",), _scanner),
        ("decimal", ("Context",), _context),
        ("loguru._logger", ("Logger",), by_type),
        ("toolz.functoolz", ("curry",), _by_attributes("func", "args", "keywords")),
        ("cytoolz.functoolz", ("curry",), _by_attributes("func", "args", "keywords")),
        ("cachetools._descriptor", ("_MethodDescriptor",), _by_attributes("__wrapped__")),
        ("cachetools._cachedmethod", ("_WrapperBase",), _by_attributes("__wrapped__")),
        ("wrapt", ("FunctionWrapper", "BoundFunctionWrapper"), _wrapper_of_wrapt),
        ("wrapt", ("BaseObjectProxy", "ObjectProxy"), _proxy_of_wrapt),
        ("ray.remote_function", ("RemoteFunction",), _by_attributes("_function", "_default_options")),
        ("regex", ("Match",), _match),
        ("regex", ("Pattern",), _pattern),
        ("ctypes", ("_CFuncPtr",), _c_function),
        ("ctypes", ("CDLL",), _c_library),
        ("multiprocessing.shared_memory", ("SharedMemory",), _shared_memory),
        ("ctypes", ("c_void_p", "_Pointer"), _pointer),
        ("ctypes", ("_SimpleCData", "Array", "Structure", "Union"), _c_data),
        ("PIL.Image", ("Image",), _image),
        ("PIL.ImageFont", ("FreeTypeFont",), _font),
        ("pyarrow", ("Table", "RecordBatch", "Array", "ChunkedArray", "Buffer"), _arrow),
        ("pandas", ("Timestamp", "Timedelta"), pandas_tables.timestamp),
        ("pandas", ("Period",), pandas_tables.period),
        ("pandas", ("Interval",), pandas_tables.interval),
        ("datetime", ("timezone",), _exact),
        ("pandas", ("DataFrame",), pandas_tables.frame),
        ("pandas", ("Series",), pandas_tables.series),
        ("pandas", ("Index",), pandas_tables.index),
        ("pandas.api.extensions", ("ExtensionArray",), pandas_tables.array),
        ("scipy.sparse._base", ("_spbase",), _sparse_matrix),
        ("datasets.iterable_dataset", ("IterableDataset", "_BaseExamplesIterable"), _stream_of_rows),
        ("numpy.lib.npyio", ("NpzFile",), _archive),
        ("numpy", ("vectorize",), _vectorized),
        ("numba.core.dispatcher", ("Dispatcher",), _jitted),
        ("numba.np.ufunc.ufunc_base", ("UfuncBase",), _universal),
        ("numba.np.ufunc.dufunc", ("DUFunc",), _universal),
        ("numba.np.ufunc.gufunc", ("GUFunc",), _universal),
        ("numba.core.ccallback", ("CFunc",), _callback),
        ("numba.experimental.jitclass.base", ("JitClassType",), _jitted_class),
        ("numpy", ("ufunc",), _ufunc),
        ("torch", ("UntypedStorage", "TypedStorage"), _storage),
        ("torch.autograd.profiler", ("record_function",), _by_attributes("name", "args")),
        ("torch.amp.autocast_mode", ("autocast",), _by_attributes(
            "device", "fast_dtype", "_enabled", "_cache_enabled")),
        ("torch.jit", ("ScriptFunction",), _scripted),
        ("torch.jit", ("ScriptModule",), scripted_module),
        ("torch._library.custom_ops", ("CustomOpDef",), _operator_of_torch),
        ("torch", ("Tensor",), tensor),
        ("torch", ("device", "dtype", "layout", "memory_format"), _word),
        ("torch", ("Generator",), _torch_generator),
        ("ahocorasick", ("Automaton",), _automaton),
        ("sklearn.neighbors", ("KDTree", "BallTree"), _neighbours),
        ("spacy.language", ("Language",), _language),
        ("spacy.tokens.doc", ("Doc",), _document),
        ("spacy.tokenizer", ("Tokenizer",), _rules),
        ("spacy.vocab", ("Vocab",), _vocabulary),
    ],
    {_VIEWS: _view_of_dict},
)  # fmt: skip
