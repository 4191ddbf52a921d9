"""How the two processes that talk to remotes open a store."""

from __future__ import annotations

from pathlib import Path

from castore import parts
from castore.gc import collect
from castore.parts import Parts
from castore.remote.origin import RemoteOrigin
from castore.system.ballast import Ballast


def open_parts(path: Path, *, max_size: float | str | None, durable: bool) -> Parts:
    """The parts of a store, without a RAM tier. The arguments are those of `castore.Store`."""
    settings, read_only = parts.open_folder(path, max_size=max_size)
    return parts.open_parts(
        path,
        settings,
        Ballast(path / "ballast", settings.file_mode),
        collect.make_room,
        RemoteOrigin,
        read_only=read_only,
        memory=0,
        durable=durable,
    )
