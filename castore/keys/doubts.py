"""Doubts: hashed values that look different in every run, compared with the values of earlier runs.

A random id, a time or a number of this run, the name of a temporary folder, or the state of a random
generator may be intended, as a seed is. Or it may prevent a result from ever being found again. A single run
does not distinguish the two cases. The next run does, or the third one where another seed is as likely. So a
store remembers a fingerprint without such values, and the values. If a later run differs only in these
values, a warning names the part. The cost is a search through the encoded bytes; the rest runs only if that
search found something.

Not found: values that do not look random, such as a short random number, the order of a list made from a set,
or a random array.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import os
import re
import time
import uuid
from typing import Any, NamedTuple, Protocol

from blake3 import blake3

from castore.errors import FullError, StoreError, warn
from castore.keys.classes import per_class

#: Folder of names under which a store remembers doubts.
FOLDER = ".doubts"
_PACKAGE = __name__.partition(".")[0]
_REMEMBERED_SECONDS = 90 * 86400
_KEPT = 8
# Texts of uuid1 and uuid4, with and without dashes.
_UUID = (
    r"[0-9a-f]{8}-[0-9a-f]{4}-[14][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    r"|\b[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}\b"
)
_ID = re.compile(_UUID)
# Random names by tempfile and multiprocessing.shared_memory.
_MADE_UP = re.compile(r"/tmp[a-z0-9_]{8}(?![a-z0-9_])|\bpsm_[0-9a-f]{8}\b")  # noqa: S108 - none is made
# Smaller process ids are ignored: they are common numbers, and the same in each run of a container.
_LEAST_PROCESS = 1000
# In more encoded bytes than this, such as a vocabulary's, a process id stands by chance.
_LONGEST_WITH_PROCESS = 65_536
# `castore.keys.encoder` writes doubtful values with these prefixes. A present time as a float begins with the
# byte "A".
_MARKS = (b"\x04uuid:16:", b"\x05float:8:A", b"\x08datetime:")
# Hashes of texts (`hash`), times in nanoseconds, and numbers of 64 and of 128 random bits.
_LARGE_MARKS = (b"\x03int:8:", b"\x03int:9:", b"\x03int:16:", b"\x03int:17:")
_LARGE_BITS = (range(56, 72), range(120, 136))
# More large numbers than this are data.
_LARGE_ONES = 16
_TIME = "time of this run"
LARGE = "large number that looks random"
GENERATOR = "random generator"
# Each begins with fixed bytes, which `re` searches for fast.
_TEXTS = (
    re.compile(rb"/tmp[a-z0-9_]{8}"),
    re.compile(rb"psm_[0-9a-f]{8}"),
    re.compile(rb"-[14][0-9a-f]{3}-[89ab]"),
    re.compile(rb"\x03str:32:[0-9a-f]{12}4[0-9a-f]{3}[89ab]"),
    re.compile(rb"\x05bytes:16:.{6}[\x10-\x1f\x40-\x4f].[\x80-\xbf]", re.DOTALL),
)
# Identifies this process: a value seen twice in one process is no evidence that it stays the same.
_PROCESS = uuid.uuid4().hex


class Notes(Protocol):
    """The methods of a store that doubts need, to write the values of one run and read them in the next."""

    def get(self, name: str) -> bytes | None:
        """See `Store.get`."""

    def put(self, name: str, data: bytes, *, ttl: float) -> object:
        """See `Store.put`."""


class Doubts(NamedTuple):
    """The values in a fingerprint that may be random.

    Attributes:
        rest: 40 hexadecimal digits that identify the value without these parts.
        parts: kind and digest of each doubtful value, by its path.
    """

    rest: str
    parts: dict[str, tuple[str, str]]

    def compare(self, store: Notes, what: str, advice: str, *, may_vary: bool = False) -> None:
        """Compare with the values of earlier runs, and remember the values of this run.

        Args:
            store: remembers the values.
            what: name of the hashed value, for the warning.
            advice: what the user can do, for the warning.
            may_vary: whether several values in one run are intended, as with arguments of several calls. If a
                run has several, there are no more warnings. Default False.

        Warns:
            RuntimeWarning: only values that look random differ from earlier runs.
        """
        name = f"{FOLDER}/{self.rest}"
        digest = blake3(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:32]
        known = store.get(name)
        nothing: dict[str, Any] = {"seen": [], "last": {}, "again": False}
        record: dict[str, Any] = json.loads(known) if isinstance(known, bytes) else nothing
        process = next((made for seen, made in record["seen"] if seen == digest), None)
        if process == _PROCESS or (process is not None and record["again"]):
            return
        if process is None:
            if all(made != _PROCESS for _, made in record["seen"]):
                self._warn(record, what, advice)
            else:
                record["again"] = record["again"] or may_vary
            record["seen"] = [*record["seen"], (digest, _PROCESS)][-_KEPT:]
        record["again"] = record["again"] or process is not None
        record["last"] = self.parts
        # If the store cannot be written, putting the result itself reports it.
        with contextlib.suppress(FullError, StoreError):
            store.put(name, json.dumps(record).encode(), ttl=_REMEMBERED_SECONDS)

    def _warn(self, record: dict[str, Any], what: str, advice: str) -> None:
        changed = {
            path: kind
            for path, (kind, now) in self.parts.items()
            if record["last"].get(path, ("", now))[1] != now
        }
        # Seeds often differ between runs, ids rarely: seeds need two earlier runs for a warning.
        seeds = all(kind in (GENERATOR, LARGE) for kind in changed.values())
        if record["again"] or not changed or len(record["seen"]) < (2 if seeds else 1):
            return
        path, kind = next(iter(changed.items()))
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        warn(
            f"{what}{path}: is a {kind}{more} that was another one in "
            f"{'each run' if seeds else 'the last run'}, "
            f"and nothing else differs, so nothing that was kept is found again; {advice}",
            RuntimeWarning,
        )


def are_in(code: bytes) -> bool:
    """Whether encoded bytes may contain a doubtful value."""
    return (
        any(map(code.__contains__, _MARKS))
        or 0 < sum(map(code.count, _LARGE_MARKS)) <= _LARGE_ONES
        or any(search.search(code) for search in _TEXTS)
        or (len(code) <= _LONGEST_WITH_PROCESS and _has_own_number(code))
    )


def _has_own_number(code: bytes) -> bool:
    number, digits, text = _own_number(os.getpid())
    # A pattern with a lookbehind before a number is slow, so its digits are searched for first.
    return text is not None and (number in code or (digits in code and text.search(code) is not None))


@functools.lru_cache(maxsize=4)
def _own_number(process: int) -> tuple[bytes, bytes, re.Pattern[bytes] | None]:
    """A process id as an encoded number, its digits, and, unless it is small, a pattern for them."""
    digits = b"%d" % process
    payload = process.to_bytes(process.bit_length() // 8 + 1, "big", signed=True)
    pattern = None if process < _LEAST_PROCESS else re.compile(rb"(?<!\d)%b(?!\d)" % digits)
    return b"\x03int:%d:%b" % (len(payload), payload), digits, pattern


def kind_of(value: Any, large: int = 0) -> str | None:
    """Describe a value that may be another one in every run; None if there is no doubt about it.

    Args:
        value: the value.
        large: number of parts of the same value that were `LARGE`. Default 0.
    """
    cls = type(value)
    if cls is str:
        return _kind_of_text(value)
    if cls is int:
        if value == os.getpid() >= _LEAST_PROCESS:
            return "number of this process"
        if not _is_large(value):
            return None
        return _TIME if _is_of_this_run(value / 1e9) else LARGE if large < _LARGE_ONES else None
    if cls is bytes:
        known = len(value) == 16 and uuid.UUID(bytes=value).version in (1, 4)
        return "random id" if known else None
    if cls is uuid.UUID:
        return "random id" if value.version in (1, 4) else None
    if cls in (float, dt.datetime):
        return _TIME if _is_of_this_run(value) else None
    return GENERATOR if is_generator(cls) else None


def _is_large(value: int) -> bool:
    """Whether an integer has 64 or 128 bits that look random. Powers of two and their neighbours do not."""
    size = abs(value)
    regular = size & (size - 1) == 0 or size & (size + 1) == 0
    return not regular and any(size.bit_length() in bits for bits in _LARGE_BITS)


def _kind_of_text(value: str) -> str | None:
    if _ID.search(value):
        return "random id"
    if _MADE_UP.search(value):
        return "made-up name of a temporary file, folder or segment"
    *_, own = _own_number(os.getpid())
    if own is not None and own.search(value.encode("utf-8", "surrogatepass")):
        return "text with the number of this process"
    return None


@per_class
def is_generator(cls: type) -> bool:
    """Whether instances of the class are random generators."""
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
    """Start time of this process in seconds since the epoch."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
