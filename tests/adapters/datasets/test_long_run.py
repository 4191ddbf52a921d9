"""The long run of the benchmarks over little text: the promises that `make bench` shows over 200 MB hold in
each test run.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers import LONG
from tools.bench import longrun


@pytest.mark.torture  # the long form has checkpoints too
def test_five_steps_run_again_changed_edited_killed_and_resumed_give_what_plain_datasets_gives(
    tmp_path: Path,
) -> None:
    seed = random.randrange(10**9)
    ways, edits = (longrun.WAYS, longrun.EDITS) if LONG else (longrun.WAYS[:1], ["append"])
    found = list(
        longrun.stages(tmp_path, tmp_path / "corpus", 1_000_000, random.Random(seed), ways, list(edits))
    )
    wrong = [stage for stage in found if not (stage.equal and stage.as_wanted)]
    assert len(found) == (10 if LONG else 5)
    assert not wrong, f"killed as random.Random({seed}) says: {wrong}"
