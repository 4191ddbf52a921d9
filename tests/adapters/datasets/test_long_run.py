"""The long run of the benchmarks over little text: the promises that `make bench` shows over 200 MB."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.bench import longrun


@pytest.mark.matrix
def test_five_steps_run_again_changed_edited_killed_and_resumed_give_what_plain_datasets_gives(
    tmp_path: Path,
) -> None:
    seed = random.randrange(10**9)
    found = list(longrun.stages(tmp_path, tmp_path / "corpus", 1_000_000, random.Random(seed)))
    wrong = [stage for stage in found if not (stage.equal and stage.as_wanted)]
    assert len(found) == 10
    assert not wrong, f"killed as random.Random({seed}) says: {wrong}"
