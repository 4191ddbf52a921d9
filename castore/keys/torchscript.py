"""Encodes functions and modules compiled by torch.jit: their code, attributes and constants.

The source is the archive of `torch.jit.save`, a zip file. Names of classes and functions in its sources and
pickles contain numbers that differ between compilations; these numbers are removed. Must never: look up a
name in a pickle, so no code is executed.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from castore.system.cpus import hash_threads

_NUMBERED = re.compile(r"___torch_mangle_\d+\.?")
# Start of a class, a function or a method.
_HEADS = re.compile(r"\n(?=(?:  )?def |class )")
_PICKLES = ("data", "constants")


def archive_parts(encoder: Any, archive: bytes, without: frozenset[str] = frozenset()) -> Iterator[Any]:
    """Yield the parts of a compiled function or module.

    Args:
        encoder: encodes the values.
        archive: result of `save_to_buffer`.
        without: names of attributes that do not count.
    """
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        # Each path begins with the archive's name.
        paths = {path.partition("/")[2]: path for path in files.namelist()}
        sources = [files.read(path).decode() for below, path in paths.items() if below.endswith(".py")]
        yield sorted(block for source in sources for block in _blocks(_NUMBERED.sub("", source)))
        for name in _PICKLES:
            if f"{name}.pkl" in paths:
                reader = _Reader(files, paths, name)
                yield name, encoder.part(_plain(reader.load(), without), f".{name}")


def _blocks(source: str) -> Iterator[str]:
    """Yield functions, and methods with their class. torch writes methods and fields in random order."""
    owner = ""
    for block in _HEADS.split(source):
        if block.startswith("class "):
            owner, *fields = block.splitlines()
            yield "\n".join([owner, *sorted(fields)])
        else:
            owner = owner if block.startswith("  ") else ""
            yield f"{owner}\n{block.rstrip()}"


class _Named:
    """Stands for an instance in a pickle: the name of its class or function, its arguments and its state."""

    name = ""

    def __new__(cls, *arguments: Any) -> _Named:
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Reads one pickle of an archive. Tensors are replaced by digests of their storage."""

    def __init__(self, files: zipfile.ZipFile, paths: dict[str, str], name: str) -> None:
        super().__init__(io.BytesIO(files.read(paths[f"{name}.pkl"])))
        self._files, self._paths, self._name = files, paths, name

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that stands for the name, without looking it up."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type("_Named", (_Named,), {"name": _NUMBERED.sub("", f"{module}.{name}")})

    def persistent_load(self, pid: Any) -> Any:
        """Return type, size and digest of a storage. Its device does not count."""
        _, kind, number, _, size = pid
        data = self._files.read(self._paths[f"{self._name}/{number}"])
        return kind.name, size, blake3(data, max_threads=hash_threads()).digest()


def _plain(value: Any, without: frozenset[str]) -> Any:
    """Turn an unpickled value into plain containers."""
    if isinstance(value, _Named):
        state = value.state
        if type(state) is dict:
            state = {name: item for name, item in sorted(state.items()) if name not in without}
        return value.name, _plain(value.arguments, without), _plain(state, without)
    if isinstance(value, type) and issubclass(value, _Named):
        return value.name
    if isinstance(value, dict):
        return [(_plain(name, without), _plain(item, without)) for name, item in value.items()]
    return [_plain(item, without) for item in value] if isinstance(value, list | tuple) else value
