"""`castore umount`: ends a mount."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from castore.cli.store_access import require_path


def umount(
    mountpoint: Annotated[str, typer.Argument(metavar="MOUNTPOINT", help="Where it is mounted.")],
) -> None:
    """End a mount, live or dead.

    \b
    castore umount /mnt/data
    """
    from castore_fuse import api

    path = os.path.abspath(require_path(mountpoint, "MOUNTPOINT"))
    os.chdir("/")  # a working folder inside the mount would keep it busy
    api.umount(path)
