"""`castore umount`: ends mounts."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from castore.cli.output import Failures, describe
from castore.cli.store_access import require_path
from castore.errors import CastoreError


def umount(
    mountpoint: Annotated[list[str], typer.Argument(metavar="MOUNTPOINT...", help="Where they are mounted.")],
) -> None:
    """End mounts, live or dead.

    \b
    castore umount /mnt/data
    """
    from castore_fuse import api

    paths = [os.path.abspath(require_path(path, "MOUNTPOINT")) for path in mountpoint]
    os.chdir("/")  # a working folder inside a mount would keep it busy
    failures = Failures()
    for path in paths:
        try:
            api.umount(path)
        except CastoreError as error:
            failures.add(describe(error))
    failures.finish()
