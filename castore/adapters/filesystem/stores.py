"""Each store is opened once a process, however many threads and file systems ask for it, and closed after the
last.
"""

from __future__ import annotations

import atexit
import os
import weakref

from castore import Store
from castore.system.forks import ForkSafeLock, finalise

_guard = ForkSafeLock()
_opened: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()


def shared_store(path: str | os.PathLike[str]) -> Store:
    """The store at ``path``, made if it does not exist, for as long as somebody holds it."""
    place = os.path.abspath(path)
    with _guard.lock:
        store = _opened.get(place)
        if store is None:
            store = _opened[place] = Store(place)
            # The collector may strike in any thread: it closes files, and waits for nobody to write the last
            # counts.
            weakref.finalize(store, finalise, store.parts.release).atexit = False
    return store


@atexit.register
def _close_all() -> None:
    """Write the last hit counts. fsspec holds its instances, and their stores, until the process ends."""
    for store in list(_opened.values()):
        store.close()
