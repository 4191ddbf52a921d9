"""Runs a script where loopback is the only network: `unshare --net python -m tests.docs.nodes_page SCRIPT
FOLDER`. Its programs are forked from processes that are in that network too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.adapters.ray.loopback import bring_up
from tests.docs.pasting import programs
from tests.warm import DATASETS, TORCH, WarmPython


def main(script: str, folder: Path) -> int:
    """Run it; returns its exit code."""
    bring_up()
    castore = WarmPython(DATASETS)
    torch = WarmPython([*TORCH, "torch.distributed.run"])
    named = {
        "castore": (castore, ["-m", "castore"]),
        "torchrun": (torch, ["-m", "torch.distributed.run"]),
        "python": (torch, []),
    }
    try:
        with programs(folder / "bin", named) as found:
            ranks = {"PYTHON_EXEC": str(folder / "bin" / "python")}
            return subprocess.run(
                ["bash", "-e", "-c", script], env={**os.environ, **found, **ranks}
            ).returncode
    finally:
        castore.close()
        torch.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
