"""The build of torch that pip would install: prints "cpu", or the reason why pip would install none or
another.

Run by tools/setup.sh with the Python of the environment. Passes its arguments on to pip. Installs nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

# Packages that only builds for a GPU need.
_OF_GPU = re.compile("nvidia|cuda|triton|pytorch-triton")


def torch_build(options: list[str]) -> str:
    """See the module. An installed torch counts as "cpu", since somebody chose it."""
    ask = [
        "install",
        "--dry-run",
        "--no-deps",
        "--quiet",
        "--report",
        "-",
        "-c",
        "constraints.txt",
        *options,
        "torch",
    ]
    command = [sys.executable, "-m", "pip", *ask]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0:
        return f"pip finds no torch for Python {sys.version_info[0]}.{sys.version_info[1]}"
    chosen = json.loads(done.stdout)["install"]
    if not chosen:
        return "cpu"
    about: dict[str, Any] = chosen[0]["metadata"]
    _, _, build = about["version"].partition("+")
    needs_gpu = any(_is_of_gpu(line) for line in about.get("requires_dist", []))
    if build == "cpu" or not (build or needs_gpu):
        return "cpu"
    return f"pip would bring torch {about['version']} for a GPU, of gigabytes"


def _is_of_gpu(requirement: str) -> bool:
    """Whether a requirement applies to this machine and names a package for GPUs."""
    from pip._vendor.packaging.requirements import Requirement

    wanted = Requirement(requirement)
    counts = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    return bool(counts and _OF_GPU.match(wanted.name))


if __name__ == "__main__":
    sys.stdout.write(torch_build(sys.argv[1:]) + "\n")
