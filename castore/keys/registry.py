"""The registry of types: which function encodes the values of which type.

A `Table` finds a function by a value's type: the first row with the type or one of its bases counts. Types of
libraries stand in a table by name, so a table imports no library. `Rules` belong to one kind of key: tables,
and functions for what the type alone does not decide, in the order in which they are tried.

Must never: hold anything about one value. An encoder does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from castore.keys.classes import per_class

#: Takes an encoder and a value. Returns the value's canonical bytes, or None where the next rule decides.
Rule: TypeAlias = Callable[[Any, Any], "bytes | None"]
#: Takes an encoder and a value. Yields the parts of the value that count; in most tables a tag comes first.
Count: TypeAlias = Callable[[Any, Any], Iterator[Any]]
#: A module, names of types in it, and the function for their values.
Row: TypeAlias = "tuple[str, tuple[str, ...], Count]"


class Table:
    """Functions by type. Called as a rule, it encodes a value by its row, under the tag that comes first.

    Args:
        rows: types by name. A module that is not imported yet has no values, so it is not imported.
        types: types, or tuples of types, that are imported anyway; tried before the rows.
    """

    def __init__(self, rows: Iterable[Row] = (), types: Mapping[Any, Count] | None = None) -> None:
        self._rows = list(rows)
        self._types: Mapping[Any, Count] = types or {}
        #: The function for the values of a type; None if the table does not have the type.
        self.of: Callable[[type], Count | None] = per_class(self._find)

    def add(self, module: str, names: tuple[str, ...], count: Count) -> None:
        """Add a row. Call this at a module's import, before any value is looked up.

        For modules that build on the table's own module.
        """
        self._rows.append((module, names, count))

    def __call__(self, encoder: Any, value: Any) -> bytes | None:
        """The canonical bytes of a value; None if the table does not have its type."""
        count = self.of(type(value))
        if count is None:
            return None
        code: bytes = encoder.tagged(*count(encoder, value))
        return code

    def _find(self, cls: type) -> Count | None:
        for types, count in self._types.items():
            if issubclass(cls, types):
                return count
        bases = set(map(id, cls.__mro__))
        for module, names, count in self._rows:
            loaded = sys.modules.get(module)
            if loaded is not None and any(id(vars(loaded).get(name)) in bases for name in names):
                return count
        return None


class Rules:
    """The treatment of each type by an encoder.

    Args:
        rules: tried in order, for values that are neither leaves nor plain containers.
        first: functions by exact type that are asked before all else. They take the step to the value too,
            and None lets the value pass. Default: none.
        orders: whether the order of dicts counts in a value, from the value and whether it counts around the
            value. Default None: it counts nowhere. Rules with `orders` also follow references: a value that
            contains itself counts by the number of levels up to it, and is no error.
        memory: makes what the rules remember about the parts of one encoder. A set's elements begin with a
            new one. Default None: nothing.
        elements: encodes an array of plain numbers in a way of its own, or returns None. Default None.
        left_out: names of attributes of objects that do not count. Default: none.
    """

    def __init__(
        self,
        *rules: Rule,
        first: Mapping[type, Callable[[Any, Any, str], bytes | None]] | None = None,
        orders: Callable[[Any, bool], bool] | None = None,
        memory: Callable[[], Any] | None = None,
        elements: Rule | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self.all = rules
        self.first = first or {}
        self.orders = orders
        self.memory = memory
        self.elements = elements
        self.left_out = left_out

    def __call__(self, encoder: Any, value: Any) -> bytes | None:
        """The canonical bytes by the first rule that does not return None; None if all do."""
        for rule in self.all:
            code = rule(encoder, value)
            if code is not None:
                return code
        return None
