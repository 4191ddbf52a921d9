"""Which `with` blocks of this thread are being left by an exception, read from the stack.

Python calls ``__exit__`` with an exception by an instruction of its own. A frame that stands at this
instruction is leaving a `with` block by an exception, whether ``__exit__`` is written in Python or in C.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType

_INSTRUCTION = dis.opmap["WITH_EXCEPT_START"]


def unwinding_blocks() -> frozenset[tuple[int, int]]:
    """The blocks that are being unwound: pairs of a frame's id and a place in its code.

    An id is valid while its frame runs.
    """
    if sys.exc_info()[1] is None:
        return frozenset()
    found = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _INSTRUCTION:
            found.add((id(frame), frame.f_lasti))
        frame = frame.f_back
    return frozenset(found)
