"""docs/nodes.md can be pasted: its blocks run in one shell, on a machine that has only loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.docs.pasting import pasted
from tests.docs.test_pages import ROOT

PAGE = ROOT / "docs" / "nodes.md"


def test_one_recipe_goes_from_one_node_to_many_by_pasting(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # the page trains, too
    script = pasted(PAGE, "/tmp/castore-nodes", tmp_path / "page")
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    alone = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    # Paths of sockets are short, so Ray's folder is not below that of the test, nor of a run of tests.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        environment = os.environ | {
            "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": ray_folder,
        }  # fmt: skip
        ran = subprocess.run(
            [*alone, sys.executable, "-m", "tests.docs.nodes_page", script, tmp_path],
            env=environment, capture_output=True, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    page = tmp_path / "page"
    results = [
        (page / name).read_text() for name in ("a.jsonl", "b.jsonl", "out-0.jsonl", "out-1.jsonl", "ci.jsonl")
    ]
    assert len(set(results)) == 1
    assert len(results[0].splitlines()) == 400
    runs = re.findall(r"^ whitespace_normalization_mapper +\S+ +([\d,]+) +([\d,]+)", ran.stdout, re.M)
    # alone, node-a, node-b, two tasks of an array, the driver of a cluster, CI
    assert [run for run, _ in runs] == ["400", "400", "0", "0", "0", "0", "0"]
    assert "\n64\n" in ran.stdout
    assert "shared results" in ran.stdout
