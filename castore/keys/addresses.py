"""Finds memory addresses of this process in hashed values: ids of objects, and addresses in texts of `repr`.

A fingerprint that contains an address differs in every process, so its result would never be found again. The
search runs over encoded bytes and costs very little: encoded bytes are short, and long ones are searched
before a digest replaces them. A number counts as an address if a live object has it as its id, also where a
text of at most 1 KiB has its digits. A text of `repr` counts if memory is mapped at its address. A number
that lies in writable memory without a known object is only a doubt (doubts.py).

Not found: an address that was turned into something else, such as a hash, a float, or an element of an array.
"""

from __future__ import annotations

import gc
import re
from typing import Any

# `castore.keys.encoder` writes integers of 41 to 47 bits like this. Linux places a process's memory at such
# addresses.
_NUMBER = b"\x03int:6:"
_LEAST = 1 << 40
# Addresses of objects are multiples of this.
_ALIGNED = 16
_TEXT = re.compile(rb" at 0x([0-9a-f]{6,16})")
_MARK = b" at 0x"
# Digits of ids in a text, decimal and hexadecimal. On x86-64, Linux maps memory at 0x7e..., 0x7f..., and at
# 0x55... to 0x56... for the heap. Each pattern begins with a letter that is searched for fast.
_DIGITS = (
    re.compile(rb"1(?<![0-9]1)(?:39|40)[0-9]{12}(?![0-9])"),
    re.compile(rb"9(?<![0-9]9)[345][0-9]{12}(?![0-9])"),
)
_HEXADECIMAL = (
    re.compile(rb"7(?<![0-9a-fA-F]7)[efEF][0-9a-fA-F]{9}0(?![0-9a-fA-F])"),
    re.compile(rb"5(?<![0-9a-fA-F]5)[56][0-9a-fA-F]{9}0(?![0-9a-fA-F])"),
)


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
    return found | _written_numbers(code)


def _written_numbers(code: bytes) -> set[int]:
    """Numbers whose digits stand in bytes, and that may be ids."""
    numbers = {int(digits) for search in _DIGITS for digits in search.findall(code)}
    numbers.update(int(digits, 16) for search in _HEXADECIMAL for digits in search.findall(code))
    return {number for number in numbers if number % _ALIGNED == 0}


def confirmed(numbers: set[int]) -> set[int]:
    """Those of `candidates` that are addresses of this process, with the same signs."""
    texts = {number for number in numbers if number < 0}
    # The search among all objects is slow, so numbers that lie nowhere are left out first.
    ids = in_memory(numbers)
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


def holds(value: Any, addresses: set[int]) -> bool:
    """Whether a value is one of these addresses, or a text or bytes that contain one."""
    if type(value) is int:
        return value in addresses
    if type(value) not in (str, bytes):
        return False
    text = value.encode("utf-8", "replace") if isinstance(value, str) else value
    numbers = {-int(digits, 16) for digits in _TEXT.findall(text)} | _written_numbers(text)
    return not addresses.isdisjoint(numbers)


def _living() -> set[int]:
    return set(map(id, gc.get_objects()))


def _mapped(permissions: str = "") -> list[tuple[int, int]]:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        rows = [line.split(" ", 2) for line in file]
    pairs = [span.split("-") for span, allowed, _ in rows if allowed.startswith(permissions)]
    return [(int(start, 16), int(end, 16)) for start, end in pairs]
