"""A cache of Python objects in two levels, RAM over a store. Any text is a key; each value has metadata.

The interface is that of EasyDeL's EasyData, which follows Levanter's TreeCache.

May import: the store and all below it.
Must never: unpickle, unless the cache was opened with ``allow_pickle``.
"""

from __future__ import annotations

from castore.adapters.tree.disk import DiskCache
from castore.adapters.tree.manager import TreeCacheManager
from castore.adapters.tree.memory import MemoryCache
from castore.adapters.tree.metadata import CacheMetadata

__all__ = ["CacheMetadata", "DiskCache", "MemoryCache", "TreeCacheManager"]
