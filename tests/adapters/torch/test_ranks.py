"""torchrun's variables are read with its defaults, and what contradicts itself is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from castore import CastoreError
from castore.adapters.torch import ranks
from castore.adapters.torch.ranks import Ranks, job_id, read_ranks

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_without_a_launcher_there_is_one_rank() -> None:
    assert read_ranks({}) == Ranks(0, 0, 1, 1, 0, 1)


def test_torchruns_variables_are_read() -> None:
    assert read_ranks(TORCHRUN) == Ranks(
        rank=5, local_rank=1, world_size=8, local_world_size=4, node=1, nodes=2
    )


def test_empty_variables_count_as_unset() -> None:
    assert read_ranks({"RANK": "", "WORLD_SIZE": " "}) == Ranks()


def test_the_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert read_ranks().rank == 1


def test_nodes_are_counted_where_a_launcher_does_not_number_them() -> None:
    bare = {key: text for key, text in TORCHRUN.items() if not key.startswith("GROUP")}
    assert (read_ranks(bare).node, read_ranks(bare).nodes) == (1, 2)


def test_nodes_of_unequal_size_are_what_the_launcher_says() -> None:
    uneven = TORCHRUN | {"RANK": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1"}
    assert (read_ranks(uneven).node, read_ranks(uneven).nodes) == (1, 2)


# As Lightning sets them for the processes that it starts itself.
LIGHTNING = {
    "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def test_ranks_that_lightning_starts_are_those_of_one_node() -> None:
    found = [read_ranks(LIGHTNING | {"LOCAL_RANK": str(local)}) for local in range(4)]
    assert found == [Ranks(local, local, 4, 4, 0, 1) for local in range(4)]
    assert len({job_id(LIGHTNING | {"LOCAL_RANK": str(local)}) for local in range(4)} - {None}) == 1


def test_ranks_of_several_nodes_need_the_size_of_a_node() -> None:
    apart = LIGHTNING | {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"}
    with pytest.raises(CastoreError, match=r"LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1"):
        read_ranks(apart)
    assert read_ranks(apart | {"LOCAL_WORLD_SIZE": "2"}) == Ranks(3, 1, 4, 2, 1, 2)


_GROUP_OF_TWO = """
import sys
import torch.distributed as dist
import torch.multiprocessing as mp
from castore.adapters.torch.ranks import Ranks, read_ranks

def check(rank, place):
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    assert read_ranks() == Ranks(rank, 0, 2, 1, rank, 2), read_ranks()
    assert read_ranks(rank=0, num_replicas=1) == Ranks()
    dist.destroy_process_group()
    assert read_ranks() == Ranks()

if __name__ == "__main__":
    mp.spawn(check, (sys.argv[1],), nprocs=2)
"""


def test_a_process_group_without_variables_tells_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_GROUP_OF_TWO)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "group")]
    alone = {name: text for name, text in os.environ.items() if name not in TORCHRUN}
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run(command, check=True, env=alone | {"PYTHONPATH": path}, timeout=140)


def test_a_given_rank_goes_before_the_variables() -> None:
    given = read_ranks({}, rank=3, num_replicas=8)
    assert (given.rank, given.world_size, given.node, given.nodes) == (3, 8, 3, 8)


def test_the_same_rank_given_by_hand_changes_nothing() -> None:
    assert read_ranks(TORCHRUN, rank=5, num_replicas=8) == read_ranks(TORCHRUN)


def test_a_rank_given_alone_takes_the_world_from_the_variables() -> None:
    assert read_ranks(TORCHRUN, rank=2).world_size == 8
    with pytest.raises(CastoreError, match=r"rank is 2, but num_replicas is 1.*give both"):
        read_ranks({}, rank=2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"RANK": "one"}, "RANK is 'one', which is no whole number"),
        ({"RANK": "1.0"}, "RANK is '1.0', which is no whole number"),
        ({"RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8"),
        ({"RANK": "-1"}, "RANK is -1"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is 4, but LOCAL_WORLD_SIZE is 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_WORLD_SIZE is 4, but WORLD_SIZE is 2"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK is 2, but GROUP_WORLD_SIZE is 2"),
    ],
)
def test_contradictions_are_errors_that_name_the_variable(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(CastoreError, match=said):
        read_ranks(TORCHRUN | wrong)


@pytest.mark.parametrize("wrong", [True, 1.0, "1"])
def test_a_given_rank_is_a_whole_number(wrong: object) -> None:
    with pytest.raises(CastoreError, match="give a whole number"):
        read_ranks({}, rank=wrong, num_replicas=2)  # type: ignore[arg-type]


def test_one_rank_on_a_node_has_nobody_to_share_with() -> None:
    assert job_id({}) is None
    assert job_id(TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) is None


def test_ranks_of_a_node_agree_on_the_job_and_jobs_differ() -> None:
    own = job_id(TORCHRUN)
    assert own == job_id(TORCHRUN | {"RANK": "7", "LOCAL_RANK": "3"})
    others = [
        {"MASTER_PORT": "29501"},
        {"MASTER_ADDR": "10.0.0.2"},
        {"TORCHELASTIC_RUN_ID": "nightly"},
        {"GROUP_RANK": "0"},
    ]
    assert len({own, *(job_id(TORCHRUN | other) for other in others)}) == 1 + len(others)


def test_a_job_that_nothing_tells_from_others_is_an_error() -> None:
    unknown = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    with pytest.raises(CastoreError, match="start with torchrun"):
        job_id(unknown)
    assert job_id(unknown | {"TORCHELASTIC_RUN_ID": "nightly"}) is not None


def test_reading_ranks_needs_no_torch() -> None:
    # The module alone: the package around it is there for datasets, and brings torch.
    code = (
        f"import runpy, sys; runpy.run_path({ranks.__file__!r})['job_id'](); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
