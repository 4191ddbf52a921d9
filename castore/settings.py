"""A store's folder and its ``castore.json``: format version and defaults.

Makes the folder, and reads and writes the defaults. Refuses folders that are no store, and file systems on
which SQLite's locks do not work. Other modules handle everything else inside the folder.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

from castore import layout
from castore.errors import InvalidValueError, NestedStoreWarning, StoreError, read_only_error, warn
from castore.objects.codecs import check_codec
from castore.system import ownership
from castore.system.ballast import Ballast
from castore.system.io_errors import AT_FAULT
from castore.system.mount_table import mounts
from castore.system.temporary import (
    make_folder,
    open_regular,
    open_with_mode,
    sync_folder,
    write_whole,
)
from castore.units import format_duration, format_size, parse_budget, parse_ttl

FORMAT = 1
FILE = layout.SETTINGS
# Bytes, far more than the settings take. A longer file is cut, and then is not valid JSON.
_MAX_BYTES = 65_536
# One slash is enough for the schemes of remotes: `Path("s3://bucket")` has one.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://|(s3|gs|az|file):/").match
# Backup tools skip a folder with this signature: https://bford.info/cachedir/
_CACHEDIR_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache made by castore.\n"
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb2",
    "smb3",
    "smbfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "9p",
    "ocfs2",
}
_NETWORK |= {
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.gcsfuse",
    "fuse.mountpoint-s3",
}


class Settings(NamedTuple):
    """The defaults that a store keeps for all its users.

    Attributes:
        codec: ``auto``, ``zstd``, ``lz4``, ``gzip`` or ``none``.
        level: of the codec; None for the codec's own default.
        max_size: budget in stored bytes, or None for no bound.
        ttl: seconds until an entry expires, or None for never.
        shared: group that may read and write the store, or None for its owner alone.
    """

    codec: str = "auto"
    level: int | None = None
    max_size: int | None = None
    ttl: float | None = None
    shared: str | None = None

    @property
    def folder_mode(self) -> int:
        """Permission bits of the store's folders."""
        return 0o2770 if self.shared else 0o700

    @property
    def file_mode(self) -> int:
        """Permission bits of files that processes write to after making them."""
        return 0o660 if self.shared else 0o600

    @property
    def object_mode(self) -> int:
        """Permission bits of finished objects."""
        return 0o440 if self.shared else 0o400


def default_path() -> Path:
    """The default store: ``$CASTORE_DIR``, else ``$XDG_CACHE_HOME/castore``, else ``~/.cache/castore``."""
    own = os.environ.get("CASTORE_DIR")
    if own:
        return Path(own)
    from platformdirs import user_cache_path

    return user_cache_path("castore")


def store_folder(path: Any = None) -> Path:
    """The absolute path of a store's folder. ``~`` and ``~user`` at its beginning are expanded.

    Args:
        path: text or a path object; default `default_path`.

    Raises:
        InvalidValueError: it is a URL, no path, or names a user that there is not.
    """
    given = default_path() if path is None else path
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise InvalidValueError(f"the folder of a store is a path as text, not {type(text).__name__}")
    if not text:
        raise InvalidValueError(
            'the path of a store is an empty text, perhaps a variable that is not set; give a path, or "."'
            " for the current folder"
        )
    if found := _SCHEME(text):
        # The URL may have a password in it.
        raise InvalidValueError(
            f"a store is a folder on a local disk, not a URL ({found[1] or found[2]}://…);"
            " a bucket or a shared folder is a remote of a store: `castore remote add`, see docs/remote.md"
        )
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        raise InvalidValueError(
            f"{text!r} begins with the home of a user that there is not; write ./{text} for a folder of that"
            " name"
        )
    return Path(os.path.abspath(expanded))


def merge(base: Settings, **changes: Any) -> Settings:
    """``base`` with every change that is not None, sizes and durations parsed and all values checked.

    ``ttl=NEVER`` and ``max_size=UNLIMITED`` remove the bounds of ``base``.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    if "max_size" in given:
        given["max_size"] = parse_budget(given["max_size"])
    if "ttl" in given:
        given["ttl"] = parse_ttl(given["ttl"])
    if "codec" in given and "level" not in given and given["codec"] != base.codec:
        given["level"] = None  # another codec's level means nothing for this one
    merged = base._replace(**given)
    check_codec(merged.codec, merged.level)
    return merged


def is_read_only(path: Path) -> bool:
    """Whether the store at ``path`` is read-only: its file system is, or this user may not write there."""
    return not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def require_writable(path: Path) -> None:
    """Check that the store at ``path`` can be changed.

    Raises:
        StoreError: it is read-only.
    """
    if is_read_only(path):
        raise read_only_error(path)


class DamagedSettingsError(StoreError):
    """The settings of a store cannot be read."""


def load(path: Path) -> Settings | None:
    """The settings of the store at ``path``, or None if there is no store.

    Raises:
        StoreError: the file is damaged, or of a format that this code does not support.
    """
    file = path / FILE
    try:
        with open(open_regular(file), "rb") as opened:
            raw = json.loads(opened.read(_MAX_BYTES))
    except FileNotFoundError as error:
        if error.errno != errno.ENOENT and path.is_dir():
            raise StoreError(f"{file} is not a file; remove it and run `castore init` there") from error
        return None
    except PermissionError as error:
        raise StoreError(_access_message(path)) from error
    except OSError as error:
        if error.errno not in AT_FAULT:
            raise
        raise _damaged(path, f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is damaged ({error})") from error
    if not isinstance(raw, dict) or "format" not in raw:
        raise _damaged(path, "is damaged (it has no format)")
    if raw["format"] != FORMAT:
        raise StoreError(
            f"{path} has format {raw['format']!r}, and this castore knows format {FORMAT}; upgrade castore"
        )
    try:
        if not isinstance(raw.get("shared"), str | None):
            raise TypeError(f"shared is the name of a group, not {raw['shared']!r}")
        return merge(Settings(), **{name: raw.get(name) for name in Settings._fields})
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"{file} holds a bad setting: {error}") from error


def _damaged(path: Path, what: str) -> DamagedSettingsError:
    if is_used(path):
        advice = "`castore doctor` sets it aside and writes it again, with the defaults"
    else:
        advice = "delete it and run `castore init` there"
    return DamagedSettingsError(f"{path / FILE} {what}; {advice}")


def _access_message(path: Path) -> str:
    closed = f"{path / FILE} may not be read by this user"
    try:
        is_own = path.stat().st_uid == os.geteuid()
    except PermissionError:
        is_own = False
    if is_own:
        return f"{closed}, to whom the store belongs; run `{ownership.chown_command(path)}` as root"
    return f"{closed}; ask its owner to share it with `init --shared`"


def is_used(path: Path) -> bool:
    """Whether the folder has what is made after the settings: an index, or a journal."""
    return path.is_dir() and (
        os.path.lexists(path / layout.INDEX) or any((path / layout.NAMES).glob("*.names"))
    )


def has_lost_settings(path: Path) -> bool:
    """Whether the folder is a store that has lost its settings."""
    return is_used(path) and not os.path.lexists(path / FILE)


def no_store_message(path: Path) -> str:
    """The message for a folder without settings."""
    if has_lost_settings(path):
        return f"the store {path} has lost its {FILE}; `castore doctor` writes it again, with the defaults"
    return f"there is no store at {path}; `castore init` or `castore add` makes one"


def recover(path: Path) -> Settings:
    """The defaults; for a store that has lost its settings, with the group that its folder is shared with."""
    if not has_lost_settings(path) or not path.stat().st_mode & 0o070:
        return Settings()
    return Settings(shared=path.group())


def describe_rewritten(path: Path, settings: Settings) -> str:
    """The message for a store whose settings are written again."""
    shared = f"shared with the group {settings.shared}, as its folders are, " if settings.shared else ""
    budget = "no budget" if settings.max_size is None else f"a budget of {format_size(settings.max_size)}"
    ttl = "that never expire" if settings.ttl is None else f"for {format_duration(settings.ttl)}"
    return (
        f"{path / FILE} was missing and has been written again:"
        f" {shared}codec {settings.codec}, {budget}, entries {ttl};"
        " `castore init` sets others"
    )


def rewrite(path: Path) -> Settings:
    """Write the settings of a store that has lost them: the result of `recover`."""
    settings = recover(path)
    make_folders(path, settings)
    save(path, settings)
    return settings


def save(path: Path, settings: Settings) -> None:
    """Write the settings, whole or not at all."""
    content = {"format": FORMAT, **settings._asdict()}
    text = json.dumps(content, indent=2) + "\n"
    try:
        write_whole(path / FILE, [text.encode()], path / "tmp", settings.file_mode)
    except OSError as error:
        raise StoreError(f"cannot write {path / FILE}: {error.strerror}") from error


def create(path: Path, settings: Settings) -> None:
    """Make the store's folders, write its settings and make the ballast for a full disk.

    Raises:
        StoreError: the folder has other files, cannot be made, or lies on a network file system.
    """
    outer = enclosing_store(path)
    if outer is not None and layout.place_of(os.path.relpath(os.path.realpath(path), outer)) is not None:
        raise StoreError(
            f"{path} is a folder of the store {outer}, for its own files; choose another for the new store"
        )
    try:
        if path.exists() and not path.is_dir():
            raise StoreError(f"{path} is a file, and a store is a folder; choose another for the store")
        path.mkdir(parents=True, exist_ok=True)
        refuse_network(path)
        is_used = (path / FILE).exists() or has_lost_settings(path)
        if not is_used and any(entry.name not in layout.TOP for entry in path.iterdir()):
            raise StoreError(f"{path} is not empty and no store; choose an empty or new folder for the store")
        make_folders(path, settings)
        for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _CACHEDIR_TAG)):
            with open(open_with_mode(path / name, os.O_WRONLY | os.O_TRUNC, 0o644), "w") as file:
                file.write(text)
        is_new = not (path / FILE).exists()
        save(path, settings)
        if is_new:
            Ballast(path / "ballast", settings.file_mode).keep()
    except OSError as error:
        is_others = error.errno == errno.EPERM and path.stat().st_uid != os.geteuid()
        why = "it belongs to somebody else" if is_others else error.strerror or error
        raise StoreError(f"cannot make a store at {path}: {why}") from error
    if is_new and outer is not None:
        warn(
            f"the new store {path} lies inside the store {outer}: that one's budget does not count it,"
            " and it goes when that one's folder is removed; a folder beside it is a better place",
            NestedStoreWarning,
        )


def enclosing_store(path: Path) -> Path | None:
    """The nearest store whose folder contains a path, or None."""
    above = Path(os.path.realpath(path)).parents
    return next((folder for folder in above if os.path.isfile(folder / FILE)), None)


def check_folders(path: Path, settings: Settings, *, read_only: bool = False) -> None:
    """Check that the store's folders are its own, and make missing ones unless the store is read-only.

    Raises:
        StoreError: one is no folder, or is a link: the store would write and remove files elsewhere.
    """
    missing = False
    for name in layout.FOLDERS:
        try:
            is_folder = stat.S_ISDIR(os.lstat(f"{path}/{name}").st_mode)
        except FileNotFoundError:
            missing |= name in layout.CREATED
        else:
            if not is_folder:
                raise StoreError(
                    f"{path / name} is a link or a file where a folder of the store belongs;"
                    " remove it, and `castore doctor` makes the folder"
                )
    if missing and not read_only:
        make_folders(path, settings)


def make_folders(path: Path, settings: Settings) -> None:
    """Make the store's missing folders, with the permission bits of its settings."""
    for folder in (path, *(path / name for name in layout.CREATED)):
        make_folder(folder, settings.folder_mode)
    if settings.shared:
        _give_to_group(path, settings.shared)


def sync_folders(path: Path) -> None:
    """Sync the store's folders, so that they and the files in the top one survive a power cut."""
    for folder in (path.parent, path, path / "objects"):
        sync_folder(folder)


def _give_to_group(path: Path, group: str) -> None:
    import shutil

    try:
        for folder in (path, *(path / name for name in layout.CREATED)):
            if folder.group() != group:
                shutil.chown(folder, group=group)
                folder.chmod(0o2770)  # chown clears the set-group-id bit
    except LookupError as error:
        raise StoreError(f"there is no group {group!r} to share {path} with") from error


def refuse_network(path: Path) -> None:
    """Raise StoreError if the store lies on a file system shared between machines.

    SQLite needs locks and shared memory. Such file systems lack them, or offer them without effect.
    """
    kind = filesystem_of(path)
    if kind in _NETWORK:
        raise StoreError(
            f"{path} is on a {kind} file system, where SQLite's index would be damaged;"
            " put the store on a local disk (--store DIR or CASTORE_DIR)"
            " and keep the source data where it is"
        )


def filesystem_of(path: Path) -> str:
    """Type of the file system that holds ``path``, as ``/proc/self/mountinfo`` names it."""
    device = os.stat(path).st_dev
    found = mounts(f"{os.major(device)}:{os.minor(device)}")
    return found[-1].fstype if found else ""
