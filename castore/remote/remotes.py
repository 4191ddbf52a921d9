"""The remotes that a store knows, in ``remotes/``: a name, a URL and options, and what was agreed on last.

No credential is ever written here: credentials come from the environment of each process, as the storage's
own tools take them. A URL that carries one is refused.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from castore import layout
from castore.errors import InvalidValueError, NotFoundError, StoreError
from castore.records import DIGEST_SIZE
from castore.remote.keys import check_ref
from castore.settings import Settings
from castore.system.temporary import make_folder, open_regular, write_whole

_MAX_BYTES = 65_536
# The newest notes of one kind that are kept.
_NOTES = 50
_PENDING_SUFFIX, _PULLING_SUFFIX = ".pending", ".pulling"
# Bytes that stand for a name, and the head of a record of them: whether the store has got them, and how many.
_MARK, _RECORD = 8, struct.Struct("<?I")


class RemoteSettings(NamedTuple):
    """A remote as a store knows it.

    Attributes:
        name: in this store.
        url: ``s3://BUCKET/PREFIX``, ``gs://…``, ``az://…`` or ``file:///FOLDER``.
        read_only: nothing is written to it from here.
        single_writer: the storage has no conditional writes, and the user vouches that only one process
            pushes at a time.
        requests: bound on requests at once, of each process that uses it; None for castore's own.
        rate: bound on bytes a second, of each process that uses it, or None.
    """

    name: str
    url: str
    read_only: bool = False
    single_writer: bool = False
    requests: int | None = None
    rate: int | None = None


def check_remote_name(name: str) -> str:
    """Return ``name``.

    Raises:
        InvalidNameError: no remote can have this name.
    """
    return check_ref(name, "remote")


class SeenCommit(NamedTuple):
    """A commit of a ref: its digest, its tree, and its time in seconds since the epoch."""

    commit: bytes
    tree: bytes
    time: float


class PendingBase(NamedTuple):
    """A base that counts if a ref has got a commit: see base.py.

    Attributes:
        commit: digest of the commit.
        parent: digest of the commit before it, or None.
        replaces: root of the base that was kept when this one was noted, or None. With any other base kept
            this one means nothing.
        root: of the base.
    """

    commit: bytes
    parent: bytes | None
    replaces: bytes | None
    root: bytes


class BegunPull(NamedTuple):
    """A pull that has begun to bring names into the store: see base.py.

    Attributes:
        replaces: root of the base that counted when the pull began, or None. When another one counts, this
            note means nothing.
        tree: root of the commit's tree.
        prefix: the names are at and below it.
        came: marks of the names that the store has got.
        coming: marks of names that it may have got.
    """

    replaces: bytes | None
    tree: bytes
    prefix: str
    came: frozenset[bytes] = frozenset()
    coming: frozenset[bytes] = frozenset()


@lru_cache(maxsize=16_384)  # a pull notes each name of a transaction before and after it
def mark_of(name: str) -> bytes:
    """The bytes that stand for a name in the note of a pull."""
    return blake3(name.encode()).digest(_MARK)


class Remotes:
    """The folder ``remotes/`` of one store.

    Args:
        store: the store's folder.
        settings: of the store, for permission bits.
    """

    def __init__(self, store: Path, settings: Settings) -> None:
        self._folder = store / layout.REMOTES
        self._tmp = store / "tmp"
        self._settings = settings

    def names(self) -> list[str]:
        """The names of all remotes, sorted."""
        try:
            return sorted(
                entry.name for entry in os.scandir(self._folder) if entry.is_dir(follow_symlinks=False)
            )
        except FileNotFoundError:
            return []

    def get(self, name: str) -> RemoteSettings:
        """A remote by its name.

        Raises:
            NotFoundError: there is none of this name.
            StoreError: its file is damaged.
        """
        path = self._folder / check_remote_name(name) / "remote.json"
        data = _read(path)
        if data is None:
            known = ", ".join(self.names()) or "none"
            raise NotFoundError(
                f"the store knows no remote {name!r} (it knows: {known});"
                f" add it with `castore remote add {name} URL`"
            )
        try:
            fields = json.loads(data)
            return RemoteSettings(
                name,
                _text(fields["url"]),
                fields["read_only"] is True,
                fields["single_writer"] is True,
                _bound(fields.get("requests")),
                _bound(fields.get("rate")),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{path} is damaged; remove the remote with `castore remote rm {name}`"
            ) from error

    def require_free(self, remote: RemoteSettings) -> None:
        """Check that the name can be given to the remote.

        Raises:
            InvalidValueError: there is one of this name with another URL.
        """
        # A process that was killed may have left the folder alone.
        is_there = _read(self._folder / check_remote_name(remote.name) / "remote.json") is not None
        if is_there and (url := self.get(remote.name).url) != remote.url:
            raise InvalidValueError(
                f"remote {remote.name!r} is {url} already; remove it first (castore remote rm {remote.name}),"
                " or, if the bucket has moved, add its new URL under another name and `castore pull --lazy`"
                " from that name"
            )

    def add(self, remote: RemoteSettings) -> None:
        """Keep a remote.

        Raises:
            InvalidValueError: there is one of this name with another URL.
        """
        self.require_free(remote)
        folder = self._folder / check_remote_name(remote.name)
        make_folder(self._folder, self._settings.folder_mode)
        make_folder(folder, self._settings.folder_mode)
        fields = {"format": 1, **remote._asdict()}
        del fields["name"]
        self._write(folder / "remote.json", json.dumps(fields, indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Forget a remote. Nothing in it changes.

        Raises:
            NotFoundError: there is none of this name.
        """
        folder = self._folder / check_remote_name(name)
        if not folder.is_dir():
            self.get(name)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    def refs(self, name: str) -> list[str]:
        """The refs of a remote that this store has pushed to or pulled from, sorted."""
        try:
            found = os.listdir(self._folder / check_remote_name(name))
        except FileNotFoundError:
            return []
        # A push that was killed has noted what it would have made.
        return sorted({file.partition("@")[0] for file in found if _is_of_ref(file)})

    def base(self, name: str, ref: str, below: str) -> bytes | None:
        """The root of the tree of names on which this store and a ref agreed last (see compare.py).

        Args:
            name: of the remote.
            ref: the ref.
            below: the folder in the store that the ref's names are in, "" for none.
        """
        return _digest(_read(self._base_path(name, ref, below)))

    def set_base(self, name: str, ref: str, below: str, base: bytes) -> None:
        """Keep a base, and remove the notes of the one before it."""
        path = self._base_path(name, ref, below)
        self._write(path, base.hex() + "\n")
        for suffix in (_PENDING_SUFFIX, _PULLING_SUFFIX):
            _beside(path, suffix).unlink(missing_ok=True)

    def pending(self, name: str, ref: str, below: str) -> list[PendingBase]:
        """The bases that pushes have noted before they moved the ref, oldest first."""
        return _parse_pending(_read(_beside(self._base_path(name, ref, below), _PENDING_SUFFIX)))

    def set_pending(self, name: str, ref: str, below: str, pending: Sequence[PendingBase]) -> None:
        """Note bases."""
        fields = [[_hex(digest) for digest in one] for one in pending[-_NOTES:]]
        path = _beside(self._base_path(name, ref, below), _PENDING_SUFFIX)
        self._write(path, json.dumps(fields) + "\n")

    def begun_pull(self, name: str, ref: str, below: str) -> BegunPull | None:
        """The pull that has begun to bring names since the base was kept; None if all have ended."""
        return _parse_begun(_beside(self._base_path(name, ref, below), _PULLING_SUFFIX))

    def begin_pull(self, name: str, ref: str, below: str, begun: BegunPull) -> None:
        """Note a pull that is about to begin, without names."""
        fields = [_hex(begun.replaces), begun.tree.hex(), begun.prefix]
        path = _beside(self._base_path(name, ref, below), _PULLING_SUFFIX)
        self._write(path, json.dumps(fields) + "\n")

    def note_names(self, name: str, ref: str, below: str, names: Iterable[str], *, came: bool) -> None:
        """Note names that the store has got by the pull that has begun, or is about to get."""
        marks = b"".join(map(mark_of, names))
        path = _beside(self._base_path(name, ref, below), _PULLING_SUFFIX)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "ab", buffering=0) as file:
            file.write(_RECORD.pack(came, len(marks) // _MARK) + marks)

    def roots(self) -> list[bytes]:
        """The roots of all bases, pending ones too, of the commits that mounts have shown last, and of those
        whose pull has begun.
        """
        found: list[bytes] = []
        for name in self.names():
            for path in (self._folder / name).iterdir():
                ref, mark, kind = path.name.partition("@")
                if kind == "seen":
                    seen = self.seen(name, ref)
                    found += [] if seen is None else [seen.tree]
                elif kind.endswith(_PENDING_SUFFIX):
                    found += [one.root for one in _parse_pending(_read(path))]
                elif kind.endswith(_PULLING_SUFFIX):
                    begun = _parse_begun(path)
                    found += [] if begun is None else [begun.tree]
                elif mark:
                    base = _digest(_read(path))
                    found += [] if base is None else [base]
        return found

    def seen(self, name: str, ref: str) -> SeenCommit | None:
        """The newest commit of a ref that a mount of this store has shown."""
        data = _read(self._folder / check_remote_name(name) / f"{check_ref(ref)}@seen")
        try:
            commit, tree, time = json.loads(data or "")
            found = SeenCommit(bytes.fromhex(commit), bytes.fromhex(tree), float(time))
        except (ValueError, TypeError, RecursionError):
            return None
        return found if len(found.commit) == len(found.tree) == DIGEST_SIZE else None

    def set_seen(self, name: str, ref: str, seen: SeenCommit) -> None:
        """Keep the newest commit that is known."""
        if self.seen(name, ref) != seen:
            fields = seen.commit.hex(), seen.tree.hex(), seen.time
            self._write(
                self._folder / check_remote_name(name) / f"{check_ref(ref)}@seen", json.dumps(fields) + "\n"
            )

    def _base_path(self, name: str, ref: str, below: str) -> Path:
        mark = blake3(below.encode()).hexdigest(length=8)
        return self._folder / check_remote_name(name) / f"{check_ref(ref)}@{mark}"

    def _write(self, path: Path, text: str) -> None:
        write_whole(path, [text.encode()], self._tmp, self._settings.file_mode)


def _read(path: Path) -> str | None:
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _is_of_ref(file: str) -> bool:
    return "@" in file and not file.endswith(_PENDING_SUFFIX)


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()


def _digest(text: str | None) -> bytes | None:
    try:
        digest = bytes.fromhex(text or "")
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_SIZE else None


def _parse_pending(text: str | None) -> list[PendingBase]:
    found: list[PendingBase] = []
    try:
        for fields in json.loads(text or "[]"):
            commit, parent, replaces, root = map(_digest, fields)
            if commit is not None and root is not None:
                found.append(PendingBase(commit, parent, replaces, root))
    except (ValueError, TypeError, RecursionError):
        return []
    return found


def _parse_begun(path: Path) -> BegunPull | None:
    try:
        with open(open_regular(path), "rb") as file:
            head, _, data = file.read().partition(b"\n")
        replaces, tree, prefix = json.loads(head)
        root = _digest(tree)
        if root is None:
            return None
        begun = BegunPull(_digest(replaces), root, _text(prefix))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, RecursionError):
        return None
    marks: tuple[list[bytes], list[bytes]] = ([], [])
    at = 0
    while at + _RECORD.size <= len(data):  # the last record may be cut
        came, count = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        some = data[at : at + count * _MARK]
        at += count * _MARK
        marks[came].extend(some[start : start + _MARK] for start in range(0, len(some) - _MARK + 1, _MARK))
    return begun._replace(came=frozenset(marks[1]), coming=frozenset(marks[0]))


def _bound(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise TypeError("no bound")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")
    return value
