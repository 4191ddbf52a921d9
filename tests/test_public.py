"""The public interface: every type and error that the public interface names can be imported from `castore`,
and no more shows.
"""

from __future__ import annotations

import builtins
import inspect
import pydoc
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import castore
from castore import Store

PUBLIC = {name: getattr(castore, name) for name in castore.__all__}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
#: Modules whose names a signature may use while types are checked only.
_FOR_CHECKERS = {name: getattr(castore, name) for name in ("SharedFrames", "Remote", "Pulled", "Pushed")}


#: The members that readers inside castore call on the frames of `Store.shared_frames`.
_OF_READERS = {"SharedFrames.of"}


def members() -> Iterator[tuple[str, Any]]:
    """Public functions, methods and properties, by their dotted names."""
    for name, value in PUBLIC.items():
        if inspect.isfunction(value):
            yield name, value
        if not inspect.isclass(value):
            continue
        for member, found in vars(value).items():
            # Users make stores; the other objects are handed to them.
            if member.startswith("_") and (name, member) not in {
                ("Store", "__init__"),
                ("Store", "__iter__"),
            }:
                continue
            if f"{name}.{member}" in _OF_READERS:
                continue
            function = found.fget if isinstance(found, property) else inspect.unwrap(found)
            if inspect.isfunction(function):
                yield f"{name}.{member}", function


MEMBERS = dict(members())


def named(hint: Any) -> Iterator[Any]:
    """The classes that an annotation names, however deep."""
    for inner in typing.get_args(hint):
        yield from named(inner)
    if inspect.isclass(hint):
        yield hint


def in_signature(function: Any) -> set[Any]:
    """The classes that the annotations of a function, and of its overloads, name."""
    found: set[Any] = set()
    overloads: list[Any] = getattr(typing, "get_overloads", lambda function: [])(function)  # of Python 3.11
    for one in (function, *overloads):
        for hint in typing.get_type_hints(one, localns=_FOR_CHECKERS).values():
            found.update(named(hint))
    return found


@pytest.mark.parametrize("name", MEMBERS)
def test_every_type_of_a_public_signature_is_exported(name: str) -> None:
    ours = {found for found in in_signature(MEMBERS[name]) if found.__module__.startswith("castore")}
    assert {found.__name__ for found in ours if PUBLIC.get(found.__name__) is not found} == set()


def test_the_walk_sees_types_that_are_nested_and_overloaded() -> None:
    assert castore.Plan in in_signature(Store.gc) or sys.version_info < (3, 11)
    assert castore.Stat in in_signature(Store.stat)
    assert castore.Entry in in_signature(Store.put_many)
    assert castore.NewFile in in_signature(Store.create)
    assert len(MEMBERS) > 50


@pytest.mark.parametrize("name", CLASSES)
def test_every_type_of_a_public_attribute_is_exported(name: str) -> None:
    hints = typing.get_type_hints(CLASSES[name], localns=_FOR_CHECKERS)
    ours = {one for key, hint in hints.items() if not key.startswith("_") for one in named(hint)}
    missing = {one.__name__ for one in ours if one.__module__.startswith("castore")} - PUBLIC.keys()
    assert missing == set()


def test_every_error_that_a_public_docstring_names_is_exported() -> None:
    texts = [inspect.getdoc(value) or "" for value in (*MEMBERS.values(), *CLASSES.values())]
    told = set(re.findall(r"\b[A-Z][A-Za-z]*(?:Error|Warning)\b", "\n".join(texts)))
    assert "SegmentError" in told
    assert {name for name in told if name not in PUBLIC and not hasattr(builtins, name)} == set()


def test_every_error_of_castore_is_exported() -> None:
    from castore import errors

    raised = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert raised - PUBLIC.keys() == set()


def test_every_public_name_has_a_docstring() -> None:
    without = [
        name
        for name, value in {**MEMBERS, **CLASSES}.items()
        if not name.endswith("__init__") and not value.__doc__
    ]
    assert without == []


def test_internals_do_not_show_in_the_help_of_a_store() -> None:
    shown = pydoc.plain(pydoc.render_doc(Store))
    methods = set(re.findall(r"^ \|  (\w+)\(", shown, re.MULTILINE))
    assert {"put", "get", "gc", "create"} <= methods
    assert {"relieve", "flush_if_due", "flush_for"} & methods == set()
    for parameter in inspect.signature(Store.save).parameters.values():
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD


def test_every_public_name_is_there_for_import_star_and_dir_and_loads_alone() -> None:
    for name in castore.__all__:
        assert name in dir(castore)
    lines = ["import castore", *(f"from castore import {name}" for name in castore.__all__)]
    script = "\n".join([*lines, "print(len(castore.__all__))"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(castore.__all__) == len(set(castore.__all__))
