"""Kinds of the standard library: containers, times, exact numbers, paths, addresses.

A kind takes instances of its class only, no subclasses: these may hold more. Modules are imported when a
value needs them.
"""

from __future__ import annotations

import collections
import datetime as dt
import importlib
import re
import types
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from castore.errors import SerializationError
from castore.serialize.kinds.forms import Kind, MisfitError, expect, listed

#: Factories that a loaded defaultdict may have: these return empty values and run no other code.
_FACTORIES: dict[str, type] = {
    factory.__name__: factory
    for factory in (
        bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset,
        collections.OrderedDict, collections.Counter, collections.deque,
    )
}  # fmt: skip
#: Characters of a `repr` above which its digest stands for it.
_LONG_TEXT = 4096
#: Keys for which zoneinfo does not look outside its own folders.
_ZONE_KEY = re.compile(r"[A-Za-z0-9_+\-]+(/[A-Za-z0-9_+\-]+)*")


# --- containers ---------------------------------------------------------------------------------------------


def in_order(values: Any) -> list[Any]:
    """The members of a set in an order that is the same in every process."""
    if set(map(type, values)) <= {str} or set(map(type, values)) <= {int}:
        return sorted(values)
    return sorted(values, key=lambda value: repr(_comparable(value)))


def _comparable(value: Any) -> Any:
    """Convert a value so that its `repr` is the same in every process; the `repr` of a set is not."""
    if type(value) is frozenset:
        return "frozenset", sorted(_shorten(repr(_comparable(item))) for item in value)
    if isinstance(value, tuple):
        return type(value).__name__, [_comparable(item) for item in value]
    return type(value).__name__, value


def _shorten(text: str) -> str:
    """The digest of a long text: `repr` doubles the escapes of a text at each set around the text."""
    return text if len(text) <= _LONG_TEXT else str(blake3(text.encode("utf-8", "surrogatepass")).hexdigest())


def _take_defaultdict(value: collections.defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise MisfitError(
            f"is a defaultdict of {factory!r}, which castore does not know; convert it with dict(...)"
        )
    return [name, dict(value)]


def _make_defaultdict(parts: Any) -> Any:
    name, items = listed(2, parts)
    return collections.defaultdict(None if name is None else _FACTORIES[name], expect(dict, items))


def _make_deque(parts: Any) -> Any:
    items, longest = listed(2, parts)
    return collections.deque(expect(list, items), longest)


def _make_namespace(parts: Any) -> Any:
    return types.SimpleNamespace(**expect(dict, parts))


# --- times --------------------------------------------------------------------------------------------------


def zone_of(value: dt.datetime | dt.time) -> dt.tzinfo | None:
    """The time zone of a moment; raises what `known_zone` raises."""
    remedy = "astimezone(datetime.timezone.utc)" if isinstance(value, dt.datetime) else "replace(tzinfo=None)"
    return known_zone(value.tzinfo, remedy)


def known_zone(zone: dt.tzinfo | None, remedy: str) -> dt.tzinfo | None:
    """Return the zone if castore knows such zones.

    Args:
        zone: a time zone, or None.
        remedy: a method of the zone's owner that takes the zone away, as the error's advice.

    Raises:
        MisfitError: castore does not know zones of that library.
    """
    if zone is None or type(zone) is dt.timezone or type(zone).__module__.partition(".")[0] == "zoneinfo":
        return zone
    raise MisfitError(
        f"has the time zone {zone!r} of {type(zone)}, which castore does not know; convert it with {remedy}"
    )


def _take_datetime(value: dt.datetime) -> Any:
    return [[value.year, value.month, value.day, *_clock(value)], zone_of(value)]


def _clock(value: dt.datetime | dt.time) -> list[int]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold]


def _make_datetime(parts: Any) -> Any:
    numbers, zone = listed(2, parts)
    year, month, day, *clock = listed(8, numbers)
    return dt.datetime.combine(dt.date(year, month, day), _make_time([clock, zone]))


def _take_time(value: dt.time) -> Any:
    return [_clock(value), zone_of(value)]


def _make_time(parts: Any) -> dt.time:
    numbers, zone = listed(2, parts)
    hour, minute, second, microsecond, fold = listed(5, numbers)
    return dt.time(hour, minute, second, microsecond, zone, fold=fold)


def _take_timezone(value: Any) -> Any:
    offset, *name = value.__getinitargs__()
    return [offset, name[0] if name else None]


def _make_timezone(parts: Any) -> Any:
    offset, name = listed(2, parts)
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _take_zone(value: Any) -> Any:
    if value.key is None:
        raise MisfitError("is a time zone from a file, without a key; use zoneinfo.ZoneInfo(key)")
    return value.key


def _make_zone(parts: Any) -> Any:
    import zoneinfo

    key = expect(str, parts)
    # zoneinfo may import a data package whose name comes from the key.
    if not _ZONE_KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no time zone")
    try:
        return zoneinfo.ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError:
        raise SerializationError(
            f"the value is in the time zone {key!r}, which this machine does not know; pip install tzdata"
        ) from None


# --- numbers, paths, addresses ------------------------------------------------------------------------------


def _of_text(module: str, attribute: str) -> Kind:
    """The kind of a class that can be constructed from its instances' `str`."""

    def make(parts: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(expect(str, parts))

    return Kind(f"{module}.{attribute}", module, attribute, str, make)


def _make_fraction(parts: Any) -> Any:
    import fractions

    above, below = listed(2, parts)
    return fractions.Fraction(expect(int, above), expect(int, below))


def _take_uuid(value: Any) -> Any:
    return [value.bytes, value.is_safe.value]


def _make_uuid(parts: Any) -> Any:
    import uuid

    data, safe = listed(2, parts)
    return uuid.UUID(bytes=expect(bytes, data), is_safe=uuid.SafeUUID(safe))


def _ints(count: int, make: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda parts: make(*[expect(int, part) for part in listed(count, parts)])


def _spread(count: int, make: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda parts: make(*listed(count, parts))


def _take_dict(value: Any) -> Any:
    """The items; with attributes, both. Torch sets ``_metadata`` on the dict of a module's state."""
    return [dict(value), dict(vars(value))] if vars(value) else dict(value)


def _dict_of(cls: type[dict[Any, Any]]) -> Callable[[Any], Any]:
    def make(parts: Any) -> Any:
        items, attributes = (parts, {}) if type(parts) is dict else listed(2, parts)
        made = cls(expect(dict, items))
        for name, item in expect(dict, attributes).items():
            vars(made)[expect(str, name)] = item
        return made

    return make


STANDARD = [
    Kind("set", "builtins", "set", in_order, lambda parts: set(expect(list, parts))),
    Kind("frozenset", "builtins", "frozenset", in_order, lambda parts: frozenset(expect(list, parts))),
    Kind("bytearray", "builtins", "bytearray", bytes, lambda parts: bytearray(expect(bytes, parts))),
    Kind("complex", "builtins", "complex", lambda value: [value.real, value.imag], _spread(2, complex)),
    Kind("range", "builtins", "range", lambda value: [value.start, value.stop, value.step], _ints(3, range)),
    Kind(
        "slice", "builtins", "slice",
        lambda value: [value.start, value.stop, value.step], _spread(3, slice),
    ),
    Kind("ordereddict", "collections", "OrderedDict", _take_dict, _dict_of(collections.OrderedDict)),
    Kind("counter", "collections", "Counter", _take_dict, _dict_of(collections.Counter)),
    Kind("defaultdict", "collections", "defaultdict", _take_defaultdict, _make_defaultdict),
    Kind("deque", "collections", "deque", lambda value: [list(value), value.maxlen], _make_deque),
    Kind("namespace", "types", "SimpleNamespace", lambda value: dict(vars(value)), _make_namespace),
    Kind("datetime", "datetime", "datetime", _take_datetime, _make_datetime),
    Kind("date", "datetime", "date", lambda value: [value.year, value.month, value.day], _ints(3, dt.date)),
    Kind("time", "datetime", "time", _take_time, _make_time),
    Kind(
        "timedelta", "datetime", "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds], _ints(3, dt.timedelta),
    ),
    Kind("timezone", "datetime", "timezone", _take_timezone, _make_timezone),
    Kind("zone", "zoneinfo", "ZoneInfo", _take_zone, _make_zone),
    _of_text("decimal", "Decimal"),
    Kind(
        "fraction", "fractions", "Fraction",
        lambda value: [value.numerator, value.denominator], _make_fraction,
    ),
    Kind("uuid", "uuid", "UUID", _take_uuid, _make_uuid),
    *(_of_text("pathlib", name) for name in ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")),
    *(
        _of_text("ipaddress", f"IPv{version}{what}")
        for version in (4, 6) for what in ("Address", "Network", "Interface")
    ),
]  # fmt: skip
