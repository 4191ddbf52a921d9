"""An operator has the same fingerprint in every process, and another one after a change, whatever the
operator consists of.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.datasets import zoo
from tests.warm import WarmPython
from tests.without_torch import is_installed

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, dict[str, str]]:
    """Fingerprints of all kinds, as new processes compute them: two of the same text, one of the changed
    text.

    A fresh Python has a seed of hashes that others do not have; the others share a random one.
    """
    folder = tmp_path_factory.mktemp("zoo")
    zoo.write(folder / "here", "1")
    zoo.write(folder / "elsewhere", "1")
    zoo.write(folder / "changed", "2")
    answers: dict[str, dict[str, str]] = {}
    names = ["here", "changed", "elsewhere"]
    words = [zoo.__file__, *(str(folder / name) for name in names)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hf")}
    warm: WarmPython = request.getfixturevalue("warm_torch" if is_installed() else "warm_datasets")
    out = warm.output(words[:-1], env=env)
    out += subprocess.run(
        [sys.executable, words[0], words[-1]],
        stdout=subprocess.PIPE,
        env={**env, "PYTHONHASHSEED": "4242"},
        timeout=300,
        check=True,
        text=True,
    ).stdout
    for name, line in zip(names, out.splitlines(), strict=True):
        answers[name] = {kind: answer[0] for kind, answer in json.loads(line).items()}
    return answers


def test_the_zoo_has_at_least_forty_kinds() -> None:
    assert len(zoo.KINDS) >= 40
    assert all("$X" in source or "helper" in source for source in zoo.KINDS.values())


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_a_fresh_process_with_another_hash_seed_finds_the_same_fingerprint(
    kind: str, found: dict[str, dict[str, str]]
) -> None:
    assert found["here"][kind] == found["elsewhere"][kind]


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_one_meaningful_change_gives_another_fingerprint(kind: str, found: dict[str, dict[str, str]]) -> None:
    assert found["here"][kind] != found["changed"][kind]


def test_no_two_kinds_have_one_fingerprint(found: dict[str, dict[str, str]]) -> None:
    assert len(set(found["here"].values())) == len(zoo.KINDS)
