"""How the two processes that talk to remotes begin."""

from __future__ import annotations

import gc
from pathlib import Path

from castore import parts
from castore.parts import Parts
from castore.read.origin import Origin
from castore.system.ballast import Ballast

_NEW_OBJECTS = 100_000


def open_parts(path: Path, *, max_size: float | str | None, durable: bool) -> Parts:
    """The parts of a store, without a RAM tier. The arguments are those of `castore.Store`."""
    settings, read_only = parts.open_folder(path, max_size=max_size)
    return parts.open_parts(
        path,
        settings,
        Ballast(path / "ballast", settings.file_mode),
        _make_room,
        _find_origin,
        read_only=read_only,
        memory=0,
        durable=durable,
    )


def look_less_for_cycles() -> None:
    """Have Python look for cycles of garbage after many more new objects than it does by default.

    These processes make thousands of rows at once, and hardly a cycle: a sixth of a fetch went to looking.
    """
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


# These are seldom needed, and their modules would add a tenth to the start of the process.


def _make_room(parts: Parts, need: int) -> None:
    from castore.gc import collect

    collect.make_room(parts, need)


def _find_origin(parts: Parts) -> Origin:
    from castore.remote.origin import RemoteOrigin

    return RemoteOrigin(parts)
