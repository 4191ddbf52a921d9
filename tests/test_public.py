"""The public interface: every type and error that the public interface names can be imported from a public
package, and no more shows.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

import pytest

import castore
from castore import Remote, Store

PACKAGES = (
    "castore",
    "castore.adapters.datasets",
    "castore.adapters.embeddings",
    "castore.adapters.filesystem",
    "castore.adapters.ray",
    "castore.adapters.torch",
    "castore.adapters.tree",
    "castore.recipes",
    "castore_fuse",
)
_WITH_TORCH = ("castore.adapters.embeddings", "castore.adapters.torch")
ROOTS = (Path(castore.__file__).parents[1], Path(castore.__file__).parents[1] / "fuse")

#: The members that readers inside castore call on the frames of `Store.shared_frames`.
_OF_READERS = {"SharedFrames.of", "SharedFrames.offer"}

#: The module that defines a name, and its name there.
Origin = tuple[str, str]

every_package = pytest.mark.parametrize("package", PACKAGES)


def load(package: str) -> ModuleType:
    if package in _WITH_TORCH:
        pytest.importorskip("torch")
    return importlib.import_module(package)


def classes_of(module: ModuleType) -> dict[str, Any]:
    found = {name: getattr(module, name) for name in module.__all__}
    # An alias is a class for `inspect` before Python 3.11.
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value) and not isinstance(value, GenericAlias)
    }


def own_bases(kind: type) -> list[type]:
    """A class and those of its bases that castore defines."""
    return [base for base in kind.__mro__ if base.__module__.startswith("castore")]


def is_shown(kind: type, member: str) -> bool:
    """Whether users call a member. They make objects of a class whose docstring has arguments."""
    if member == "__init__":
        return "Args:" in (kind.__doc__ or "")
    return not member.startswith("_") or member == "__iter__"


def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Public functions, methods and properties, by their dotted names."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield name, value
        for kind in own_bases(value) if inspect.isclass(value) else ():
            for member, found in vars(kind).items():
                function = getattr(found, "fget", None) or getattr(found, "__func__", found)
                if f"{name}.{member}" in _OF_READERS or not is_shown(value, member):
                    continue
                if inspect.isfunction(function):
                    yield f"{name}.{member}", function


@functools.cache
def syntax(module: str) -> ast.Module:
    """The source of a module, which need not be imported for this."""
    stems = [root.joinpath(*module.split(".")) for root in ROOTS]
    files = [file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py"))]
    return ast.parse(next(file for file in files if file.exists()).read_text())


@functools.cache
def imports(module: str) -> dict[str, Origin]:
    """The names that a module imports from others; imports for type checkers count."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(syntax(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def origin(module: str, name: str) -> Origin:
    while module.startswith("castore") and name in imports(module):
        module, name = imports(module)[name]
    return module, name


@functools.cache
def exported() -> dict[Origin, str]:
    """The names that the public packages export, each with the package's name."""
    found: dict[Origin, str] = {}
    for package in PACKAGES:
        for node in syntax(package).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {origin(package, name): package for name in ast.literal_eval(node.value)}
    return found


def in_text(annotation: str, module: str) -> set[Origin]:
    """The names of castore in an annotation of a module. Type variables are left out."""
    nodes = list(ast.walk(ast.parse(annotation, mode="eval")))
    dotted = {node.value: node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found: set[Origin] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            place = origin(module, node.id)
            if node not in dotted:
                found.add(place)
            elif node.id in imports(module) and place[0].startswith("castore"):
                found.add(origin(".".join(place), dotted[node]))
    return {
        (package, name)
        for package, name in found
        if package.startswith("castore") and not hasattr(builtins, name)
        if not isinstance(getattr(importlib.import_module(package), name, None), typing.TypeVar)
    }


def in_annotations(annotated: Any) -> set[Origin]:
    """The names of castore in the annotations of a function or in the public ones of a class."""
    hints = annotated.__annotations__.items()
    if inspect.isclass(annotated):
        hints = [(key, hint) for key, hint in hints if not key.startswith("_")]
    texts = [getattr(hint, "__forward_arg__", hint) for _, hint in hints]  # a NamedTuple has references
    return {name for text in texts if isinstance(text, str) for name in in_text(text, annotated.__module__)}


def in_signature(function: Any) -> set[Origin]:
    """The names of castore in the annotations of a function and of its overloads."""
    overloads: list[Any] = getattr(typing, "get_overloads", lambda function: [])(function)  # of Python 3.11
    return set().union(*(in_annotations(one) for one in (inspect.unwrap(function), *overloads)))


def documented(module: ModuleType) -> dict[str, Any]:
    """The functions, methods and classes of a public package whose docstrings users read."""
    return {**dict(members(module)), **classes_of(module)}


@every_package
def test_every_type_of_a_public_signature_or_attribute_is_exported(package: str) -> None:
    module = load(package)
    used = {name: in_signature(function) for name, function in members(module)}
    for name, kind in classes_of(module).items():
        used[name] = set().union(
            *(in_annotations(base) for base in own_bases(kind) if "__annotations__" in vars(base))
        )
    missing = {name: found - exported().keys() for name, found in used.items()}
    assert {name: found for name, found in missing.items() if found} == {}


def test_the_walk_sees_types_that_are_nested_overloaded_aliased_and_for_checkers_only() -> None:
    assert ("castore.gc.collect", "Plan") in in_signature(Store.gc) or sys.version_info < (3, 11)
    assert ("castore.stats", "Stat") in in_signature(Store.stat)
    assert ("castore.records", "Entry") in in_signature(Store.put_many)
    assert ("castore.records", "Buffer") in in_signature(Store.put_many)
    assert ("castore.remote.remote", "Remote") in in_signature(Store.add_remote)
    assert ("castore.write.incoming", "NewFile") in in_signature(Store.create)
    assert len(dict(members(castore))) > 50


def named_in_docstrings(package: str, pattern: str) -> set[tuple[str, str]]:
    """The names that docstrings of a public package have and that no public package exports."""
    public = {name for _, name in exported()}
    return {
        (shown, name)
        for shown, value in documented(load(package)).items()
        for name in re.findall(pattern, inspect.getdoc(value) or "")
        if name not in public and not hasattr(builtins, name)
    }


@every_package
def test_every_error_that_a_public_docstring_names_is_exported(package: str) -> None:
    assert named_in_docstrings(package, r"\b[A-Z][A-Za-z]*(?:Error|Warning)\b") == set()


@every_package
def test_every_class_that_a_public_docstring_names_is_exported(package: str) -> None:
    files = [file for root in ROOTS for file in root.glob("castore*/**/*.py")]
    ours = set(re.findall(r"^class ([A-Z]\w+)", "\n".join(file.read_text() for file in files), re.M))
    assert {found for found in named_in_docstrings(package, r"`([A-Z]\w+)\b") if found[1] in ours} == set()


def test_every_error_of_castore_is_exported() -> None:
    from castore import errors

    raised = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert raised - set(castore.__all__) == set()


def test_every_public_name_has_a_docstring() -> None:
    shown = documented(castore)
    assert [
        name for name, value in shown.items() if not name.endswith("__init__") and not value.__doc__
    ] == []


def test_internals_do_not_show_in_the_help_of_a_store() -> None:
    shown = pydoc.plain(pydoc.render_doc(Store))
    methods = set(re.findall(r"^ \|  (\w+)\(", shown, re.MULTILINE))
    assert {"put", "get", "gc", "create"} <= methods
    assert {"relieve", "flush_if_due", "flush_for"} & methods == set()
    assert not [name for name in _private_attributes() if f"``{name}``" in shown]


def _private_attributes() -> set[str]:
    """Attributes of a store that its decision page calls not public."""
    page = Path("docs/decisions/one-door.md").read_text()
    [listed] = re.findall(r"The attributes ([^.]+?) are not public", re.sub(r"\s+", " ", page))
    return set(re.findall(r"`(\w+)`", listed))


def test_what_is_for_adapters_and_what_is_not_public_is_listed(tmp_path: Path) -> None:
    # Python 3.13 takes the indentation out of docstrings, and `getdoc` does so everywhere.
    text = (inspect.getdoc(Store) or "").partition("A part of the interface is for adapters")[2]
    for_adapters = text.partition("\n\n")[0]
    public = [name for name in vars(Store) if not name.startswith("_")]
    # In the source too, they stand together at the end.
    assert [*public[public.index("find") :], "tree"] == re.findall(r"``(\w+)``", for_adapters)
    with Store(tmp_path / "store") as store:
        attributes = {name for name in vars(store) if not name.startswith("_")}
    documented = set(re.findall(r"^    (\w+): ", text.partition("Attributes:")[2], re.M))
    assert attributes - documented == _private_attributes() | {"tree"}


def test_every_option_of_a_public_function_stands_in_its_signature() -> None:
    parameters = [
        (name, parameter.kind)
        for name, function in members(castore)
        for parameter in inspect.signature(function).parameters.values()
    ]
    assert [name for name, kind in parameters if kind is inspect.Parameter.VAR_KEYWORD] == []


@pytest.mark.parametrize("method", ["push", "pull"])
def test_a_store_pushes_and_pulls_with_the_options_of_its_remote(method: str) -> None:
    of_store = dict(inspect.signature(getattr(Store, method)).parameters)
    assert str(of_store.pop("to" if method == "push" else "remote").annotation) == "str"
    assert list(of_store.values()) == list(inspect.signature(getattr(Remote, method)).parameters.values())


def test_every_public_name_is_there_for_import_star_and_dir_and_loads_alone() -> None:
    for name in castore.__all__:
        assert name in dir(castore)
    lines = ["import castore", *(f"from castore import {name}" for name in castore.__all__)]
    script = "\n".join([*lines, "print(len(castore.__all__))"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(castore.__all__) == len(set(castore.__all__))
