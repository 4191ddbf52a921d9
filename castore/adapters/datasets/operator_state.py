"""Whether an operator remembers rows that it has seen: in a set of texts, a counter, a vocabulary.

The results of such an operator depend on the rows before. So a block's result may not be kept for other
inputs, no block may be left out, and no row may run twice. Its fingerprint tells: it is another one after the
rows than before them.

A model that the first call loads is no memory: an object of a library may take the place of None. From then
on it has to stay as it is. Whether it was made from rows, as a scaler that the first batch fits, does not
show in one process: so results have the digests of such objects (`loaded`), and results of a step whose
objects differ were made from other rows. Must never take data for such an object.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from blake3 import blake3

from castore.adapters.datasets.operator_keys import encoded
from castore.errors import UnhashableError
from castore.keys.encoder import LEAVES, AnyOrder, Encoder, Watch
from castore.keys.libraries import library_of_class

#: Objects of libraries that have taken the place of None: the place of each, and its digest.
Loaded: TypeAlias = frozenset[tuple[str, str]]

# From one fingerprint to the next so many times the time passes that one takes: fewer times where it takes at
# most so many seconds. So a kill rarely leaves a block behind which nobody has looked.
_BETWEEN, _BETWEEN_QUICK, _QUICK_SECONDS = 50, 10, 0.005
# Of Python's own objects that have no digest, those that are connections and tools, and no data.
_NO_DATA = frozenset(
    ("_ssl", "_thread", "asyncio", "concurrent", "http", "logging", "multiprocessing", "socket", "sqlite3",
     "ssl", "subprocess", "tarfile", "threading", "urllib", "zipfile")
)  # fmt: skip
# So many numbers of each tensor of a model tell two models apart: to hash all takes a second a gigabyte.
_SAMPLE = 256
# Libraries whose objects are data, but for torch's modules.
_OF_DATA = frozenset(
    ("array", "builtins", "collections", "numpy", "pandas", "polars", "pyarrow", "random", "torch")
)


class OperatorState:
    """The state of an operator, over the run of a step. A forked process goes on with a copy.

    Args:
        operator: what may remember something: the function, and the arguments that it is given.
        name: the operator's name.
        is_named: the caller has said what identifies the operator, which need not have a fingerprint.
    """

    def __init__(self, operator: Any, name: str, *, is_named: bool = False) -> None:
        self._operator = operator
        self.name = name
        self._is_named = is_named
        self._first: bytes | None = None
        self._nones: frozenset[tuple[str, ...]] = frozenset()
        self._loaded: dict[str, str] = {}
        self._has_changed = False
        self._has_run = False  # since the last look
        self._next = 0.0

    def begin(self) -> None:
        """Take note of the state before the operator runs for the first time, and that it runs now."""
        if self._first is None:
            watch = _Nones()
            self._first = self._take(watch)
            self._nones = frozenset(watch.found)
        self._has_run = True

    @property
    def loaded(self) -> Loaded:
        """The objects that were seen in the place of None: where each is, and its digest."""
        return frozenset(self._loaded.items())

    def has_changed(self, *, now: bool = False) -> bool:
        """Whether the state has been seen to be another one than at the beginning.

        Looks after the first rows, and later on where that takes little of the time that has passed.

        Args:
            now: look, however long that takes, if the operator has run since the last look.
        """
        if self._has_run and not self._has_changed and (now or time.perf_counter() >= self._next):
            self._has_run, began = False, time.perf_counter()
            watch = _Loaded(self._nones)
            present = self._take(watch)
            is_other = present != self._first and bool(present or not self._is_named)
            self._has_changed = is_other or not self._are_as_before(watch.objects)
            took = time.perf_counter() - began
            pause = (_BETWEEN_QUICK if took <= _QUICK_SECONDS else _BETWEEN) * took
            self._next = time.perf_counter() + pause
        return self._has_changed

    def _are_as_before(self, objects: Mapping[str, Any]) -> bool:
        """Whether objects that have taken the place of None are as they were when they were first seen."""
        for place, value in objects.items():
            digest = self._digest(value)
            if digest is None or digest != self._loaded.setdefault(place, digest):
                return False
        return True

    def _digest(self, value: Any) -> str | None:
        """The digest of such an object; "" if it has none, and None if it is data all the same."""
        kind = type(value)
        try:
            code = _sample(value) if _is_module(kind) else encoded(value, self.name).code
            return str(blake3(code).hexdigest()[:32])
        except UnhashableError:
            is_python = (library_of_class(kind) or "").rpartition(" of ")[2].startswith("Python ")
            return None if is_python and kind.__module__.partition(".")[0] not in _NO_DATA else ""

    def _take(self, watch: Watch) -> bytes:
        """The fingerprint; empty if there is none."""
        try:
            return blake3(encoded(self._operator, self.name, watch).code).digest()
        except UnhashableError:
            return b""


def differ(loaded: Iterable[Loaded]) -> bool:
    """Whether some results were made with other objects in the place of None than others."""
    every = frozenset[tuple[str, str]]().union(*loaded)
    return len({place for place, _ in every}) < len(every)


class _Nones(Watch):
    """Notes the ways to all parts that are None."""

    sees_leaves = True

    def __init__(self) -> None:
        self.found: set[tuple[str, ...]] = set()
        self._way: list[str] = []

    def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
        """As in Watch."""
        self._way.append(step)
        try:
            if value is None:
                self.found.add(tuple(self._way))
            return encoder.part(value, step, direct=True)
        finally:
            self._way.pop()


class _Loaded(Watch):
    """Sees None where an object of a library has taken its place."""

    sees_leaves = True

    def __init__(self, nones: frozenset[tuple[str, ...]]) -> None:
        self._nones = nones
        self._way: list[str] = []
        #: The objects, by the way to them.
        self.objects: dict[str, Any] = {}

    def begin(self) -> None:
        """As in Watch."""
        self.objects = {}

    def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
        """As in Watch."""
        self._way.append(step)
        try:
            is_loaded = _may_be_loaded(type(value)) and tuple(self._way) in self._nones
            if is_loaded:
                self.objects["".join(self._way)] = value
            return encoder.part(None if is_loaded else value, step, direct=True)
        finally:
            self._way.pop()


def _may_be_loaded(kind: type) -> bool:
    """Whether objects of a class are models and connections, and no data."""
    if kind in LEAVES or kind is AnyOrder or library_of_class(kind) is None:
        return False
    return _is_module(kind) or kind.__module__.partition(".")[0] not in _OF_DATA


def _is_module(kind: type) -> bool:
    """Whether objects of a class are models of PyTorch."""
    return any(base.__module__ == "torch.nn.modules.module" for base in kind.__mro__)


def _sample(model: Any) -> bytes:
    """Some numbers of each tensor of a model.

    Raises:
        UnhashableError: a tensor has no numbers.
    """
    parts: list[bytes] = []
    try:
        for name, tensor in model.state_dict().items():
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // _SAMPLE)].cpu().double().numpy()
            parts += [f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode(), some.tobytes()]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise UnhashableError(f"a model's tensors cannot be read: {error}") from error
    return b"".join(parts)
