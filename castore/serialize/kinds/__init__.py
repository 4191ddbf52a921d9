"""Values that are more than numbers, text and containers, as parts that any codec of castore keeps, and back.

A *kind* takes a value apart into a `Form`: the kind's name, the class where there are many of one kind, and parts, which
are plain values or forms of other kinds. `castore.serialize.serializers` and the samples of `castore.adapters.torch` write forms
each in their own way, so both take the same values.

`fixed` has the kinds that need no class of the user's: `standard` of the standard library, `numeric` of NumPy, torch and
tokenizers, `images` of PIL, `tables` of pyarrow. `classes` has the user's own named tuples, dataclasses, enums and tensor subclasses, `registry` the types
that the user explains with `register_type`.

Assumes that what is put together comes from hostile bytes. Must never import a module or call a constructor because
bytes name it, except for the modules and classes that `fixed` lists.
"""

from __future__ import annotations

from castore.serialize.kinds.numeric import tensor_problem
from castore.serialize.kinds.parts import Form, MisfitError
from castore.serialize.kinds.registry import (
    is_found_by_name,
    is_registered,
    put_together,
    register_type,
    take_apart,
    way_out,
)

__all__ = [
    "Form",
    "MisfitError",
    "is_found_by_name",
    "is_registered",
    "put_together",
    "register_type",
    "take_apart",
    "tensor_problem",
    "way_out",
]
