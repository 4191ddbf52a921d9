"""What counts of compiled code: its instructions by what they mean, not by where they stand in tables.

Names, constants and calls of a code object and of those inside it, as a fingerprint takes them: line numbers, docstrings
and annotations left out. Knows nothing of functions, modules or values; runs nothing. Bytecode differs between minor
versions of Python.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

# Arguments and kind of function; the rest of the flags tells of the compiler and of __future__.
_FLAGS = 0xFF | 0x200
#: What a class body stores that says nothing of what it computes: copyreg leaves __slotnames__ in a class once one of
#: its objects was pickled.
BODY_NOISE = {"__doc__", "__firstlineno__", "__static_attributes__", "__slotnames__"}


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions, classes and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if is_code(constant):
            yield from codes(constant)


def is_code(value: object) -> bool:
    """Whether a constant is the code of something inside."""
    return isinstance(value, types.CodeType)


@functools.lru_cache(maxsize=4096)
def steps(code: types.CodeType) -> tuple[tuple[str, Any], ...]:
    """Names of instructions with what their arguments stand for, so that places in tables do not matter.

    A docstring shifts the table of constants; by value, nothing changes. Remembered: code never changes, and code that
    is equal has equal instructions.
    """
    return tuple(_read_steps(code))


def _read_steps(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    for step in dis.get_instructions(code):
        if step.opname != "EXTENDED_ARG":
            by_value = step.opcode in dis.hasconst or isinstance(step.argval, str)
            argument = step.argval if by_value else step.arg
            # dis of Python 3.11 leaves names of keyword arguments unresolved.
            yield step.opname, code.co_consts[step.arg or 0] if step.opname == "KW_NAMES" else argument


def instructions(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """All of one code object that counts; the code of inner functions stands elsewhere."""
    yield "arguments", code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield "kinds", (code.co_argcount, code.co_posonlyargcount, code.co_flags & _FLAGS)
    yield "exceptions", getattr(code, "co_exceptiontable", b"")
    rows = steps(code)
    # In the body of a class these are a constant that is then stored.
    noise = {at for at, row in enumerate(rows) if row[0] == "STORE_NAME" and row[1] in BODY_NOISE}
    for at, (opname, argument) in enumerate(rows):
        if at not in noise and at + 1 not in noise:
            yield opname, "code" if is_code(argument) else argument


def outer_reads(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """What code reads from around it: ``("closure", name)`` and ``("global", name)``."""
    for opname, argument in steps(code):
        if opname.startswith("LOAD_") and argument != "__name__":
            if "DEREF" in opname:
                yield "closure", argument
            if "GLOBAL" in opname or opname == "LOAD_NAME":
                yield "global", argument
