"""The tutorial can be pasted: every shell block of docs/tutorial.md runs, in order, in one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
# In place of the second that a mount may take to follow, which on a busy machine is not always enough.
UNTIL_IT_SHOWS = (
    "for _ in {1..600}; do grep -qsF \"print('hello')\" mnt/stdlib/files/abc.py && break; sleep 0.1; done"
)


def test_the_tutorial_runs_as_it_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    blocks = re.findall(r"^```sh\n(.*?)^```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    place = tmp_path / "tutorial"
    script = "".join(blocks).replace("/tmp/castore-tutorial", str(place))
    assert script.count("\nsleep 1\n") == 1
    script = script.replace("\nsleep 1\n", f"\n{UNTIL_IT_SHOWS}\n")
    tools = tmp_path / "bin"  # `castore` and `python` of the environment that runs the tests
    tools.mkdir()
    for name, module in (("castore", "-m castore "), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        (tools / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path)}
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
