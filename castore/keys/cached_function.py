"""`Store.cached`: stores a function's results under a key of its code and its arguments."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from castore.errors import InvalidValueError
from castore.keys.doubts import Notes
from castore.keys.encoder import AnyOrder, digits_of
from castore.keys.objects import OBJECTS, digest_of, encode_function
from castore.keys.tracing import encode

_RANDOM_ADVICE = (
    "if it does not count, leave it out of its object with __getstate__, "
    "or pass what identifies it as an argument"
)
_ARGUMENT_ADVICE = (
    "if it does not count, pass it some other way than as an argument; "
    "if it is meant, each value has a result of its own"
)
# Searches for arguments that look random are limited to this many per function: searching and storing take
# time.
_SEARCHED = 8
#: Kinds of functions that return before they have run, and the function to decorate instead.
_RUNNING: dict[str, tuple[Callable[[Any], bool], str]] = {
    "an async function": (
        inspect.iscoroutinefunction,
        "awaits it, with asyncio.run(...), and returns the result",
    ),
    "an async generator": (
        inspect.isasyncgenfunction,
        "collects what it yields, in a list, and returns that",
    ),
    "a generator": (inspect.isgeneratorfunction, "collects what it yields, list(...), and returns that"),
}
# Binds arguments as they are given.
_ANY = inspect.signature(lambda *args, **kwargs: None)
_LRU = type(functools.lru_cache(len))
F = TypeVar("F", bound=Callable[..., Any])


class Results(Notes, Protocol):
    """The methods of a store that `cached` needs."""

    def get_or_compute(self, key: str, compute: Callable[[], Any], *, ttl: float | str | None) -> Any:
        """See `Store.get_or_compute`."""


def cached(store: Results, *, ttl: float | str | None, prefix: str | None) -> Callable[[F], F]:
    """See `Store.cached`. Arguments are bound to the signature, so ``f(1)`` and ``f(x=1)`` are one entry.

    Where the signature may be another function's, they count as they are given.
    """

    def decorate(function: F) -> F:
        signature = _signature(function)
        name = _name_of(function)
        folder = prefix or f"cached/{name.replace('<', '').replace('>', '')}"
        short_name = name.rpartition(".")[2]
        searched = 0

        def name_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            nonlocal searched
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            # The code is encoded at each call: a module that the function uses may have been reloaded since.
            code = encode_function(function)
            if (doubts := code.doubts()) is not None:
                doubts.compare(store, short_name, _RANDOM_ADVICE)
            asked = AnyOrder(code=digest_of(code), arguments=AnyOrder(bound.arguments))
            encoded = encode(OBJECTS, asked, short_name, texts=code.found.texts)
            digits = digits_of(encoded.code)
            if searched < _SEARCHED and (doubts := encoded.doubts()) is not None:
                searched += 1
                doubts.compare(store, short_name, _ARGUMENT_ADVICE, may_vary=True)
            return f"{folder}/{digits}"

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return store.get_or_compute(name_for(args, kwargs), lambda: function(*args, **kwargs), ttl=ttl)

        wrapper.cache_name = lambda *args, **kwargs: name_for(args, kwargs)  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    return decorate


def _signature(function: Any) -> inspect.Signature:
    if not callable(function):
        raise InvalidValueError(f"store.cached decorates a function, not {type(function)}")
    for kind, (matches, advice) in _RUNNING.items():
        if matches(function) or matches(inspect.getattr_static(type(function), "__call__", None)):
            raise InvalidValueError(
                f"store.cached keeps what a call returns, and {_name_of(function)} is {kind}, "
                f"which returns before it has run; decorate a function that {advice}"
            )
    try:
        signature = inspect.signature(function)
        return _ANY if _has_borrowed_signature(function) else signature
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"store.cached cannot tell the arguments of {function!r}: {error}; "
            "decorate a function that calls it"
        ) from error


def _has_borrowed_signature(function: Any) -> bool:
    """Whether a function's signature is that of the function which it wraps, or one that was set by hand.

    A wrapper may take other arguments, and other defaults, than the wrapped function.
    """
    while isinstance(function, functools.partial | _LRU):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    if isinstance(function, types.MethodType):
        function = function.__func__
    asked = [function, inspect.getattr_static(type(function), "__call__", None)]
    held = {name for one in asked for name in getattr(one, "__dict__", ())}
    return not held.isdisjoint(("__signature__", "__wrapped__"))


def _name_of(function: Any) -> str:
    """Module and name of a function, of the function that a partial calls, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    # A spawned worker calls the program's main module `__mp_main__`.
    module = getattr(named, "__module__", None) or "builtins"  # methods in C have none
    module = "__main__" if module == "__mp_main__" else module
    return f"{module}.{named.__qualname__}"
