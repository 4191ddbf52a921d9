"""Fingerprints of objects: their class by its code, and what pickle would keep of them.

`castore.keys` refuses an object it does not know, since a config should say what it means. Where code and data are
hashed as they are (operators, datasets), an object is what its class's code makes of its state, and pickle's protocol
says what that state is: what `__getstate__` leaves out does not count. Assumes that nobody changes an object while it
is hashed. Nothing is pickled, and nothing is remembered by identity beyond one use of an encoder.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from castore.fingerprints import FunctionEncoder
from castore.keys import UnencodableError
from castore.tokenizing import tokenizer_parts


class InstanceEncoder(FunctionEncoder):
    """A FunctionEncoder that also takes objects of any class."""

    def rest(self, value: Any) -> bytes:
        """NumPy's values as `numpy` says, tokenizers by their rules, and objects by class and state."""
        np = sys.modules.get("numpy")
        if np is not None and isinstance(value, np.ndarray | np.generic | np.dtype):
            return self.numpy(value)
        tokenizer = tokenizer_parts(value)
        if tokenizer is not None:
            return self.tagged(*tokenizer(self, value))
        return self.tagged("object", *self.object_(value))

    def numpy(self, value: Any) -> bytes:
        """The canonical bytes of an array, a scalar or a dtype."""
        return super().rest(value)

    def object_(self, value: Any) -> Iterator[Any]:
        """What an object is made of: its class, and what pickle would keep of it."""
        # Objects refer to one another in circles: the second time, a number stands for what was met before.
        self._met[id(value)] = (len(self._met), value)
        yield self.part(type(value), f" -> {type(value).__name__}")
        reduced = _reduced(value)
        if isinstance(reduced, str):  # the name of something global
            yield reduced
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None, None)[:5]
        yield self.part(make)
        # The class is here already, and stands in front of every object's arguments.
        yield self.part(tuple(item for item in arguments if item is not type(value)), " -> arguments")
        yield self.part(list(items) if items is not None else None)
        yield self.part(dict(pairs) if pairs is not None else None)
        yield from self.state(_not_remembered(value, state))

    def state(self, state: Any) -> Iterator[Any]:
        """The attributes of an object, or whatever else its `__getstate__` returns."""
        # With __slots__: attributes from __dict__, and the others.
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        for part in parts:
            if type(part) is dict and all(type(name) is str for name in part):
                yield [(name, self.part(part[name], f".{name}")) for name in sorted(part)]
            else:
                yield self.part(part, ".__getstate__()")


def _reduced(value: Any) -> Any:
    try:
        return value.__reduce_ex__(4)
    except Exception as error:  # whatever the user's __getstate__ does
        raise UnencodableError(
            f"cannot hash {type(value)}: {error}; leave it out in __getstate__, or give its class a __castore_key__ method"
        ) from error


def _not_remembered(value: Any, state: Any) -> Any:
    """The state of an object without what its cached properties have kept: their code counts, with the class."""
    if type(state) is not dict:
        return state
    cached = {
        name
        for cls in type(value).__mro__
        for name, member in vars(cls).items()
        if isinstance(member, functools.cached_property)
    }
    return {name: item for name, item in state.items() if name not in cached} if cached else state
