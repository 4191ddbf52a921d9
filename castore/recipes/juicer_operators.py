"""Finds Data-Juicer's own operators by name, with their parameters, where `py-data-juicer` is installed.

The library is imported only for a name that no other source has: the import takes seconds. Must never change
the library. Must never choose between its operators and castore's: `castore.recipes.registry` chooses.
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


def is_installed() -> bool:
    """Whether the library is installed; the check does not import it.

    >>> isinstance(is_installed(), bool)
    True
    """
    return _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None


@functools.lru_cache(maxsize=1)
def load_operators() -> dict[str, type]:
    """All operators of the library by name; empty if the library is not installed.

    Raises:
        CastoreError: the library is installed, and cannot be imported.
    """
    if not is_installed():
        return {}
    try:
        return dict(import_module(f"{_PACKAGE}.ops").OPERATORS.modules)
    except Exception as error:  # importing a heap of optional libraries may raise anything
        raise CastoreError(
            f"cannot import py-data-juicer for its operators: {type(error).__name__}: "
            f"{error}{_checkout_advice()}"
        ) from error


def _checkout_advice() -> str:
    """Advice where Python finds the library in a folder that was never installed; "" where it was."""
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


def find_parameters(target: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters that a class of the library's operators takes by name; None for any other class, and for
    old releases of the library.

    The operators pass on the parameters that they do not know, so their signature does not list all of them.
    """
    kind = getattr(sys.modules.get(f"{_PACKAGE}.ops.base_op"), "OP", None)
    if not isinstance(kind, type) or not isinstance(target, type) or not issubclass(target, kind):
        return None
    shared = getattr(target, "_BASE_PARAMS", None)
    if shared is None:
        return None
    known = {name: _optional_parameter(name) for name in shared}
    for cls in reversed(target.__mro__):
        own = inspect.signature(vars(cls)["__init__"]).parameters if "__init__" in vars(cls) else {}
        named = {name: p for name, p in own.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        known |= named if cls is target else {name: _optional_parameter(name) for name in named}
    known.pop("self", None)
    return known


def _optional_parameter(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
