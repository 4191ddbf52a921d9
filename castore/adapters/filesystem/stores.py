"""Opens each store once a process, however many threads and file systems use it, and closes it after the
last.
"""

from __future__ import annotations

import atexit
import os
import weakref

from castore import Store
from castore.errors import StoreError
from castore.system.forks import ForkSafeLock, finalise

_guard = ForkSafeLock()
_stores: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()


def shared_store(path: str | os.PathLike[str]) -> Store:
    """The store that is at ``path`` now, made if it does not exist, for as long as it is referenced."""
    place = os.path.abspath(path)
    with _guard.lock:
        store = _stores.get(place)
        if store is None or not is_in_place(store):
            store = _stores[place] = Store(place)
            # The collector may run in any thread: the finaliser closes files, and does not wait for locks in
            # order to write the last counts.
            weakref.finalize(store, finalise, store.parts.release).atexit = False
    return store


def is_in_place(store: Store) -> bool:
    """Whether a store is still the one at its path.

    The folder may have been made anew, or a link to it may lead elsewhere.
    """
    try:
        store.parts.index.beacon.require_in_place()
    except StoreError:
        return False
    return True


@atexit.register
def _close_all() -> None:
    """Write the last hit counts: fsspec references its instances, and so their stores, until the end.

    A store whose folder was removed meanwhile has no place for them.
    """
    for store in list(_stores.values()):
        if store.path.exists():
            store.close()
