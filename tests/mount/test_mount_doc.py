"""docs/mount.md can be pasted: its shell blocks run in order in one shell, with the output it quotes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.docs.pasting import Program, pasted, programs
from tests.warm import WarmPython

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "mount.md"


def test_the_blocks_run_as_they_are_printed(tmp_path: Path, warm_castore: WarmPython) -> None:
    place = tmp_path / "place"
    script = pasted(PAGE, "/tmp/castore-mount", place)
    named: dict[str, Program] = {"castore": (warm_castore, ["-m", "castore"]), "python": (warm_castore, [])}
    with programs(tmp_path / "bin", named) as found:
        run = subprocess.run(
            ["bash", "-e", "-c", script], env=os.environ | found, capture_output=True, text=True, timeout=300
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
        assert f"`{option}`" in PAGE.read_text()
        assert re.search(rf"^ +(.*\| )?{re.escape(option)}[*]?( \|.*)?\)", helper, re.MULTILINE), option
