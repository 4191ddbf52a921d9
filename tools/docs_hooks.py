"""Hooks of MkDocs and griffe for `make docs`, named in mkdocs.yml.

A public name without a docstring ends the build. Doctests of docstrings become blocks of code.

Sources are read with griffe, as mkdocstrings does, so none of the adapters' libraries has to be installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parent.parent


def on_pre_build(config: Any) -> None:
    """End the build with one line for each public name without a docstring."""
    pages = (Path(config["docs_dir"]) / "api").glob("*.md")
    modules = sorted(name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M))
    loader = griffe.GriffeLoader(search_paths=[ROOT, ROOT / "fuse"])
    for package in ("castore", "castore_fuse"):
        loader.load(package)
    loader.resolve_aliases(implicit=True)
    missing = [name for module in modules for name in undocumented(loader.modules_collection[module])]
    if missing:
        raise PluginError("public names without a docstring:\n" + "\n".join(f"  {name}" for name in missing))


def undocumented(module: griffe.Module) -> Iterator[str]:
    """The public names of a module, and the public methods of its classes, that have no docstring."""
    for export in module.exports or ():
        name = str(export)
        if name not in module.members:
            yield f"{module.path}.{name} (not found: import it in a block of TYPE_CHECKING)"
            continue
        found = module[name]
        if not found.has_docstring:
            yield f"{module.path}.{name}"
        if found.is_class:
            yield from (
                f"{module.path}.{name}.{member.name}"
                for member in found.all_members.values()
                if not member.name.startswith("_") and is_callable(member) and not member.has_docstring
            )


def is_callable(member: griffe.Object | griffe.Alias) -> bool:
    """Whether a member is a method or a property."""
    return member.is_function or "property" in member.labels


class Doctests(griffe.Extension):  # type: ignore[misc]  # griffe is in the environment of the site alone
    """Puts fences around doctests: as Markdown, each ``>>>`` would open three quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that griffe has just read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return ``text`` with a fence around each doctest: from ``>>>`` to the next empty line."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if inside and not line.strip():
            lines.append("```")
            inside = False
        elif not inside and line.startswith(">>> "):
            lines.append("```pycon")
            inside = True
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
