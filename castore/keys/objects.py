"""Fingerprints of objects: the code of their class, and their state as pickle's protocol defines it.

`castore.keys.encoder` refuses unknown objects, because a config should be explicit. In functions, operators
and datasets an object counts by its class's code and its state. Pickle's protocol defines the state:
`copyreg` first, then `__reduce_ex__`; attributes that `__getstate__` leaves out do not count. Types that the
protocol describes badly are in `castore.keys.values`. An object must not change while it is hashed.

Must never: pickle anything, or remember an object by identity beyond one use of an encoder.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import pickle
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from blake3 import blake3

from castore.errors import InvalidValueError
from castore.keys import addresses
from castore.keys.bytecode import codes, steps
from castore.keys.classes import has_member, per_class
from castore.keys.doubts import LARGE, Doubts, is_generator, kind_of
from castore.keys.encoder import KEY_DIGITS, AnyOrder, UnencodableError
from castore.keys.functions import FunctionEncoder, order_of_keys
from castore.keys.libraries import library_of
from castore.keys.tokenizers import tokenizer_parts
from castore.keys.values import SHARED, full_name

Self = TypeVar("Self", bound="InstanceEncoder")

_VERSION = b"castore.function.1"
#: Attributes of numpy.ma's arrays. `InstanceEncoder.numpy` encodes what counts of them.
_MASKED_NOISE = {
    "_mask",
    "_fill_value",
    "_hardmask",
    "_sharedmask",
    "_isfield",
    "_baseclass",
    "_optinfo",
    "_basedict",
}
_MODULE = "torch.nn.modules.module.Module"
_PARAMETRIZED = "torch.nn.utils.parametrize"
#: torch sets this when it compiles a module in place.
_MODULE_NOISE = {"_compiled_call_impl"}
_MODULE_TABLES = {"_parameters", "_buffers", "_modules"}
_LRU = type(functools.lru_cache(len))
#: Vectorizers of scikit-learn store here the id of the stop word list that they have checked.
_SKLEARN_NOISE = {"_stop_words_id"}


def function_fingerprint(function: Callable[..., Any]) -> str:
    """Return 64 hexadecimal digits that change when the result of `function` may have changed.

    Args:
        function: a function, a lambda, a partial, a method, or a callable object. Functions written in C
            count by name and version.

    Raises:
        UnhashableError: the function refers to a value without a stable hash; the message has the path to the
            value.
        InvalidValueError: `function` is not callable.

    >>> function_fingerprint(lambda x: x + 1) == function_fingerprint(lambda x: x + 1)
    True
    >>> function_fingerprint(lambda x: x + 1) == function_fingerprint(lambda x: x + 2)
    False
    """
    return function_doubts(function)[0]


def function_doubts(function: Callable[..., Any]) -> tuple[str, Doubts | None]:
    """Return `function_fingerprint` of a function, and the values in it that look random."""
    if not callable(function):
        raise InvalidValueError(f"a fingerprint of a function needs a function, not {type(function)}")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    encoder = InstanceEncoder()
    code = encoder.encode(function, name)
    return str(blake3(_VERSION + code).hexdigest()), encoder.doubts(function)


class InstanceEncoder(FunctionEncoder):
    """A FunctionEncoder that also encodes objects of any class."""

    def __init__(self) -> None:
        super().__init__()
        # Number of enclosing functions and classes that set modules to eval before they use them.
        self._settled = 0
        # The same for classes of which only `_settles_behind` tells: their modules count as in eval mode.
        self._settled_behind = 0
        self._around: list[int] = []
        # The path of `doubts` and its findings; None in an encoder that does not trace doubts.
        self._steps: list[str] = []
        self._doubts: dict[str, tuple[str, str]] | None = None
        self._kinds: Counter[str] = Counter()
        self._suspects: set[int] = set()
        # Ids of torch modules' tables. The tables live as long as their modules.
        self._unordered: set[int] = set()

    def mapping(self, value: dict[Any, Any]) -> bytes:
        """As in FunctionEncoder, but the order of a torch module's tables does not count."""
        return self.unordered(value) if id(value) in self._unordered else super().mapping(value)

    def doubts(self, value: object) -> Doubts | None:
        """Find the parts of an encoded value that may be other ones in every run; None if there are none."""
        suspects = addresses.in_memory(self._seen.addresses)
        if not self._seen.doubtful and not suspects:
            return None
        tracer = type(self)()
        tracer._tracing, tracer.leaves, tracer._doubts, tracer._suspects = True, {}, {}, suspects
        try:
            rest = tracer.part(value)
        except RecursionError:  # tracing needs more stack than encoding, and must not fail
            return None
        return Doubts(str(blake3(rest).hexdigest()[:KEY_DIGITS]), tracer._doubts) if tracer._doubts else None

    def _traced(self, value: Any, step: str) -> bytes:
        """As in FunctionEncoder; for `doubts`, a placeholder for a part that may be random."""
        if self._doubts is None:
            return super()._traced(value, step)
        self._steps.append(step)
        try:
            kind = kind_of(value, self._kinds[LARGE])
            if self._suspects and addresses.holds(value, self._suspects):
                told = "number" if type(value) is int else "text with a number"
                kind = f"{told} that may be an address of this process"
            if kind is None or id(value) in self._met:
                return super()._traced(value, step)
            self._kinds[kind] += 1
            self._doubts["".join(self._steps)] = kind, blake3(type(self)().part(value)).hexdigest()[:32]
            return self.tagged("doubtful", kind)
        finally:
            self._steps.pop()

    def _nested(self, value: Any) -> bytes:
        # A part that contains itself, as a registry of functions that use the registry, counts by the number
        # of levels up to it.
        if id(value) in self._around:
            return self.tagged("around", len(self._around) - self._around.index(id(value)))
        self._around.append(id(value))
        try:
            return super()._nested(value)
        finally:
            self._around.pop()

    def other(self, value: Any) -> bytes:
        """As in FunctionEncoder, with the types in `SHARED`."""
        cls = type(value)
        if is_generator(cls):
            self._seen.doubtful = True
        if has_member(cls, "__castore_key__"):
            self._ordered = False  # `__castore_key__` returns a config, in which order does not count
            return super().other(value)
        count = SHARED.of(cls)
        if count is not None:
            return self.tagged(*count(self, value))
        return super().other(value)

    def _beside(self: Self) -> Self:
        """As in FunctionEncoder."""
        alone = super()._beside()
        alone._around, alone._settled = self._around, self._settled
        alone._settled_behind = self._settled_behind
        alone._kinds = self._kinds
        alone._steps, alone._doubts, alone._suspects = self._steps, self._doubts, self._suspects
        return alone

    def function(self, function: types.FunctionType) -> Iterator[Any]:
        """As in FunctionEncoder, but the mode of modules that the function sets to eval does not count."""
        dispatch = _dispatch_registry(function)
        if dispatch is not None:
            yield "singledispatch", sorted((self.part(kind), self.part(f)) for kind, f in dispatch.items())
            return
        settles = _calls_eval(function.__code__)
        self._settled += settles
        try:
            yield from super().function(function)
        finally:
            self._settled -= settles

    def dataclass(self, value: Any) -> bytes:
        """As any object: attributes beside the fields count, and attributes that pickle leaves out do not."""
        return self.rest(value)

    def rest(self, value: Any) -> bytes:
        """Encode NumPy's values with `numpy`, tokenizers by their rules, other objects by class and state."""
        np = sys.modules.get("numpy")
        if np is not None and issubclass(type(value), np.ndarray | np.generic | np.dtype):
            return self.numpy(value)
        tokenizer = tokenizer_parts(value)
        if tokenizer is not None:
            return self.tagged(*tokenizer(self, value))
        try:
            return self.tagged("object", *self.object_(value))
        except UnencodableError as error:
            library = library_of(type(value).__module__)
            if library is None:
                error.is_users = True
            elif not error.is_users and " of Python " not in library:
                error.holder = full_name(type(value)), len(error.path)
            raise

    def numpy(self, value: Any) -> bytes:
        """Return the canonical bytes of an array, a scalar or a dtype."""
        np = sys.modules["numpy"]
        cls = type(value)
        if value is np.ma.masked:
            return self.tagged("masked constant")
        if issubclass(cls, np.ma.MaskedArray):
            mask = None if value.mask is np.ma.nomask else np.ma.getmaskarray(value)
            parts = np.ma.getdata(value), mask, value.fill_value, bool(value.hardmask)
            return self.tagged("masked", *parts, *self._beside_elements(value, np.ma.MaskedArray))
        if issubclass(cls, np.dtype) and value.hasobject:
            return self.tagged("dtype", *_dtype_with_objects(self, value))
        if issubclass(cls, np.ndarray) and value.dtype.hasobject:
            code = self.tagged("objects", value.dtype, value.shape, np.asarray(value).ravel().tolist())
        elif issubclass(cls, np.ndarray):
            code = self.elements(np.asarray(value))
        else:
            return super().rest(value)
        beside = self._beside_elements(value, np.ndarray)
        return self.tagged("array of", code, *beside) if beside else code

    def elements(self, value: Any) -> bytes:
        """Return the canonical bytes of a plain array without Python objects."""
        return super().rest(value)

    def _beside_elements(self, value: Any, plain: type) -> list[Any]:
        """Parts of an array besides its elements: its class if it is a subclass, and its attributes."""
        np = sys.modules["numpy"]
        cls = type(value)
        if cls in (plain, np.memmap):
            return []
        held = getattr(value, "__dict__", {})
        if plain is not np.ndarray:
            held = {name: item for name, item in held.items() if name not in _MASKED_NOISE}
        return [cls, self.lasting(value, dict(held))]

    def object_(self, value: Any) -> Iterator[Any]:
        """Yield the parts of an object: its class, and its state as pickle's protocol defines it."""
        # Objects may refer to one another in cycles: a number represents an object that was met before.
        self._met[id(value)] = (len(self._met), value)
        yield self.part(type(value), f" -> {type(value).__name__}")
        reduced = _reduced(value)
        if type(reduced) is str:  # the name of a global object
            yield _global(value, reduced)
            return
        make, arguments, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
        yield self.part(make)
        # The class was encoded above, and is among the arguments of every object.
        yield self.part(tuple(item for item in arguments if item is not type(value)), " -> arguments")
        yield self.part(list(items) if items is not None else None)
        # The order of an OrderedDict follows after its attributes.
        ordered = issubclass(type(value), OrderedDict)
        pairs = None if pairs is None else AnyOrder(pairs) if ordered else dict(pairs)
        yield self.part(pairs)
        if setter is not None:
            yield "setter", self.part(setter)
        settled, behind = _settles(type(value)), _settles_behind(type(value))
        self._settled += settled
        self._settled_behind += behind
        try:
            yield from self.state(self.lasting(value, state))
        finally:
            self._settled -= settled
            self._settled_behind -= behind
        order = order_of_keys(pairs or {}) if ordered else order_of_layers(value)
        if order is not None:
            yield "order", self.part(order)

    def lasting(self, value: Any, state: Any) -> Any:
        """The state of an object without attributes that its use changes and no result depends on.

        Returns:
            None if nothing is left.
        """
        if type(state) is tuple and len(state) == 2:  # of a class with __slots__
            attributes, slots = state
            return state if type(attributes) is not dict else (self.lasting(value, attributes), slots)
        if type(state) is not dict:
            return state
        noise, is_module = _noise_of(type(value))
        if is_module and self._settled:
            noise = noise | {"training"}
        kept = {name: item for name, item in state.items() if name not in noise}
        if is_module and self._settled_behind and "training" in kept:
            # Models that are in eval mode already keep the keys under which stores have their results.
            kept["training"] = False
        if is_module:
            self._unordered |= {id(kept[name]) for name in _MODULE_TABLES & kept.keys()}
        return (_renumbered(kept) if is_module else kept) or None

    def state(self, state: Any) -> Iterator[Any]:
        """Yield the encoded attributes of an object, or the encoded result of its `__getstate__`."""
        # With __slots__ there are two dicts: attributes in `__dict__`, and those in slots.
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        for part in parts:
            if type(part) is dict and all(type(name) is str for name in part):
                yield [(name, self.part(part[name], f".{name}")) for name in sorted(part)]
            else:
                yield self.part(part, ".__getstate__()")


def _dtype_with_objects(encoder: InstanceEncoder, dtype: Any) -> Iterator[Any]:
    np = sys.modules["numpy"]
    if dtype.names is not None:
        fields = [(name, *dtype.fields[name]) for name in dtype.names]
        yield from (fields, dtype.itemsize, dtype.isalignedstruct, dtype.type is np.record)
    elif dtype.subdtype is not None:
        yield dtype.subdtype
    else:
        # StringDType: the value for a missing string, and whether other values are converted to strings.
        yield type(dtype).__name__, getattr(dtype, "coerce", None), getattr(dtype, "na_object", ())


def _renumbered(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a torch module with its hooks renumbered: torch numbers hooks over the whole process."""
    tables = {
        name: item
        for name, item in state.items()
        if name.endswith("hooks") and isinstance(item, OrderedDict) and item
    }
    places = {number: place for place, number in enumerate(sorted({*itertools.chain(*tables.values())}))}
    hooks = {name: {places[number]: hook for number, hook in item.items()} for name, item in tables.items()}
    return {**state, **hooks} if hooks else state


def order_of_layers(value: Any) -> list[str] | None:
    """Names of a torch module's parts if their order counts and is not numeric or alphabetic; else None."""
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(type(value), torch.nn.Sequential | torch.nn.ModuleDict):
        return None
    names = [*vars(value)["_modules"]]
    numbers = [*map(str, range(len(names)))]
    return None if names == (numbers if {*names} == {*numbers} else sorted(names)) else names


def _reduced(value: Any) -> Any:
    """Reduce an object as pickle does: by `copyreg`'s table, or by the object's `__reduce_ex__`."""
    cls = type(value)
    # A parametrized module refuses to be pickled, because its class has no global name.
    if _is_module(cls) and cls.__module__ == _PARAMETRIZED:
        return copyreg.__newobj__, (cls,), vars(value)  # type: ignore[attr-defined]
    registered = copyreg.dispatch_table.get(cls)
    try:
        reduced = value.__reduce_ex__(4) if registered is None else registered(value)
    except RecursionError:
        raise
    except Exception as error:  # the user's __getstate__ may raise anything
        told = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        advice = (
            "pass what it was made of, or leave it out in the __getstate__ of what holds it"
            if library_of(cls.__module__)
            else "leave it out in __getstate__, or give its class a __castore_key__ method"
        )
        raise UnencodableError(f"cannot hash {cls}: {told}; {advice}") from error
    if type(reduced) is str or (type(reduced) is tuple and 2 <= len(reduced) <= 6):
        return reduced
    raise UnencodableError(
        f"cannot hash {cls}: its __reduce_ex__ gives {type(reduced)}, which pickle cannot use"
    )


def pickled_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object in its pickled state; None if that state is no dict."""
    reduced = _reduced(value)
    state = reduced[2] if type(reduced) is tuple and len(reduced) > 2 else None
    return state if type(state) is dict else None


def _global(value: Any, name: str) -> str:
    """The name by which pickle would look an object up."""
    module: str = pickle.whichmodule(value, name)  # type: ignore[attr-defined]
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise UnencodableError(
            f"cannot hash {type(value)}: it calls itself {name!r}, and {module} has another of that name; "
            "give its class a __castore_key__ method"
        )
    return name


@per_class
def _noise_of(cls: type) -> tuple[frozenset[str], bool]:
    """Names of attributes that do not count, and whether the class is a torch module."""
    # Values of cached properties do not count: the properties' code counts, with the class.
    noise = {
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, functools.cached_property)
    }
    is_module = _is_module(cls)
    noise |= _MODULE_NOISE if is_module else set()
    noise |= _SKLEARN_NOISE if any(base.__module__.startswith("sklearn.") for base in cls.__mro__) else set()
    return frozenset(noise), is_module


def _is_module(cls: type) -> bool:
    return any(full_name(base) == _MODULE for base in cls.__mro__)


@per_class
def _settles(cls: type) -> bool:
    """Whether methods of a class set modules to eval before use, so that the modules' mode does not count.

    For a class that is a torch module itself: whether a method calls ``self.eval``.
    """
    return _sets_to_eval(cls, lambda member: (member,), ("LOAD_FAST",))


@per_class
def _settles_behind(cls: type) -> bool:
    """As `_settles`, for methods behind decorators (torch.no_grad), and for inner functions that read self.

    SentenceTransformer has such methods.
    """
    return _sets_to_eval(cls, _with_wrapped, ("LOAD_FAST", "LOAD_DEREF"))


def _sets_to_eval(cls: type, functions_of: Callable[[Any], Iterable[Any]], loads: tuple[str, ...]) -> bool:
    own = _is_module(cls)
    return any(
        isinstance(function, types.FunctionType)
        and name not in ("__init__", "__new__")
        and (_calls_own_eval(function.__code__, loads) if own else _calls_eval(function.__code__))
        for base in cls.__mro__
        if full_name(base) != _MODULE and (own or not library_of(base.__module__))
        for name, member in vars(base).items()
        for function in functions_of(member)
    )


def _with_wrapped(member: Any) -> Iterator[Any]:
    """A member of a class, and the functions that it wraps, from the outside to the inside."""
    seen: set[int] = set()
    while member is not None and id(member) not in seen:
        yield member
        seen.add(id(member))
        # Only members of known types are asked: others may run the user's code.
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, functools.cached_property):
            member = member.func
        elif isinstance(member, types.FunctionType):
            member = member.__dict__.get("__wrapped__")
        elif isinstance(member, staticmethod | classmethod | _LRU):
            member = member.__wrapped__
        else:
            return


@functools.lru_cache(maxsize=4096)
def _calls_eval(code: types.CodeType) -> bool:
    return any(_is_eval(row) for inner in codes(code) for row in steps(inner))


def _is_eval(row: tuple[str, Any]) -> bool:
    return row[0] in ("LOAD_ATTR", "LOAD_METHOD") and row[1] == "eval"


def _calls_own_eval(code: types.CodeType, loads: tuple[str, ...]) -> bool:
    rows = steps(code)
    return any(
        before[0].startswith(loads) and before[1] == "self" and _is_eval(row)
        for before, row in itertools.pairwise(rows)
    )


def _dispatch_registry(function: types.FunctionType) -> dict[type, Any] | None:
    """The implementations of a `functools.singledispatch` function, without its cache; else None."""
    registry = function.__dict__.get("registry")
    if isinstance(registry, types.MappingProxyType) and callable(function.__dict__.get("dispatch")):
        return dict(registry)
    return None
