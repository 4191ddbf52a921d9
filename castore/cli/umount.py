"""`castore umount`: ends a mount."""

from __future__ import annotations

from typing import Annotated

import typer


def umount(
    mountpoint: Annotated[str, typer.Argument(metavar="MOUNTPOINT", help="Where it is mounted.")],
) -> None:
    """End a mount, live or dead.

    \b
    castore umount /mnt/data
    """
    from castore_fuse import api

    api.umount(mountpoint)
