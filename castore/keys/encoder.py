"""Keys: names computed from what a result depends on, so that the same computation finds the same entry.

`key` is for configs and content, `fingerprint` for any single value. `Encoder` walks through a value by
rules; here are the rules for configs, and `castore.keys.objects` has those for functions and objects. A value
must not change while it is hashed. NumPy and other slow imports (dataclasses, decimal, uuid) are not imported
here: a value can be an array only in a process that has imported NumPy already.

Must never: use `repr`, `str`, `id` or pickle of a value, which differ between runs or hide differences. A
value without a stable, exact encoding raises an UnhashableError that names it.

The encoding is injective: a tag for the type, the length, the payload. Payloads over 1 KiB are replaced by
their BLAKE3 digest under a tag of their own, so an array of any size costs no memory. Parts of dicts and sets
are sorted by their encodings. A change to the encoding changes every key, so the encoding has a version.
"""

from __future__ import annotations

import copy
import datetime as dt
import enum
import os
import pathlib
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import add, itemgetter, le
from typing import Any, NoReturn, TypeAlias

from blake3 import blake3

from castore.errors import InvalidValueError, UnhashableError
from castore.keys.classes import has_member
from castore.keys.moved import name_in_keys
from castore.keys.registry import Rules
from castore.names import check_name

Content: TypeAlias = str | bytes | bytearray | memoryview | os.PathLike[str] | Iterable[bytes]
"""The ``content`` that `key` takes: text, bytes, a file by its path, or pieces of bytes."""

# 160 bits, like Git's: with 128 bits, an attacker could find configs or contents with equal keys in 2**64
# steps.
KEY_DIGITS = 40
_VERSION = b"castore.key.1"
_CHUNK = 1 << 20
_LONG_LEAF = 1024
# Far beyond any config. Python's frames of so many levels stay below the default recursion limit of 1000.
_DEEPEST = 100
# Attributes with the name of a time zone, in zoneinfo, pytz and dateutil.
_ZONE_NAMES = ("key", "zone", "_filename")
# Longest step and longest path shown in an error, in characters.
_LONG_STEP = 60
_LONG_PATH = 120
# Stays empty: the rules for configs number nothing.
_NONE_MET: dict[int, tuple[Any, object]] = {}


def key(config: object, prefix: str | None = None, content: Content | None = None) -> str:
    """Return the name under which to store the result for `config` (and `content`).

    The order of dicts and sets does not matter, but every type does: 1, 1.0, True, "1" and b"1" differ. So do
    a list and a tuple, 0.0 and -0.0, a path and its text. Paths are hashed as paths: their files are not
    read.

    Args:
        config: None, bool, int, float, complex, str, bytes, bytearray, list, tuple and named tuples, dict,
            set, frozenset, range, slice, paths, enums, dataclasses, dates and times, Decimal, UUID, NumPy
            scalars, arrays and dtypes, nested at most 100 levels deep. Objects of your own classes are
            accepted if the class has a method `__castore_key__` that returns such a value, one that
            identifies the object.
        prefix: a valid name. The key is then `prefix_<hex>`. Default: the key is `<hex>`.
        content: bytes that the result depends on: a str (as UTF-8), bytes, a path object of a file to read,
            or an iterable of bytes in order. The same bytes give the same key in any of these forms. Default:
            no content.

    Returns:
        A valid name that ends in 40 hexadecimal digits (160 bits of BLAKE3).

    Raises:
        UnhashableError: a part of `config` has no stable hash; the message has the path to the part.
        InvalidNameError: `prefix` is not a valid name.
        InvalidValueError: `content` is of another type, or cannot be read.

    >>> key({"model": "bert", "length": 128}, prefix="tokenized") == key(
    ...     {"length": 128, "model": "bert"}, prefix="tokenized")
    True
    >>> key({"length": 128}) == key({"length": 128.0})
    False
    >>> key({"model": object()})
    Traceback (most recent call last):
    castore.errors.UnhashableError: config['model']: cannot hash <class 'object'>; pass a str or a number ...
    """
    digits = digits_of(Encoder(CONFIGS).encode(config, "config"), content)
    return digits if prefix is None else check_name(f"{check_name(prefix)}_{digits}")


def digits_of(config: bytes, content: Content | None = None) -> str:
    """The hexadecimal digits of a key, from the canonical bytes of a config."""
    hasher = blake3(_VERSION)
    hasher.update(_leaf(b"config", config))
    if content is not None:
        hasher.update(_leaf(b"content", _content_digest(content)))
    return str(hasher.hexdigest()[:KEY_DIGITS])


def fingerprint(value: object, what: str = "value") -> str:
    """Return 64 hexadecimal digits (BLAKE3-256) that identify `value`.

    Args:
        value: a value of any type that `key` accepts in a config.
        what: name of the value in error messages. Default "value".

    Raises:
        UnhashableError: a part of `value` has no stable hash; the message has the path to the part.

    >>> fingerprint({1, 2, 3}) == fingerprint({3, 2, 1})
    True
    """
    return str(blake3(_VERSION + Encoder(CONFIGS).encode(value, what)).hexdigest())


class UnencodableError(Exception):
    """A part has no encoding. Collects the path to the part on the way up. Never leaves this package.

    Attributes:
        path: steps to the part, the last step first.
        holder: class of the library object that contains the part, and the number of steps from there to the
            part.
        is_users: whether an object of a user's class contains the part: users search that object first.
        whole_module: whether the problem says already that the part counts since its module is handed on.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []
        self.holder: tuple[str, int] | None = None
        self.is_users = False
        self.whole_module = False

    def message(self) -> str:
        """The path to the part, and the problem, for the error message."""
        if self.holder is None or not self.holder[1]:
            return f"{_path(self.path)}: {self.problem}"
        holder, inside = self.holder
        return (
            f"{_path(self.path[inside:])}: cannot hash this {holder}: "
            f"its part {_path(self.path[:inside])}: {self.problem}"
        )


class RefusedError(UnhashableError):
    """An object's `__castore_key__` raised UnhashableError: results that depend on it must not be stored."""


class AnyOrder(dict[Any, Any]):
    """A dict whose order does not count, for encoders that count the order of dicts: attributes, options."""


class Encoder:
    """Turns one value into canonical bytes, by `Rules`. Use each instance once: it tracks its position.

    Leaves and plain containers are encoded by their exact type, all other values by the rules.

    Args:
        rules: what is done with each type.
        watch: sees what the encoder does. Default None: nothing does.
        found: collects what is found in the bytes (`castore.keys.tracing`). Default None, for configs.

    Attributes:
        leaves: functions for values that contain no others, by type. Containers use them directly, without
            `part`.
        open: ids on the way to the part, with whether each is a value's: otherwise it is a followed module's.
        met: numbers of functions, classes and objects by id, with the object. They refer to one another in
            cycles: a number represents an object that is met again.
        parameters: how many of these are parameters of models.
        roots: numbers by id, with the object, of those of which only parts have been encoded.
        known_parts: the numbers, with the parts' steps.
        ordered: whether the order of dicts counts here: it counts in the user's values, not in a library's.
        marks: names of what surrounds the part, for rules further inside.
        unordered: ids of dicts whose order does not count. Their objects keep them alive.
        memory: what the rules remember about the parts of this encoder.
    """

    leaves: Mapping[type, Callable[[Any], bytes]]
    watch: Watch | None = None
    found: Any = None
    marks: frozenset[str] = frozenset()
    ordered = False
    parameters = 0

    def __init__(self, rules: Rules, watch: Watch | None = None, found: Any = None) -> None:
        # For a small config this takes a good part of the time, so it does little.
        self.rules = rules
        self.open: dict[int, bool] = {}
        self.met = _NONE_MET
        self.roots = _NONE_MET
        self._asks_first = False
        if rules.orders is not None:
            self._begin_following(rules, watch, found)

    def _begin_following(self, rules: Rules, watch: Watch | None, found: Any) -> None:
        self.watch, self.found, self.ordered, self.marks = watch, found, True, found.counted
        self._asks_first = bool(rules.first) or watch is not None
        self._begin_numbering()
        if watch is not None and watch.sees_leaves:
            self.leaves = {}
            return
        # Encoded parts come back as bytes, and must be searched.
        self.leaves = leaves = {**LEAVES, bytes: found.leaf}
        for kind in rules.first:
            leaves.pop(kind, None)

    def encode(self, value: object, what: str) -> bytes:
        """Return the canonical bytes of `value`; `what` names it in the UnhashableError."""
        try:
            return self.part(value)
        except UnencodableError as error:
            raise UnhashableError(f"{what}{error.message()}") from error.__cause__
        except RecursionError:
            raise UnhashableError(f"{what}: is nested too deep for what is left of Python's stack") from None

    def part(self, value: Any, step: str = "", direct: bool = False) -> bytes:
        """Return the canonical bytes of a part.

        Args:
            value: the part.
            step: the path to the part from the part that contains it. Default "".
            direct: without the rules that come first, and without the watch. Default False.
        """
        if self._asks_first and not direct:
            first = self.rules.first.get(type(value))
            if first is not None and (code := first(self, value, step)) is not None:
                return code
            if self.watch is not None:
                return self.watch.part(self, value, step)
        try:
            encode_leaf = LEAVES.get(type(value))
            return encode_leaf(value) if encode_leaf is not None else self._nested(value)
        except UnencodableError as error:
            error.path.append(step)
            raise
        except (RecursionError, MemoryError, RefusedError):
            raise
        except Exception as error:  # a user's object may raise anything when an attribute is read
            raised = UnencodableError(_unasked(value, error))
            raised.path.append(step)
            raise raised from error

    def watched(self, value: Any, step: str) -> bytes:
        """As `part`, without the rules that come first; for such a rule itself."""
        if self.watch is not None:
            return self.watch.part(self, value, step)
        return self.part(value, step, direct=True)

    def _nested(self, value: Any) -> bytes:
        number = id(value)
        if number in self.met:
            return self.tagged("met", self.met[number][0])
        if number in self.open:
            return self._again(number)
        if len(self.open) >= _DEEPEST:
            raise UnencodableError(f"is nested more than {_DEEPEST} levels deep")
        self.open[number] = True
        try:
            encode_container = _CONTAINERS.get(type(value))
            code = self._by_rules(value) if encode_container is None else encode_container(self, value)
        finally:
            del self.open[number]
        return self.tagged("root", self.roots[number][0], code) if number in self.roots else code

    def _by_rules(self, value: Any) -> bytes:
        around = self.ordered
        try:
            if self.rules.orders is not None:
                self.ordered = self.rules.orders(value, around)
            for rule in self.rules.all:
                code = rule(self, value)
                if code is not None:
                    return code
            refuse(value)
        finally:
            self.ordered = around

    def _again(self, number: int) -> bytes:
        # A part that contains itself, as a registry of functions that use the registry, counts by the number
        # of levels up to it.
        if self.rules.orders is None or not self.open[number]:
            raise UnencodableError("contains itself; a key needs a finite value")
        values = [other for other, is_value in self.open.items() if is_value]
        return self.tagged("around", len(values) - values.index(number))

    def tagged(self, tag: str, *parts: Any) -> bytes:
        """A tag and parts, as bytes."""
        if self.watch is not None:
            self.watch.tagged(tag, parts)
        return self.part((tag, *parts))

    def number(self, value: object) -> None:
        """Give a value the next number, which stands for the value wherever it is met again."""
        self.met[id(value)] = (len(self.met) - self.parameters, value)

    def number_parameter(self, value: object) -> None:
        """The same for a parameter of a model: those that are one object are trained as one."""
        self.met[id(value)] = (("parameter", self.parameters), value)
        self.parameters += 1

    def root(self, value: object) -> int:
        """The number of a value of which only parts are encoded. It stands beside the value's bytes wherever
        the value is encoded as a whole.
        """
        number: int = self.roots.setdefault(id(value), (len(self.roots), value))[0]
        return number

    def beside(self) -> Encoder:
        """An encoder for an element of a set: the same context, own numbers since a set's order is random."""
        if self.rules.orders is None:
            return self
        alone = copy.copy(self)
        alone._begin_numbering()
        return alone

    def _begin_numbering(self) -> None:
        self.met = {}
        self.roots = {}
        self.known_parts: set[tuple[int, str]] = set()
        self.parameters = 0
        self.unordered: set[int] = set()
        self.memory: Any = self.rules.memory() if self.rules.memory is not None else None


class Watch:
    """Sees what an encoder does. This one lets everything pass.

    Attributes:
        sees_leaves: whether `part` sees leaves in containers too.
    """

    sees_leaves = False

    def begin(self) -> None:
        """An encoding begins. A second one begins where the first has met what counts from the start on."""

    def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
        """The canonical bytes of a part; `encoder.part(..., direct=True)` makes them."""
        return encoder.part(value, step, direct=True)

    def tagged(self, tag: str, parts: tuple[Any, ...]) -> None:
        """A tag and its parts will be encoded."""

    def function(self, encoder: Encoder, function: Any, parts: list[Any]) -> None:
        """These are the parts of a function that count."""

    def reference(self, value: Any, step: str, code: bytes) -> None:
        """A function refers to a value, and these are the value's canonical bytes."""

    def settings(self, value: Any, step: str, parts: list[tuple[str, Any, bytes]]) -> None:
        """A function reads these parts of a value alone, each with its step and its canonical bytes."""


# --- containers ---------------------------------------------------------------------------------------------


def _items(encoder: Encoder, value: Iterable[Any]) -> list[bytes]:
    """The encoded parts of a list or a tuple, in order."""
    leaf = encoder.leaves.get
    return [
        encode(item) if (encode := leaf(type(item))) else encoder.part(item, f"[{place}]")
        for place, item in enumerate(value)
    ]


def _members(encoder: Encoder, value: Iterable[Any]) -> list[bytes]:
    """The encoded parts of a set, sorted."""
    leaf = encoder.leaves.get
    return sorted(
        encode(item) if (encode := leaf(type(item))) else encoder.beside().part(item, "{...}")
        for item in value
    )


def _dict(encoder: Encoder, value: dict[Any, Any]) -> bytes:
    """The canonical bytes of a dict. In the user's values the order of keys counts, unless it is sorted."""
    counts = encoder.ordered and len(value) > 1 and type(value) is dict and id(value) not in encoder.unordered
    order = order_of_keys(value) if counts else None
    leaves = encoder.leaves
    if leaves.keys() >= {*map(type, value), *map(type, value.values())}:  # for example a vocabulary
        names = [leaves[type(name)](name) for name in value]
        pairs = map(add, names, [leaves[type(item)](item) for item in value.values()])
        code = _joined(b"dict", sorted(pairs), each=2)
        return code if order is None else encoder.tagged("in order", code, _joined(b"list", names))
    code = _joined(b"dict", _pairs(encoder, value), each=2)
    return code if order is None else encoder.tagged("in order", code, encoder.part(order, ".keys()"))


def _pairs(encoder: Encoder, value: dict[Any, Any]) -> list[bytes]:
    """Each encoded key with its encoded value, sorted."""
    # All keys before any value, so that an encoder that numbers objects numbers them in the same order.
    codes = [encoder.part(name, f".keys()[{place}]") for place, name in enumerate(value)]
    names = sorted(zip(codes, value, strict=True), key=itemgetter(0))
    # Sorted again for unequal keys with equal encodings, such as NaN. No code is a prefix of another code, so
    # the values decide the order only between equal codes.
    return sorted([code + encoder.part(value[name], f"[{name!r}]") for code, name in names])


def order_of_keys(pairs: dict[Any, Any]) -> list[Any] | None:
    """The keys of a dict in their order; None if the order is numeric or alphabetic."""
    keys = list(pairs)
    sortable = {*map(type, keys)} in ({str}, {int}, set())
    return None if sortable and all(map(le, keys, keys[1:])) else keys


# --- rules for plain values ---------------------------------------------------------------------------------


def own_key(encoder: Encoder, value: Any) -> bytes | None:
    """A value whose class has `__castore_key__`, by what that returns."""
    # By type, not with isinstance: isinstance reads `__class__`, and some objects raise errors then.
    cls = type(value)
    if not has_member(cls, "__castore_key__"):
        return None
    try:
        own = cls.__castore_key__(value)
    except UnhashableError as error:
        raise RefusedError(str(error)) from error
    if own is value:
        name = f"{cls.__module__}.{cls.__qualname__}"
        raise RefusedError(f"{name}.__castore_key__ returns the object itself; return what it is made of")
    return _joined(b"own", [_class_name(cls), encoder.part(own, ".__castore_key__()")])


def named_value(encoder: Encoder, value: Any) -> bytes | None:
    """A member of an enumeration, or a path."""
    cls = type(value)
    if issubclass(cls, enum.Enum):
        # A combination of flags has no name of its own before Python 3.11.
        member = value.value if issubclass(cls, enum.Flag) else value.name
        return _joined(b"enum", [_class_name(cls), encoder.part(member)])
    if issubclass(cls, pathlib.PurePath):
        concrete = b"path" if issubclass(cls, pathlib.Path) else b"pure path"
        tag = b"windows" if issubclass(cls, pathlib.PureWindowsPath) else concrete
        return _leaf(tag, _utf8(str(value)))
    return None


def _dataclass(encoder: Encoder, value: Any) -> bytes | None:
    if not has_member(type(value), "__dataclass_fields__"):
        return None
    import dataclasses  # already imported by the module that defines the dataclass

    return _fields(encoder, b"dataclass", value, sorted(field.name for field in dataclasses.fields(value)))


def late_leaf_or_named_tuple(encoder: Encoder, value: Any) -> bytes | None:
    """A leaf of a type that is slow to import, or a named tuple."""
    cls = type(value)
    if (encode := _late_leaf(cls)) is not None:
        return encode(value)
    if issubclass(cls, tuple) and has_member(cls, "_fields"):
        return _fields(encoder, b"namedtuple", value, value._fields)
    return None


def _fields(encoder: Encoder, tag: bytes, value: Any, names: Iterable[str]) -> bytes:
    parts = [_class_name(type(value))]
    for name in names:
        parts += [_text(name), encoder.part(_attribute(value, name), f".{name}")]
    return _joined(tag, parts)


def plain_array(encoder: Encoder, value: Any) -> bytes | None:
    """NumPy's arrays, scalars and dtypes."""
    np = sys.modules.get("numpy")
    if np is not None:
        cls = type(value)
        if issubclass(cls, np.dtype):
            return _leaf(b"dtype", _dtype(value))
        if cls in (np.ndarray, np.memmap):
            return _joined(b"array", _array_parts(value))
        if issubclass(cls, np.generic):
            return _joined(b"scalar", _array_parts(np.asarray(value)))
    return None


def refuse(value: object) -> NoReturn:
    """Raise the error for a value that cannot be hashed."""
    hint = "pass a str or a number that identifies it, or give its class a __castore_key__ method that does"
    for plain in (dict, list, set, str, int, float):
        if issubclass(type(value), plain):
            hint = f"pass {plain.__name__}(...) of it"
            break
    raise UnencodableError(f"cannot hash {type(value)}; {hint}")


def _path(reached: list[str]) -> str:
    """The path to a part, for error messages. Long steps and long paths are shortened."""
    steps = [step if len(step) <= _LONG_STEP else f"{step[:_LONG_STEP]}..." for step in reversed(reached)]
    path = "".join(steps)
    if len(path) <= _LONG_PATH:
        return path
    return f"{path[: _LONG_PATH // 2]} ... {path[-_LONG_PATH // 2 :]}"


def _unasked(value: object, error: Exception) -> str:
    """Describe a value that raised an error when an attribute was read. Formatting may raise errors too."""
    try:
        problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"cannot hash {type(value)}: {problem}"
    except Exception:  # noqa: BLE001 - the user's own __repr__ or __str__
        return f"cannot hash a value of {object.__repr__(type(value))}: it raises errors when it is asked"


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except AttributeError:
        raise UnencodableError(f"has no value for its field {name!r}") from None


def _leaf(tag: bytes, payload: Any) -> bytes:
    """Tag, length and payload. The tag's length comes first, so that no encoding is a prefix of another."""
    size = len(payload)
    if size > _LONG_LEAF:
        return b"%c%b#%d:%b" % (len(tag), tag, size, blake3(payload).digest())
    return b"%c%b:%d:%b" % (len(tag), tag, size, payload)


def _joined(tag: bytes, parts: list[bytes], each: int = 1) -> bytes:
    # Parts contain their own lengths, so their number is enough to separate them again.
    return b"%c%b+%d:%b" % (len(tag), tag, each * len(parts), b"".join(parts))


def _utf8(text: str) -> bytes:
    # Python represents file names that are not UTF-8 with lone surrogates.
    return text.encode("utf-8", "surrogatepass")


def _text(text: str) -> bytes:
    # `_leaf` inlined, in half the time, as in `_int`: a vocabulary has many strings and integers.
    data = text.encode("utf-8", "surrogatepass")
    return b"\x03str:%d:%b" % (len(data), data) if len(data) <= _LONG_LEAF else _leaf(b"str", data)


def _class_name(cls: type) -> bytes:
    return _text(f"{name_in_keys(cls.__module__)}.{cls.__qualname__}")


def _integer(number: int) -> bytes:
    return number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)


def _int(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)
    return b"\x03int:%d:%b" % (len(data), data) if len(data) <= _LONG_LEAF else _leaf(b"int", data)


def _double(number: float) -> bytes:
    return b"nan" if number != number else struct.pack(">d", number)


def _zoned(moment: dt.datetime | dt.time) -> bytes:
    # Offset and abbreviation alone do not identify a zone: two zones may agree at one moment. So the zone's
    # name counts.
    zone = moment.tzinfo
    called = ""
    if zone is not None and type(zone) is not dt.timezone:
        key = next((name for at in _ZONE_NAMES if type(name := getattr(zone, at, None)) is str), None)
        called = f" {key}" if key is not None else f" {type(zone).__module__}.{type(zone).__qualname__}"
        if key is None and type(zone).__module__.partition(".")[0] == "zoneinfo":
            raise UnencodableError("is in a time zone without a name; give its ZoneInfo a key=...")
    return _utf8(f"{moment.isoformat()} {moment.tzname()} {moment.fold}{called}")


def _dtype(dtype: Any) -> bytes:
    if dtype.metadata:
        return _plain_dtype(dtype) + b" with " + Encoder(CONFIGS).part(dict(dtype.metadata))
    return _plain_dtype(dtype)


def _plain_dtype(dtype: Any) -> bytes:
    np = sys.modules["numpy"]
    if dtype.hasobject:
        raise UnencodableError(f"cannot hash dtype {dtype}, which holds Python objects; pass a list")
    if dtype.names is not None:
        fields = (f"{name!r}={_dtype(dtype.fields[name][0])!r}" for name in dtype.names)
        return _utf8(f"{{{', '.join(fields)}}}{_layout(dtype)}")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _utf8(f"{_dtype(base)!r}{shape}")
    if dtype.type in (np.longdouble, np.clongdouble):
        raise UnencodableError(
            f"cannot hash dtype {dtype}, which has padding between its numbers; use float64"
        )
    if dtype.isbuiltin == 2:  # a library's own type: `str` contains only its size
        return _utf8(f"{dtype.str} {dtype.type.__module__}.{dtype.type.__qualname__}")
    return _utf8(dtype.str)


def _layout(dtype: Any) -> str:
    """Layout of a structured dtype besides its fields; empty if the fields lie one after another."""
    np = sys.modules["numpy"]
    notes, end = [], 0
    for field, offset, *titles in (dtype.fields[name] for name in dtype.names):
        notes += [f"at {offset}"] if offset != end else []
        notes += [f"title {title!r}" for title in titles if type(title) is str]
        end = offset + field.itemsize
    notes += [f"size {dtype.itemsize}"] if dtype.itemsize != end else []
    notes += ["aligned"] if dtype.isalignedstruct else []
    notes += ["record"] if dtype.type is np.record else []
    return f" {notes}" if notes else ""


def _array_parts(array: Any) -> list[bytes]:
    """Type, shape and elements of an array, in C order whatever the array's memory layout."""
    np = sys.modules["numpy"]
    parts = [_leaf(b"dtype", _dtype(array.dtype)), _text(str(tuple(int(size) for size in array.shape)))]
    if array.dtype.names is not None:
        # Field by field, because the padding between fields has undefined contents.
        for name in array.dtype.names:
            parts += _array_parts(array[name])
        return parts
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.nbytes:
        parts.append(_leaf(b"elements", flat.view(np.uint8)))
    return parts


def _content_digest(content: object) -> bytes:
    hasher = blake3()
    if isinstance(content, str):
        hasher.update(_utf8(content))
    elif isinstance(content, bytes | bytearray | memoryview):
        hasher.update(content)
    elif isinstance(content, os.PathLike):
        _hash_file(hasher, content)
    elif isinstance(content, Iterable) and not isinstance(content, dict | set | frozenset):
        for chunk in content:
            if not isinstance(chunk, bytes | bytearray | memoryview):
                raise InvalidValueError(f"content must yield bytes, not {type(chunk).__name__}")
            hasher.update(chunk)
    else:
        raise InvalidValueError(
            "content must be a str, bytes, a path object or an iterable of bytes in order, "
            f"not {type(content).__name__}"
        )
    return hasher.digest()


def _hash_file(hasher: blake3, path: os.PathLike[str]) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                hasher.update(buffer[:size])
    except OSError as error:
        raise InvalidValueError(
            f"cannot read the content file {os.fspath(path)!r}: {error.strerror}"
        ) from error


#: Functions for values that contain no others, by exact type.
LEAVES: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: _leaf(b"none", b""),
    type(Ellipsis): lambda _: _leaf(b"ellipsis", b""),
    bool: lambda value: _leaf(b"bool", b"1" if value else b"0"),
    int: _int,
    float: lambda value: _leaf(b"float", _double(value)),
    complex: lambda value: _joined(
        b"complex", [_leaf(b"", _double(value.real)), _leaf(b"", _double(value.imag))]
    ),
    str: _text,
    bytes: lambda value: _leaf(b"bytes", value),
    bytearray: lambda value: _leaf(b"bytearray", value),
    dt.datetime: lambda value: _leaf(b"datetime", _zoned(value)),
    dt.time: lambda value: _leaf(b"time", _zoned(value)),
    dt.date: lambda value: _leaf(b"date", _utf8(value.isoformat())),
    dt.timedelta: lambda value: _leaf(b"timedelta", _integer(value // dt.timedelta(microseconds=1))),
}

Encoder.leaves = LEAVES

# Types of modules that are slow to import. A value can have such a type only if its module is imported
# already.
_LATE_LEAVES: dict[tuple[str, str], Callable[[Any], bytes]] = {
    ("decimal", "Decimal"): lambda value: _leaf(b"decimal", _utf8(str(value))),
    ("uuid", "UUID"): lambda value: _leaf(b"uuid", value.bytes),
}


def _late_leaf(cls: type) -> Callable[[Any], bytes] | None:
    for (module, name), encode in _LATE_LEAVES.items():
        if getattr(sys.modules.get(module), name, None) is cls:
            return encode
    return None


_CONTAINERS: dict[type, Callable[[Encoder, Any], bytes]] = {
    list: lambda encoder, value: _joined(b"list", _items(encoder, value)),
    tuple: lambda encoder, value: _joined(b"tuple", _items(encoder, value)),
    dict: _dict,
    AnyOrder: _dict,
    set: lambda encoder, value: _joined(b"set", _members(encoder, value)),
    frozenset: lambda encoder, value: _joined(b"frozenset", _members(encoder, value)),
    range: lambda encoder, value: _joined(b"range", _items(encoder, (value.start, value.stop, value.step))),
    slice: lambda encoder, value: _joined(b"slice", _items(encoder, (value.start, value.stop, value.step))),
}

#: The rules for configs. All other types are refused.
CONFIGS = Rules(own_key, named_value, _dataclass, late_leaf_or_named_tuple, plain_array)
