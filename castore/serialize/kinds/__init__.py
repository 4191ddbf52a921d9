"""Takes apart values that are more than numbers, text and containers, and puts them together again.

A *kind* takes a value apart into a `Form`: the kind's name, the class if the kind has many classes, and
parts. Parts are plain values or values of other kinds. `castore.serialize.serializers` and the samples of
`castore.adapters.torch` each write forms in their own format, so both accept the same values.

The fixed kinds need no user class: `standard_library` has the standard library's, `numeric` those of NumPy,
torch and transformers, `scipy_sparse` SciPy's, `images` PIL's, `arrow_tables` pyarrow's, `pandas_scalars`,
`pandas_arrays` and `pandas_frames` pandas'. `user_classes` has users' named tuples, dataclasses, enums and
tensor subclasses. `kind_registry` has the types that users explain with `register_type`.

There is no kind for frames of polars. Its threads do not survive a fork: in a forked worker of a loader that
gets such a frame, polars waits for ever.

May import: errors, what lies beside it in `serialize`, and the libraries of its kinds, once a program uses
them.
Must never: import a module or call a constructor because bytes name it, except for the modules and classes of
the fixed kinds: the parts to put together may come from hostile bytes.
"""

from __future__ import annotations

from castore.serialize.kinds.forms import Form, MisfitError
from castore.serialize.kinds.kind_registry import (
    fields_of,
    is_found_by_name,
    is_registered,
    put_together,
    register_type,
    take_apart,
    way_out,
)
from castore.serialize.kinds.numeric import tensor_problem

__all__ = [
    "Form",
    "MisfitError",
    "fields_of",
    "is_found_by_name",
    "is_registered",
    "put_together",
    "register_type",
    "take_apart",
    "tensor_problem",
    "way_out",
]
