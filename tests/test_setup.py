"""`make` on a stranger's machine: each interpreter has an environment, and torch never brings gigabytes
unasked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.without_torch import ROOT

VERSION = "{}.{}".format(*sys.version_info)
TORCH = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def test_an_interpreter_that_is_chosen_has_an_environment_of_its_own() -> None:
    chosen = run("make", "-n", "demo", f"PYTHON={sys.executable}").stdout
    assert f".venv-{VERSION}/bin/python -m tools.demo" in chosen
    assert ".venv/bin/python -m tools.demo" in run("make", "-n", "demo", "PYTHON=python3").stdout
    assert (
        f".venv-bench-{VERSION}/bin/python" in run("make", "-n", "bench", f"PYTHON={sys.executable}").stdout
    )


def test_an_interpreter_that_does_not_run_is_reported_in_a_sentence(tmp_path: Path) -> None:
    shim = tmp_path / "python3.99"  # as pyenv leaves one for each version, whether it is chosen or not
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.99: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    done = run("tools/setup.sh", "demo", PYTHON=str(shim))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"setup: '{shim}' does not run on this machine.")
    done = run("tools/setup.sh", "demo", PYTHON="no-such-python")
    assert (done.returncode, done.stderr) == (1, "setup: there is no 'no-such-python' on this machine.\n")


def test_a_build_of_torch_that_is_unknown_is_reported_in_a_sentence() -> None:
    done = run("tools/setup.sh", "demo", TORCH="gpu")
    assert done.returncode == 1
    assert done.stderr.startswith("setup: TORCH=gpu is unknown")


def wheel(folder: Path, version: str, *requirements: str) -> None:
    """A wheel of torch that says nothing but its version and requirements."""
    about = f"torch-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


GPU = "nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux'"


@pytest.mark.parametrize(
    ("builds", "told"),
    [
        ({}, f"pip finds no torch for Python {VERSION}"),
        ({"": [GPU, "filelock"]}, f"pip would bring torch {TORCH} for a GPU, of gigabytes"),
        pytest.param(
            {"": ["filelock", "nvidia-cudnn-cu13; platform_system == 'Windows'"]},
            "cpu",
            marks=pytest.mark.matrix,
        ),
        ({"+cu130": []}, f"pip would bring torch {TORCH}+cu130 for a GPU, of gigabytes"),
        pytest.param({"+cpu": []}, "cpu", marks=pytest.mark.matrix),
        ({"": [GPU], "+cpu": []}, "cpu"),
    ],
)
def test_what_pip_would_bring_as_torch_is_known_before_it_does(
    builds: dict[str, list[str]], told: str, tmp_path: Path
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for build, requirements in builds.items():
        wheel(links, TORCH + build, *requirements)
    # As if torch were not installed here. In isolation from pip's configuration on this machine.
    options = ["--ignore-installed", "--no-index", "--find-links", str(links)]
    done = run(
        sys.executable, "tools/torch_build.py", *options, PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS=""
    )
    assert (done.stdout, done.stderr) == (f"{told}\n", "")
