"""Free shared memory and free RAM, checked before either is allocated.

Pages of ``/dev/shm`` are RAM. A segment's size is limited by the file system's size, by the machine's free
memory, and by the control group of a container or batch job. Assumes Linux.
"""

from __future__ import annotations

import os
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108 - no temporary folder, but the kernel's shared memory
_CGROUPS = Path("/sys/fs/cgroup")


def shm_size() -> int:
    """Size of ``/dev/shm`` in bytes."""
    status = os.statvfs(SHM)
    return status.f_frsize * status.f_blocks


def shm_free() -> int:
    """Unused bytes of ``/dev/shm``, whether or not the machine has the RAM for them."""
    status = os.statvfs(SHM)
    return status.f_frsize * status.f_bavail


def memory_free() -> int:
    """Bytes of RAM and swap that are available to this process. Page cache counts as free."""
    with open("/proc/meminfo") as file:
        kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    free = (kibibytes["MemAvailable"] + kibibytes["SwapFree"]) * 1024
    return max(0, min([free, *_free_in_groups()]))


def _free_in_groups() -> list[int]:
    """Free bytes in each control group (version 2) that limits this process."""
    with open("/proc/self/cgroup") as file:
        path = next((line.strip()[3:] for line in file if line.startswith("0::")), "/")
    group = _CGROUPS / path.lstrip("/")
    folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(_CGROUPS)]
    return [free for folder in folders if (free := _free_in_group(folder)) is not None]


def _free_in_group(folder: Path) -> int | None:
    """Free bytes in one control group; None if the group sets no limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None  # the root group, or one without the memory controller
    return int(limit) - used + int(statistics.get("inactive_file", 0))
