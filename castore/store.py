"""The store: the one interface through which adapters, commands, the mount and users reach castore.

A method checks its arguments and passes the work on: `castore.write` puts, `castore.read` gets, `castore.gc`
and `castore.repair` keep the store in shape. Threads may share a `Store`. A `Store` survives a fork, and
pickles as its path and options.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from castore import layout, stats, training
from castore.errors import (
    FullError,
    InvalidValueError,
    NotFoundError,
    RemoteWarning,
    TooLargeError,
    warn,
    warn_unkept,
)
from castore.gc import GRACE_SECONDS
from castore.index import mounts, places
from castore.index.transaction import Write
from castore.names import check_name, check_names, check_prefix, require_several
from castore.parts import Parts, open_folder, open_parts, share_frames
from castore.read.blob_file import buffered_file
from castore.read.open_blob import OpenBlob
from castore.read.origin import BlobAccess, Origin
from castore.read.source import ATTEMPTS
from castore.read.tree_reader import TreeReader
from castore.records import (
    AWAY,
    LOST,
    Blob,
    Buffer,
    Entry,
    Found,
    Mount,
    Totals,
    has_expired,
    parse_digest,
)
from castore.settings import store_folder
from castore.system.ballast import Ballast, is_short
from castore.system.local_files import explain_gone
from castore.system.single_flight import ComputeLocks
from castore.units import parse_budget, parse_count, parse_duration, parse_flag, parse_part, parse_size
from castore.write.arguments import copy_if_writable, parse_expected, parse_items
from castore.write.batch import Batch
from castore.write.incoming import NewFile
from castore.write.putter import Putter, SupportsRead

if TYPE_CHECKING:
    from castore.gc.collect import Collected, Plan
    from castore.remote.outcomes import Progress, Pulled, Pushed
    from castore.remote.remote import Remote
    from castore.remote.shared_results import SharedResults, SharedTurn
    from castore.repair.verify import Report
    from castore.shm.shared_frames import SharedFrames

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_S = TypeVar("_S", bound="Store")

#: Names the remote over which stores share results, where no argument does.
REMOTE_VARIABLE = "CASTORE_REMOTE"
#: Default bound in bytes on the RAM tier of a `Store`. It is modest, because each process has its own tier.
DEFAULT_MEMORY = 128_000_000

_HEX = re.compile(r"[0-9a-f]{0,64}").fullmatch

#: Names that `delete_many` removes in one commit.
_BATCH = 2000
#: The same where the disk has no room for a long log.
_SMALL_BATCH = 50


def _require(record: object, kind: type[Blob] | type[Entry], of: str) -> None:
    if not isinstance(record, kind):
        source = kind.__name__.lower()
        raise InvalidValueError(f"{of} takes what `Store.{source}` gives, not {type(record).__name__}")


# The modules that serialise objects, collect, verify, or read from remotes are imported where they are used:
# many programs do none of that, and the start of each command counts.


def _make_room(parts: Parts, need: int) -> None:
    from castore.gc import collect

    collect.make_room(parts, need)


def _find_origin(parts: Parts) -> Origin:
    from castore.remote.origin import RemoteOrigin

    return RemoteOrigin(parts)


class Store:
    """A folder that keeps each artefact once, compressed and verified.

    Args:
        path: the store's folder, made if it does not exist; default ``$CASTORE_DIR``, then
            ``$XDG_CACHE_HOME/castore``, then ``~/.cache/castore``. ``~`` at its beginning is the home folder.
        codec: ``"auto"`` (zstd, or raw for bytes that do not shrink), ``"zstd"``, ``"lz4"``, ``"gzip"`` or
            ``"none"``; default the codec that the store was made with.
        level: level of the codec; default the codec's own.
        max_size: budget in stored bytes (an int, or ``"200GB"``). Puts that would pass it evict the least
            recently used entries first. `castore.UNLIMITED` sets no bound. Default the budget that the store
            was made with.
        memory: bound on the RAM tier of this process in bytes, 0 for none; default 128 MB.
        shared_memory: bytes of shared memory (or ``"4GB"``) for decoded frames of large compressed blobs. All
            processes of this user and machine that open the store with the same bound share it. Default none.
        ttl: seconds (or ``"30d"``) until a new entry expires; `castore.NEVER` for never. Default the lifetime
            that the store was made with.
        durable: whether a put that has returned survives a power cut, at the price of an fsync each.
        allow_pickle: let `save` and `load` use pickle where nothing else fits. Loading a pickle runs code.
        remote: name of a remote (see `add_remote`) over which stores share what they compute:
            `get_or_compute` and `cached` ask it before they compute, and offer it their results. "" for none;
            default ``$CASTORE_REMOTE``, then none.

    A store that this user may read and not write opens too, on a read-only file system for instance. Methods
    that would change it raise a `StoreError`, and hits and last accesses are not counted.

    A part of the interface is for adapters, which work with entries and blobs past the rules of `get`:
    ``find``, ``find_many``, ``entries_with_key``, ``delete_unchanged``, ``names_of``,
    ``blobs_starting_with``, ``get_blob``, ``bring``, ``path_of``, ``remove_blobs``, ``count_use``,
    ``has_dictionary``, ``counters``, ``is_shared``, ``shared_remote``, ``share``, ``find_shared``,
    ``offer_shared``, ``require_writable`` and ``tree``.

    Attributes:
        path: the store's folder.
        settings: codec, budget and lifetime of new entries.
        read_only: whether this user can only read the store.
        allow_pickle: as it was given.

    Any method raises a `StoreError` if the folder is gone, or if the index is missing or cannot be used. A
    method that changes the store raises a `FullError` if the disk is full. A method that reads bytes raises a
    `RemoteError` if they are only in a remote, and the remote cannot be used.

    Raises:
        StoreError: the folder is no store, of another format, not accessible, or on a network file system.
        InvalidValueError: an argument makes no sense.
        FullError: ``/dev/shm`` or the machine has not as much memory free as ``shared_memory``.
        SegmentError: other processes use the store with another ``shared_memory``.
        NotFoundError: the store does not know ``remote``.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp() + "/cache")
    >>> store.put("greetings/hello.txt", b"hello").size
    5
    >>> store.get("greetings/hello.txt")
    b'hello'
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        codec: str | None = None,
        level: int | None = None,
        max_size: float | str | None = None,
        memory: int | str = DEFAULT_MEMORY,
        shared_memory: int | str | None = None,
        ttl: float | str | None = None,
        durable: bool = False,
        allow_pickle: bool = False,
        remote: str | None = None,
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
            "remote": remote,
        }
        durable, self.allow_pickle = parse_flag(durable, "durable"), parse_flag(allow_pickle, "allow_pickle")
        self.path = store_folder(path)
        #: Whether this user can only read the store. Its file system is read-only, or the permissions say so.
        self.settings, self.read_only = open_folder(
            self.path, codec=codec, level=level, max_size=max_size, ttl=ttl
        )
        self._ballast = Ballast(self.path / "ballast", self.settings.file_mode)
        self.parts = parts = open_parts(
            self.path,
            self.settings,
            self._ballast,
            _make_room,
            _find_origin,
            read_only=self.read_only,
            memory=parse_size(memory),
            durable=durable,
        )
        # Not public: docs/decisions/one-door.md lists these, and who may use them.
        self.index, self.objects, self.source = parts.index, parts.objects, parts.source
        self.writer, self.prefixes, self._usage = parts.writer, parts.prefixes, parts.usage
        #: The view that a mount reads: names as a tree of files.
        self.tree = TreeReader(parts.index, parts.objects, parts.source, parts.usage)
        self._putter = Putter(self.writer, self.settings, self.path, self.prefixes)
        self._locks = ComputeLocks(self.path / "locks" / "compute", self.settings.file_mode)
        self._shared: SharedResults | None = None
        if remote:
            self.remote(remote)  # a name that the store does not know is an error now, not at the first miss
        if shared := os.environ.get(REMOTE_VARIABLE) if remote is None else remote:
            self._shared = self._share_results(shared)
        if shared_memory is not None and (size := parse_size(shared_memory)):
            share_frames(parts, size)

    @property
    def shared_frames(self) -> SharedFrames | None:
        """The shared frames, with ``hits``, ``misses`` and ``held`` bytes; None without ``shared_memory``."""
        return self.source.shared

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._options), (str(self.path),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def close(self) -> None:
        """Close files and connections, after writing the usage counts if the disk has room for them.

        Waits for at most a minute until results that were computed here are in the store's ``remote``. Any
        later call opens the store again.
        """
        if self._shared is not None:
            self._shared.close()
        self.parts.close()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *exc: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self.close()
        else:  # whoever has pressed Ctrl-C waits for no remote
            self.parts.close()

    def __castore_key__(self) -> str:
        """A function that uses a store gives the same results with another one."""
        return "Store"

    # Putting

    def put(
        self,
        name: str,
        data: Buffer,
        *,
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        pin: bool = False,
        serializer: str = "bytes",
    ) -> Entry:
        """Keep ``data`` under ``name``. An entry of that name is replaced.

        Args:
            name: relative POSIX path.
            data: bytes, bytearray or memoryview.
            codec, level: default the store's.
            ttl: seconds (or ``"30d"``) until the entry expires, or `castore.NEVER`; default the store's.
            metadata: JSON-like, kept with the entry.
            pin: have gc leave the entry alone.
            serializer: how `load` turns the bytes into an object.

        Raises:
            InvalidNameError, NameConflictError: the name cannot be used.
            InvalidValueError: ``codec``, ``level``, ``ttl``, ``pin`` or ``serializer`` makes no sense.
            SerializationError: ``data`` is no bytes, or the metadata is not JSON-like.
            TooLargeError, FullError: it does not fit into the budget or onto the disk.
        """
        spec = self._putter.make_spec(name, ttl, metadata, pin, serializer)
        return self._putter.put(spec, data, *self._putter.resolve_codec(codec, level))

    def put_file(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        pin: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> Entry:
        """Keep a file of any size, in constant memory; the arguments are those of `put`.

        Args:
            progress: called with the number of bytes of each piece that is compressed. Known bytes are not
                compressed again.

        Raises:
            OSError: the file cannot be read.
            InvalidValueError: it is not a regular file, or changed while it was read; or an argument makes no
                sense.
            InvalidNameError, NameConflictError, SerializationError, TooLargeError, FullError: as for `put`.
        """
        spec = self._putter.make_spec(name, ttl, metadata, pin, "bytes")
        return self._putter.put_file(spec, path, *self._putter.resolve_codec(codec, level), progress)

    def put_stream(
        self,
        name: str,
        file: SupportsRead,
        *,
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        pin: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> Entry:
        """Read a binary file, a pipe or a response to its end, and keep the bytes. Takes constant memory.

        Nothing is kept if reading fails. For a regular file `put_file` is quicker: it looks the file up
        before it compresses it.

        Args:
            file: has a ``read(n)`` that gives bytes, and b"" at the end. It is left open.
            codec, level, ttl, metadata, pin: as for `put`.
            progress: called with the bytes of each piece read.

        Raises:
            InvalidValueError: the stream is non-blocking and had nothing to read; or an argument makes no
                sense.
            SerializationError: the stream gives text, or the metadata is not JSON-like.
            InvalidNameError, NameConflictError, TooLargeError, FullError: as for `put`.
            Exception: what its ``read`` raised.

        >>> import io, tempfile
        >>> store = Store(tempfile.mkdtemp() + "/cache")
        >>> store.put_stream("numbers", io.BytesIO(b"1 2 3")).size
        5
        """
        spec = self._putter.make_spec(name, ttl, metadata, pin, "bytes")
        return self._putter.put_stream(spec, file, *self._putter.resolve_codec(codec, level), progress)

    def create(
        self,
        name: str,
        *,
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        pin: bool = False,
        replace: bool = True,
    ) -> AbstractContextManager[NewFile]:
        """A context manager whose binary file is kept at the end of the block. An exception keeps nothing.

        The file takes any number of bytes, in order and in constant memory, and cannot seek. ``name`` does
        not change until the block ends. After the block, `NewFile.entry` is the new entry. Closing the
        file inside the block ends the writing and keeps nothing yet, so an `io.TextIOWrapper` or an archive
        may close it.

        Args:
            codec, level, ttl, metadata, pin: as for `put`.
            replace: False raises a `NameConflictError` at the end of the block if the name is there by then.
                A name that is missing for `get` is not there.

        Raises:
            InvalidNameError, InvalidValueError, SerializationError: as for `put`, at once.
            NameConflictError, TooLargeError, FullError: as for `put`, at the end of the block.

        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp() + "/cache")
        >>> with store.create("digits") as file:
        ...     for number in range(3):
        ...         _ = file.write(str(number).encode())
        ...     "digits" in store
        False
        >>> file.entry.size, store.get("digits")
        (3, b'012')
        """
        spec = self._putter.make_spec(name, ttl, metadata, pin, "bytes")
        return self._putter.create(spec, *self._putter.resolve_codec(codec, level), replace=replace)

    def put_many(
        self,
        items: Iterable[tuple[str, Buffer] | tuple[str, Buffer, dict[str, Any] | None]],
        *,
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        pin: bool = False,
    ) -> list[Entry]:
        """Keep many small blobs, with one commit for up to 2,000 of them (or 32 MiB).

        Several times faster than as many calls of `put`. Items are consumed lazily. Each batch is seen whole
        or not at all.

        Args:
            items: ``(name, data)``, or ``(name, data, metadata)``.
            codec, level, ttl, pin: as for `put`, for all of them.

        Raises:
            InvalidValueError: an item has another shape, or an argument makes no sense.
            InvalidNameError, NameConflictError, SerializationError, TooLargeError, FullError: as for `put`;
                earlier batches are kept.
        """
        specified = self._putter.make_specs(items, ttl, pin)
        return self._putter.put_many(specified, *self._putter.resolve_codec(codec, level))

    def put_if(
        self,
        expected: tuple[str, str | None],
        items: Iterable[tuple[str, Any] | tuple[str, Any, dict[str, Any] | None]],
        *,
        drop: Iterable[str] = (),
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        serializer: str = "bytes",
    ) -> list[Entry] | None:
        """Keep several blobs and remove some names in one commit, if a name is unchanged (compare and set).

        Args:
            expected: a name, and the digest in hex that it must still point to, or None if it must be
                missing, as it is for `get`. Where bytes were found damaged or gone, None and the digest that
                `entry` still gives both hold, and a put heals the name.
            items: ``(name, data)``, or ``(name, data, metadata)``, of any size together. They are seen whole
                or not at all. Without items, names are only removed.
            drop: names to remove; missing ones are passed over.
            codec, level, ttl: as for `put`, for all items.
            serializer: turns the objects of all items into bytes, as in `save`; `load` turns them back. By
                default items are bytes, bytearrays or memoryviews.

        Returns:
            The entries, or None if ``expected`` does not hold any more. Nothing was done then.

        Raises:
            InvalidValueError: ``expected`` or an item has another shape, or an argument makes no sense.
            InvalidNameError, NameConflictError, SerializationError, TooLargeError, FullError: as for `put`,
                and as for `save` with a serializer; nothing was done.
        """
        name, digest = parse_expected(expected)
        is_list = isinstance(items, list | tuple)  # else an item may be gone when the next one comes
        return self._putter.put_if(
            (name, digest),
            [
                (
                    self._putter.make_spec(name, ttl, metadata, False, serializer),
                    self._dumped(data, serializer)
                    if is_list
                    else copy_if_writable(self._dumped(data, serializer)),
                )
                for name, data, metadata in parse_items(items)
            ],
            list(check_names(drop, "put_if(drop=)")),
            *self._putter.resolve_codec(codec, level),
        )

    def _dumped(self, value: Any, serializer: str) -> Buffer:
        """The bytes of a value: bytes as they are, objects as the serializer writes them."""
        if serializer == "bytes":
            return value  # type: ignore[no-any-return]  # other types are refused later
        from castore.serialize import serializers

        return serializers.dump(value, serializer, allow_pickle=self.allow_pickle)[1]

    def batch(
        self, *, codec: str | None = None, level: int | None = None, ttl: float | str | None = None
    ) -> Batch:
        """A context manager for puts and deletes that are all seen at the end of the block, or not at all.

        Args:
            codec, level: as for `put`, for all puts; each put may give its own.
            ttl: the same; `castore.NEVER` for never.

        Raises:
            InvalidValueError: there is no such codec or level. A lifetime that makes no sense is the error of
                the first put.

        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp() + "/cache")
        >>> with store.batch() as batch:
        ...     _ = batch.put("run/weights", b"1 2 3")
        ...     _ = batch.put("run/config", b"{}")
        ...     batch.delete("run/old")
        ...     store.get("run/weights") is None
        True
        >>> [entry.name for entry in batch.entries], store.get("run/config")
        (['run/weights', 'run/config'], b'{}')
        """
        return Batch(self._putter, codec, level, ttl)

    # Getting

    @overload
    def get(self, name: str) -> bytes | None: ...

    @overload
    def get(self, name: str, default: T) -> bytes | T: ...

    def get(self, name: str, default: Any = None) -> Any:
        """The bytes of ``name``, verified, or ``default`` if the name is missing.

        A name is missing if it has no entry, if its entry has expired, or if its bytes were found damaged or
        gone. Then `get` and `get_many` give the default, `load` and `open` raise `NotFoundError`, and ``name
        in store`` is false. Putting the bytes again heals the name.

        Raises:
            InvalidNameError: nothing can have that name.

        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp() + "/cache")
        >>> store.get("no/such/name", b"")
        b''
        """
        try:
            data = self.source.get(name)
        except TypeError:  # a list of names, which no dict takes
            check_name(name)
            raise
        return default if data is None else data

    @overload
    def get_many(self, names: Iterable[str]) -> list[bytes | None]: ...

    @overload
    def get_many(self, names: Iterable[str], default: T) -> list[bytes | T]: ...

    def get_many(self, names: Iterable[str], default: Any = None) -> list[Any]:
        """`get` for many names, in their order, with one question to the index.

        Raises:
            InvalidNameError: nothing can have one of the names.
            InvalidValueError: ``names`` is one name, or not several.
        """
        several = list(require_several(names, "get_many"))
        try:
            found = self.source.get_many(several)
        except TypeError:  # one of them is a list, which no dict takes
            for name in several:
                check_name(name)
            raise
        return found if default is None else [default if data is None else data for data in found]

    def prefetch(self, names: Iterable[str]) -> None:
        """Begin to fetch the bytes of names that are only in a remote, and return at once.

        They come in the background, in the order of the names, for readers of any process. A reader need not
        wait for the names before its own. Give no more than fits into the store's budget: what comes pushes
        out what was used longest ago. Other names are passed over. An error of the remote is not told here:
        the reader of such a name gets it.

        Raises:
            InvalidNameError: nothing can have one of the names.
            InvalidValueError: ``names`` is one name, or not several.
            RemoteError: no process that fetches can be started, or this user may not write to the store.
        """
        self.source.prefetch([check_name(name) for name in require_several(names, "prefetch")])

    def open(self, name: str) -> io.BufferedReader:
        """A seekable file over the bytes of ``name``. It decodes only the frames that are read.

        The bytes stay readable until the file is closed, whatever gc does.

        Raises:
            NotFoundError: the name is missing: it has no entry or an expired one, or its bytes are damaged or
                gone.
            InvalidNameError: nothing can have that name.
            CorruptError: (while reading) the bytes are damaged, and this read is the first to find it. The
                name is missing from then on.
        """
        reader = self._open(name, self._blob(name))
        self.source.count_use(name)
        self._usage.flush_if_due()
        return buffered_file(reader.share(self.source.shared), name, self.source.quarantine)

    def _open(self, name: str, blob: Blob) -> BlobAccess:
        gone: FileNotFoundError | None = None
        for _ in range(ATTEMPTS):
            if blob.pack == LOST:
                break
            try:
                return self.source.open(blob)
            except FileNotFoundError as error:
                gone = error
            if blob.pack == AWAY:
                break
            blob = self._blob(name)  # the name has other bytes by now, and gc removed the former ones
        raise self._not_found(name) from gone

    def _blob(self, name: str) -> Blob:
        found = self.index.find(check_name(name))
        if found is None or has_expired(found.expires, time.time()):
            raise self._not_found(name)
        return found.blob

    def _not_found(self, name: str) -> NotFoundError:
        found = self.index.find(name)
        if found is not None and found.blob.pack == AWAY and not has_expired(found.expires, time.time()):
            return NotFoundError(
                f"the bytes of {name!r} are only in a remote, which has lost or damaged them;"
                " `castore remote check --deep` tells more, and `castore pull --lazy` takes new places"
            )
        if found is not None and found.blob.pack == LOST and not has_expired(found.expires, time.time()):
            return NotFoundError(
                f"the bytes of {name!r} in {self.path} were found damaged or missing; put them again, or"
                " delete the name"
            )
        return NotFoundError(f"there is no entry {name!r} in {self.path}; `castore ls` lists what there is")

    # Blobs

    def blob(self, digest: bytes | str) -> Blob | None:
        """The record of a blob: its sizes, its codec and where its bytes lie. None for an unknown digest.

        Args:
            digest: 64 hex characters as in `Entry.digest`, or 32 raw bytes.

        Raises:
            InvalidValueError: ``digest`` is no digest.
        """
        return self.index.blob(parse_digest(digest))

    def open_blob(self, digest: bytes | str | Blob) -> OpenBlob:
        """A blob by its digest, held open: any range of its bytes, or all of them in order.

        Args:
            digest: BLAKE3-256 of the bytes, 64 hex characters as in `Entry.digest`, or 32 raw bytes; or the
                blob's record, which saves a look-up.

        Raises:
            NotFoundError: there is no such blob, or its bytes were found damaged or are gone.
            InvalidValueError: ``digest`` is no digest.

        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp() + "/cache")
        >>> entry = store.put("greeting", b"hello world")
        >>> with store.open_blob(entry.digest) as blob:
        ...     blob.size, blob.read(6, 5), b"".join(blob.pieces())
        (11, b'world', b'hello world')
        """
        blob = digest if isinstance(digest, Blob) else self.blob(digest)
        gone: FileNotFoundError | None = None
        if blob is not None and blob.pack != LOST:
            try:
                reader = self.source.open(blob)
                return OpenBlob(reader.share(self.source.shared), self.source.quarantine)
            except FileNotFoundError as error:
                gone = error
        digits = digest if isinstance(digest, bytes | str) else digest.digest
        shown = digits if isinstance(digits, str) else digits.hex()
        raise NotFoundError(f"the bytes of blob {shown} are not in {self.path}, or were damaged") from gone

    # Objects

    def save(
        self,
        name: str,
        obj: Any,
        *,
        serializer: str | None = None,
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        pin: bool = False,
    ) -> Entry:
        """Keep a Python object, such as text, JSON-like values, dataclasses, arrays, tensors or Arrow tables.

        Args:
            name, codec, level, ttl, metadata, pin: as for `put`.
            serializer: one of ``bytes bytearray text msgpack npy safetensors arrow pickle``; default the one
                that fits the object.

        Raises:
            SerializationError: no serializer that is allowed fits; the message names the part. Or the
                metadata is not JSON-like.
            InvalidNameError, NameConflictError, InvalidValueError, TooLargeError, FullError: as for `put`.
        """
        from castore.serialize import serializers

        used, data = serializers.dump(obj, serializer, allow_pickle=self.allow_pickle)
        return self.put(
            name, data, serializer=used, codec=codec, level=level, ttl=ttl, metadata=metadata, pin=pin
        )

    def load(self, name: str) -> Any:
        """The object that `save` kept.

        Raises:
            NotFoundError: the name is missing: it has no entry or an expired one, or its bytes are damaged or
                gone.
            InvalidNameError: nothing can have that name.
            SerializationError: it is a pickle, and the store was not opened with ``allow_pickle=True``; or it
                holds a type that this process has neither imported nor registered.
        """
        is_there, value = self._load(name)
        if not is_there:
            raise self._not_found(name)
        return value

    def _load(self, name: str) -> tuple[bool, Any]:
        read = self.source.read(check_name(name))
        if read is None:
            return False, None
        from castore.serialize import serializers

        return True, serializers.load(read.data, read.serializer, allow_pickle=self.allow_pickle)

    def get_or_compute(
        self,
        key: str,
        compute: Callable[[], Any],
        *,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        validate: Callable[[Any], bool] | None = None,
        serializer: str | None = None,
    ) -> Any:
        """The object kept under ``key``. On a miss, one thread of one process calls ``compute()``.

        With the store's ``remote``, a result that another store has computed under this key is taken from
        there, and a new one is offered to it in the background. If something is wrong with the remote, the
        object is computed here, and the log has the reason.

        Args:
            key: a name, such as `castore.key` gives.
            compute: takes nothing, returns what `save` takes.
            ttl, metadata, serializer: as for `save`.
            validate: returns whether a kept object is still good. If not, the object is computed again.

        Raises:
            InvalidValueError: threads of this process would wait for one another's keys for ever; the one
                that would close the circle gets this error. Circles over processes are not seen, and wait. Or
                an argument makes no sense.
            SerializationError: the kept object cannot be loaded, as in `load`, or the new one cannot be
                saved, as in `save`, or is a tensor with an autograd graph, which would be lost.
            InvalidNameError, NameConflictError: as for `put`.
            Exception: what ``compute`` raised; nothing is kept then, and the next caller tries again.

        Warns:
            CacheWarning: the new object is returned and not kept: it does not fit into the budget or onto the
                disk. The next caller computes it again.
        """
        if validate is not None and not callable(validate):
            raise InvalidValueError(f"validate is a function that is called, not {type(validate).__name__}")
        hit, value = self._load_valid(key, validate)
        if hit:
            return value
        self.index.require_writable()
        # Arguments with which nothing can be kept are refused before the value is computed.
        if not callable(compute):
            raise InvalidValueError(f"compute is a function that is called, not {type(compute).__name__}")
        self._putter.make_spec(key, ttl, metadata, False, "bytes")
        if serializer is not None:
            from castore.serialize.serializers import check_serializer

            check_serializer(serializer)
        with explain_gone(self.path), self._locks.hold(key):
            hit, value = self._load_valid(key, validate)
            if hit:
                return value
            with self.share(key, ttl=ttl) or nullcontext() as turn:
                if turn is not None:
                    hit, value = turn.load(partial(self._load_valid, key, validate))
                    if hit:
                        return value
                value = compute()
                from castore.serialize.safetensors_files import require_no_graph

                require_no_graph(value)
                try:
                    self.save(key, value, ttl=ttl, metadata=metadata, serializer=serializer)
                except (TooLargeError, FullError) as error:  # the work of hours must not be lost for that
                    warn_unkept(key, error)
                else:
                    if turn is not None:
                        turn.offer()
            return value

    def _load_valid(self, key: str, validate: Callable[[Any], bool] | None) -> tuple[bool, Any]:
        is_there, value = self._load(key)
        return is_there and (validate is None or validate(value)), value

    @overload
    def cached(self, function: F, /) -> F: ...

    @overload
    def cached(self, /, *, ttl: float | str | None = None, prefix: str | None = None) -> Callable[[F], F]: ...

    def cached(
        self, function: Any = None, /, *, ttl: float | str | None = None, prefix: str | None = None
    ) -> Any:
        """A decorator that keeps a function's results, keyed by its code and its arguments.

        A path counts by its text, not by its file, because the function may write that file. For a file that
        the function reads, pass ``castore.key("text", content=path)`` as one more argument. An edit of the
        file then gives another key.

        Args:
            function: a function, a partial, or an object that can be called; ``@store.cached`` and
                ``@store.cached()`` are the same.
            ttl: seconds (or ``"30d"``), or `castore.NEVER`; default the store's.
            prefix: folder of the entries; default ``cached/<module>.<function>``.

        Raises:
            InvalidValueError: the decorated object cannot be called, or Python cannot list its arguments;
                (when called) ``ttl`` makes no sense.
            UnhashableError: (when called) an argument, or an object that the function refers to, has no
                stable hash.
            InvalidNameError, NameConflictError, SerializationError: (when called) as for `get_or_compute`.

        Warns:
            CacheWarning: (when called) as for `get_or_compute`.
        """
        from castore.keys.cached_function import cached

        decorate: Callable[[Any], Any] = cached(self, ttl=ttl, prefix=prefix)
        return decorate if function is None else decorate(function)

    # Names

    def __contains__(self, name: str) -> bool:
        """Whether `get` finds bytes under ``name``, as far as the index knows. Does not count as a use.

        No remote is asked: bytes that are only in a remote count as there, and if the remote has lost them, a
        read is a miss all the same.

        Raises:
            InvalidNameError: nothing can have that name.
        """
        try:
            return self._blob(name).pack != LOST
        except NotFoundError:
            return False

    def __iter__(self) -> Iterator[str]:
        """The names of all entries that are not missing, in their order."""
        return self.index.names(time.time())

    def __len__(self) -> int:
        """The number of entries that have not expired. Damaged ones count until they are put again."""
        return self.index.count(time.time())

    def __bool__(self) -> bool:
        """True, also for an empty store: ``if store`` tests whether there is a store."""
        return True

    def entry(self, name: str, *, expired: bool = False) -> Entry | None:
        """The entry of a name, or None if there is none or it has expired.

        Args:
            expired: also return an entry that has expired and that gc has not removed yet.

        Raises:
            InvalidNameError: nothing can have that name.
        """
        entry = self.index.entry(check_name(name))
        return None if entry is None or (not expired and has_expired(entry.expires, time.time())) else entry

    def entries(self, prefix: str = "", *, damaged: bool = True, expired: bool = False) -> Iterator[Entry]:
        """Entries at or below a prefix, in the order of names.

        Args:
            prefix: whole parts of names: ``a`` covers ``a/b`` and not ``ab``; "" for all.
            damaged: also entries whose bytes were found damaged or gone.
            expired: also entries that have expired and that gc has not removed yet.

        Raises:
            InvalidNameError: ``prefix`` is neither empty nor a name.
        """
        return self.index.entries(check_prefix(prefix), 0.0 if expired else time.time(), damaged=damaged)

    def children(self, folder: str = "") -> Iterator[Entry | str]:
        """The direct contents of a folder of names, in order: entries that are not missing, and folder paths.

        A folder exists as long as a name lies in it. The names inside inner folders are skipped.

        Args:
            folder: whole parts of names; "" for the top.

        Raises:
            InvalidNameError: ``folder`` is neither empty nor a name.

        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp() + "/cache")
        >>> _ = store.put_many([("a/b/c", b""), ("a/d", b"")])
        >>> [child if isinstance(child, str) else child.name for child in store.children("a")]
        ['a/b', 'a/d']
        """
        return self.index.children(check_prefix(folder), time.time())

    def copy(self, name: str, to: str) -> Entry:
        """Give the same bytes a second name. No bytes are read or written.

        The new entry has the serializer, the metadata and the expiry of the old one, and no pin. An entry
        named ``to`` is replaced.

        Raises:
            NotFoundError: ``name`` is missing.
            InvalidNameError, NameConflictError: ``to`` cannot be used, or nothing can have the name ``name``.
        """
        return self._copy(name, to, move=False)

    def rename(self, name: str, to: str) -> Entry:
        """Give an entry another name in one commit. The metadata, the expiry and the pin stay.

        An entry named ``to`` is replaced.

        Raises:
            NotFoundError: ``name`` is missing.
            InvalidNameError, NameConflictError: ``to`` cannot be used, or nothing can have the name ``name``.
        """
        return self._copy(name, to, move=True)

    def _copy(self, name: str, to: str, *, move: bool) -> Entry:
        check_name(to)
        for _ in range(ATTEMPTS):
            entry = self.entry(name)
            if entry is None or name not in self:
                break
            if (copied := self._putter.copy(entry, to, move=move)) is not None:
                return copied
        raise self._not_found(name)

    def delete(self, name: str) -> bool:
        """Remove a name; gc removes the bytes once no name is left. False if there was no such name.

        An expired entry that gc has not removed yet is removed too, and gives True.

        Raises:
            InvalidNameError: nothing can have that name.
        """
        check_name(name)
        return self._delete([name]) == 1

    def delete_many(self, names: Iterable[str]) -> int:
        """Remove many names, 2,000 to a commit; returns how many there were.

        Raises:
            InvalidNameError: nothing can have one of the names; the names of earlier commits are gone.
            InvalidValueError: ``names`` is one name, or not several.
        """
        remaining, count = check_names(names, "delete_many"), 0
        while batch := list(islice(remaining, _SMALL_BATCH if is_short(self.path) else _BATCH)):
            count += self._delete(batch)
        return count

    def _delete(self, names: list[str]) -> int:
        def delete(txn: Write) -> int:
            return sum(txn.delete_entry(name) for name in names)

        return self.parts.relieve(lambda: self.index.transact(delete))

    def pin(self, name: str) -> None:
        """Have gc leave an entry alone, also once it has expired.

        Raises:
            NotFoundError: there is no such entry, or it has expired already.
            InvalidNameError: nothing can have that name.
        """
        self._set_pinned(name, True)

    def unpin(self, name: str) -> None:
        """Undo `pin`.

        Raises:
            NotFoundError: there is no such entry.
            InvalidNameError: nothing can have that name.
        """
        self._set_pinned(name, False)

    def _set_pinned(self, name: str, pinned: bool) -> None:
        with self.index.write() as txn:
            if not txn.set_pinned(check_name(name), pinned, time.time()):
                raise self._not_found(name)

    # Dictionaries

    def train_dictionary(
        self,
        prefix: str,
        data: Iterable[bytes] | None = None,
        *,
        samples: int = training.SAMPLES,
        size: int | str = training.SIZE,
        level: int | None = None,
    ) -> training.Trained:
        """Train a zstd dictionary for new blobs of at most 16 KiB at or below ``prefix``.

        Args:
            prefix: whole parts of names; "" for all. The longest prefix counts.
            data: the samples; default the small blobs in the store.
            samples: number of samples, of at most 16 MiB together. A fifth is held out to measure the gain.
            size: largest size of the dictionary in bytes. Few samples give a smaller one.
            level: zstd level to train for; default the store's.

        Raises:
            DictionaryError: there are too few samples, or the dictionary would not pay. Nothing has changed.
            InvalidValueError: the store's codec is another than zstd, or ``data``, ``samples``, ``size`` or
                ``level`` makes no sense.
            InvalidNameError: ``prefix`` is neither empty nor a name.
        """
        return training.train(self.parts, prefix, data, samples, size, level)

    def drop_dictionary(self, prefix: str) -> bool:
        """Compress new blobs below ``prefix`` without its dictionary. False if it had none.

        The dictionary stays for the blobs that need it.

        Raises:
            InvalidNameError: ``prefix`` is neither empty nor a name.
        """
        with self.index.write():
            return self.prefixes.set(check_prefix(prefix), None)

    def recompress(
        self, prefix: str = "", *, progress: Callable[[int], object] | None = None
    ) -> training.Rewritten:
        """Compress the small blobs below ``prefix`` again with its dictionary, where that saves 5 % and more.

        Readers and writers go on meanwhile. The former bytes stay on disk until gc rewrites their packs.

        Args:
            progress: called with the number of bytes of the entries that were examined.

        Raises:
            InvalidNameError: ``prefix`` is neither empty nor a name.
        """
        return training.recompress(self.parts, prefix, progress)

    # Remotes

    def add_remote(
        self,
        name: str,
        url: str,
        *,
        read_only: bool = False,
        single_writer: bool = False,
        requests: int | None = None,
        rate: int | str | None = None,
        create: bool = True,
    ) -> Remote:
        """Keep a remote under a name. Makes the place a remote if it is none yet.

        Args:
            name: letters, digits, dots, dashes and underscores.
            url: ``s3://BUCKET/PREFIX``, ``gs://…``, ``az://…``, or ``file:///FOLDER`` on a shared file
                system. Credentials are taken from the environment, as the storage's own tools do, and are
                never kept.
            read_only: nothing will be written to it from this store.
            single_writer: vouch that only one process pushes at a time, for a storage without conditional
                writes.
            requests: bound on requests at once, of each process that uses it; default 16.
            rate: bound on bytes a second (an int, or ``"50MB"``), of each process that uses it; default none.
            create: False where the place must be a remote already: the folder of a share that is not mounted
                here would become a new, empty one.

        Raises:
            InvalidNameError, InvalidValueError: of the name, the URL, a bound, or the name has another URL
                already.
            RemoteError: the place cannot be used: `RemoteMissingError`, `RemoteDeniedError` and
                `RemoteUnreachableError` say why.
            MissingDependencyError: a bucket needs ``castore[remote]``.

        Warns:
            RemoteWarning: of what may surprise, such as a clock that is wrong.

        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> store, other = Store(folder + "/one"), Store(folder + "/other")
        >>> _ = store.put("greetings/hello.txt", b"hello")
        >>> store.add_remote("team", f"file://{folder}/bucket").push("greetings").added
        1
        >>> other.add_remote("team", f"file://{folder}/bucket").pull().added
        1
        >>> other.get("greetings/hello.txt")
        b'hello'
        """
        from castore.remote.remote import Remote
        from castore.remote.remotes import Remotes, RemoteSettings, check_remote_name
        from castore.remote.urls import parse_url

        self.require_writable()
        bytes_a_second = None if rate is None else parse_size(rate)
        if requests is not None:
            requests = parse_count(requests, "requests")
        if bytes_a_second == 0:
            raise InvalidValueError("a remote that may do nothing is of no use: give a rate of at least 1")
        settings = RemoteSettings(
            check_remote_name(name), url, read_only, single_writer, requests, bytes_a_second
        )
        place = parse_url(url)
        if place.scheme == "file" and self.path in (Path(place.path), *Path(place.path).parents):
            raise InvalidValueError(f"{url!r} lies in the store's own folder; choose another for the remote")
        known = Remotes(self.path, self.settings)
        known.require_free(settings)  # before anything is written to the place
        remote = Remote(self.parts, settings, self._remote_options())
        for sentence in remote.prepare(create=parse_flag(create, "create")):
            warn(f"remote {name!r}: {sentence}", RemoteWarning)
        known.add(settings)
        return remote

    def remote(self, name: str) -> Remote:
        """The remote of a name that `add_remote` has kept.

        Raises:
            NotFoundError: there is none.
            InvalidNameError: no remote can have that name.
        """
        from castore.remote.remote import Remote
        from castore.remote.remotes import Remotes

        return Remote(self.parts, Remotes(self.path, self.settings).get(name), self._remote_options())

    def remotes(self) -> list[str]:
        """The names of the remotes that the store knows, sorted."""
        from castore.remote.remotes import Remotes

        return Remotes(self.path, self.settings).names()

    def remove_remote(self, name: str) -> None:
        """Forget a remote. Nothing in it changes.

        Raises:
            NotFoundError: there is none of this name.
            InvalidNameError: no remote can have that name.
            InvalidValueError: bytes of names of this store are there, and not here.
        """
        from castore.remote.remotes import Remotes

        self.require_writable()
        with self.index.write() as txn:
            if not places.forget(txn, name):
                raise InvalidValueError(
                    f"names of {self.path} have their bytes only in remote {name!r}: delete them, or bring"
                    " the bytes with `castore pull` without --lazy first, or, if the bucket has moved, add"
                    " its new URL under another name and `castore pull --lazy` from that name"
                )
            Remotes(self.path, self.settings).remove(name)

    def push(
        self,
        prefix: str = "",
        *,
        to: str,
        ref: str = "main",
        note: str = "",
        delete: bool = False,
        restore: bool = False,
        progress: Progress | None = None,
    ) -> Pushed:
        """Bring names into a ref of a remote, and the bytes that the remote lacks, as `Remote.push` does.

        Args:
            prefix, ref, note, delete, restore, progress: as for `Remote.push`.
            to: name of the remote.

        Raises:
            NotFoundError: there is no such remote, or no name at or below ``prefix``.
            ConflictError, CorruptError, InvalidNameError, InvalidValueError, RemoteError: as for
                `Remote.push`.
        """
        return self.remote(to).push(
            prefix, ref=ref, note=note, delete=delete, restore=restore, progress=progress
        )

    def pull(
        self,
        ref: str = "main",
        *,
        remote: str,
        commit: str | None = None,
        prefix: str = "",
        below: str = "",
        replace: bool = False,
        lazy: bool = False,
        progress: Progress | None = None,
    ) -> Pulled:
        """Bring the names of a remote's ref into the store, and the bytes, as `Remote.pull` does.

        Args:
            ref, commit, prefix, below, replace, lazy, progress: as for `Remote.pull`.
            remote: name of the remote.

        Raises:
            NotFoundError: there is no such remote.
            ConflictError, CorruptError, FullError, InvalidNameError, InvalidValueError: as for `Remote.pull`.
            NameConflictError, RemoteError: as for `Remote.pull`.
        """
        return self.remote(remote).pull(
            ref, commit=commit, prefix=prefix, below=below, replace=replace, lazy=lazy, progress=progress
        )

    def _share_results(self, remote: str) -> SharedResults:
        from castore.remote.shared_results import SharedResults

        return SharedResults(self.parts, remote)

    def _remote_options(self) -> dict[str, Any]:
        return {"max_size": self.settings.max_size, "durable": self._options["durable"]}

    # Mounts

    def mounts(self) -> list[Mount]:
        """The live mounts of the store, the oldest first: those whose process runs.

        A mount of another container counts as live for an hour after its last heartbeat. A live mountpoint
        may be out of this process's reach, in another container or with another user.

        >>> import tempfile
        >>> Store(tempfile.mkdtemp() + "/cache").mounts()
        []
        """
        return mounts.list_live(self.index)

    # Upkeep

    def flush(self, *, seconds: float | None = None) -> None:
        """Write hit counts and last accesses to the index now instead of within seconds.

        Args:
            seconds: write only what is due, for at most about so long, and skip what other writers hold up:
                for a thread that calls this every few moments. Default: write everything, however long it
                takes.

        Raises:
            InvalidValueError: ``seconds`` is no duration.
        """
        if seconds is None:
            self._usage.flush()
        else:
            self._usage.flush_for(parse_duration(seconds))

    def totals(self) -> Totals:
        """The numbers of entries and blobs, and their bytes. As quick at ten million as at ten."""
        return self.index.totals()

    def stat(self) -> stats.Stat:
        """Figures about the store: entries, bytes, hits, misses, mounts."""
        self._usage.flush_if_possible()
        return stats.measure(self.parts)

    @overload
    def gc(
        self,
        max_size: float | str | None = None,
        *,
        dry_run: Literal[False] = False,
        grace: float | str = ...,
    ) -> Collected: ...

    @overload
    def gc(
        self, max_size: float | str | None = None, *, dry_run: Literal[True], grace: float | str = ...
    ) -> Plan: ...

    @overload
    def gc(
        self, max_size: float | str | None = None, *, dry_run: bool, grace: float | str = ...
    ) -> Collected | Plan: ...

    def gc(
        self,
        max_size: float | str | None = None,
        *,
        dry_run: bool = False,
        grace: float | str = GRACE_SECONDS,
    ) -> Collected | Plan:
        """Remove expired entries, the least recently used ones over the budget, and bytes without a name.

        Args:
            max_size: budget in stored bytes for this run, or `castore.UNLIMITED`; default the store's. 0
                removes every entry that no pin holds.
            dry_run: return the plan, and remove nothing.
            grace: seconds for which bytes are kept after their last name was deleted or replaced.

        Returns:
            `Collected`, the removed entries and bytes; with ``dry_run`` a `Plan`, those that would be
            removed.

        Raises:
            InvalidValueError: ``max_size`` is no size, or ``grace`` no duration.
            FullError: the disk has no room to rewrite a pack; all else is done.
        """
        from castore.gc import collect

        budget = self.settings.max_size if max_size is None else parse_budget(max_size)
        seconds = parse_duration(grace)
        with explain_gone(self.path):
            if dry_run:
                return collect.plan(self.parts, budget, seconds)
            self.index.require_writable()
            return self._collect(budget, seconds)

    def _collect(self, budget: int | None, seconds: float) -> Collected:
        from castore.gc import collect

        try:
            collected = self.parts.relieve(lambda: collect.run(self.parts, budget, seconds))
            if (self.path / layout.PAGES).is_dir():
                from castore.remote import page_trim

                page_trim.trim(self.parts)
            return collected
        finally:
            self._ballast.keep()

    def verify(
        self,
        *,
        repair: bool = False,
        sample: float = 1.0,
        progress: Callable[[int], object] | None = None,
    ) -> Report:
        """Read all blobs, or a sample, and set the damaged ones aside.

        Args:
            repair: also drop the entries of damaged blobs, so that the next run computes them again.
            sample: part of the blobs to read, chosen at random: 0.05 reads 5 %.
            progress: called with the stored bytes of each blob that was read.

        Raises:
            InvalidValueError: ``sample`` is no part: more than 0, and at most 1.
        """
        from castore.repair import verify

        sample = parse_part(sample, "sample")
        if repair:
            self.index.require_writable()
        with explain_gone(self.path):
            return verify.run(self.parts, repair=repair, sample=sample, progress=progress)

    # For adapters: entries and blobs, without the rules of `get` (docs/decisions/one-door.md)

    def find(self, name: str) -> Found | None:
        """The blob that a name points to, expired or not, with the name's expiry and serializer, or None.

        Raises:
            InvalidNameError: nothing can have that name.
        """
        return self.index.find(check_name(name))

    def find_many(self, names: Iterable[str]) -> dict[str, Found]:
        """`find` for many names with one query of the index; missing names are left out.

        Raises:
            InvalidNameError: nothing can have one of the names.
            InvalidValueError: ``names`` is one name, or not several.
        """
        return self.index.find_many(list(check_names(names, "find_many")))

    def entries_with_key(self, key: str, prefix: str = "") -> Iterator[Entry]:
        """Entries below a prefix, expired or not, whose metadata has a key of that name.

        The key may lie at the top or deeper. Text inside a value may look like the key, so check the
        metadata. Reads every entry's row.

        Args:
            key: as the metadata has it.
            prefix: whole parts of names; "" for all.

        Raises:
            InvalidNameError: ``prefix`` is neither empty nor a name.

        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp() + "/cache")
        >>> _ = store.put("a", b"1", metadata={"run": 7})
        >>> _ = store.put("b", b"2")
        >>> [entry.name for entry in store.entries_with_key("run")]
        ['a']
        """
        return self.index.entries_with_key(key, check_prefix(prefix))

    def delete_unchanged(self, entry: Entry) -> bool:
        """Remove an entry, unless its bytes or its metadata have changed since it was read.

        Returns:
            Whether it was removed.

        Raises:
            InvalidValueError: ``entry`` is no `Entry`.
        """
        _require(entry, Entry, "delete_unchanged")
        with self.index.write() as txn:
            return txn.delete_unchanged(entry.name, bytes.fromhex(entry.digest), entry.metadata)

    def names_of(self, digest: bytes | str) -> list[str]:
        """The names that point to a blob, expired or not. Reads every entry's row.

        Args:
            digest: 64 hex characters as in `Entry.digest`, or 32 raw bytes.

        Raises:
            InvalidValueError: ``digest`` is no digest.
        """
        return self.index.names_of(parse_digest(digest))

    def blobs_starting_with(self, digits: str, limit: int = 2) -> list[Blob]:
        """The first blobs whose digests begin with some hex digits; those without bytes are left out.

        Args:
            digits: lowercase hex digits, at most 64.
            limit: number of blobs; two show whether ``digits`` are ambiguous.

        Raises:
            InvalidValueError: ``digits`` are no hex digits, or ``limit`` is no number of at least 1.

        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp() + "/cache")
        >>> entry = store.put("greeting", b"hello")
        >>> [blob.size for blob in store.blobs_starting_with(entry.digest[:12])]
        [5]
        """
        if type(digits) is not str or not _HEX(digits):
            raise InvalidValueError(f"a digest begins with hex digits, at most 64, not {digits!r:.100}")
        low, high = (bytes.fromhex(digits.ljust(64, fill)) for fill in "0f")
        return self.index.blobs_between(low, high, parse_count(limit, "limit"))

    def get_blob(self, blob: Blob) -> bytes | None:
        """All bytes of a blob, verified, as `get` gives those of a name; None if they are damaged or gone.

        Raises:
            InvalidValueError: ``blob`` is no `Blob`.
        """
        _require(blob, Blob, "get_blob")
        return self.source.fetch(blob)

    def bring(self, blob: Blob) -> Blob:
        """Have a blob's bytes in the store if they are only in a remote; returns the blob's record then.

        Raises:
            NotFoundError: the remote has lost them.
            RemoteError: the remote cannot be used.
            InvalidValueError: ``blob`` is no `Blob`.
        """
        _require(blob, Blob, "bring")
        if blob.pack != AWAY:
            return blob
        try:
            self.source.bring([blob.digest])
        except FileNotFoundError as error:
            raise NotFoundError(str(error)) from error
        return self.index.blob(blob.digest) or blob

    def path_of(self, blob: Blob) -> str:
        """The file that holds a blob's stored bytes: an object of its own, or a pack. Never write to it.

        Raises:
            NotFoundError: the bytes were found damaged or missing, or are only in a remote.
            InvalidValueError: ``blob`` is no `Blob`.
        """
        _require(blob, Blob, "path_of")
        if not blob.is_here:
            raise NotFoundError(
                f"the bytes of blob {blob.digest.hex()} are not in {self.path}: they are damaged, missing, or"
                " only in a remote; `castore stat` with the digest tells which"
            )
        return self.objects.path(blob)

    def remove_blobs(self, digests: Iterable[bytes]) -> None:
        """Remove those of some blobs that no entry names, without the grace period of gc.

        Raises:
            InvalidValueError: ``digests`` are no several digests.
            StoreError: a live mount does not answer.
        """
        from castore.gc import collect

        several = require_several(digests, "remove_blobs", "digests")
        collect.remove_blobs(self.parts, [parse_digest(digest) for digest in several])

    def count_use(self, name: str) -> None:
        """Count a name as read now, for gc and `stat`. For code that reads the bytes without `get`.

        Raises:
            InvalidNameError: nothing can have that name.
        """
        self.source.count_use(check_name(name))
        self._usage.flush_if_due()

    def has_dictionary(self, name: str) -> bool:
        """Whether new small blobs of that name are compressed with a dictionary.

        Raises:
            InvalidNameError: nothing can have that name.
        """
        return self.prefixes.dictionary(check_prefix(name)) is not None

    def counters(self) -> dict[str, int]:
        """Hits, misses, damaged blobs and evictions by name, over all processes and runs.

        Counts that are still in memory are not in it; `stat` has them.
        """
        return self.index.counters()

    @property
    def is_shared(self) -> bool:
        """Whether the results of computations are shared over a ``remote``."""
        return self._shared is not None

    @property
    def shared_remote(self) -> Remote | None:
        """The remote over which the results of computations are shared; None without one.

        Raises:
            NotFoundError: the store does not know the remote that ``$CASTORE_REMOTE`` names.
        """
        return None if self._shared is None else self.remote(self._shared.remote)

    def share(self, name: str, *, ttl: float | str | None = None) -> SharedTurn | None:
        """This process's turn to find an entry over the store's ``remote``, or to compute and offer it; None
        for a store without a ``remote``. The caller holds a lock of the name.

        Args:
            name: of the entry, which covers all that its bytes depend on.
            ttl: seconds after its computation for which an entry is good; default the store's.

        Raises:
            InvalidNameError: nothing can have that name.
            InvalidValueError: ``ttl`` makes no sense.
        """
        check_name(name)
        seconds = self._putter.seconds(ttl)
        return None if self._shared is None else self._shared.turn(name, seconds)

    def find_shared(self, names: Iterable[str], *, ttl: float | str | None = None) -> None:
        """Have those of some entries here that the store's ``remote`` has, since other nodes computed them.
        Nobody else is kept from computing the others meanwhile; see `share`.

        Args:
            names: each covers all that its bytes depend on.
            ttl: seconds after its computation for which an entry is good; default the store's.

        Raises:
            InvalidNameError: nothing can have one of those names.
            InvalidValueError: ``names`` are no several names, or ``ttl`` makes no sense.
        """
        several = [check_name(name) for name in require_several(names, "find_shared", "names")]
        seconds = self._putter.seconds(ttl)
        if self._shared is not None:
            self._shared.find_many(several, seconds)

    def offer_shared(
        self, names: Iterable[str], *, wait: bool = False, progress: Progress | None = None
    ) -> None:
        """Offer entries that were computed here to other nodes, over the store's ``remote``.

        Args:
            names: each covers all that its bytes depend on.
            wait: until all of them are in the remote; by default that happens in the background.
            progress: called with the number of entries that are in the remote, and of all; with ``wait``.

        Raises:
            InvalidNameError: nothing can have one of those names.
            InvalidValueError: ``names`` are no several names; or, with ``wait``, the remote is only read.
            RemoteError: the remote did not take them; with ``wait``.
        """
        several = [check_name(name) for name in require_several(names, "offer_shared", "names")]
        if self._shared is None:
            return
        if wait:
            self._shared.offer_now(several, progress or (lambda done, total: None))
        else:
            self._shared.offer_many(several)

    def require_writable(self) -> None:
        """Check that this user can change the store.

        Raises:
            StoreError: the store is read-only.
        """
        self.index.require_writable()
