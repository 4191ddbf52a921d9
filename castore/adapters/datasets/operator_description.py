"""The description of an operator beside its fingerprint, from which `explain` names the changes.

A description is plain JSON: digests of the user's functions and classes, of each parameter, and of each value
that the code refers to, with a short text of each value that can be shown. Descriptions decide nothing: keys
come from the fingerprint.
"""

from __future__ import annotations

import functools
import platform
import types
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from blake3 import blake3

from castore.adapters.datasets.operator_keys import encoded
from castore.errors import UnhashableError
from castore.keys.doubts import Doubts
from castore.keys.encoder import Encoder, Watch

_SHOWN = 80
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)


class Description(NamedTuple):
    """The description of an operator.

    Attributes:
        fingerprint: 64 hexadecimal digits of all that counts.
        parts: a digest and a short text of each part, by the part's label.
        doubts: the parts that look random; None if there are none.
        texts: kinds of texts beside the code that the operator reads, of its arguments too.
    """

    fingerprint: str
    parts: dict[str, list[str]]
    doubts: Doubts | None = None
    texts: frozenset[str] = frozenset()


class Identity(NamedTuple):
    """The ``fingerprint`` and the ``texts`` of a `Description` alone."""

    fingerprint: str
    texts: frozenset[str]


def describe(operator: Any, name: str, fingerprint: str | None = None) -> Description:
    """The fingerprint and the description of an operator.

    Args:
        operator: a function, or an object.
        name: the operator's name in errors.
        fingerprint: identifies the operator, in place of its code and parameters.

    Raises:
        UnhashableError: a part of the operator has no stable hash.
    """
    if fingerprint is not None:
        digits = identify(operator, name, fingerprint).fingerprint
        return Description(digits, {"the fingerprint that was given": [digits[:32], fingerprint[:_SHOWN]]})
    parameters = list(_parameters(operator))
    notes = _Notes(value for _, value in parameters)
    made = encoded(operator, name, notes)
    digits = _digits(operator, made.code)
    parts = {f"the code of {qualified}": [digest, ""] for qualified, digest in notes.code.items()}
    parts |= notes.values
    for parameter, value in parameters:
        parts[f"the parameter {parameter!r}"] = [notes.alone(value), _text(value)]
    if (revision := _revision(operator)) != 1:
        parts["the revision of the operator"] = [str(revision), str(revision)]
    parts["Python"] = [version := ".".join(platform.python_version_tuple()[:2]), version]
    for library in notes.libraries:
        package, _, version = library.rpartition(" of ")[2].rpartition(" ")
        parts[f"the library {package}"] = [version, version]
    return Description(digits, parts, made.doubts(), made.found.texts)


def identify(operator: Any, name: str, fingerprint: str | None = None) -> Identity:
    """As `describe`, in less time."""
    if fingerprint is not None:
        return Identity(str(blake3(f"given: {fingerprint}".encode()).hexdigest()), frozenset())
    made = encoded(operator, name)
    return Identity(_digits(operator, made.code), made.found.texts)


def _digits(operator: Any, code: bytes) -> str:
    # Castore's own operators count by its release, and between two releases by the number of fixes to their
    # results.
    revision = _revision(operator)
    return str(blake3(code if revision == 1 else code + f"revision {revision}".encode()).hexdigest())


def _revision(operator: Any) -> int:
    return int(getattr(type(operator), "_castore_revision", 1))


class _Notes(Watch):
    """Notes what a description names while an operator is encoded.

    Args:
        wanted: the values that `alone` will be asked for.

    Attributes:
        code: digests of the user's functions that were met, by qualified name.
        values: a digest and a short text of each value that a function refers to, by the value's label.
        libraries: names and versions of the libraries.
    """

    def __init__(self, wanted: Iterable[Any]) -> None:
        self._wanted = {id(value) for value in wanted}
        self.begin()

    def begin(self) -> None:
        """As in Watch: nothing is noted yet."""
        self.code: dict[str, str] = {}
        self.values: dict[str, list[str]] = {}
        self.libraries: set[str] = set()
        self._owners: list[str] = []
        self._alone: dict[int, str] = {}
        self._bound = 0

    def alone(self, value: Any) -> str:
        """A digest of a wanted value, as if nothing were around it; "" if it cannot be hashed alone."""
        if id(value) not in self._alone:
            try:
                self._alone[id(value)] = _digest(encoded(value, "parameter").code)
            except UnhashableError:
                return ""  # pickle would leave it out, or else the operator had no fingerprint
        return self._alone[id(value)]

    def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
        """As in Watch, with a note of wanted values: hashing a large value again takes time."""
        is_function = type(value) is types.FunctionType
        if is_function:
            self._owners.append(_qualified(value))
        before = self._bound, len(encoder.met)
        try:
            code = encoder.part(value, step, direct=True)
        finally:
            if is_function:
                self._owners.pop()
        # If nothing in the value refers to values met outside it, the value's bytes are those of it alone.
        if id(value) in self._wanted and before == (self._bound, len(encoder.met)):
            self._alone[id(value)] = _digest(code)
        return code

    def tagged(self, tag: str, parts: tuple[Any, ...]) -> None:
        """As in Watch."""
        if tag == "library" and parts and isinstance(parts[0], str):
            self.libraries.add(parts[0])
        self._bound += tag in ("met", "around")

    def function(self, encoder: Encoder, function: types.FunctionType, parts: list[Any]) -> None:
        """As in Watch: a note of the own code of each user function."""
        # Plain bytes are the instructions and defaults; tuples refer to other values.
        own = [part for part in parts if type(part) is not tuple]
        self.code[_qualified(function)] = _digest(encoder.tagged("own", *own))

    def reference(self, value: Any, step: str, code: bytes) -> None:
        """As in Watch."""
        if self._owners and not issubclass(type(value), _CODE) and not callable(value):
            self._note_value(value, step, code)

    def _note_value(self, value: Any, step: str, code: bytes) -> None:
        what = step.removeprefix(" -> ").replace("closure ", "").replace("global ", "")
        self.values[f"the value of {what} in {self._owners[-1]}"] = [_digest(code), _text(value)]

    def settings(self, value: Any, step: str, parts: list[tuple[str, Any, bytes]]) -> None:
        """As in Watch: a note of each part."""
        for inner, item, code in parts:
            if self._owners and not issubclass(type(item), _CODE):  # the code of functions is noted anyway
                self._note_value(item, step + inner, code)


def _qualified(function: types.FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _parameters(operator: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(operator, functools.partial):
        yield from ((f"[{place}]", value) for place, value in enumerate(operator.args))
        yield from operator.keywords.items()
    elif isinstance(operator, types.MethodType):
        yield from _parameters(operator.__self__)
    elif not isinstance(operator, _CODE) and hasattr(operator, "__dict__"):
        yield from vars(operator).items()


def _digest(code: bytes) -> str:
    return str(blake3(code).hexdigest()[:32])


def _text(value: Any) -> str:
    """A value as a short text. Only the beginning of a large value is read."""
    if isinstance(value, dict) and len(value) > _SHOWN:
        value = dict(islice(value.items(), _SHOWN))
    elif isinstance(value, set) and len(value) > _SHOWN:
        value = set(islice(value, _SHOWN))
    elif isinstance(value, str | bytes | list | tuple) and len(value) > _SHOWN:
        value = value[:_SHOWN]
    elif value is not None and not isinstance(
        value, bool | int | float | complex | str | bytes | list | tuple | dict | set
    ):
        return type(value).__name__
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
