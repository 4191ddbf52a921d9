"""Keys: names computed from what a result depends on, so that the same question finds the same entry.

`key` is for configs and content, `fingerprint` for any one value; functions are in `castore.keys.functions`.
Assumes that a value does not change while it is hashed. Must never answer by `repr`, `str`, `id` or pickle, which
differ between runs or hide differences: what has no stable, exact encoding is an UnhashableError that names it.
Imports no NumPy: a value can only be an array where somebody has imported it already. Nor what else takes long: dataclasses, decimal, uuid.

The encoding is injective: a tag that tells the type, the length, the payload. Leaves of over 1 KiB are replaced by
their BLAKE3 digest under a tag of their own, so an array of any size costs no memory. Parts of dicts and sets are
sorted by their encodings. A change to it changes every key, so it carries a version.
"""

from __future__ import annotations

import datetime as dt
import enum
import os
import pathlib
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias

from blake3 import blake3

from castore.errors import InvalidValueError, UnhashableError
from castore.keys.classes import has_member
from castore.names import check_name

Content: TypeAlias = str | bytes | bytearray | memoryview | os.PathLike[str] | Iterable[bytes]

# 160 bits, as Git's: with 128, somebody who supplies configs or content could find two of one key in 2**64 steps.
KEY_DIGITS = 40
_VERSION = b"castore.key.1"
_CHUNK = 1 << 20
_LONG_LEAF = 1024
# Far beyond any config; five Python frames a level leave room under the default recursion limit of 1000.
_DEEPEST = 100
# Where classes of time zones have the name of one: zoneinfo, pytz, dateutil.
_ZONE_NAMES = ("key", "zone", "_filename")
# Of the way to a part, in an error.
_LONG_STEP = 60
_LONG_PATH = 120


def key(config: object, prefix: str | None = None, content: Content | None = None) -> str:
    """The name under which the result for `config` (and `content`) belongs.

    The order of dicts and sets does not matter; every type does: 1, 1.0, True, "1" and b"1" differ, and so do
    a list and a tuple, 0.0 and -0.0, a path and its text. Paths are hashed as paths: their files are not read.

    Args:
        config: None, bool, int, float, complex, str, bytes, bytearray, list, tuple and named tuples, dict, set,
            frozenset, range, slice, paths, enums, dataclasses, dates and times, Decimal, UUID, NumPy scalars,
            arrays and dtypes, nested as you like. Objects of your own count if their class has a method
            `__castore_key__` that returns something of these which identifies them.
        prefix: a valid name; the key is then `prefix_<hex>`, else `<hex>`.
        content: bytes that the result depends on: a text (as UTF-8), bytes, the file at a path object, or
            an iterable of bytes in order. However it comes, the same bytes give the same key.

    Returns:
        a valid name that ends in 40 hexadecimal digits (160 bits of BLAKE3).

    Raises:
        UnhashableError: a part of `config` has no stable hash; the message has the path to it.
        InvalidNameError: `prefix` is no valid name.
        InvalidValueError: `content` is of another kind, or cannot be read.

    >>> key({"model": "bert", "length": 128}, prefix="tokenized") == key(
    ...     {"length": 128, "model": "bert"}, prefix="tokenized")
    True
    >>> key({"length": 128}) == key({"length": 128.0})
    False
    >>> key({"model": object()})
    Traceback (most recent call last):
    castore.errors.UnhashableError: config['model']: cannot hash <class 'object'>; pass a str or a number ...
    """
    digits = digits_of(Encoder().encode(config, "config"), content)
    return digits if prefix is None else check_name(f"{check_name(prefix)}_{digits}")


def digits_of(config: bytes, content: Content | None = None) -> str:
    """The hexadecimal digits of a key, given the canonical bytes of a config."""
    hasher = blake3(_VERSION)
    hasher.update(_leaf(b"config", config))
    if content is not None:
        hasher.update(_leaf(b"content", _content_digest(content)))
    return str(hasher.hexdigest()[:KEY_DIGITS])


def fingerprint(value: object, what: str = "value") -> str:
    """64 hexadecimal digits (BLAKE3-256) that identify `value`, of any type that `key` takes in a config.

    Args:
        value: what to hash.
        what: its name in the message of an error.

    Raises:
        UnhashableError: a part of `value` has no stable hash; the message has the path to it.

    >>> fingerprint({1, 2, 3}) == fingerprint({3, 2, 1})
    True
    """
    return str(blake3(_VERSION + Encoder().encode(value, what)).hexdigest())


class UnencodableError(Exception):
    """On its way up from a part that has no encoding; collects the path to it. Never leaves this package.

    Attributes:
        path: steps to the part, the last one first.
        holder: the class of a library's object that the part is inside of, and how many steps inside.
        is_users: whether an object of the user's own is around the part: that is what people will look for.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []
        self.holder: tuple[str, int] | None = None
        self.is_users = False

    def told(self) -> str:
        """Where it is, and what the problem is, for people."""
        if self.holder is None or not self.holder[1]:
            return f"{_path(self.path)}: {self.problem}"
        holder, inside = self.holder
        return f"{_path(self.path[inside:])}: cannot hash this {holder}: its part {_path(self.path[:inside])}: {self.problem}"


class RefusedError(UnhashableError):
    """An object's own `__castore_key__` says that what is made of it must not be kept."""


class AnyOrder(dict[Any, Any]):
    """A dict whose order says nothing, where that of others counts: attributes, options by name."""


class Encoder:
    """Turns a value into canonical bytes. One use each: it remembers where it stands to notice cycles.

    Attributes:
        leaves: by type, what encodes values that hold no others; containers do not ask `part` about these.
    """

    leaves: Mapping[type, Callable[[Any], bytes]]

    def __init__(self) -> None:
        self._open: set[int] = set()

    def encode(self, value: object, what: str) -> bytes:
        """The canonical bytes of `value`; `what` names it in the UnhashableError."""
        try:
            return self.part(value)
        except UnencodableError as error:
            raise UnhashableError(f"{what}{error.told()}") from error.__cause__
        except RecursionError:
            raise UnhashableError(f"{what}: is nested too deep for what is left of Python's stack") from None

    def part(self, value: Any, step: str = "") -> bytes:
        """The canonical bytes of a part; `step` is how it is reached from the part around it."""
        try:
            encode_leaf = _LEAVES.get(type(value))
            if encode_leaf is not None:
                return encode_leaf(value)
            return self._nested(value)
        except UnencodableError as error:
            error.path.append(step)
            raise
        except (RecursionError, MemoryError, RefusedError):
            raise
        except Exception as error:  # whatever an object of the user's does when it is asked for an attribute
            raised = UnencodableError(_unasked(value, error))
            raised.path.append(step)
            raise raised from error

    def _nested(self, value: Any) -> bytes:
        if id(value) in self._open:
            raise UnencodableError("contains itself; a key needs a finite value")
        if len(self._open) >= _DEEPEST:
            raise UnencodableError(f"is nested more than {_DEEPEST} levels deep")
        self._open.add(id(value))
        try:
            encode_container = _CONTAINERS.get(type(value))
            return encode_container(self, value) if encode_container else self.other(value)
        finally:
            self._open.discard(id(value))

    def other(self, value: Any) -> bytes:
        """The canonical bytes of a value whose type is in no table."""
        # By its type, not by isinstance: that asks for __class__, and some objects answer with an error.
        cls = type(value)
        if has_member(cls, "__castore_key__"):
            try:
                own = cls.__castore_key__(value)
            except UnhashableError as error:
                raise RefusedError(str(error)) from error
            return _joined(b"own", [_class_name(cls), self.part(own, ".__castore_key__()")])
        if issubclass(cls, enum.Enum):
            # A combination of flags has no name of its own before Python 3.11.
            member = value.value if issubclass(cls, enum.Flag) else value.name
            return _joined(b"enum", [_class_name(cls), self.part(member)])
        if issubclass(cls, pathlib.PurePath):
            concrete = b"path" if issubclass(cls, pathlib.Path) else b"pure path"
            tag = b"windows" if issubclass(cls, pathlib.PureWindowsPath) else concrete
            return _leaf(tag, _utf8(str(value)))
        if has_member(cls, "__dataclass_fields__"):
            return self.dataclass(value)
        if (encode := _late_leaf(cls)) is not None:
            return encode(value)
        if issubclass(cls, tuple) and has_member(cls, "_fields"):
            return self._fields(b"namedtuple", value, value._fields)
        return self.rest(value)

    def dataclass(self, value: Any) -> bytes:
        """The canonical bytes of an object of a dataclass: its fields."""
        import dataclasses  # which somebody has imported already

        return self._fields(b"dataclass", value, sorted(field.name for field in dataclasses.fields(value)))

    def _fields(self, tag: bytes, value: Any, names: Iterable[str]) -> bytes:
        parts = [_class_name(type(value))]
        for name in names:
            parts += [_text(name), self.part(_attribute(value, name), f".{name}")]
        return _joined(tag, parts)

    def rest(self, value: Any) -> bytes:
        """The canonical bytes of what nothing else takes: NumPy's values; the rest is refused."""
        np = sys.modules.get("numpy")
        if np is not None:
            cls = type(value)
            if issubclass(cls, np.dtype):
                return _leaf(b"dtype", _dtype(value))
            if cls in (np.ndarray, np.memmap):
                return _joined(b"array", _array_parts(value))
            if issubclass(cls, np.generic):
                return _joined(b"scalar", _array_parts(np.asarray(value)))
        return refuse(value)

    def items(self, value: Iterable[Any]) -> list[bytes]:
        """The parts of a list or a tuple, in order."""
        leaf = self.leaves.get
        return [
            encode(item) if (encode := leaf(type(item))) else self.part(item, f"[{place}]")
            for place, item in enumerate(value)
        ]

    def members(self, value: Iterable[Any]) -> list[bytes]:
        """The parts of a set, in an order of our own."""
        leaf = self.leaves.get
        return sorted(encode(item) if (encode := leaf(type(item))) else self.member(item) for item in value)

    def member(self, item: Any) -> bytes:
        """A part of a set."""
        return self.part(item, "{...}")

    def mapping(self, value: dict[Any, Any]) -> bytes:
        """The canonical bytes of a dict, whatever its order."""
        return self.unordered(value)

    def unordered(self, value: dict[Any, Any]) -> bytes:
        """The canonical bytes of a dict whose order does not count."""
        return _joined(b"dict", self.pairs(value), each=2)

    def pairs(self, value: dict[Any, Any]) -> list[bytes]:
        """Each key with its value, in an order of our own."""
        leaves = self.leaves
        if leaves.keys() >= {*map(type, value), *map(type, value.values())}:  # a vocabulary, say
            return sorted(
                [leaves[type(name)](name) + leaves[type(item)](item) for name, item in value.items()]
            )
        # All keys before any value, so that a subclass that numbers what it meets does so in one order.
        codes = [self.part(name, f".keys()[{place}]") for place, name in enumerate(value)]
        names = sorted(zip(codes, value, strict=True), key=itemgetter(0))
        # Sorted again for keys that are unequal and yet encode alike: NaN. No code is the start of another, so what
        # follows a code counts only between those.
        return sorted([code + self.part(value[name], f"[{name!r}]") for code, name in names])


def refuse(value: object) -> NoReturn:
    """Say that `value` cannot be hashed."""
    hint = "pass a str or a number that identifies it, or give its class a __castore_key__ method that does"
    for plain in (dict, list, set, str, int, float):
        if issubclass(type(value), plain):
            hint = f"pass {plain.__name__}(...) of it"
            break
    raise UnencodableError(f"cannot hash {type(value)}; {hint}")


def _path(reached: list[str]) -> str:
    """The way to a part, for people: what is too long of it is left out in the middle."""
    steps = [step if len(step) <= _LONG_STEP else f"{step[:_LONG_STEP]}..." for step in reversed(reached)]
    path = "".join(steps)
    if len(path) <= _LONG_PATH:
        return path
    return f"{path[: _LONG_PATH // 2]} ... {path[-_LONG_PATH // 2 :]}"


def _unasked(value: object, error: Exception) -> str:
    """Of a value that raised an error when it was asked; both may raise another one when they are shown."""
    try:
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"cannot hash {type(value)}: {told}"
    except Exception:  # noqa: BLE001 - the user's own __repr__ or __str__
        return f"cannot hash a value of {object.__repr__(type(value))}: it raises errors when it is asked"


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except AttributeError:
        raise UnencodableError(f"has no value for its field {name!r}") from None


def _leaf(tag: bytes, payload: Any) -> bytes:
    """Tag, length and payload; the length of the tag is in front, so that none is the start of another."""
    size = len(payload)
    if size > _LONG_LEAF:
        return b"%c%b#%d:%b" % (len(tag), tag, size, blake3(payload).digest())
    return b"%c%b:%d:%b" % (len(tag), tag, size, payload)


def _joined(tag: bytes, parts: list[bytes], each: int = 1) -> bytes:
    # Parts carry their own lengths, so their number is all that is needed to take them apart again.
    return b"%c%b+%d:%b" % (len(tag), tag, each * len(parts), b"".join(parts))


def _utf8(text: str) -> bytes:
    # File names that are not UTF-8 arrive with lone surrogates.
    return text.encode("utf-8", "surrogatepass")


def _text(text: str) -> bytes:
    # `_leaf` at half the time, like the next one: there are many of both in a vocabulary.
    data = text.encode("utf-8", "surrogatepass")
    return b"\x03str:%d:%b" % (len(data), data) if len(data) <= _LONG_LEAF else _leaf(b"str", data)


def _class_name(cls: type) -> bytes:
    return _text(f"{cls.__module__}.{cls.__qualname__}")


def _integer(number: int) -> bytes:
    return number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)


def _int(number: int) -> bytes:
    data = _integer(number)
    return b"\x03int:%d:%b" % (len(data), data) if len(data) <= _LONG_LEAF else _leaf(b"int", data)


def _double(number: float) -> bytes:
    return b"nan" if number != number else struct.pack(">d", number)


def _zoned(moment: dt.datetime | dt.time) -> bytes:
    # Offset and zone name stand for the zone, and what it is called: zones that agree at one moment may be two.
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
        return _plain_dtype(dtype) + b" with " + Encoder().part(dict(dtype.metadata))
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
    if dtype.isbuiltin == 2:  # a library's own: `str` tells its size alone
        return _utf8(f"{dtype.str} {dtype.type.__module__}.{dtype.type.__qualname__}")
    return _utf8(dtype.str)


def _layout(dtype: Any) -> str:
    """What a dtype of fields says beside them; nothing where they lie one behind the other."""
    np = sys.modules["numpy"]
    told, end = [], 0
    for field, offset, *titles in (dtype.fields[name] for name in dtype.names):
        told += [f"at {offset}"] if offset != end else []
        told += [f"title {title!r}" for title in titles if type(title) is str]
        end = offset + field.itemsize
    told += [f"size {dtype.itemsize}"] if dtype.itemsize != end else []
    told += ["aligned"] if dtype.isalignedstruct else []
    told += ["record"] if dtype.type is np.record else []
    return f" {told}" if told else ""


def _array_parts(array: Any) -> list[bytes]:
    """Type, shape and elements of an array, in C order whatever its layout in memory."""
    np = sys.modules["numpy"]
    parts = [_leaf(b"dtype", _dtype(array.dtype)), _text(str(tuple(int(size) for size in array.shape)))]
    if array.dtype.names is not None:
        # Field by field, since the padding between fields holds whatever was in memory.
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
            f"content must be a str, bytes, a path object or an iterable of bytes in order, not {type(content).__name__}"
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


_LEAVES: dict[type, Callable[[Any], bytes]] = {
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

Encoder.leaves = _LEAVES

# Of modules that take long to import: a value can only be of theirs where somebody has imported them already.
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
    list: lambda encoder, value: _joined(b"list", encoder.items(value)),
    tuple: lambda encoder, value: _joined(b"tuple", encoder.items(value)),
    dict: lambda encoder, value: encoder.mapping(value),
    AnyOrder: lambda encoder, value: encoder.unordered(value),
    set: lambda encoder, value: _joined(b"set", encoder.members(value)),
    frozenset: lambda encoder, value: _joined(b"frozenset", encoder.members(value)),
    range: lambda encoder, value: _joined(b"range", encoder.items((value.start, value.stop, value.step))),
    slice: lambda encoder, value: _joined(b"slice", encoder.items((value.start, value.stop, value.step))),
}
