"""Digests of what a dataset's code refers to outside of the dataset: globals, and the code of functions.

Names that the code itself assigns or writes to do not count: a model that is loaded late, a dict of what has
been read. A digest is the same in another process.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

from blake3 import blake3

from castore.adapters.torch.dataset_identity import DATASETS
from castore.adapters.torch.noted_values import mark_of
from castore.errors import UnhashableError
from castore.keys.bytecode import codes, names_written, outer_reads
from castore.keys.encoder import Encoder, Watch
from castore.keys.libraries import library_of
from castore.keys.tracing import encode

_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_DIGEST = 16
_UNBOUND = object()


class Binding(NamedTuple):
    """A name of a module with the value that it was bound to, and the module's names.

    Attributes:
        mark: of the value; a write to the value changes it.
    """

    scope: dict[str, Any]
    name: str
    value: Any
    mark: object

    @classmethod
    def of(cls, scope: dict[str, Any], name: str) -> Binding:
        """The binding of now."""
        value = scope.get(name, _UNBOUND)
        return cls(scope, name, value, mark_of(value))

    def is_old(self) -> bool:
        """Whether the name is bound to another object now, or its value was written to."""
        value = self.scope.get(self.name, _UNBOUND)
        return value is not self.value or mark_of(value) != self.mark

    def now(self) -> Binding:
        """The binding with the value of now."""
        return Binding.of(self.scope, self.name)


class Outside(NamedTuple):
    """The values that code refers to outside of itself.

    Attributes:
        digests: of each global, and of each function's own code, by what they are of. Lambdas, and attributes
            of several modules, share a name.
        bindings: of the globals. Comparing objects is quick, and says only that there may be a change.
    """

    digests: dict[str, set[bytes]]
    bindings: list[Binding]


def outside_of(code: Iterable[types.FunctionType | type]) -> Outside:
    """The values that functions and classes refer to outside of themselves, by names that none writes to.

    Args:
        code: the functions and classes. All that they call is followed through the user's own modules.
    """
    watch = _Outside()
    for one in code:
        with contextlib.suppress(UnhashableError):  # of a part that pickle leaves out: the dataset has a key
            encode(DATASETS, one, "", watch)
    digests = {
        f"the {label} of {module}": digests
        for (module, label), digests in watch.found.items()
        if (module, label) not in watch.written
    }
    bindings = {(id(one.scope), one.name): one for one in watch.bindings()}
    return Outside(digests, [*bindings.values()])


class _Outside(Watch):
    """Notes the values that functions refer to by names outside of them, while code is encoded.

    Attributes:
        found: digests by the module and the name.
        written: modules and names that functions assign or write to.
        functions: the user's functions that were met.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], set[bytes]] = {}
        self.written: set[tuple[str, str]] = set()
        self.functions: list[types.FunctionType] = []
        self._modules: list[str] = []

    def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
        if type(value) is not types.FunctionType:
            return encoder.part(value, step, direct=True)
        module = _module(value.__globals__.get("__name__"))
        self.written |= {(module, _label(name)) for name in names_written(value.__code__)}
        if library_of(module) is None:
            self.functions.append(value)
        self._modules.append(module)
        try:
            return encoder.part(value, step, direct=True)
        finally:
            self._modules.pop()

    def function(self, encoder: Encoder, function: types.FunctionType, parts: list[Any]) -> None:
        # The name and the instructions come first; behind them stand values.
        own = [part for part in parts[:2] if type(part) is not tuple]
        self._note(f"code of {function.__qualname__}", encoder.tagged("own", *own))

    def reference(self, value: Any, step: str, code: bytes) -> None:
        label = f"attribute {step[1:]!r}" if step.startswith(".") else step.removeprefix(" -> ")
        if not self._modules or label.startswith("closure ") or isinstance(value, types.ModuleType):
            return
        if isinstance(value, _CODE):  # its code is noted on its own
            self._note(label, f"{_module(value.__module__)}.{value.__qualname__}".encode())
            return
        try:
            # Alone: inside other code, the bytes depend on what has been met before.
            self._note(label, encode(DATASETS, value, "").code)
        except UnhashableError:
            return

    def bindings(self) -> Iterator[Binding]:
        """The names that the functions read: globals, and attributes of the user's modules."""
        for function in self.functions:
            scope, module = function.__globals__, _module(function.__globals__.get("__name__"))
            inside = [*codes(function.__code__)]
            attributes = {name for code in inside for name in code.co_names}
            for name in {name for code in inside for kind, name in outer_reads(code) if kind == "global"}:
                if name in scope and (module, _label(name)) not in self.written:
                    yield Binding.of(scope, name)
                    yield from _attributes_of(scope[name], attributes)

    def _note(self, label: str, code: bytes) -> None:
        self.found.setdefault((self._modules[-1], label), set()).add(blake3(code).digest(_DIGEST))


def _attributes_of(module: Any, names: Set[str]) -> Iterator[Binding]:
    """Some names of a module, if it is one of the user's, and of the modules that those are bound to."""
    if isinstance(module, types.ModuleType) and library_of(module.__name__) is None:
        scope = vars(module)
        for name in names & scope.keys():
            yield Binding.of(scope, name)
            yield from _attributes_of(scope[name], names - {name})


def _label(name: str) -> str:
    return f"global {name!r}"


def _module(name: Any) -> str:
    """A module's name. In spawned workers the main module has another one."""
    return str(name).replace("__mp_main__", "__main__")
