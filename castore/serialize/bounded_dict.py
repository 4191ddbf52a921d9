"""A bounded dict for values that are derived from headers: headers recur."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class BoundedDict(dict[Any, T]):
    """Values derived from headers, until they would take more than `budget` bytes together; then it is
    emptied.

    Threads may share it: at worst a value is derived twice, or the count is off by what raced.
    """

    def __init__(self, budget: int) -> None:
        super().__init__()
        self._budget = budget
        self._held = 0

    def remember(self, key: Any, value: T, weight: int) -> None:
        """Hold a value that counts for ``weight`` bytes."""
        if weight + self._held > self._budget:
            self.clear()
            self._held = 0
        if weight <= self._budget:
            self[key] = value
            self._held += weight
