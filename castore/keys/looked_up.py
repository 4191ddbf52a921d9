"""Values that a library finds by a name in the code that calls the library.

pandas takes ``@name`` in the text of a query for a variable of the caller, DuckDB and polars take a table's
name in SQL for one, and ``torch.ops`` has operators by name. No instruction of the code reads such a value.

Must never: import a library, or read a value that the code can do without.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Iterator, Set
from typing import Any

from castore.keys.bytecode import BESIDE, codes, steps

# Methods and functions that take a query of pandas, and those that take SQL.
_QUERIES = {"query", "eval"}
_SQL = {"sql", "execute", "query", "from_query"}
_VARIABLE = re.compile(r"@([A-Za-z_]\w*)")
_READS_TABLE = re.compile(r"\b(?:from|join)\b", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_]\w*")
# The packages of the types whose objects are tables for DuckDB or polars.
_TABLES = {"duckdb", "_duckdb", "numpy", "pandas", "polars", "pyarrow"}


def looked_up(code: types.CodeType, names: Set[str], scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that libraries find for a function, each with its name.

    Args:
        code: the function's code.
        names: all names in the code and in code inside it.
        scope: the function's globals.
    """
    variables, tables = names_in_texts(code, texts_of(names, scope))
    yield from ((name, scope[name]) for name in sorted(variables & scope.keys()))
    for name in sorted((tables - variables) & scope.keys()):
        if is_table(scope[name]):
            yield name, scope[name]
    yield from _operators(names)


@functools.lru_cache(maxsize=4096)
def takes_queries(code: types.CodeType) -> bool:
    """Whether code calls something that may take a query, whatever its text: but for ``model.eval()``."""
    for inner in codes(code):
        rows = [row for row in steps(inner) if row[0] not in BESIDE]
        for at, (opname, name) in enumerate(rows):
            if opname in ("LOAD_ATTR", "LOAD_METHOD") and name in _QUERIES | _SQL:
                following, count = rows[at + 1]
                if not (name == "eval" and following.startswith("CALL") and not count):
                    return True
    return False


def texts_of(names: Set[str], scope: dict[str, Any]) -> tuple[str, ...]:
    """The texts among the globals of these names: a query may be a constant of its module."""
    return tuple(sorted(scope[name] for name in names if type(scope.get(name)) is str))


@functools.lru_cache(maxsize=4096)
def names_in_texts(code: types.CodeType, constants: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Names in the texts of code, and in constants of its module, that are no local variables: of variables
    in queries, and of what may be a table in SQL. Empty unless the code calls something that takes such a
    text.
    """
    inside = [*codes(code)]
    called = {name for inner in inside for name in inner.co_names}
    if not called & (_QUERIES | _SQL):
        return frozenset(), frozenset()
    texts = [*constants, *(text for inner in inside for text in _texts(inner.co_consts))]
    local = {name for inner in inside for name in (*inner.co_varnames, *inner.co_cellvars)}
    variables = {name for text in texts for name in _VARIABLE.findall(text)} if called & _QUERIES else set()
    tables: set[str] = set()
    if called & _SQL and any(map(_READS_TABLE.search, texts)):  # an f-string is several texts
        tables = {name for text in texts for name in _NAME.findall(text)}
    return frozenset(variables - local), frozenset(tables - local)


def is_table(value: Any) -> bool:
    """Whether DuckDB or polars may take a value for a table."""
    cls = type(value)
    return cls in (dict, list) or cls.__module__.partition(".")[0] in _TABLES


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _texts(constant)


def _operators(names: Set[str]) -> Iterator[tuple[str, Any]]:
    """The operators that `torch.library.custom_op` has made, of those that code may take from `torch.ops`."""
    known = sys.modules.get("torch._library.custom_ops")
    if known is None or "ops" not in names:
        return
    for qualified, operator in sorted(known.OPDEFS.items()):
        if {*qualified.split("::")} <= names:
            yield qualified, operator
