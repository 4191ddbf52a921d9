"""Data-Juicer's own operators, where `py-data-juicer` is installed: found by name, with the parameters that
they take.

The library is imported only for a name that nobody else has: that takes seconds. Must never change the
library, and must never choose between its operators and castore's: `castore.recipes.registry` does.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from importlib import import_module
from typing import Any

from castore.errors import CastoreError

_PACKAGE = "data_juicer"


def installed() -> bool:
    """Whether the library is there; it is not imported for that.

    >>> isinstance(installed(), bool)
    True
    """
    return _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None


@functools.lru_cache(maxsize=1)
def operators() -> dict[str, type]:
    """All of its operators by name; none where it is not installed.

    Raises:
        CastoreError: it is there, and cannot be imported.
    """
    if not installed():
        return {}
    try:
        return dict(import_module(f"{_PACKAGE}.ops").OPERATORS.modules)
    except Exception as error:  # whatever a heap of optional libraries raises when it is imported
        raise CastoreError(
            f"cannot import py-data-juicer for its operators: {type(error).__name__}: {error}{_checkout()}"
        ) from error


def _checkout() -> str:
    """What to do where Python finds the library in a folder that nobody installed; "" where somebody did."""
    if importlib.metadata.packages_distributions().get(_PACKAGE):
        return ""
    spec = importlib.util.find_spec(_PACKAGE)
    place = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    if place is None:
        return ""
    return (
        f"; Python found it in {place}, which is not installed: pip install -e {os.path.dirname(place)}, "
        "or run in another folder"
    )


def parameters(target: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters that a class of its operators takes by name; None for what is none of them, and for old
    releases.

    Its operators hand on whatever they do not know themselves, so their signature does not tell.
    """
    kind = getattr(sys.modules.get(f"{_PACKAGE}.ops.base_op"), "OP", None)
    if not isinstance(kind, type) or not isinstance(target, type) or not issubclass(target, kind):
        return None
    shared = getattr(target, "_BASE_PARAMS", None)
    if shared is None:
        return None
    known = {name: _optional(name) for name in shared}
    for cls in reversed(target.__mro__):
        own = inspect.signature(vars(cls)["__init__"]).parameters if "__init__" in vars(cls) else {}
        named = {name: p for name, p in own.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        known |= named if cls is target else {name: _optional(name) for name in named}
    known.pop("self", None)
    return known


def _optional(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
