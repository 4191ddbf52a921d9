"""Doubts: values in what is hashed that look as if they were drawn anew in every run, and what earlier runs had there.

A random id, a time or a number of this run, the name of a temporary folder and the state of a random generator may be
meant, as a seed is, or may keep a result from ever being found again. One run cannot tell; the next one can. So a store remembers a fingerprint without such values, and
which values there were: where a later run differs from it in nothing else, a warning names the part. Costs a search
through the encoded bytes; all the rest is done only where something was found.

Cannot see what does not look random: a short random number, the order of a list that was made of a set, a random array.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import os
import re
import sys
import time
import uuid
import warnings
from typing import Any, NamedTuple, Protocol

from blake3 import blake3

from castore.errors import FullError, StoreError
from castore.keys.classes import per_class

#: Where a store remembers them.
FOLDER = ".doubts"
_PACKAGE = __name__.partition(".")[0]
_REMEMBERED_SECONDS = 90 * 86400
_KEPT = 8
# What uuid1 and uuid4 give, with and without dashes.
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[14][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}|\b[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}\b"
_ID = re.compile(_UUID)
# What tempfile and multiprocessing.shared_memory make up.
_MADE_UP = re.compile(r"/tmp[a-z0-9_]{8}(?![a-z0-9_])|\bpsm_[0-9a-f]{8}\b")  # noqa: S108 - none is made
# Numbers of processes below are other numbers too, and the same in each run of a container.
_LEAST_PROCESS = 1000
# How `castore.keys.encoder` writes what may be one of these: a seconds-since-1970 float of our days begins with "A".
_MARKS = (b"\x04uuid:16:", b"\x05float:8:A", b"\x08datetime:")
_TEXTS = (
    re.compile(rb"/tmp[a-z0-9_]{8}|psm_[0-9a-f]{8}"),
    re.compile(rb"-[14][0-9a-f]{3}-[89ab]"),
    re.compile(rb"\x03str:32:[0-9a-f]{12}4[0-9a-f]{3}[89ab]"),
)
# Whoever is asked twice in one process gives the same twice.
_PROCESS = uuid.uuid4().hex


class Notes(Protocol):
    """What doubts need of a store: to write down what one run had, and to read it in the next."""

    def get(self, name: str) -> bytes | None:
        """See `Store.get`."""

    def put(self, name: str, data: bytes, *, ttl: float) -> object:
        """See `Store.put`."""


class Doubts(NamedTuple):
    """What of a fingerprint may be random.

    Attributes:
        rest: 40 hexadecimal digits of all the rest.
        parts: by its path, the kind and a digest of each value.
    """

    rest: str
    parts: dict[str, tuple[str, str]]

    def tell(self, store: Notes, what: str, advice: str, *, may_vary: bool = False) -> None:
        """Compare with what runs before this one had, and remember this one's.

        Args:
            store: where it is remembered.
            what: what was hashed, for the warning.
            advice: how to say what identifies it.
            may_vary: several values in one run are meant, as arguments of several calls are; then there is no more doubt.

        Warns:
            RuntimeWarning: nothing but values that look random differs from earlier runs.
        """
        name = f"{FOLDER}/{self.rest}"
        digest = blake3(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:32]
        known = store.get(name)
        nothing: dict[str, Any] = {"seen": [], "last": {}, "again": False}
        told: dict[str, Any] = json.loads(known) if isinstance(known, bytes) else nothing
        process = next((made for seen, made in told["seen"] if seen == digest), None)
        if process == _PROCESS or (process is not None and told["again"]):
            return
        if process is None:
            if all(made != _PROCESS for _, made in told["seen"]):
                self._warn(told, what, advice)
            else:
                told["again"] = told["again"] or may_vary
            told["seen"] = [*told["seen"], (digest, _PROCESS)][-_KEPT:]
        told["again"] = told["again"] or process is not None
        told["last"] = self.parts
        # A store that takes nothing says so where the result itself is put.
        with contextlib.suppress(FullError, StoreError):
            store.put(name, json.dumps(told).encode(), ttl=_REMEMBERED_SECONDS)

    def _warn(self, told: dict[str, Any], what: str, advice: str) -> None:
        changed = {
            path: kind
            for path, (kind, now) in self.parts.items()
            if told["last"].get(path, ("", now))[1] != now
        }
        # Another seed is the rule, and another id the exception.
        generators = all(kind == "random generator" for kind in changed.values())
        if told["again"] or not changed or len(told["seen"]) < (2 if generators else 1):
            return
        path, kind = next(iter(changed.items()))
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        warnings.warn(
            f"{what}{path}: is a {kind}{more} that was another one in {'each run' if generators else 'the last run'}, and"
            f" nothing else differs, so nothing that was kept is found again; {advice}",
            RuntimeWarning,
            stacklevel=outside(),
        )


def outside() -> int:
    """How many frames up from its caller, for `warnings`, the first code is that is not castore's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    return level


def are_in(code: bytes) -> bool:
    """Whether encoded bytes hold something that may be doubtful."""
    number, text = _own_number(os.getpid())
    return (
        any(mark in code for mark in (*_MARKS, *number))
        or any(search.search(code) for search in _TEXTS)
        or (text is not None and text.search(code) is not None)
    )


@functools.lru_cache(maxsize=4)
def _own_number(process: int) -> tuple[tuple[bytes, ...], re.Pattern[bytes] | None]:
    """How the number of a process is encoded, as a number and in a text."""
    if process < _LEAST_PROCESS:
        return (), None
    payload = process.to_bytes(process.bit_length() // 8 + 1, "big", signed=True)
    return (b"\x03int:%d:%b" % (len(payload), payload),), re.compile(rb"(?<!\d)%d(?!\d)" % process)


def kind_of(value: Any) -> str | None:
    """What a value looks like that may be another one in every run; None if there is no doubt about it."""
    cls = type(value)
    if cls is str:
        return _kind_of_text(value)
    if cls is int:
        return "number of this process" if value == os.getpid() >= _LEAST_PROCESS else None
    if cls is uuid.UUID:
        return "random id" if value.version in (1, 4) else None
    if cls in (float, dt.datetime):
        return "time of this run" if _is_of_this_run(value) else None
    return "random generator" if is_generator(cls) else None


def _kind_of_text(value: str) -> str | None:
    if _ID.search(value):
        return "random id"
    if _MADE_UP.search(value):
        return "made-up name of a temporary file, folder or segment"
    _, own = _own_number(os.getpid())
    if own is not None and own.search(value.encode("utf-8", "surrogatepass")):
        return "text with the number of this process"
    return None


@per_class
def is_generator(cls: type) -> bool:
    """Whether its values are random generators."""
    return any((base.__module__, base.__qualname__) in _GENERATORS for base in cls.__mro__)


_GENERATORS = {
    ("random", "Random"),
    ("_random", "Random"),
    ("numpy.random.mtrand", "RandomState"),
    ("numpy.random._generator", "Generator"),
    ("numpy.random.bit_generator", "BitGenerator"),
    ("torch._C", "Generator"),
    ("torch", "Generator"),
}


def _is_of_this_run(value: float | dt.datetime) -> bool:
    try:
        seconds = value if isinstance(value, float) else value.timestamp()
    except (OverflowError, ValueError, OSError):
        return False
    return _started() <= seconds <= time.time()


@functools.cache
def _started() -> float:
    """When this process began, as seconds since 1970."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
