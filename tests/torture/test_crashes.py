"""Nothing acknowledged is lost, and nothing else is found, whenever a process is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.helpers import in_small_process
from tests.torture.random_kills import KINDS, PHASES, kill_at_random


def test_kills_at_random_moments_lose_nothing_that_was_acknowledged(
    tmp_path: Path, scale: Callable[[int, int], int], figure: Callable[[str], None]
) -> None:
    least = scale(25, 2_000)
    hits, left = in_small_process(kill_at_random, tmp_path / "store", least, seen_all)
    count, (phases, kinds) = sum(hits.values()), counted(hits)
    assert seen_all(hits, left), f"some operations or phases were never hit: {kinds}, {phases}, {left} left"
    assert sum(kinds.values()) >= count * 3 // 4, f"too few kills hit an operation: {phases}"
    assert phases["in a transaction"] >= count // 20, f"too few kills hit a transaction: {phases}"
    assert left >= count // 20, f"only {left} kills left something behind"
    figure(f"{count} kills: " + ", ".join(f"{phases[phase]} {phase}" for phase in PHASES))
    figure(f"they hit {', '.join(f'{kinds[kind]} {kind}' for kind in KINDS)}; {left} left something for gc")


def counted(hits: Counter[tuple[str, str]]) -> tuple[Counter[str], Counter[str]]:
    """The number of kills by phase, and by the kind of the operation that they hit."""
    phases, kinds = Counter[str](), Counter[str]()
    for (kind, phase), number in hits.items():
        phases[phase] += number
        kinds[kind] += number if phase != PHASES[0] else 0
    return phases, kinds


def seen_all(hits: Counter[tuple[str, str]], left: int) -> bool:
    """Whether kills hit each kind of operation and each phase of one, and some left something behind."""
    phases, kinds = counted(hits)
    return min(kinds[kind] for kind in KINDS) > 0 and min(phases[phase] for phase in PHASES[1:]) > 2 < left
