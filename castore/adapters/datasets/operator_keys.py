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
from typing import Any

from blake3 import blake3

from castore.errors import UnhashableError
from castore.keys.encoder import Encoder, Watch
from castore.keys.functions import orders
from castore.keys.objects import OBJECTS
from castore.keys.registry import Rules, Table
from castore.keys.tracing import Encoded, encode
from castore.system.cpus import hash_threads

_VERSION = b"castore.operator.1"
_LARGE = 1 << 20
#: The advice for a part that looks random.
RANDOM_ADVICE = (
    "if it does not count, leave it out with __getstate__, or say what identifies the operator with"
    " fingerprint=..."
)


def operator_fingerprint(
    operator: Any, name: str = "operator", *, texts: frozenset[str] = frozenset()
) -> str:
    """64 hexadecimal digits that change when the operator's computation may have changed.

    Args:
        operator: a function, a method, or an object: anything that can be called or has methods to call.
        name: the operator's name in the message of an error.
        texts: kinds of texts beside the code, such as docstrings, that count although no code of the
            operator's reads them: those that a function reads of an argument. Default: none.

    Raises:
        UnhashableError: a part of it has no stable hash; the message has the path to it.

    >>> operator_fingerprint(len) == operator_fingerprint(len)
    True
    >>> operator_fingerprint(len) == operator_fingerprint(max)
    False
    """
    return str(blake3(_VERSION + encoded(operator, name, texts=texts).code).hexdigest())


def encoded(
    operator: Any, name: str, watch: Watch | None = None, *, texts: frozenset[str] = frozenset()
) -> Encoded:
    """The canonical bytes of an operator, which a watch may see; see `operator_fingerprint`."""
    try:
        return encode(OPERATORS, operator, name, watch, texts=texts)
    except UnhashableError as error:
        raise UnhashableError(
            f"{error}; or leave that part out with __getstate__, or say what identifies the operator with "
            "fingerprint=..."
        ) from None


# --- rules --------------------------------------------------------------------------------------------------


def _large(encoder: Encoder, value: Any) -> bytes | None:
    """A large array, in a faster way."""
    if value.nbytes < _LARGE or value.dtype.names is not None or value.dtype.itemsize == 0:
        return None
    np = sys.modules["numpy"]
    hasher = blake3(max_threads=hash_threads())
    # Row by row: an array that is not contiguous is not copied whole.
    rows = len(value) if value.flags.c_contiguous else max(1, len(value) * _LARGE * 64 // value.nbytes)
    for start in range(0, len(value), rows):
        hasher.update(np.ascontiguousarray(value[start : start + rows]).reshape(-1).view(np.uint8).data)
    return encoder.tagged("large array", encoder.part(value.dtype), value.shape, hasher.digest())


#: Rules beside those that all adapters share. `dataset_fingerprint` adds that of datasets: a dataset's format
#: holds what operators hold, so that module builds on this one.
HELD = Table([])
#: The rules for operators.
OPERATORS = Rules(HELD, OBJECTS, orders=orders, elements=_large)
