"""diskcache: `Cache` becomes a thin layer over a `castore.Store`, with diskcache's names.

Keys are any objects that castore can hash. The key itself is in the entry's metadata, because iteration
returns it. `incr`, `decr` and `add` are compare-and-set loops over `Store.put_if`, tags are metadata, `cull`
is gc, and `reset` accepts only castore's own behaviour. Methods without a counterpart are missing: cases that
need one are left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diskcache

import castore
from castore.records import Entry
from castore.serialize import serializers

_FOLDER = "cache"


class Cache:
    """diskcache's `Cache` over a store."""

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = str(tempfile.mkdtemp() if directory is None else directory)
        self._store = castore.Store(Path(self.directory) / "store", memory=0)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.directory,)

    def close(self) -> None:
        self._store.close()

    def check(self) -> list[str]:
        """The problems of the store."""
        return [str(found) for found in self._store.verify().bad]

    # One key

    def set(
        self, key: Any, value: Any, expire: float | None = None, read: bool = False, tag: Any = None
    ) -> bool:
        value = value.read() if read else value
        self._store.save(_name(key), value, ttl=expire, metadata=_metadata(key, tag))
        return True

    def add(self, key: Any, value: Any, expire: float | None = None) -> bool:
        return key not in self and self._put_if(key, None, value, expire)

    def get(
        self, key: Any, default: Any = None, read: bool = False, expire_time: bool = False, tag: bool = False
    ) -> Any:
        entry = self._store.entry(_name(key))
        try:
            if read and entry is not None and entry.serializer == "bytes":
                return self._store.open(entry.name)
            value = default if entry is None else self._store.load(entry.name)
        except castore.NotFoundError:
            entry, value = None, default
        times = (entry and entry.expires,) if expire_time else ()
        tags = (entry and _object(entry.metadata["tag"]),) if tag else ()
        return (value, *times, *tags) if times or tags else value

    def read(self, key: Any) -> Any:
        return self._store.open(self._get_entry(key).name)

    def delete(self, key: Any) -> bool:
        return self._store.entry(_name(key)) is not None and self._store.delete(_name(key))

    def pop(self, key: Any, default: Any = None, expire_time: bool = False, tag: bool = False) -> Any:
        found = self.get(key, default, expire_time=expire_time, tag=tag)
        self.delete(key)
        return found

    def incr(self, key: Any, delta: int = 1, default: int | None = 0) -> int:
        while True:
            entry = self._store.entry(_name(key))
            if entry is None and default is None:
                raise KeyError(key)
            value = int((default or 0) if entry is None else self._store.load(entry.name)) + delta
            if self._put_if(key, entry and entry.digest, value, None):
                return value

    def decr(self, key: Any, delta: int = 1, default: int | None = 0) -> int:
        return self.incr(key, -delta, default)

    def _put_if(self, key: Any, digest: str | None, value: Any, expire: float | None) -> bool:
        used, _ = serializers.dump(value)
        items = [(_name(key), value, _metadata(key))]
        return self._store.put_if((_name(key), digest), items, ttl=expire, serializer=used) is not None

    def _get_entry(self, key: Any) -> Entry:
        entry = self._store.entry(_name(key))
        if entry is None:
            raise KeyError(key)
        return entry

    def __getitem__(self, key: Any) -> Any:
        return self._store.load(self._get_entry(key).name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.set(key, value)

    def __delitem__(self, key: Any) -> None:
        if not self.delete(key):
            raise KeyError(key)

    def __contains__(self, key: Any) -> bool:
        return self._store.entry(_name(key)) is not None

    # All keys

    def _entries(self) -> list[Entry]:
        return sorted(self._store.entries(_FOLDER), key=lambda entry: entry.metadata["at"])

    def __len__(self) -> int:
        return len(self._entries())

    def __iter__(self) -> Iterator[Any]:
        return (_key(entry) for entry in self._entries())

    def __reversed__(self) -> Iterator[Any]:
        return (_key(entry) for entry in self._entries()[::-1])

    def iterkeys(self, reverse: bool = False) -> Iterator[Any]:
        return (_key(entry) for entry in sorted(self._entries(), key=_key, reverse=reverse))

    def clear(self) -> int:
        return self._store.delete_many(entry.name for entry in self._entries())

    def expire(self) -> int:
        """Remove expired entries."""
        return len(self._store.gc().expired)

    def evict(self, tag: Any) -> int:
        """Remove the entries with that tag."""
        tagged = [entry.name for entry in self._entries() if _object(entry.metadata["tag"]) == tag]
        return self._store.delete_many(tagged)

    def reset(self, setting: str, value: Any) -> None:
        """Accept a setting that is castore's behaviour: `set` never removes entries, and eviction is LRU."""
        if setting != "cull_limit" and (setting, value) != ("eviction_policy", "least-recently-used"):
            raise NotImplementedError(f"castore has no {setting}={value!r}")

    def stats(self, enable: bool = True) -> tuple[int, int]:
        """Hits and misses, which castore always counts."""
        figures = self._store.stat()
        return figures.memory_hits + figures.disk_hits, figures.misses

    def memoize(self, typed: bool = True) -> Callable[[Any], Any]:
        return self._store.cached()


def _name(key: Any) -> str:
    return f"{_FOLDER}/{castore.key(key)}"


def _metadata(key: Any, tag: Any = None) -> dict[str, Any]:
    # diskcache iterates in the order of insertion: "at" is that order.
    return {"key": _text(key), "tag": _text(tag), "at": time.monotonic_ns()}


def _text(value: Any) -> list[str]:
    used, data = serializers.dump(value)
    return [used, data.hex()]


def _object(text: list[str]) -> Any:
    return serializers.load(bytes.fromhex(text[1]), text[0])


def _key(entry: Entry) -> Any:
    return _object(entry.metadata["key"])


diskcache.Cache = Cache
