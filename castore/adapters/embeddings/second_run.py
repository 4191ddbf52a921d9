"""An encoder that may give another result each time runs twice on its first batch.

It is one whose code names a random number generator of its own, or that has written to its weights. Any other
encoder runs once on each batch. Must never take equal results for a proof: an encoder may change later on.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from castore.adapters.embeddings.devices import list_tensors
from castore.adapters.embeddings.frozen_encoders import MOST_VALUES, used_modules
from castore.adapters.noted_globals import functions_in
from castore.adapters.noted_values import walk
from castore.errors import InvalidValueError
from castore.keys.bytecode import codes
from castore.keys.libraries import library_of

# Differences that count, as parts of the greatest value: kernels of GPUs add in any order.
_NOISE, _NOISE_OF_HALF = 1e-3, 2e-2
# Names of sources of random numbers whose state is nobody's to compare.
_SOURCES = frozenset(
    {"default_rng", "Generator", "RandomState", "Random", "SystemRandom", "urandom", "token_bytes", "uuid4"}
)
# The methods that a call of an encoder runs.
_CALLED = ("forward", "__call__")


def names_random_source(encoder: Any) -> bool:
    """Whether the user's code of an encoder names a random number generator that is not a global one.

    Code that does not run in a call, as that which makes the weights, does not count.

    >>> import numpy as np
    >>> def noisy(batch): return batch + np.random.default_rng().random(len(batch))
    >>> names_random_source(noisy), names_random_source(torch.nn.Linear(2, 2))
    (True, False)
    """
    return any(_SOURCES.intersection(code.co_names) for code in _codes_of_call(encoder))


def _codes_of_call(encoder: Any) -> Iterator[types.CodeType]:
    """The user's code that a call may run: `forward`, and the methods and global functions that it names."""
    todo: list[Any] = []
    methods: dict[str, list[Any]] = {}
    parts = [encoder, *(module for _, module in used_modules(encoder))]  # a function may hold some in cells
    for seen in chain.from_iterable(walk(part, MOST_VALUES) for part in parts):
        found = functions_in(seen.value)
        if isinstance(getattr(seen.value, "__func__", seen.value), types.FunctionType):
            todo += found
            continue
        for function in found:
            methods.setdefault(function.__name__, []).append(function)
    for name in _CALLED:
        todo += methods.get(name, [])
    done: set[types.CodeType] = set()
    while todo:
        function = inspect.unwrap(todo.pop())  # `forward` may have a decorator, such as torch.no_grad()
        if not isinstance(function, types.FunctionType) or function.__code__ in done:
            continue
        done.add(function.__code__)
        for code in codes(function.__code__):
            yield code
            for name in code.co_names:
                named = function.__globals__.get(name)
                is_users = isinstance(named, types.FunctionType) and library_of(named.__module__) is None
                todo += [named] if is_users else methods.get(name, [])


def require_same(name: str, first: Any, second: Any) -> None:
    """Compare what an encoder has given for one batch.

    Raises:
        InvalidValueError: the results differ.
    """
    before, after = list_tensors(first), list_tensors(second)
    if len(before) != len(after) or any(map(_differ, before, after)):
        raise InvalidValueError(
            f"the encoder {name!r} gives another result for the same batch the second time: it draws random"
            " numbers from a generator of its own, or changes as it runs; have it give an item the same"
            " result each time, or leave it uncached with CacheType.NONE"
        )


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if one.layout is not torch.strided or one.is_nested or one.is_quantized:
        return False  # not known
    if not one.is_floating_point() and not one.is_complex():
        return not torch.equal(one, other)
    noise = _NOISE_OF_HALF if one.dtype in (torch.float16, torch.bfloat16) else _NOISE
    before, after = _as_real(one), _as_real(other)
    greatest = torch.where(before.isfinite(), before.abs(), 0.0).max() if before.numel() else 0.0
    is_same = (before == after) | (before.isnan() & after.isnan())
    is_same |= (before - after).abs() <= noise * greatest
    return not bool(is_same.all())


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().to(torch.promote_types(real.dtype, torch.float32))
