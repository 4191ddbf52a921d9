"""Encodes a value with its references, searches the bytes, and traces what is found to its part.

The search is for addresses of this process (`castore.keys.addresses`), which are errors, and for values that
may be other ones in every run (`castore.keys.doubts`). The search costs little, because it runs over encoded
bytes. Only if it finds something, the value is encoded once more by an encoder with a watch, which knows the
path.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from typing import Any, NamedTuple

from blake3 import blake3

from castore.errors import UnhashableError
from castore.keys import addresses, doubts
from castore.keys.doubts import LARGE, Doubts, kind_of
from castore.keys.encoder import KEY_DIGITS, LEAVES, Encoder, UnencodableError, Watch
from castore.keys.registry import Rules

# The beginning of encoded bytes, and the length from which a digest replaces them.
_ENCODED = re.compile(rb"[\x01-\x14][a-z]+\+\d+:")
_LONG = 1024
# Findings in encoded bytes up to this length are remembered, for the code of cached functions.
_SHORT = 4096
_encode_bytes = LEAVES[bytes]
_ADDRESS = (
    "is an address of this process, which is another one in every run, so nothing would be found again; "
    "leave it out in __getstate__, or give its class a __castore_key__ method"
)


class Found:
    """Findings in encoded bytes. Separate: a reference to its own method would keep an encoder alive."""

    def __init__(self, counted: frozenset[str] = frozenset(), whole: frozenset[str] = frozenset()) -> None:
        self.addresses: set[int] = set()
        self.doubtful = False
        # Kinds of texts that count in this encoding, and those that the code met so far reads.
        self.counted = counted
        self.texts = counted
        # Names of parts of settings that count alone so far, and of those that code met so far assigns. Parts
        # with these names count with all of their objects, as all do where code finds parts by texts.
        self.alone: set[str] = set()
        self.assigned: set[str] = set()
        self.finds_by_text = False
        self.whole = whole
        # Whether the encoding has imported a module, which may have given other modules more attributes.
        self.imported = False

    def search(self, code: bytes) -> None:
        """Search encoded bytes for addresses and doubtful values."""
        found, doubtful = (_search if len(code) > _SHORT else _search_once)(code, os.getpid())
        self.addresses |= found
        self.doubtful = self.doubtful or doubtful

    def leaf(self, code: bytes) -> bytes:
        """The canonical bytes of bytes; long encoded bytes are searched before a digest replaces them."""
        if len(code) > _LONG and _ENCODED.match(code):
            self.search(code)
        return _encode_bytes(code)


def _search(code: bytes, process: int) -> tuple[set[int], bool]:
    """Candidates for addresses in encoded bytes, and whether doubtful values are in them.

    The answer depends on the process: its number is doubtful.
    """
    return addresses.candidates(code), doubts.are_in(code)


_search_once = functools.lru_cache(maxsize=256)(_search)


class Encoded(NamedTuple):
    """A value and its canonical bytes.

    Attributes:
        code: the canonical bytes.
        value: the value.
        rules: the rules by which it was encoded.
        found: the findings in the bytes.
    """

    code: bytes
    value: object
    rules: Rules
    found: Found

    def doubts(self) -> Doubts | None:
        """Find the parts of the value that may be other ones in every run; None if there are none."""
        suspects = addresses.in_memory(self.found.addresses)
        if not self.found.doubtful and not suspects:
            return None
        trace = _ToDoubts(suspects)
        try:
            found = Found(self.found.counted, self.found.whole)
            rest = Encoder(self.rules, trace, found).part(self.value)
        except RecursionError:  # tracing needs more stack than encoding, and must not fail
            return None
        return Doubts(str(blake3(rest).hexdigest()[:KEY_DIGITS]), trace.parts) if trace.parts else None


def encode(
    rules: Rules,
    value: object,
    what: str,
    watch: Watch | None = None,
    *,
    texts: frozenset[str] = frozenset(),
) -> Encoded:
    """Encode a value by rules that follow references.

    Args:
        rules: what is done with each type.
        value: the value.
        what: name of the value in error messages.
        watch: sees the encoding. Default None: nothing does.
        texts: kinds of texts beside the code that count, as those that a function reads of its arguments.
            Texts that the value's own code reads are added. Default: none.

    Raises:
        UnhashableError: a part of the value has no stable hash, or contains an address of this process; the
            message has the path to the part.
    """
    found = Found(texts)
    code = _until_complete(rules, value, what, watch, found)
    found.search(code)
    sought = addresses.confirmed(found.addresses) if found.addresses else None
    if sought:
        _until_complete(rules, value, what, _ToAddress(sought), Found(texts))
        raise UnhashableError(f"{what}: {_ADDRESS}")
    return Encoded(code, value, rules, found)


def _until_complete(rules: Rules, value: object, what: str, watch: Watch | None, found: Found) -> bytes:
    """The canonical bytes of a value, once its code's imports are done, and it is known which texts the code
    reads and which parts of objects it assigns.
    """
    while True:  # so that the first result equals the later ones
        found.imported = False
        found.counted = found.texts
        found.alone = set()
        if watch is not None:
            watch.begin()
        code = Encoder(rules, watch, found).encode(value, what)
        alone = found.alone - found.whole
        clash = alone if found.finds_by_text else alone & found.assigned
        found.whole |= clash
        if not (found.imported or clash) and found.texts == found.counted:
            return code


class _ToAddress(Watch):
    """Raises an error at a part that contains a sought address; the error collects the path to the part."""

    sees_leaves = True

    def __init__(self, sought: set[int]) -> None:
        self._sought = sought

    def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
        if addresses.holds(value, self._sought):
            error = UnencodableError(_ADDRESS)
            error.path.append(step)
            raise error
        return encoder.part(value, step, direct=True)


class _ToDoubts(Watch):
    """Puts a placeholder in the place of each part that may be another one in every run.

    Attributes:
        parts: kind and digest of each such part, by its path.
    """

    sees_leaves = True

    def __init__(self, suspects: set[int]) -> None:
        self.parts: dict[str, tuple[str, str]] = {}
        self._suspects = suspects
        self._steps: list[str] = []
        self._kinds: Counter[str] = Counter()

    def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
        self._steps.append(step)
        try:
            kind = kind_of(value, self._kinds[LARGE])
            if self._suspects and addresses.holds(value, self._suspects):
                noun = "number" if type(value) is int else "text with a number"
                kind = f"{noun} that may be an address of this process"
            if kind is None or id(value) in encoder.met:
                return encoder.part(value, step, direct=True)
            self._kinds[kind] += 1
            alone = Encoder(encoder.rules, found=Found(encoder.found.counted)).part(value)
            self.parts["".join(self._steps)] = kind, blake3(alone).hexdigest()[:32]
            return encoder.tagged("doubtful", kind)
        finally:
            self._steps.pop()
