"""A DataLoader's workers read from a remote that their parent has used, however they are started."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from tests.remote.servers import Place, environment
from tests.warm import WarmPython

_ROOT = Path(__file__).parents[2]


def test_workers_of_every_start_method_fetch_after_their_parent_has_pushed_pulled_and_read(
    seaweedfs: Place, tmp_path: Path, warm_torch: WarmPython
) -> None:
    pytest.importorskip("torch")
    with environment(seaweedfs.environment):
        ran = warm_torch.run(
            ["-m", "tests.remote.loading", tmp_path, f"{seaweedfs.url}/{uuid.uuid4().hex}"],
            env=os.environ | {"PYTHONPATH": os.fspath(_ROOT)},
            cwd=_ROOT,
            text=True,
        )
    assert ran.stdout == "good\n", ran.stderr
