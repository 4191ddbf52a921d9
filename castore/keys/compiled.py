"""Code of the user's that a compiler has made: modules of Cython, pybind11 and C, and libraries of cffi.

Such code cannot be read, so the bytes of its file count, as a whole: an edit of one function runs again what
uses another. A file that was built anew since this process has loaded it is an error, for the process goes on
with the code of before.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import re
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from blake3 import blake3

from castore.keys.classes import full_name
from castore.keys.encoder import Encoder, UnencodableError
from castore.keys.libraries import library_of
from castore.system.mappings import Mappings

_ENDINGS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_LIBRARY_OF_CFFI = "cffi.api._make_ffi_library.<locals>.FFILibrary"
_OF_PYTHON = (types.FunctionType, types.MethodType, type)
_PATH = re.compile(r"'(.+)'")


def compiled_digest(module: Any) -> bytes | None:
    """The digest of the file of a compiled module of the user's, by its name; None for other modules.

    Raises:
        UnencodableError: another file lies there since the module was imported.
    """
    file = getattr(sys.modules.get(module), "__file__", None) if isinstance(module, str) else None
    if not isinstance(file, str) or not file.endswith(_ENDINGS) or library_of(module) is not None:
        return None
    if not Mappings().has(file):
        raise UnencodableError(
            f"is of the compiled module {module!r}, which was built anew since it was imported: this process"
            " runs the code of before; begin a new one"
        )
    return _digest_of_file(file)


def compiled_code(encoder: Encoder, value: Any) -> bytes | None:
    """The rule for functions of compiled modules, and for libraries that cffi has opened."""
    cls = type(value)
    if full_name(cls) == _LIBRARY_OF_CFFI:
        return encoder.tagged("library of cffi", *_library_of_cffi(cls))
    if full_name(cls) == "_cffi_backend.Lib" and (named := _PATH.search(repr(value))):
        digest = compiled_digest(named[1])
        return None if digest is None else encoder.tagged("compiled", named[1], digest)
    # Compilers have types of their own for functions, such as ``cython_function_or_method``.
    if not ("func" in cls.__name__ or "method" in cls.__name__) or issubclass(cls, _OF_PYTHON):
        return None
    module: Any = getattr(value, "__module__", None)
    digest = compiled_digest(module)
    if digest is None:
        return None
    held: Any = getattr(value, "__self__", None)
    parts = [getattr(value, part, None) for part in ("__defaults__", "__kwdefaults__")]
    parts.append(held if held is not sys.modules.get(module) else None)
    return encoder.tagged("compiled", full_name(value), digest, *map(encoder.part, parts))


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
        with suppress(OSError):  # removed after loading
            yield _digest_of_file(found[1])


def _digest_of_file(file: str) -> bytes:
    state = os.stat(file)
    return _digest(file, state.st_ino, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest(file: str, *_: int) -> bytes:
    return blake3(max_threads=1).update_mmap(file).digest()
