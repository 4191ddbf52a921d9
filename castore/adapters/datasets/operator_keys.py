"""A fingerprint of an operator's computation: its code, followed through the user's own modules, and its
state.

Builds on `castore.keys.objects`: functions count by their code, libraries by name and version. Objects count
by their class and by the state that pickle would keep; models and arrays by content; tokenizers by their
rules, not by leftovers of their use. Objects that cannot change a result (locks, loggers, streams of a GPU,
opaque handles) count by their kind. The state of a source of random numbers counts: equal seeds are equal,
and a used source has moved on.

Assumes that state which an object leaves out of its pickle does not count, and that nobody changes an
operator while it is hashed. Must never give a random answer: a part without a stable hash is an
UnhashableError that names its path. Must never remember anything by identity from one call to the next, since
an array or a model can be changed in place.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from castore.adapters.datasets.table_digest import table_digest
from castore.errors import UnhashableError
from castore.keys.objects import InstanceEncoder
from castore.keys.values import Kinds

_VERSION = b"castore.operator.1"
_LARGE = 1 << 20
#: The advice for a part that looks random.
RANDOM_ADVICE = (
    "if it does not count, leave it out with __getstate__, or say what identifies the operator with"
    " fingerprint=..."
)


def operator_fingerprint(operator: Any, name: str = "operator") -> str:
    """64 hexadecimal digits that change when the operator's computation may have changed.

    Args:
        operator: a function, a method, or an object: anything that can be called or has methods to call.
        name: the operator's name in the message of an error.

    Raises:
        UnhashableError: a part of it has no stable hash; the message has the path to it.

    >>> operator_fingerprint(len) == operator_fingerprint(len)
    True
    >>> operator_fingerprint(len) == operator_fingerprint(max)
    False
    """
    return str(blake3(_VERSION + encode(operator, name)).hexdigest())


def encode(operator: Any, name: str, encoder: OperatorEncoder | None = None) -> bytes:
    """The canonical bytes of an operator; see `operator_fingerprint`."""
    try:
        return (encoder or OperatorEncoder()).encode(operator, name)
    except UnhashableError as error:
        raise UnhashableError(
            f"{error}; or leave that part out with __getstate__, or say what identifies the operator with "
            "fingerprint=..."
        ) from None


class OperatorEncoder(InstanceEncoder):
    """An InstanceEncoder that also takes the values that operators hold.

    Attributes:
        code: digests of the user's functions and classes that were met, by qualified name, for reports of
            changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.code: dict[str, str] = {}

    def other(self, value: Any) -> bytes:
        """As in InstanceEncoder, and the values that only operators hold."""
        count = HELD.of(type(value))
        if count is not None:
            return self.tagged(*count(self, value))
        return super().other(value)

    def member(self, item: Any) -> bytes:
        """As in InstanceEncoder, with the context of the set, and with the notes made inside it."""
        alone = self._beside()
        code = alone.part(item, "{...}")
        self.code |= alone.code
        return code

    def function(self, function: types.FunctionType) -> Iterator[Any]:
        """As in InstanceEncoder, with a note of the own code of each user function."""
        parts = list(super().function(function))
        # Plain bytes are the instructions and defaults; tuples refer to other values.
        own = [part for part in parts if type(part) is not tuple]
        self.code[f"{function.__module__}.{function.__qualname__}"] = _short(self.tagged("own", *own))
        yield from parts

    def elements(self, value: Any) -> bytes:
        """As in InstanceEncoder, with a faster way for large arrays."""
        if value.nbytes < _LARGE or value.dtype.names is not None or value.dtype.itemsize == 0:
            return super().elements(value)
        return self.tagged(*_large(self, value))


def _short(code: bytes) -> str:
    return str(blake3(code).hexdigest()[:32])


# --- what operators hold ------------------------------------------------------------------------------------


def _large(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    np = sys.modules["numpy"]
    hasher = blake3(max_threads=blake3.AUTO)
    # Row by row: an array that is not contiguous is not copied whole.
    rows = len(value) if value.flags.c_contiguous else max(1, len(value) * _LARGE * 64 // value.nbytes)
    for start in range(0, len(value), rows):
        hasher.update(np.ascontiguousarray(value[start : start + rows]).reshape(-1).view(np.uint8).data)
    yield from ("large array", encoder.part(value.dtype), value.shape, hasher.digest())


def _arrow(encoder: OperatorEncoder, value: Any) -> Iterator[Any]:
    pa = sys.modules["pyarrow"]
    if isinstance(value, pa.Buffer):
        yield from ("buffer", blake3(value, max_threads=blake3.AUTO).digest())
        return
    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    if not isinstance(value, pa.Table):
        value = pa.table({"": value})
    yield from ("arrow", table_digest(value))


#: Encoders of the values that only operators hold. `dataset_fingerprint` adds datasets: a dataset's format
#: holds what operators hold, so that module builds on this one.
HELD = Kinds([("pyarrow", ("Table", "RecordBatch", "Array", "ChunkedArray", "Buffer"), _arrow)])
