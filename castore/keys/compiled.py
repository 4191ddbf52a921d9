"""Code of the user's that a compiler has made: modules of Cython, pybind11 and C, libraries of cffi and C.

Such code cannot be read, so the bytes of its file count, as a whole: an edit of one function runs again what
uses another. A compiled module may call the others of its package, so those that are loaded count with it,
and so do the user's Python code and the plain values that lie in it. A file that was built anew since this
process has loaded it is an error, for the process goes on with the code of before.

Cannot see values that C keeps to itself, nor a library of C that is reached through another one.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from castore.keys.classes import full_name
from castore.keys.encoder import Encoder, UnencodableError
from castore.keys.libraries import library_of
from castore.system.mappings import Mappings

_ENDINGS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_LIBRARY_OF_CFFI = "cffi.api._make_ffi_library.<locals>.FFILibrary"
_OF_PYTHON = (types.FunctionType, types.MethodType, type)
_PLAIN = {bool, int, float, complex, str, bytes, type(None)}
_PATH = re.compile(r"'(.+)'")


def compiled_digest(module: Any) -> bytes | None:
    """The digest of the file of a compiled module of the user's, by its name; None for other modules.

    Raises:
        UnencodableError: another file lies there since the module was imported.
    """
    file = getattr(sys.modules.get(module), "__file__", None) if isinstance(module, str) else None
    if not isinstance(file, str) or not file.endswith(_ENDINGS) or library_of(module) is not None:
        return None
    return digest_of_loaded(file, f"the compiled module {module!r}")


def digest_of_loaded(file: str, what: str) -> bytes:
    """The digest of a file of code that this process has loaded.

    Args:
        file: its path.
        what: it is, for the error.

    Raises:
        UnencodableError: another file lies there since, or none.
    """
    if not Mappings().has(file):
        raise UnencodableError(
            f"is of {what}, which was built anew, moved or removed since it was loaded: this process runs the"
            " code of before; begin a new one"
        )
    state = os.stat(file)
    return _digest(file, state.st_ino, state.st_size, state.st_mtime_ns)


def compiled_code(encoder: Encoder, value: Any) -> bytes | None:
    """The rule for compiled modules and their functions, and for libraries that cffi has opened."""
    cls = type(value)
    if full_name(cls) == _LIBRARY_OF_CFFI:
        return encoder.tagged("library of cffi", *_library_of_cffi(cls))
    if full_name(cls) == "_cffi_backend.Lib" and (named := _PATH.search(repr(value))):
        digest = compiled_digest(named[1])
        return None if digest is None else encoder.tagged("compiled", named[1], digest)
    if issubclass(cls, types.ModuleType):
        return _module(encoder, value)
    # Compilers have types of their own for functions, such as ``cython_function_or_method``.
    if not ("func" in cls.__name__ or "method" in cls.__name__) or issubclass(cls, _OF_PYTHON):
        return None
    module: Any = getattr(value, "__module__", None)
    if compiled_digest(module) is None:
        return None
    held: Any = getattr(value, "__self__", None)
    parts = [getattr(value, part, None) for part in ("__defaults__", "__kwdefaults__")]
    parts += [held if held is not sys.modules[module] else None, sys.modules[module]]
    return encoder.tagged("compiled", full_name(value), *map(encoder.part, parts))


def _module(encoder: Encoder, module: types.ModuleType) -> bytes | None:
    """A compiled module, by its file and those of its package, and by what of the user's lies in it."""
    name = getattr(module, "__name__", None)
    if compiled_digest(name) is None:
        return None
    encoder.number(module)
    package = str(name).partition(".")[0]
    beside = sorted(other for other in [*sys.modules] if other.partition(".")[0] == package)
    digests = [(other, digest) for other in beside if (digest := compiled_digest(other)) is not None]
    held = [
        (called, encoder.part(item, f".{called}"))
        for called, item in sorted(vars(module).items())
        if not called.startswith("__") and _counts(item)
    ]
    return encoder.tagged("compiled module", name, digests, held)


def _counts(item: Any) -> bool:
    """Whether something in a compiled module is the user's own: Python code, or a plain value."""
    if isinstance(item, types.ModuleType):
        return library_of(item.__name__) is None
    if isinstance(item, types.FunctionType | type):
        return library_of(item.__module__) is None and compiled_digest(item.__module__) is None
    return type(item) in _PLAIN


def _library_of_cffi(cls: type) -> Iterator[Any]:
    """The path and the digest of a library that `ffi.dlopen` has opened; a name without a folder is a system
    library.
    """
    functions = (getattr(item, "__closure__", None) or () for item in vars(cls).values())
    cells = (cell.cell_contents for closure in functions for cell in closure)
    told = next((repr(held) for held in cells if "library" in repr(held)[:20]), "")
    found = _PATH.search(told)
    if found is None:
        raise UnencodableError("cannot hash a library that cffi opened; open it with ctypes, by its path")
    yield found[1]
    if "/" in found[1]:
        yield digest_of_loaded(found[1], f"the library {found[1]!r}")


@functools.lru_cache(maxsize=256)
def _digest(file: str, *_: int) -> bytes:
    return blake3(max_threads=1).update_mmap(file).digest()
