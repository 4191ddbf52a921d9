"""Decides whether a module is the user's, Python's, or part of a distribution, and of which version.

The module's location decides, not its name. User code lies outside the standard library and site-packages, or
was put there by hand. A package that pip installed into any other folder, with its records beside it, is a
library too. Of the module in question only its parent packages are imported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import sysconfig
import types
from typing import Any

from castore.keys.classes import per_class
from castore.keys.moved import name_in_keys

# Python's flag of types that are made while a program runs.
_ON_HEAP = 1 << 9
_PACKAGE = __name__.partition(".")[0]
_OF_C = types.MethodDescriptorType | types.WrapperDescriptorType


def library_of(module: Any) -> str | None:
    """The module's name with name and version of its distribution, or of Python; None for user code."""
    return _find_library(module) if isinstance(module, str) else None


@per_class
def library_of_class(cls: type) -> str | None:
    """As `library_of`, for a class; None for a class of the user's that only names a library's module.

    Python takes a class's module from the code that calls `type`. For ``type(name, (Base,), {...})`` over an
    abstract class that is `abc`, for `dataclasses.make_dataclass` it may be `types`. `functools.wraps` copies
    the module of another class.
    """
    library = library_of(cls.__module__)
    if library is None or not cls.__flags__ & _ON_HEAP or _has(cls):
        return library
    body = vars(cls).values()
    # An enumeration's body has methods of its bases.
    of_c = any(isinstance(item, _OF_C) and item.__objclass__ is cls for item in body)
    is_users = (" of Python " in library and not of_c) or any(map(_is_users_code, body))
    return None if is_users else library


def _nearest(module: str) -> Any:
    """The module, or the next package around it that is imported: `numpy.recarray` names `numpy.rec`, which
    may not be.
    """
    while module not in sys.modules and "." in module:
        module = module.rpartition(".")[0]
    return sys.modules.get(module)


def _has(cls: type) -> bool:
    """Whether the module that a class names has the class."""
    found = _nearest(cls.__module__)
    for part in cls.__qualname__.split("."):
        try:
            found = vars(found).get(part)
        except TypeError:
            return False
    if found is cls:
        return True
    return getattr(_nearest(cls.__module__), cls.__qualname__, None) is cls  # of a lazy module


def _is_users_code(item: object) -> bool:
    item = getattr(item, "fget", getattr(item, "__func__", item))
    return isinstance(item, types.FunctionType) and library_of(item.__globals__.get("__name__")) is None


@functools.cache
def _find_library(module: str) -> str | None:
    top = module.partition(".")[0]
    if top == _PACKAGE:
        return f"{name_in_keys(module)} of {_distribution(top)}"
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None  # __main__, and modules that were created by hand
    # Lazy modules (transformers) have path objects in place of strings.
    places = [*map(str, spec.submodule_search_locations or []), spec.origin or ""] if spec else []
    places = _places_of(module, places)
    paths = _folders()
    # By location, not by name: a user's statistics.py is not the standard library's. The standard library's
    # folder may contain site-packages, so site-packages come first.
    if any(place.startswith(f"{paths[kind]}/") for kind in ("purelib", "platlib") for place in places) or any(
        "/site-packages/" in place or "/dist-packages/" in place for place in places
    ):
        # A file that belongs to no distribution was put there by hand: it is user code.
        distribution = _distribution(top)
        return f"{module} of {distribution}" if distribution else None
    python = ("built-in", "frozen", f"{paths['stdlib']}/", f"{paths['platstdlib']}/")
    if any(place.startswith(python) for place in places):
        return f"{module} of Python {sys.version_info.major}.{sys.version_info.minor}"
    beside = next(filter(None, (_beside(place, top) for place in places)), None)
    return f"{module} of {beside}" if beside else None


@functools.cache
def _folders() -> dict[str, str]:
    """The folders of the standard library and of installed packages, by kind."""
    return sysconfig.get_paths()


def _places_of(module: str, places: list[str]) -> list[str]:
    """Those places of a top-level package that have a module of it.

    Several distributions and a user's folder may share the name of a package, and a package may add folders
    to its path. A module may be loaded from a file elsewhere.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str) or not os.path.isabs(file):
        if len(places) <= 2:  # a folder, and the file in it: not a name that is shared
            return places
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return places
        file = (spec.origin or next(iter(spec.submodule_search_locations or []), "")) if spec else ""
        if not file:
            return places
    folders = {place.removesuffix("/__init__.py") for place in places if place}
    return [place for place in folders if file == place or file.startswith(f"{place}/")] or [file]


def _beside(place: str, top: str) -> str | None:
    """Name and version of the distribution that ``pip install --target`` put at a location, or None."""
    folder, name = os.path.split(place)
    if name != top and not name.startswith(f"{top}."):
        return None
    if not any(name.endswith(".dist-info") for name in _names_in(folder)):
        return None  # a user's project has no .dist-info beside it
    import importlib.metadata

    for found in importlib.metadata.distributions(path=[folder]):
        # A project under development may have an egg-info beside it, but no RECORD.
        if found.read_text("RECORD") and any(
            file.parts[0].partition(".")[0] == top for file in found.files or ()
        ):
            return f"{found.metadata['Name']} {found.version}"
    return None


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _distribution(top: str) -> str:
    """Name and version of the distribution that holds a top-level package; "" if none does, or if it was
    installed as links to a project that is worked on.
    """
    import importlib.metadata  # imported here: takes 15 ms, with the e-mail parser

    try:
        owners = [importlib.metadata.distribution(top)]
        names = [top]
    except importlib.metadata.PackageNotFoundError:
        owners = [found for found in importlib.metadata.distributions() if _holds(found, top)]
        names = sorted({found.metadata["Name"] for found in owners})
    if top != _PACKAGE and any(map(_is_link_to_a_project, owners)):
        return ""
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _is_link_to_a_project(distribution: Any) -> bool:
    """Whether a distribution was installed as links to a folder that is worked on: `flit install -s` does."""
    told = distribution.read_text("direct_url.json")
    return told is not None and re.search(r'"editable":\s*true', told) is not None


def _holds(distribution: Any, top: str) -> bool:
    """Whether a distribution has a top-level package, by `importlib.metadata.packages_distributions`' rule.

    `packages_distributions` itself parses the name of each file of each distribution. With 200 distributions
    this takes 0.3 s of processor time.
    """
    if declared := (distribution.read_text("top_level.txt") or "").split():
        return top in declared
    record = distribution.read_text("RECORD")
    if record is None:
        names = [file.parts for file in distribution.files or () if file.suffix == ".py"]
        return any(parts[0].removesuffix(".py") == top for parts in names)
    return (
        re.search(rf"^{re.escape(top)}(/[^,\n]*)?\.(py|[^,/\n]*so|[^,/\n]*pyd)[\",]", record, re.MULTILINE)
        is not None
    )


def library_object(value: Any) -> str | None:
    """Name and library of an object that its library has under that name (a ufunc, a compiled function)."""
    try:
        name = getattr(value, "__name__", None)
        module = getattr(value, "__module__", None) or type(value).__module__
    except Exception:  # noqa: BLE001 - the user's __getattr__ may raise anything, and is no library's
        return None
    library = library_of(module) if isinstance(name, str) else None
    if library and name and getattr(_nearest(module), name, None) is value:
        return f"{name} in {library}"
    return None
