"""Recognises Data-Juicer's operators by their classes, and has the columns that they expect in a dataset.

An object can only be an operator of Data-Juicer's after the library was imported. Must never import the
library.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

_BASES = "data_juicer.ops.base_op"
#: Data-Juicer's column of tags, which its tagging operators expect to be there.
META = "__dj__meta__"
#: The same for the results of its aggregators over a group.
GROUP_META = "__dj__batch_meta__"

DatasetUse = Literal["select", "group"]


def whole_dataset_use(operator: Any) -> DatasetUse | None:
    """How an operator uses a whole dataset: it selects rows, it groups them, or neither."""
    for base, how in (("Selector", "select"), ("Grouper", "group")):
        kind = _base_class(base)
        if kind is not None and isinstance(operator, kind):
            return how  # type: ignore[return-value]
    return None


def is_juicer_operator(operator: Any) -> bool:
    """Whether an operator is one of Data-Juicer's, by its class."""
    kind = _base_class("OP")
    return kind is not None and isinstance(operator, kind)


def tag_columns(operator: Any) -> list[str]:
    """The columns of dictionaries that an operator writes into, and expects to find."""
    if not is_juicer_operator(operator):
        return []
    tagging = getattr(sys.modules[_BASES], "TAGGING_OPS", None)
    columns = [META] if tagging is not None and operator._name in tagging.modules else []
    return [*columns, GROUP_META] if isinstance(operator, _base_class("Aggregator") or ()) else columns


def _base_class(name: str) -> type | None:
    """A base class of the library, if the library has been imported."""
    found = getattr(sys.modules.get(_BASES), name, None)
    return found if isinstance(found, type) else None
