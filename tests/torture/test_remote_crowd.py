"""Two to eight nodes on one remote lose nothing that was acknowledged, whoever is killed."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import in_small_process
from tests.remote.conftest import folder, seaweedfs  # noqa: F401 (fixtures)
from tests.remote.servers import Place as Server
from tests.remote.servers import environment
from tests.torture.remote_crowd import KILLS, Place, crowd

#: How often each event must be seen in the quick form.
_ENOUGH = {"pushed": 3, "read": 5, "warmed": 1, "mounted": 2, "collected": 1}
_ENOUGH_OF_FIVE = {"pulled": 1, "pulled lazily": 1, "got": 3}


@pytest.mark.parametrize(
    ("server", "nodes"),
    [
        ("folder", 5),
        *(
            pytest.param(server, nodes, marks=pytest.mark.matrix)
            for server, nodes in [("folder", 2), ("folder", 8), ("seaweedfs", 8)]
        ),
    ],
)
def test_nodes_that_push_pull_mount_and_collect_while_they_are_killed_lose_nothing(
    server: str,
    nodes: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    scale: Callable[[float, float], float],
    figure: Callable[[str], None],
) -> None:
    there: Server = request.getfixturevalue(server)
    place = Place(tmp_path, f"{there.url}/{uuid.uuid4().hex}", nodes, grace=scale(1.0, 4.0))
    with environment(there.environment):
        seen = in_small_process(crowd, place, partial(_enough, nodes, scale(0.0, 60.0), time.monotonic()))
    did = ", ".join(
        f"{seen[what]} {what}" for what in ("pushed", "merged", "pulled", "pulled lazily", "read")
    )
    kills = ", ".join(f"{seen[f'killed {kind}']} {kind}" for kind in KILLS)
    figure(
        f"{nodes} nodes, {server}: {did}; {seen['collected']} collections; kills: {kills};"
        " nothing acknowledged was lost, nothing wrong was read, nothing was left behind"
    )


def _enough(nodes: int, seconds: float, began: float, seen: Counter[str]) -> bool:
    needed = _ENOUGH | (_ENOUGH_OF_FIVE if nodes >= 5 else {}) | {f"killed {kind}": 1 for kind in KILLS}
    return time.monotonic() > began + seconds and all(seen[what] >= count for what, count in needed.items())
