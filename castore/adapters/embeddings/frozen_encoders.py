"""The check that an encoder gives the same answer for ever.

A trainable or random encoder is refused, by name.

The check reads parameters, and modules that behave differently in training. The check cannot see dropout that
is called as a function: `refuse_random_numbers` notices such dropout when it draws random numbers.
"""

from __future__ import annotations

import functools
import inspect
import operator
import random
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from castore.adapters.noted_globals import functions_in, reached_bindings
from castore.adapters.noted_values import assigned, differ, fused_writes, kind_of, only_observes, walk
from castore.errors import InvalidValueError
from castore.keys.bytecode import attributes_read, codes, steps

#: The remedy where a dataset is random.
RANDOM_ADVICE = (
    "random augmentations cannot be cached: take them out, apply them behind the encoder, or leave it"
    " uncached with CacheType.NONE"
)
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
#: Values of an encoder that are looked at, at most.
MOST_VALUES = 20_000
# Of these it is asked before each look-up of items whether other objects are in their place: the nearest.
_NEAREST = 64
_WITH_CODE = frozenset({"function", "method", "object", "module", "class"})
# Up to so many values all are compared before each look-up of items.
_FEW = 100
# Looks at all values, and walks over all modules, take a twentieth of the time each.
_PAUSE = 20


def why_not_frozen(encoder: Any) -> str | None:
    """Why a module, or one that a function uses, is trainable or random, in words; None if it is frozen.

    >>> why_not_frozen(nn.Linear(2, 2))
    "its parameter 'weight' requires grad; freeze it with requires_grad_(False)"
    >>> why_not_frozen(nn.Sequential(nn.Dropout(0.1)))
    "its module '0' (Dropout) is in train mode, and gives another result every time; call eval() on the
    encoder"
    >>> why_not_frozen(nn.Sequential(nn.Dropout(0.1)).eval())
    >>> why_not_frozen(nn.Linear(2, 2).forward)
    "its parameter 'self.weight' requires grad; freeze it with requires_grad_(False)"
    """
    modules = list(used_modules(encoder))
    for prefix, held in modules:
        for name, parameter in held.named_parameters(prefix):
            if parameter.requires_grad:
                return f"its parameter {name!r} requires grad; freeze it with requires_grad_(False)"
    for prefix, held in modules:
        for name, module in held.named_modules(prefix=prefix):
            is_training = getattr(module, "training", False)  # a frozen script has no mode
            if is_training and _differs_in_training(module):
                return (
                    f"its module {name or 'itself'!r} ({type(module).__name__}) is in train mode, and gives "
                    "another result every time; call eval() on the encoder"
                )
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
                return (
                    f"its module {name or 'itself'!r} ({type(module).__name__}) has no running statistics, "
                    "so an item's result depends on the other items of its batch; give it some "
                    "(track_running_stats=True), or do not cache the encoder"
                )
    return None


def check_frozen(encoder: Any, name: str) -> None:
    """Check that an encoder may be cached.

    Raises:
        InvalidValueError: it may change; the message names the parameter or module.
    """
    problem = why_not_frozen(encoder)
    if problem:
        raise InvalidValueError(f"the encoder {name!r} cannot be cached: {problem}")


def used_modules(encoder: Any, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that an encoder is or uses.

    It uses a method's object, a function's globals and enclosing names, a partial's arguments.
    """
    if isinstance(encoder, nn.Module):
        yield name, encoder
    elif isinstance(encoder, functools.partial):
        for number, value in enumerate((encoder.func, *encoder.args)):
            yield from used_modules(value, f"{name or 'partial'}.{number}")
        for keyword, value in encoder.keywords.items():
            yield from used_modules(value, keyword)
    elif inspect.ismethod(encoder):
        yield from used_modules(encoder.__self__, "self")
    else:
        named = _outer_values(encoder) if inspect.isfunction(encoder) else getattr(encoder, "__dict__", {})
        yield from ((name, value) for name, value in named.items() if isinstance(value, nn.Module))


def _outer_values(function: types.FunctionType) -> dict[str, Any]:
    """The values of a function's global and enclosing names, also of functions and comprehensions inside."""
    code, cells = function.__code__, function.__closure__ or ()
    names = _global_names(code)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with suppress(ValueError):  # the enclosing function has not assigned it yet
            found[name] = cell.cell_contents
    return found


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    loads = (step for inner in codes(code) for step in steps(inner))
    return tuple(dict.fromkeys(argument for opname, argument in loads if opname == "LOAD_GLOBAL"))


def reads_train_mode(module: nn.Module) -> bool:
    """Whether a module's own code reads whether a module is in train mode.

    torch's own modules do not count: `why_not_frozen` knows those that differ.

    >>> class Noisy(nn.Linear):
    ...     def forward(self, x): return super().forward(x) + self.training
    >>> reads_train_mode(Noisy(2, 2)), reads_train_mode(nn.Dropout())
    (True, False)
    """
    kind: Any = type(module)
    return _has_code_for_train_mode(kind)


@functools.lru_cache(maxsize=4096)
def _has_code_for_train_mode(kind: Any) -> bool:
    own = (base for base in kind.__mro__ if not base.__module__.startswith("torch.nn."))
    functions = (value for base in own for value in vars(base).values() if inspect.isfunction(value))
    return any("training" in attributes_read(function.__code__) for function in functions)


class _NowAndThen:
    """Looks that take a twentieth of a thread's time, at most."""

    def __init__(self) -> None:
        self._next = 0.0  # by time.perf_counter()

    def __call__(self, look: Callable[[], bool]) -> bool:
        """The answer of a look; False if it is too early for another."""
        if time.perf_counter() < self._next:
            return False
        began = time.thread_time()  # waiting for a processor is no cost
        found = look()
        self._next = time.perf_counter() + _PAUSE * (time.thread_time() - began)
        return found


class ChangeDetector:
    """Signs of a changed encoder. A sign is no proof: an equal value in the place of another is one too.

    Before each look-up the weights' addresses and counts of writes are compared, whether they are trained,
    and a function's outer names; before a look-up of items also which values the attributes of modules have.
    Before something is encoded, and before a look-up of items now and then, all values within the encoder
    are, and the globals that its code reads.

    Args:
        encoder: a module or a function.
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._look, self._walk = _NowAndThen(), _NowAndThen()
        self.note()

    def note(self) -> None:
        """Take the present state as the one to compare with."""
        self._is_copy = self._was_changed = False
        self._globals = reached_bindings(
            function
            for seen in walk(self._encoder, MOST_VALUES)
            if kind_of(seen.value) in _WITH_CODE
            for function in functions_in(seen.value)
        )
        self.settle()

    def note_copy(self) -> None:
        """Take the state of a copy that was just made, unless the original's weights had changed already."""
        if not self._is_copy:
            was_changed = self._was_changed
            self.note()
            self._was_changed = was_changed

    def settle(self) -> None:
        """Accept the changes that the encoder has made to itself while it ran."""
        self._process = process_settings()
        self._outside = _function_values(self._encoder)
        self._weights = _weights(self._encoder)
        self._write_states = _write_states(self._weights)
        self._attributes = _attributes(self._encoder)
        self._seen = walk(self._encoder, MOST_VALUES)
        self._globals = [one.now() for one in self._globals]

    def weights_changed(self) -> bool:
        """Whether the weights were written to, or a function's outer names are other objects; now and then
        also whether other weights are in their place. Takes microseconds, and is all that a look-up of keys
        asks: these are of the time when the cache was filled.
        """
        if self._is_copy:
            return True
        outside = _function_values(self._encoder)
        if any(outside.get(name) is not value for name, value in self._outside.items()):
            return True
        if _write_states(self._weights) != self._write_states:
            return True
        return self._walk(self.weights_replaced)

    def weights_replaced(self) -> bool:
        """Whether other weights are in the place of the noted ones. Walks over all modules."""
        return not _are_same(_weights(self._encoder), self._weights)

    def may_have_changed(self, *, encodes: bool) -> bool:
        """Whether the encoder seems to differ from the noted state, before a look-up of items.

        Args:
            encodes: the encoder will run. Then all values are compared, and an encoder without weights counts
                as changed.
        """
        if self._was_changed or self.weights_changed() or process_settings() != self._process:
            return True
        if not _are_same(_attributes(self._encoder), self._attributes):
            return True
        if encodes:
            return not self._weights or self._differs()
        if len(self._seen) + sum(len(one.state.values) for one in self._globals) <= _FEW:
            return self._differs()
        nearest = [seen.value for seen in walk(self._encoder, _NEAREST, marked=False)]
        if not _are_same(nearest, [seen.value for seen in self._seen[:_NEAREST]]):
            return True
        return self._look(self._differs)

    def changed_globals(self) -> list[str]:
        """The globals that have changed since they were noted, in words."""
        return [one.label for one in self._globals if one.is_old()]

    def _differs(self) -> bool:
        return (
            differ(self._seen, walk(self._encoder, MOST_VALUES))
            or any(one.is_old() for one in self._globals)
            or _write_states(_weights(self._encoder)) != self._write_states
        )

    def __getstate__(self) -> dict[str, Any]:
        # In a copy, and in another process, everything has another address: `note` follows.
        was_changed = self._is_copy or self.may_have_changed(encodes=True)
        return {
            "_encoder": self._encoder,
            "_is_copy": self.weights_changed(),
            "_was_changed": was_changed,
            "_globals": [],
            "_look": _NowAndThen(),
            "_walk": _NowAndThen(),
        }


def process_settings() -> tuple[torch.dtype, list[Any]]:
    """The default dtype, and the hooks that somebody has given to all modules."""
    tables = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks
    hooks = [hook for table in tables for hook in table.values()]
    return torch.get_default_dtype(), [hook for hook in hooks if not only_observes(hook)]


def _function_values(encoder: Any) -> dict[str, Any]:
    return _outer_values(encoder) if inspect.isfunction(encoder) else {}


def _weights(encoder: Any) -> list[torch.Tensor]:
    modules = [module for _, module in used_modules(encoder)]
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _attributes(encoder: Any) -> list[object]:
    """The values of the attributes of all modules, but for those that `forward` assigns."""
    found: list[object] = []
    for _, held in used_modules(encoder):
        todo: list[nn.Module | None] = [held]
        while todo:
            module = todo.pop()
            if module is not None and not isinstance(module, torch.jit.ScriptModule):
                own = assigned(type(module))
                state = vars(module)
                found += [item for name, item in state.items() if name not in own] if own else state.values()
                found += state["_forward_hooks"].values()
                found += state["_forward_pre_hooks"].values()
                inner = state["_modules"].values()
                found += inner
                todo += inner
    return found


def _are_same(values: Sequence[object], others: Sequence[object]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))


def _write_states(tensors: list[torch.Tensor]) -> list[object]:
    """Each tensor's address, the number of writes that torch has counted, and whether it is trained; and the
    writes of fused optimizers.

    Each look-up of a batch asks for all of a deep encoder, so most are asked in one go.
    """
    if _PLAIN.issuperset(map(type, tensors)):
        with suppress(RuntimeError):  # sparse ones have no address, those of inference mode no counter
            states = [(tensor.data_ptr(), tensor._version, tensor.requires_grad) for tensor in tensors]
            return [states, fused_writes(tensors)]
    return [[*map(_write_state, tensors)], fused_writes(tensors)]


def _write_state(tensor: torch.Tensor) -> tuple[int, int, bool]:
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    writes = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr() if plain else id(tensor), writes, tensor.requires_grad


def _differs_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    # Batch norm learns averages even when nothing else is trained.
    return isinstance(module, nn.modules.batchnorm._NormBase | nn.RReLU)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the states of the random number generators, so that training draws what it would have drawn."""
    states = _random_states()
    devices = (
        list(range(torch.cuda.device_count()))
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else []
    )
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[1])
            np.random.set_state(states[2])  # noqa: NPY002 - the global source, which user code draws from


@contextmanager
def refuse_random_numbers(what: str, advice: str) -> Iterator[None]:
    """Check that nothing draws from a global random number generator inside the block.

    Raises:
        InvalidValueError: something did: ``what`` is random; ``advice`` is the remedy.
    """
    before = _random_states()
    yield
    after = _random_states()
    if not (
        torch.equal(before[0], after[0])
        and before[1] == after[1]
        and all(np.array_equal(one, other) for one, other in zip(before[2], after[2], strict=True))
        and all(map(torch.equal, before[3], after[3]))
    ):
        raise InvalidValueError(
            f"{what} draws random numbers, so its result is another one each time; {advice}"
        )


def _random_states() -> tuple[torch.Tensor, Any, Any, list[torch.Tensor]]:
    on_devices = (
        torch.cuda.get_rng_state_all()
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else []
    )
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), on_devices  # noqa: NPY002
