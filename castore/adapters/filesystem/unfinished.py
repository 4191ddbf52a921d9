"""Written files that are never closed: kept once unreferenced, as in other file systems of fsspec.

Compression layers and archives rely on that: they never close the file that they write into. A file that is
held to the end of the program is not kept, since the layers above it may hold some of its bytes.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import logging
import sys
import weakref
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING

# The stores' own exit handler runs after this module's since it is registered before.
from castore.adapters.filesystem import stores as _stores  # noqa: F401
from castore.system.forks import ForkSafeLock

if TYPE_CHECKING:
    from castore.adapters.filesystem.files import WriteFile

log = logging.getLogger("castore")

_open: weakref.WeakSet[WriteFile] = weakref.WeakSet()
_held: dict[int, object] = {}
#: Files that nobody holds any more. `append` and `popleft` are atomic.
_left: deque[WriteFile] = deque()
#: Held while such a file is ended.
_ending = ForkSafeLock()
#: The thread that the collector runs in.
_collecting: list[int] = []
#: Finalisers of this room are no sign of being inside the store.
_HERE = "castore.adapters.filesystem.files", "castore.adapters.filesystem.unfinished"


def add(file: WriteFile, held: object) -> None:
    """Have it said at the end of the program if nobody ends a file before.

    Args:
        file: held weakly.
        held: what the file needs to be kept. The collector would end it together with the file, or before.
    """
    _open.add(file)
    _held[id(held)] = held


def ended(file: WriteFile, held: object) -> None:
    """Forget a file that was kept or discarded."""
    _open.discard(file)
    _held.pop(id(held), None)


def finish(file: WriteFile) -> None:
    """End a file that nobody holds any more.

    The collector ends files and the layers above them in any order: they wait for its end, so that all layers
    have written what they held. It may also run inside the store, where this thread holds locks or is in the
    middle of a transaction: the file waits for the next look into a file system, or the end of the program.
    """
    _left.append(file)
    if not is_collecting():
        _finish_soon()


def is_collecting() -> bool:
    """Whether the collector runs in this thread, and so this code in a finaliser of it."""
    return _thread.get_ident() in _collecting


def _finish_soon() -> None:
    if not _is_inside_store():
        finish_left()


def _is_inside_store() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("castore.") and not module.startswith(_HERE):
            return True
        frame = frame.f_back
    return False


def finish_left() -> None:
    """End the files that had to wait. Called by the file system before it looks for names."""
    while _left:
        try:
            file = _left.popleft()
        except IndexError:  # another thread was faster
            return
        with _ending.lock:
            try:
                file.finish()
            except Exception:
                log.exception("nothing of castore://%s is kept", file.path)


def _on_collector(phase: str, _: dict[str, int]) -> None:
    if phase == "start":
        _collecting.append(_thread.get_ident())
    else:
        _collecting.clear()
        if _left:
            _finish_soon()


gc.callbacks.append(_on_collector)


@atexit.register
def _end_all() -> None:
    finish_left()
    with _ending.lock:  # another thread may still keep one
        for file in list(_open):
            file.lose("the program has ended, and nobody has closed it")
