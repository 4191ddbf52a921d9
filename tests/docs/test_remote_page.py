"""docs/remote.md can be pasted: its shell blocks run in one shell; its Python prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pasting import pasted, programs
from tests.docs.test_pages import ROOT, run_examples
from tests.warm import WarmPython

pytestmark = pytest.mark.usefixtures("forked_processes")

PAGE = ROOT / "docs" / "remote.md"


def test_two_nodes_share_a_folder_by_pasting(tmp_path: Path, warm_castore: WarmPython) -> None:
    script = pasted(PAGE, "/tmp/castore-remote", tmp_path / "page")
    with programs(tmp_path / "bin", {"castore": (warm_castore, ["-m", "castore"])}) as found:
        ran = subprocess.run(
            ["bash", "-e", "-c", script], env=os.environ | found, capture_output=True, text=True
        )
    assert (ran.returncode, ran.stderr) == (0, "")
    told = re.findall(r"^(?:pushed|pulled) (\d \w+)", ran.stdout, re.M)
    assert told == ["2 new", "2 new", "1 changed", "1 changed", "1 new"]
    assert ran.stdout.count("cat\ndog\n") == 3
    assert ran.stdout.count("owl\n") == 1  # the mount shows the newest commit
    assert "\t2\t288.9 KB\towls\n" in ran.stdout
    assert "12 B  set/labels.txt\n" in ran.stdout


def test_the_python_of_the_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples(PAGE, more_than=15, capsys=capsys)
