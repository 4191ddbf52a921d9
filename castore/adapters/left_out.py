"""Finds parts of values that their bytes (`castore.serialize`) leave out, and that a function may look at.

Samples of a dataset may lose such parts (docs/torch.md names them). Where bytes stand for the argument of a
function, two arguments that differ in such a part would have one result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from blake3 import blake3

from castore.errors import SerializationError, UnhashableError
from castore.keys.images import further_facts, further_frames
from castore.keys.objects import OBJECTS
from castore.keys.tracing import encode
from castore.keys.values import LEFT_ON_TENSORS
from castore.serialize.kinds import MisfitError, fields_of, is_registered, take_apart
from castore.serialize.kinds.images import is_image

_FIXED = frozenset({str, int, float, bool, bytes, type(None)})
_DEEPEST = 64
_OF_JPEG = frozenset({"quantization", "layer"})


class _Part(NamedTuple):
    """A part of a value, and the way to it.

    Attributes:
        value: the part.
        around: the part that it is in; None for the whole.
        step: how it is reached from there, as code.
        depth: number of parts that it is in.
    """

    value: Any
    around: _Part | None = None
    step: str | tuple[Any] = ""
    depth: int = 0

    def inside(self, value: Any, step: str | tuple[Any]) -> _Part:
        """A part of this one; ``step`` is a key or place, in a tuple, or code."""
        return _Part(value, self, step, self.depth + 1)

    def error(self, problem: str) -> SerializationError:
        """The error for this part."""
        steps, part = list[str](), self
        while part.around is not None:
            steps.append(part.step if isinstance(part.step, str) else f"[{part.step[0]!r}]")
            part = part.around
        return SerializationError(f"{''.join(reversed(steps)) or 'the value'} {problem}")


def facts_left_out(value: Any, *, is_result: bool = False) -> list[list[Any]]:
    """The class, the format, the file's name, further frames and facts (`castore.keys.images`) of each image
    inside a value. Bytes have the pixels of one frame, and `info`.

    Args:
        value: the value.
        is_result: whether it comes back from its bytes. An image of several frames, and a tensor with an
            autograd graph, are errors then.

    Raises:
        SerializationError: the value has another part that bytes leave out; the message has the path to it.
    """
    facts, waiting = list[list[Any]](), [_Part(value)]
    while waiting:
        part = waiting.pop()
        kind = type(part.value)
        if part.depth > _DEEPEST:
            raise part.error("is nested too deep, or contains itself")
        if kind is dict:
            for name, item in part.value.items():
                if type(item) not in _FIXED:
                    waiting.append(part.inside(item, (name,)))
        elif kind in (list, tuple):
            if not _FIXED.issuperset(map(type, part.value)):
                waiting += [part.inside(item, (place,)) for place, item in enumerate(part.value)]
        elif is_image(part.value):
            name = str(getattr(part.value, "filename", ""))
            facts.append(
                [
                    kind.__name__, str(part.value.format), *([name] if name else []),
                    *_frames(part, is_result), *_further(part),
                ]
            )  # fmt: skip
        elif kind not in _FIXED:
            if (problem := _problem(part.value, is_result)) is not None:
                raise part.error(problem)
            waiting += [part.inside(item, step) for step, item in _fields(part.value)]
    return facts


def _frames(part: _Part, is_result: bool) -> list[Any]:
    """The place of the present one of an image's frames, and a digest of them all; nothing if it has one."""
    name = type(part.value).__name__
    if is_result and getattr(part.value, "n_frames", 1) > 1:
        raise part.error(f"is a {name} of several frames, of which one would come back; give its copy()")
    try:
        return list(further_frames(part.value) or ())
    except ValueError:
        raise part.error(f"is a {name} of several frames, and its file is closed") from None


def _further(part: _Part) -> list[str]:
    """A digest of an image's further facts; nothing if it has none."""
    found = further_facts(part.value)
    if not found:
        return []
    if _OF_JPEG.issuperset(found):  # lists of integers: in a tenth of the time
        return [blake3(repr(found).encode()).hexdigest()]
    try:
        return [blake3(encode(OBJECTS, found, "tags").code).hexdigest()]
    except UnhashableError as error:
        raise part.error(f"is an image with {error}") from None


def _fields(value: Any) -> Iterable[tuple[str, Any]]:
    """The parts of a value that castore takes apart, each with the way to it."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        flat = value.flat if value.dtype == object else ()
        return [(f".flat[{place}]", item) for place, item in enumerate(flat)]
    if is_registered(type(value)):  # its class says what its bytes have
        return ()
    try:
        form = take_apart(value)
    except MisfitError:  # the bytes of the value are an error, too
        return ()
    return () if form is None else fields_of(form)


def _problem(value: Any, is_result: bool) -> str | None:
    """A part of a tensor or an array that bytes leave out."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        if is_result and value.grad_fn is not None:
            return "is a tensor with a graph, which its bytes lack; convert it with detach()"
        names = [name for name in vars(value) if not name.startswith(LEFT_ON_TENSORS)]
        if names:
            found = f"the attribute {names[0]!r}"
        else:
            found = "a gradient" if value.is_leaf and value.grad is not None else ""
        return f"is a tensor with {found}, which its bytes lack; give that beside it" if found else None
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.metadata:
        return "is an array whose dtype has metadata, which its bytes lack"
    return None
