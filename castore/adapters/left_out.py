"""Finds parts of values that their bytes (`castore.serialize`) leave out, and that a function may look at.

Samples of a dataset may lose such parts (docs/torch.md names them). Where bytes stand for the argument of a
function, two arguments that differ in such a part would have one result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from castore.errors import SerializationError
from castore.serialize.kinds import MisfitError, is_registered, take_apart
from castore.serialize.kinds.images import is_image

# Attributes that torch.compile and transformers set on tensors, by their prefixes.
_LEFT_ON_TENSORS = ("_dynamo_", "_is_hf_initialized")
_FIXED = frozenset({str, int, float, bool, bytes, type(None)})
_DEEPEST = 64


def facts_left_out(value: Any, *, is_result: bool = False) -> list[list[Any]]:
    """The class, the format and further frames of each image inside a value, in order. Bytes have the pixels
    of one frame, and `info`.

    Args:
        value: the value.
        is_result: whether it comes back from its bytes. An image of several frames is an error then.

    Raises:
        SerializationError: the value has another part that bytes leave out; the message has the path to it.
    """
    return list(_facts(value, "", 0, is_result))


def _facts(value: Any, path: str, depth: int, is_result: bool) -> Iterator[list[Any]]:
    kind = type(value)
    if kind in _FIXED:
        return
    if depth > _DEEPEST:
        raise SerializationError(f"{path or 'the value'} is nested too deep, or contains itself")
    if kind is dict:
        for name, item in value.items():
            yield from _facts(item, f"{path}[{name!r}]", depth + 1, is_result)
    elif kind in (list, tuple):
        for place, item in enumerate(value):
            yield from _facts(item, f"{path}[{place}]", depth + 1, is_result)
    elif is_image(value):
        yield [kind.__name__, str(value.format), *_frames(value, path, is_result)]
    elif (problem := _problem(value)) is not None:
        raise _error(path, problem)
    else:
        yield from _facts_of_fields(value, path, depth, is_result)


def _frames(image: Any, path: str, is_result: bool) -> list[Any]:
    """The place of the present one of an image's frames, and a digest of them all; nothing if it has one."""
    if getattr(image, "n_frames", 1) == 1:
        return []
    name = type(image).__name__
    if is_result:
        raise _error(path, f"is a {name} of several frames, of which one would come back; give its copy()")
    file = getattr(image, "fp", None)
    if file is None or file.closed:
        raise _error(path, f"is a {name} of several frames, and its file is closed")
    at = file.tell()
    try:
        file.seek(0)
        digest = blake3(file.read()).hexdigest()
    finally:
        file.seek(at)
    return [image.tell(), digest]


def _facts_of_fields(value: Any, path: str, depth: int, is_result: bool) -> Iterator[list[Any]]:
    if is_registered(type(value)):  # its class says what its bytes have
        return
    try:
        form = take_apart(value)
    except MisfitError:  # the bytes of the value are an error, too
        return
    if form is not None:
        for step, part in form.fields():
            yield from _facts(part, path + step, depth + 1, is_result)


def _problem(value: Any) -> str | None:
    """A part of a tensor, an array or a dict that bytes leave out."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        names = [name for name in vars(value) if not name.startswith(_LEFT_ON_TENSORS)]
        if names:
            return (
                f"is a tensor with the attribute {names[0]!r}, which is not kept; give it beside the tensor"
            )
        return (
            "is a tensor with a gradient, which is not kept; give its detach()" if _has_grad(value) else None
        )
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.metadata:
        return "is an array whose dtype has metadata, which is not kept"
    if isinstance(value, dict) and getattr(value, "__dict__", None):
        return f"is a {type(value).__name__} with attributes, which are not kept"
    return None


def _has_grad(tensor: Any) -> bool:
    return tensor.is_leaf and tensor.grad is not None


def _error(path: str, problem: str) -> SerializationError:
    return SerializationError(f"{path or 'the value'} {problem}")
