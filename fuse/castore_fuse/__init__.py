"""castore_fuse: mounts a castore as a folder of plain read-only files, through libfuse 3.

Names are imported on first use: `import castore_fuse` is quick, and works without libfuse.

May import: the store and all below it.
Must never: write into a store, or give a byte that was not checked; import the adapters or watched folders.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castore.remote.outcomes import Prefetch
    from castore_fuse.api import foreground, mount, mounted, umount
    from castore_fuse.errors import BusyError, MountError

_MODULES = {
    "BusyError": "castore_fuse.errors",
    "MountError": "castore_fuse.errors",
    "Prefetch": "castore.remote.outcomes",
    "foreground": "castore_fuse.api",
    "mount": "castore_fuse.api",
    "mounted": "castore_fuse.api",
    "umount": "castore_fuse.api",
}

__all__ = ["BusyError", "MountError", "Prefetch", "foreground", "mount", "mounted", "umount"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
