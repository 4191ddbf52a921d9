"""docs/mount.md can be pasted: its shell blocks run in order in one shell, with the output it quotes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "mount.md").read_text()


def test_the_blocks_run_as_they_are_printed(tmp_path: Path) -> None:
    place = tmp_path / "place"
    script = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    tools = tmp_path / "bin"  # `castore` and `python` of the environment that runs the tests
    tools.mkdir()
    for name, module in (("castore", "-m castore "), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        (tools / name).chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        ["bash", "-e", "-c", script.replace("/tmp/castore-mount", str(place))],
        env=os.environ | path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    sums = re.findall(r"^([0-9a-f]{64})  ", run.stdout, re.MULTILINE)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    assert "34567 (2000000,)" in run.stdout
    assert "80 files in the shard" in run.stdout
    assert not place.exists()


def test_options_it_names_are_those_of_the_helper() -> None:
    helper = (ROOT / "fuse" / "mount.fuse.castore").read_text()
    for option in ("pin", "prefix=", "allow_other", "cache_size=", "threads="):
        assert f"`{option}`" in PAGE
        assert re.search(rf"^ +(.*\| )?{re.escape(option)}[*]?( \|.*)?\)", helper, re.MULTILINE), option
