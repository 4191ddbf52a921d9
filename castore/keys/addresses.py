"""Addresses of this process in what is hashed: ids of objects, and the texts that `repr` makes of them.

A fingerprint that holds one is another in every process, and nothing would ever be found again. Encoded bytes are
searched, which costs next to nothing: they are short, and long ones are searched where a digest takes their place. Only
what lies in this process counts: a number is an address where an object lives there, a text where memory is mapped. A number
that lies in memory where no object is known is no more than a doubt (doubts.py).

Cannot see an address that was turned into something else first: a hash of it, a float, an element of an array.
"""

from __future__ import annotations

import gc
import re

# How `castore.keys.encoder` writes whole numbers of 41 to 47 bits: where Linux puts what a process allocates.
_NUMBER = b"\x03int:6:"
_LEAST = 1 << 40
# Objects lie at multiples of this.
_ALIGNED = 16
_TEXT = re.compile(rb" at 0x([0-9a-f]{6,16})")
_MARK = b" at 0x"


def candidates(code: bytes) -> set[int]:
    """Numbers in encoded bytes that may be addresses."""
    found: set[int] = set()
    place = code.find(_NUMBER)
    while place >= 0:
        start = place + len(_NUMBER)
        number = int.from_bytes(code[start : start + 6], "big", signed=True)
        if number >= _LEAST and number % _ALIGNED == 0:
            found.add(number)
        place = code.find(_NUMBER, start)
    if _MARK in code:
        found.update(-int(digits, 16) for digits in _TEXT.findall(code))
    return found


def confirmed(numbers: set[int]) -> set[int]:
    """Those of `candidates` that are addresses of this process; numbers of texts are negative in both."""
    ids = {number for number in numbers if number > 0}
    texts = numbers - ids
    found = ids & _living() if ids else set()
    if texts:
        spans = _mapped()
        found |= {number for number in texts if any(start <= -number < end for start, end in spans)}
    return found


def in_memory(numbers: set[int]) -> set[int]:
    """Those of `candidates` that lie in memory that this process writes to: objects that gc does not know may live there."""
    ids = {number for number in numbers if number > 0}
    spans = _mapped("rw") if ids else []
    return {number for number in ids if any(start <= number < end for start, end in spans)}


def holds(value: int | str, addresses: set[int]) -> bool:
    """Whether a value is, or tells, one of these addresses."""
    if isinstance(value, int):
        return value in addresses
    return not addresses.isdisjoint(
        -int(digits, 16) for digits in _TEXT.findall(value.encode("utf-8", "replace"))
    )


def _living() -> set[int]:
    return set(map(id, gc.get_objects()))


def _mapped(permissions: str = "") -> list[tuple[int, int]]:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        rows = [line.split(" ", 2) for line in file]
    pairs = [span.split("-") for span, allowed, _ in rows if allowed.startswith(permissions)]
    return [(int(start, 16), int(end, 16)) for start, end in pairs]
