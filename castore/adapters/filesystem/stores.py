"""Each store is opened once a process, however many threads and file systems ask for it, and closed after the
last.
"""

from __future__ import annotations

import os
import weakref

from castore import Store
from castore.system.forks import Guard

_guard = Guard()
_opened: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()


def shared_store(path: str | os.PathLike[str]) -> Store:
    """The store at ``path``, made if it does not exist, for as long as somebody holds it."""
    place = os.path.abspath(path)
    with _guard.lock:
        store = _opened.get(place)
        if store is None:
            store = _opened[place] = Store(place)
            weakref.finalize(store, store.parts.close)
    return store
