"""Finds memory addresses of this process in hashed values: ids of objects, and addresses in texts of `repr`.

A fingerprint that contains an address differs in every process, so its result would never be found again. The
search runs over encoded bytes and costs very little: encoded bytes are short, and long ones are searched
before a digest replaces them. A number counts as an address if a live object has it as its id. A text counts
if memory is mapped at its address. A number that lies in writable memory without a known object is only a
doubt (doubts.py).

Not found: an address that was turned into something else, such as a hash, a float, or an element of an array.
"""

from __future__ import annotations

import gc
import re

# `castore.keys.encoder` writes integers of 41 to 47 bits like this. Linux places a process's memory at such
# addresses.
_NUMBER = b"\x03int:6:"
_LEAST = 1 << 40
# Addresses of objects are multiples of this.
_ALIGNED = 16
_TEXT = re.compile(rb" at 0x([0-9a-f]{6,16})")
_MARK = b" at 0x"


def candidates(code: bytes) -> set[int]:
    """Numbers in encoded bytes that may be addresses. Addresses in texts are returned as negative numbers."""
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
    """Those of `candidates` that are addresses of this process, with the same signs."""
    ids = {number for number in numbers if number > 0}
    texts = numbers - ids
    found = ids & _living() if ids else set()
    if texts:
        spans = _mapped()
        found |= {number for number in texts if any(start <= -number < end for start, end in spans)}
    return found


def in_memory(numbers: set[int]) -> set[int]:
    """Those of `candidates` that lie in writable memory of this process.

    Objects that Python's garbage collector does not track may live there.
    """
    ids = {number for number in numbers if number > 0}
    spans = _mapped("rw") if ids else []
    return {number for number in ids if any(start <= number < end for start, end in spans)}


def holds(value: int | str, addresses: set[int]) -> bool:
    """Whether a value is one of these addresses, or a text that contains one."""
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
