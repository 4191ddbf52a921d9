"""Nodes of a Ray cluster divide the work of a pipeline, whichever of them are lost or come."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from castore import Store
from castore.adapters.ray.nodes import Place
from castore.errors import RemoteWarning
from tests.remote.nodes import end_fetcher, know

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store(tmp_path / "driver") as store:
        know(store, "team", (tmp_path / "bucket").as_uri())
    return tmp_path


def test_a_node_makes_no_remote_where_the_share_is_not_mounted(folder: Path) -> None:
    with Store(folder / "driver", remote="team") as store:
        place = Place.of(store)._replace(path=str(folder / "node"))
    shutil.move(folder / "bucket", folder / "elsewhere")
    with pytest.warns(RemoteWarning, match=r"shares nothing with the others.* is its file system mounted"):
        node = place.open()
    with node:
        node.put("a", b"x")
        assert node.remotes() == []
    assert not (folder / "bucket").exists()
    shutil.move(folder / "elsewhere", folder / "bucket")
    with place.open() as node:
        assert node.shared_remote is not None


@pytest.mark.matrix  # half a minute; the page of nodes has one node of Ray in each run
def test_a_cluster_runs_each_row_once_and_the_driver_none(folder: Path) -> None:
    ray_folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of sockets are short
    modules = folder / "modules"  # of the job, which edits them: no bytecode may outlive an edit
    modules.mkdir()
    path = [str(ROOT), str(ROOT / "fuse"), str(modules), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": ray_folder}
    command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", "tests.adapters.ray.cluster_job", str(folder)],
            cwd=folder, env={**os.environ, **variables, **quiet}, timeout=400,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for marker in folder.glob("*/castore.json"):
            with Store(marker.parent) as store:
                end_fetcher(store)
        shutil.rmtree(ray_folder, ignore_errors=True)
    assert done.stdout.splitlines()[-1] == "runs_a_recipe_by_the_command_line"
