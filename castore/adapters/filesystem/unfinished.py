"""Written files that are never closed: stored once they are unreferenced, as in other file systems of fsspec.

Compression layers and archives rely on that: they never close the file that they write into. A file that is
referenced until the end of the program is discarded, since the layers above it may hold some of its bytes.
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
from typing import Protocol

# The stores' own exit handler runs after this module's since it is registered before.
from castore.adapters.filesystem import stores as _stores  # noqa: F401
from castore.system.forks import ForkSafeLock

log = logging.getLogger("castore")


class UnfinishedFile(Protocol):
    """A file that is being written."""

    path: str

    def finish(self) -> None:
        """Store the bytes."""

    def discard_with_warning(self, why: str) -> None:
        """Drop the bytes, and log why."""


_open_files: weakref.WeakSet[UnfinishedFile] = weakref.WeakSet()
_resources: dict[int, object] = {}
#: Files without a reference. `append` and `popleft` are atomic.
_unreferenced: deque[UnfinishedFile] = deque()
#: Held while an unreferenced file is ended.
_ending_guard = ForkSafeLock()
#: The thread in which the collector runs.
_collector_thread: list[int] = []
#: Frames of these modules do not mean that the thread is inside the store.
_OWN_MODULES = "castore.adapters.filesystem.files", "castore.adapters.filesystem.unfinished"


def add(file: UnfinishedFile, resource: object) -> None:
    """Register an open file: a warning is logged at the end of the program if the file is not ended before.

    Args:
        file: the file, referenced weakly.
        resource: an object that the file needs in order to be stored. Without this reference, the collector
            could end it before the file.
    """
    _open_files.add(file)
    _resources[id(resource)] = resource


def forget(file: UnfinishedFile, resource: object) -> None:
    """Forget a file that was stored or discarded."""
    _open_files.discard(file)
    _resources.pop(id(resource), None)


def finish(file: UnfinishedFile) -> None:
    """End a file that is not referenced any more.

    The collector ends files and the layers above them in any order. Files therefore wait for the end of the
    collection, when all layers have written their bytes. The collector may also run inside the store, where
    this thread holds locks or is in a transaction. Then the file waits for the next call of the file system,
    or for the end of the program.
    """
    _unreferenced.append(file)
    if not is_collecting():
        _finish_soon()


def is_collecting() -> bool:
    """Whether the collector runs in this thread, so that this code runs in a finaliser."""
    return _thread.get_ident() in _collector_thread


def _finish_soon() -> None:
    if not _is_inside_store():
        finish_unreferenced()


def _is_inside_store() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("castore.") and not module.startswith(_OWN_MODULES):
            return True
        frame = frame.f_back
    return False


def finish_unreferenced() -> None:
    """End the files that had to wait. The file system calls this before it looks up names."""
    while _unreferenced:
        try:
            file = _unreferenced.popleft()
        except IndexError:  # another thread was faster
            return
        with _ending_guard.lock:
            try:
                file.finish()
            except Exception:
                log.exception("castore://%s was discarded", file.path)


def _on_collector(phase: str, _: dict[str, int]) -> None:
    if phase == "start":
        _collector_thread.append(_thread.get_ident())
    else:
        _collector_thread.clear()
        if _unreferenced:
            _finish_soon()


gc.callbacks.append(_on_collector)


@atexit.register
def _end_all() -> None:
    finish_unreferenced()
    with _ending_guard.lock:  # another thread may still be ending a file
        for file in list(_open_files):
            file.discard_with_warning("the program ended before it was closed")
