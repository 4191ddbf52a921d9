"""Fuzzing castore's parsers (fuzzing.py).

The quick form uses hypothesis, the long form atheris for a million inputs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import LONG
from tests.torture.fuzzing import TARGETS, feed, seeds

Figure = Callable[[str], None]
SEEDS = seeds()
EXAMPLES = 2_000 if LONG else 80
INPUTS = 1_000_000
MEMORY_MB = 1_024


@st.composite
def hurt(draw: st.DrawFn, seed: bytes) -> bytes:
    """The seed with a few places changed, cut out, or doubled."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "bytes", "cut", "double"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "bytes":
            data[at : at + 4] = draw(st.binary(min_size=1, max_size=9))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_taken_or_refused_in_castores_words(name: str, figure: Figure) -> None:
    ended: Counter[bool] = Counter()

    @given(hurt(SEEDS[name]) | st.binary(max_size=300))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(data: bytes) -> None:
        ended[feed(TARGETS[name], data)] += 1

    assert feed(TARGETS[name], SEEDS[name]), "the seed is not understood: the fuzzer would start from nothing"
    run()
    assert ended[True] > 0, "nothing was ever taken"
    # Scans skip bytes that are no record.
    assert name in ("pack", "journal") or ended[False] > 0, "nothing was ever refused"
    figure(f"{name}: {ended.total()} inputs, {ended[False]} refused, no other error")


@pytest.mark.skipif(not LONG, reason="a million inputs are the long form")
def test_a_million_inputs_find_no_crash_no_hang_and_no_hunger(tmp_path: Path, figure: Figure) -> None:
    runs = INPUTS // len(TARGETS) + 1
    fuzz = Path(__file__).parents[2] / "tools" / "fuzz.py"
    done = 0
    for name in TARGETS:
        command = [sys.executable, str(fuzz), name, "--runs", str(runs), "--memory", str(MEMORY_MB)]
        # libFuzzer ends without cleaning up, and keeps its findings in the working folder.
        place = os.environ | {"TMPDIR": str(tmp_path)}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=place)
        assert ended.returncode == 0, f"{name}: {ended.stderr[-3_000:]}"
        assert f"Done {runs} runs" in ended.stderr, f"{name}: {ended.stderr[-500:]}"
        done += runs
    assert done >= INPUTS
    figure(f"{done:,} inputs to {len(TARGETS)} parsers: no crash, no hang, memory below {MEMORY_MB} MB")
