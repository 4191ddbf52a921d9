"""The columns of a pandas frame in a form that does not depend on how the frame came to be.

Pandas keeps columns of one dtype in one block or in many, as they were added. Imports nothing: a process with
a frame has imported pandas.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def column_groups(frame: Any) -> Iterator[tuple[list[int], Any]]:
    """Yield places of columns, and their values.

    Columns of one NumPy dtype come together, as a matrix whose rows they are. Each other column, and each of
    Python objects, comes alone, as the array that pandas has of it.
    """
    numpy = sys.modules["numpy"]
    groups: dict[Any, list[int]] = {}
    for place, dtype in enumerate(frame.dtypes):
        is_plain = isinstance(dtype, numpy.dtype) and dtype.kind != "O"
        groups.setdefault(dtype.str if is_plain else place, []).append(place)
    for kind, places in groups.items():
        if type(kind) is int:
            yield places, frame.iloc[:, kind].array
        else:
            yield places, (frame if len(groups) == 1 else frame.iloc[:, places]).to_numpy().T
