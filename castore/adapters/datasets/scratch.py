"""Folders for uncompressed Arrow files in work, until their dataset is in the store.

A process has one folder for each place: below the store, where there is room for data, or below a user's
folder. The folder's name contains the process's id. The folder is removed when the process ends. A killed
process's folder is removed when the next process makes its own, or with the next gc: it tells that
process of the kill.

Must never: remove the folder of a live process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import time
import uuid
from pathlib import Path

from castore import layout
from castore.store import Store
from castore.system.forks import ForkSafeLock
from castore.system.temporary import leftover_folders, make_folder, pid_namespace, process_started

_folders: dict[tuple[int, Path], Path] = {}
_killed: dict[Path, float] = {}  # places where killed processes had left folders; when this was seen
_guard = ForkSafeLock()


def new_file(store: Store, temp_dir: str | os.PathLike[str] | None = None) -> Path:
    """A path for a new Arrow file of this process, in a folder of its own."""
    parent = (
        store.path / layout.WORK if temp_dir is None else Path(os.path.abspath(temp_dir)) / "castore-work"
    )
    folder = _process_folder(parent, store.settings.folder_mode) / uuid.uuid4().hex
    make_folder(folder, 0o700)
    return folder / "data.arrow"


def is_ours(file: str | os.PathLike[str]) -> bool:
    """Whether `new_file` of this process named that file, or the file's folder."""
    above = Path(file).parent.parent
    with _guard.lock:
        return _folders.get((os.getpid(), above.parent)) == above


def seconds_after_kill(file: Path) -> float | None:
    """Seconds since this process saw that another was killed, which had files in the place where `new_file`
    has named that one; None if none was.
    """
    seen = _killed.get(file.parent.parent.parent)
    return None if seen is None else time.monotonic() - seen


def remove(file: Path) -> None:
    """Remove a file that `new_file` named, with the files beside it. Mapped bytes stay readable."""
    shutil.rmtree(file.parent, ignore_errors=True)


def remove_unused(files: set[Path], used: set[str]) -> None:
    """Remove those files, made by `new_file`, whose folders hold nothing used; ``files`` keeps the others."""
    folders = {os.path.dirname(path) for path in used}
    for file in [file for file in files if str(file.parent) not in folders]:
        remove(file)
        files.discard(file)


def _process_folder(parent: Path, mode: int) -> Path:
    place = os.getpid(), parent
    with _guard.lock:
        if place not in _folders or not _folders[place].is_dir():  # the store may have been emptied
            if not parent.is_dir():
                parent.parent.mkdir(parents=True, exist_ok=True)
                make_folder(parent, mode)
            for left in leftover_folders(parent):
                _killed[parent] = time.monotonic()
                shutil.rmtree(left, ignore_errors=True)
            name = f"{pid_namespace()}-{os.getpid()}-{process_started(os.getpid()) or 0}-{uuid.uuid4().hex}"
            folder = parent / name
            make_folder(folder, 0o700)
            atexit.register(_remove_own, os.getpid(), folder)
            _folders[place] = folder
        return _folders[place]


def _remove_own(pid: int, folder: Path) -> None:
    if pid == os.getpid():  # a forked child inherits the hook, not the folder
        shutil.rmtree(folder, ignore_errors=True)
