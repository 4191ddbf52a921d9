"""Where torch is not installed, all tests that need none run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.warm import WarmPython
from tests.without_torch import ROOT, needs_torch

_WITHOUT = """
import sys
assert "torch" not in sys.modules
sys.modules["torch"] = None  # an import of torch is the error that it is where torch is not installed
import pytest
ignored = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that are imported already
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-W", ignored, *sys.argv[1:]]))
"""


# Folders with and without tests that need torch, and doctests: where torch is not installed, a run collects
# all of them.
_PARTS = ["tests/adapters", "tests/keys", "tests/mount", "castore/store.py"]


def test_without_torch_all_else_is_collected_and_what_is_left_out_is_reported(
    warm_datasets: WarmPython,
) -> None:
    # Without the options of this run: with -v, a quiet collection is not as quiet.
    environment = {**os.environ, "COLUMNS": "200", "PYTEST_ADDOPTS": ""}
    done = warm_datasets.run(["-c", _WITHOUT, *_PARTS], cwd=ROOT, env=environment, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "torch is not installed: " in done.stdout
    assert "tests/adapters/torch (" in done.stdout
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert {"tests/keys/test_encoder.py", "tests/mount/test_view.py", "castore/store.py"} <= collected
    assert not any(needs_torch(ROOT / path) for path in collected)


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("import torch.nn", True),
        ("from torchdata import x", True),
        ("try:\n    from safetensors import torch\nexcept ImportError:\n    raise", True),
        ("from castore.adapters import torch", True),
        ("from tests.adapters.torch import drawn", True),
        ("def f():\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("from castore.adapters import datasets, tree", False),
    ],
)
def test_imports_at_the_top_tell_whether_torch_is_needed(source: str, needed: bool, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(source)
    assert needs_torch(file) is needed
