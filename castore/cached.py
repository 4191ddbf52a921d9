"""`Store.cached`: a function's results, kept under a key of its code and its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from castore.fingerprints import function_fingerprint
from castore.keys import key

if TYPE_CHECKING:
    from castore.store import Store

F = TypeVar("F", bound=Callable[..., Any])


def cached(store: Store, *, ttl: float | str | None, prefix: str | None) -> Callable[[F], F]:
    """See `Store.cached`. Arguments are bound to the signature first, so ``f(1)`` and ``f(x=1)`` are one entry."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        folder = (
            prefix
            or f"cached/{function.__module__}.{function.__qualname__.replace('<', '').replace('>', '')}"
        )

        def name_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            # The code is looked at on each call: what a function refers to may have been reloaded since.
            return f"{folder}/{key({'code': function_fingerprint(function), 'arguments': dict(bound.arguments)})}"

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return store.get_or_compute(name_for(args, kwargs), lambda: function(*args, **kwargs), ttl=ttl)

        wrapper.cache_name = lambda *args, **kwargs: name_for(args, kwargs)  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    return decorate
