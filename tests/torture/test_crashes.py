"""Nothing acknowledged is lost, and nothing else is found, whenever a process is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.torture.random_kills import KINDS, PHASES, kill_at_random


def test_kills_at_random_moments_lose_nothing_that_was_acknowledged(
    tmp_path: Path, scale: Callable[[int, int], int], figure: Callable[[str], None]
) -> None:
    count = scale(200, 2_000)
    hits, left = kill_at_random(tmp_path / "store", count)
    phases, kinds = Counter[str](), Counter[str]()
    for (kind, phase), number in hits.items():
        phases[phase] += number
        kinds[kind] += number if phase != PHASES[0] else 0
    assert sum(kinds.values()) >= count * 3 // 4, f"too few kills hit an operation: {phases}"
    assert phases["in a transaction"] >= count // 20, f"too few kills hit a transaction: {phases}"
    assert min(kinds[kind] for kind in KINDS) > 0, f"some operations were never hit: {kinds}"
    assert left >= count // 20, f"only {left} kills left something behind"
    figure(f"{count} kills: " + ", ".join(f"{phases[phase]} {phase}" for phase in PHASES))
    figure(f"they hit {', '.join(f'{kinds[kind]} {kind}' for kind in KINDS)}; {left} left something for gc")
