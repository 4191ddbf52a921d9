"""A store's folder and its ``castore.json``: format version and defaults.

Makes the folder, refuses what is no store or lies on a file system where SQLite's locks do not hold, and reads and
writes the defaults. Everything else inside the folder belongs to other modules.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from castore.errors import StoreError
from castore.objects.codecs import check_codec
from castore.sectors import AT_FAULT
from castore.sizes import parse_duration, parse_size
from castore.temporary import create_temporary, open_regular, sync_folder

FORMAT = 1
FILE = "castore.json"
# Far more than the settings take; what is longer is cut, and then no JSON.
_MOST = 65_536
FOLDERS = ("objects", "objects/packs", "objects/names", "objects/dicts", "tmp", "locks", "quarantine")
# The signature is what makes backup tools skip the folder: https://bford.info/cachedir/
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
    """The defaults a store keeps for all who open it.

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
        """Permission bits of files that are written to."""
        return 0o660 if self.shared else 0o600

    @property
    def object_mode(self) -> int:
        """Permission bits of finished objects."""
        return 0o440 if self.shared else 0o400


def default_path() -> Path:
    """Where the store is if nobody says: ``$CASTORE_DIR``, ``$XDG_CACHE_HOME/castore``, ``~/.cache/castore``."""
    own = os.environ.get("CASTORE_DIR")
    if own:
        return Path(own)
    from platformdirs import user_cache_path

    return user_cache_path("castore")


def merge(base: Settings, **changes: Any) -> Settings:
    """``base`` with every change that is not None, sizes and durations parsed and all values checked."""
    given = {name: value for name, value in changes.items() if value is not None}
    if "max_size" in given:
        given["max_size"] = parse_size(given["max_size"])
    if "ttl" in given:
        given["ttl"] = parse_duration(given["ttl"])
    if "codec" in given and "level" not in given and given["codec"] != base.codec:
        given["level"] = None  # another codec's level means nothing for this one
    merged = base._replace(**given)
    check_codec(merged.codec, merged.level)
    return merged


def load(path: Path) -> Settings | None:
    """The settings of the store at ``path``, or None if there is no store.

    Raises:
        StoreError: the file is damaged, or of a format this code does not know.
    """
    file = path / FILE
    try:
        with open(open_regular(file), "rb") as opened:
            raw = json.loads(opened.read(_MOST))
    except FileNotFoundError as error:
        if error.errno != errno.ENOENT and path.is_dir():
            raise StoreError(f"{file} is not a file; remove it and run `castore init` there") from error
        return None
    except PermissionError as error:
        raise StoreError(
            f"{file} may not be read by this user; ask its owner to share it with `init --shared`"
        ) from error
    except OSError as error:
        if error.errno not in AT_FAULT:
            raise
        raise StoreError(
            f"{file} cannot be read ({error.strerror}); delete it and run `castore init` there"
        ) from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{file} is damaged ({error}); delete it and run `castore init` there") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise StoreError(
            f"{path} has format {found!r}, and this castore knows format {FORMAT}; upgrade castore"
        )
    try:
        if not isinstance(raw.get("shared"), str | None):
            raise TypeError(f"shared is the name of a group, not {raw['shared']!r}")
        return merge(Settings(), **{name: raw.get(name) for name in Settings._fields})
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"{file} holds a bad setting: {error}") from error


def save(path: Path, settings: Settings) -> None:
    """Write the settings, whole or not at all."""
    content = {"format": FORMAT, **settings._asdict()}
    fd, temporary = create_temporary(path / "tmp")
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, settings.file_mode)
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(fd)  # a power cut must not leave a store whose settings are zeros
        temporary.rename(path / FILE)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise  # a Ctrl-C while the disk is slow
        raise StoreError(f"cannot write {path / FILE}: {error.strerror}") from error


def create(path: Path, settings: Settings) -> None:
    """Make the store's folders and write its settings.

    Raises:
        StoreError: the folder holds other things, cannot be made, or lies on a network file system.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        refuse_network(path)
        if not (path / FILE).exists() and any(not _is_own(entry.name) for entry in path.iterdir()):
            raise StoreError(
                f"{path} is not empty and no castore; choose an empty or new folder for the store"
            )
        make_folders(path, settings)
        (path / ".gitignore").write_text("*\n")
        (path / "CACHEDIR.TAG").write_text(_CACHEDIR_TAG)
        save(path, settings)
    except OSError as error:
        raise StoreError(f"cannot make a store at {path}: {error.strerror or error}") from error


def check_folders(path: Path, settings: Settings) -> None:
    """See that the store's folders are its own, and make those that are missing.

    Raises:
        StoreError: one is a link, which would have the store write and remove files somewhere else, or no folder.
    """
    missing = False
    for name in FOLDERS:
        try:
            is_folder = stat.S_ISDIR(os.lstat(f"{path}/{name}").st_mode)
        except FileNotFoundError:
            missing = True
        else:
            if not is_folder:
                raise StoreError(
                    f"{path / name} is a link or a file where a folder of the store belongs;"
                    " remove it, and `castore doctor` makes the folder"
                )
    if missing:
        make_folders(path, settings)


def make_folders(path: Path, settings: Settings) -> None:
    """Make what is missing of the store's folders, with the permission bits they must have."""
    for folder in (path, *(path / name for name in FOLDERS)):
        folder.mkdir(exist_ok=True)
        if folder.stat().st_mode & 0o7777 != settings.folder_mode:
            folder.chmod(settings.folder_mode)
    if settings.shared:
        _give_to_group(path, settings.shared)


def sync_folders(path: Path) -> None:
    """Have the store's folders, and the files in the top one, survive a power cut."""
    for folder in (path.parent, path, path / "objects"):
        sync_folder(folder)


def _is_own(name: str) -> bool:
    # Files that are only there while another process makes the same store count too.
    own = {
        FILE,
        ".gitignore",
        "CACHEDIR.TAG",
        "index.sqlite",
        "ballast",
        *(folder.split("/")[0] for folder in FOLDERS),
    }
    return name in own or name.startswith((f"{FILE}.", "index.sqlite-"))


def _give_to_group(path: Path, group: str) -> None:
    import shutil

    try:
        for folder in (path, *(path / name for name in FOLDERS)):
            if folder.group() != group:
                shutil.chown(folder, group=group)
                folder.chmod(0o2770)  # chown clears the set-group-id bit
    except LookupError as error:
        raise StoreError(f"there is no group {group!r} to share {path} with") from error


def refuse_network(path: Path) -> None:
    """Raise StoreError if the store lies on a file system shared between machines.

    SQLite needs locks and shared memory that those do not give, or give without effect.
    """
    kind = filesystem_of(path)
    if kind in _NETWORK:
        raise StoreError(
            f"{path} is on a {kind} file system, where SQLite's index would be damaged; put the store on a local disk"
            " (--store DIR or CASTORE_DIR) and keep the source data where it is"
        )


def filesystem_of(path: Path) -> str:
    """Type of the file system that holds ``path``, as ``/proc/self/mountinfo`` names it."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kind = ""
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            if left.split()[2] == wanted:
                kind = right.split()[0]
    return kind
