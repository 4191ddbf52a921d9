"""Opening a store: its folder and settings, the parts that do the work, and letting go of them again.

What one does with a store is in store.py; nothing here puts, gets or removes anything. The parts are public to the modules of
castore that are handed a `Store`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from castore import collect, settings
from castore.ballast import Ballast
from castore.beacon import Beacon
from castore.compute import ComputeLocks
from castore.errors import StoreError
from castore.index import Index
from castore.journal import Journal
from castore.objects.codecs import FRAME_SIZE
from castore.objects.directory import ObjectDirectory
from castore.prefixes import Prefixes
from castore.putting import Putter
from castore.reading import BlobSource
from castore.sizes import parse_size
from castore.usage import Usage
from castore.writing import BlobWriter

if TYPE_CHECKING:
    from castore.shared_frames import SharedFrames
    from castore.store import Store

_S = TypeVar("_S", bound="OpenStore")

#: Bound on the RAM tier of a `Store` that is not told otherwise: each process has its own, so it is modest.
DEFAULT_MEMORY = 128_000_000


class OpenStore:
    """An open store and its parts. The arguments are those of `Store`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        codec: str | None = None,
        level: int | None = None,
        max_size: int | str | None = None,
        memory: int | str = DEFAULT_MEMORY,
        shared_memory: int | str | None = None,
        ttl: float | str | None = None,
        durable: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {
            "codec": codec,
            "level": level,
            "max_size": max_size,
            "memory": memory,
            "shared_memory": shared_memory,
            "ttl": ttl,
            "durable": durable,
            "allow_pickle": allow_pickle,
        }
        self.path = Path(os.path.abspath(settings.default_path() if path is None else path))
        kept = settings.load(self.path)
        is_new = kept is None
        if kept is None:
            kept = settings.merge(settings.Settings(), codec=codec, level=level, max_size=max_size, ttl=ttl)
            settings.create(self.path, kept)
        self.settings = settings.merge(kept, codec=codec, level=level, max_size=max_size, ttl=ttl)
        settings.refuse_network(self.path)
        settings.check_folders(self.path, self.settings)
        self.allow_pickle = allow_pickle
        self._ballast = Ballast(self.path / "ballast", self.settings.file_mode)
        if is_new:
            self._ballast.keep()
        self._ballast.relieve(partial(self._connect, parse_size(memory), durable))
        if shared_memory is not None and (size := parse_size(shared_memory)):
            self._attach(size)

    def _connect(self, memory: int, durable: bool) -> None:
        mode = self.settings.file_mode
        try:
            self._beacon = Beacon(self.path / "locks" / "beacon", mode)
        except OSError as error:
            raise StoreError(
                f"cannot use the store {self.path}: {error.strerror}: {error.filename}"
            ) from error
        journal = Journal(self.path / "objects" / "names", self.path / "tmp", self._beacon, mode)
        self.objects = ObjectDirectory(
            self.path,
            object_mode=self.settings.object_mode,
            file_mode=mode,
            folder_mode=self.settings.folder_mode,
            durable=durable,
        )
        self.index = Index(
            self.path / "index.sqlite",
            self._beacon,
            journal,
            mode=mode,
            is_empty=self.objects.is_empty,
            durable=durable,
        )
        if durable:
            settings.sync_folders(self.path)
        self._usage = Usage(self.index)
        self.source = BlobSource(self.index, self.objects, self._beacon, self._usage, memory)
        self.writer = BlobWriter(
            self.index, self.objects, self.settings.max_size, partial(collect.make_room, cast("Store", self))
        )
        self.prefixes = Prefixes(self.objects.dictionaries, self.path / "tmp", self._beacon, mode)
        self._putter = Putter(self.writer, self.settings, self.path, self.prefixes)
        self._locks = ComputeLocks(self.path / "locks" / "compute", mode)

    def _attach(self, shared_memory: int) -> None:
        from castore.shared_frames import SharedFrames  # brings multiprocessing along

        try:
            self.source.shared = SharedFrames(self.path, shared_memory, FRAME_SIZE)
        except BaseException:
            self.close()
            raise

    @property
    def shared_frames(self) -> SharedFrames | None:
        """The frames that processes share, with their ``hits``, ``misses`` and ``held`` bytes; None without them."""
        return self.source.shared

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._options), (str(self.path),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def close(self) -> None:
        """Let go of files and connections, after writing what has been counted if there is room for it."""
        self._usage.flush_if_possible()
        self.writer.close()
        self.objects.close()
        self.index.journal.close()
        self.index.close()
        if self.source.shared is not None:
            self.source.shared.close()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
