"""The tutorial can be pasted: every shell block of docs/tutorial.md runs, in order, in one shell."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pasting import Program, pasted, programs
from tests.warm import WarmPython

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
# In place of the second that a mount may take to follow, which on a busy machine is not always enough.
UNTIL_IT_SHOWS = (
    "for _ in {1..600}; do grep -qsF \"print('hello')\" mnt/stdlib/files/abc.py && break; sleep 0.1; done"
)


def test_the_tutorial_runs_as_it_is_printed(
    tmp_path: Path, warm_castore: WarmPython, warm_torch: WarmPython
) -> None:
    pytest.importorskip("torch")
    place = tmp_path / "tutorial"
    script = pasted(TUTORIAL, "/tmp/castore-tutorial", place)
    assert script.count("\nsleep 1\n") == 1
    script = script.replace("\nsleep 1\n", f"\n{UNTIL_IT_SHOWS}\n")
    named: dict[str, Program] = {"castore": (warm_castore, ["-m", "castore"]), "python": (warm_torch, [])}
    with programs(tmp_path / "bin", named) as found:
        environment = os.environ | found | {"XDG_STATE_HOME": str(tmp_path)}
        run = subprocess.run(["bash", "-e", "-c", script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    output = run.stdout
    sums = re.findall(r"^([0-9a-f]{64})  \S+shard-0\.tar$", output, re.MULTILINE)
    assert len(sums) == 2
    assert sums[0] == sums[1], "the mount shows other bytes than the file"
    assert "epoch 1: mean byte" in output
    assert "\nhello" in output or "print('hello')" in output
    assert output.count("tokenizing stdlib/files/ast.py") == 1, "the second run must come from the cache"
    assert "fewer bytes on samples that it has not seen" in output
    assert "all as they were put" in output
    assert not place.exists()
