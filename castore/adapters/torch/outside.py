"""Digests of what a dataset's code refers to outside of the dataset: globals, and the code of functions.

Names that the code itself assigns or writes to do not count: a model that is loaded late, a dict of what has
been read. A digest is the same in another process.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from blake3 import blake3

from castore.adapters.noted_globals import Binding, bindings_of, label_of, module_of
from castore.adapters.torch.dataset_identity import DATASETS
from castore.errors import UnhashableError
from castore.keys.bytecode import names_written
from castore.keys.encoder import Encoder, Watch
from castore.keys.libraries import library_of
from castore.keys.tracing import encode

_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_DIGEST = 16


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
    return Outside(digests, bindings_of(watch.functions, watch.written))


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
        module = module_of(value.__globals__.get("__name__"))
        self.written |= {(module, label_of(name)) for name in names_written(value.__code__)}
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
            self._note(label, f"{module_of(value.__module__)}.{value.__qualname__}".encode())
            return
        try:
            # Alone: inside other code, the bytes depend on what has been met before.
            self._note(label, encode(DATASETS, value, "").code)
        except UnhashableError:
            return

    def _note(self, label: str, code: bytes) -> None:
        self.found.setdefault((self._modules[-1], label), set()).add(blake3(code).digest(_DIGEST))
