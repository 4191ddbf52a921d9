"""A job on a Ray cluster of several nodes on this machine, in a network of its own: only loopback is there.

usage: unshare --net python -m tests.adapters.ray.cluster_job FOLDER
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster

from castore import Store
from castore.adapters.datasets import Pipeline
from castore.adapters.ray import map_batches, run, run_on_nodes
from castore.errors import InvalidValueError
from castore.remote.folder_bucket import FolderBucket
from tests.adapters.ray import loopback
from tests.mount.conftest import until

ROWS = 3000
_PAD = "x" * 10_000  # a block has several hundred rows


class Nodes:
    """A cluster. Each node but the head, which only keeps house, has a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False} | _SMALL,
        )
        self._nodes: dict[str, Any] = {}

    def add(self) -> None:
        store = str(self.folder / f"node{len(self._nodes)}")
        variables = {"CASTORE_DIR": store, "CASTORE_TEST_LOG": str(self.log)}
        self._nodes[store] = self.cluster.add_node(num_cpus=1, env_vars=variables, **_SMALL)

    def kill(self, store: str) -> None:
        """Kill the node of a store."""
        self.cluster.remove_node(self._nodes[store], allow_graceful=False)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def take_log(self) -> list[tuple[int, str]]:
        """The numbers that functions have seen since the last call, and the store of the node of each."""
        if not self.log.exists():
            return []
        lines = [line.split() for line in self.log.read_text().splitlines()]
        self.log.unlink()
        return [(int(number), store) for number, store in lines]


_SMALL = {"object_store_memory": 100 << 20}


def note(number: int) -> None:
    with open(os.environ["CASTORE_TEST_LOG"], "a") as file:
        file.write(f"{number} {os.environ['CASTORE_DIR']}\n")


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"n": list(range(ROWS)), "text": [f"{n} {_PAD}" for n in range(ROWS)]})


def measure(row: dict[str, Any]) -> dict[str, Any]:
    import time

    note(row["n"])
    time.sleep(0.004)
    return {"length": len(row["text"])}


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * row["length"]}


def fail(row: dict[str, Any]) -> dict[str, Any]:
    raise KeyError(f"row {row['n']}")


def squares(batch: dict[str, Any]) -> dict[str, Any]:
    for number in batch["id"]:
        note(int(number))
    return {
        "id": batch["id"],
        "square": batch["id"] ** 2,
        "grid": batch["id"][:, None, None] * np.ones((2, 2)),
    }


def runs_a_pipeline_while_a_node_is_killed_and_another_comes(nodes: Nodes, store: Store) -> None:
    for _ in range(2):
        nodes.add()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, Pipeline([measure, double], store=store), rows())
        until(lambda: nodes.log.exists() and len(nodes.log.read_text().splitlines()) > ROWS / 2, 300)
        at_work = nodes.log.read_text().splitlines()[-1].split()[1]
        nodes.kill(at_work)
        nodes.add()
        result = running.result()
    plain = rows().map(lambda row: {"length": len(row["text"])}).map(double)
    assert result.dataset[:] == plain[:]
    assert result.dataset.features == plain.features
    assert [step.rows_run for step in result.steps] == [0, 0], "the driver has run rows"
    seen = nodes.take_log()
    assert {number for number, _ in seen} == set(range(ROWS))
    assert len(seen) < 1.5 * ROWS, "more ran again than what the killed node had under way"
    assert len({place for _, place in seen}) > 1, "the killed node has run all"


def runs_nothing_again(nodes: Nodes, store: Store) -> None:
    assert run(Pipeline([measure, double], store=store), rows()).hits == 2
    assert nodes.take_log() == []


def raises_what_an_operator_raises(nodes: Nodes, store: Store) -> None:
    with pytest.raises(KeyError, match="row"):
        run(Pipeline([fail], store=store), rows())


def refuses_stores_and_pipelines_that_share_nothing(nodes: Nodes, store: Store) -> None:
    alone = Store(nodes.folder / "alone")
    for refused in (
        partial(run, Pipeline([double], store=alone), rows()),
        partial(run_on_nodes, print, alone),
        partial(run, Pipeline([double], store=store, use_cache=False), rows()),
        partial(map_batches, ray.data.range(10), squares, alone),
    ):
        with pytest.raises(InvalidValueError, match=r"remote|use_cache"):
            refused()


def keeps_batches(nodes: Nodes, store: Store) -> None:
    numbers, bucket = ray.data.range(5000, override_num_blocks=1), FolderBucket(nodes.folder / "bucket")
    before = len(list(bucket.listing("keys/")))
    first = map_batches(numbers, squares, store, batch_size=500).sort("id").take_all()
    assert [row["square"] for row in first] == [number**2 for number in range(5000)]
    assert first[7]["grid"].tolist() == [[7, 7], [7, 7]]
    assert sorted(number for number, _ in nodes.take_log()) == list(range(5000))
    # Results are offered in the background; the next run may be on another node.
    until(lambda: len(list(bucket.listing("keys/"))) == before + 10)
    again = map_batches(numbers, squares, store, batch_size=500).sort("id").take_all()
    assert str(again) == str(first)
    assert nodes.take_log() == []
    frames = map_batches(numbers, lambda frame: frame[frame["id"] < 3], store, batch_format="pandas")
    assert frames.count() == 3


class Times:
    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def __call__(self, batch: dict[str, Any], plus: int = 0) -> dict[str, Any]:
        return {"id": batch["id"], "made": batch["id"] * self.factor + plus}


def halves(batch: dict[str, Any]) -> Any:
    yield {"id": batch["id"][:5], "made": batch["id"][:5]}
    yield {"id": batch["id"][5:], "made": batch["id"][5:]}


def keeps_batches_of_all_kinds_of_functions(nodes: Nodes, store: Store) -> None:
    # A node has one CPU, which an actor keeps: no task reads the numbers.
    numbers = ray.data.from_items([{"id": number} for number in range(10)], override_num_blocks=1)
    one_actor: dict[str, Any] = {"concurrency": 1, "fn_constructor_kwargs": {"factor": 3}}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (halves, {}),
        (Times(), {}),
        (Times(), {"fn_kwargs": {"plus": 1}}),
        (Times(), {"fn_args": (2,)}),
        (Times, one_actor),
        (Times, one_actor | {"fn_kwargs": {"plus": 1}}),
    ]
    for function, options in kinds:
        plain = numbers.map_batches(function, batch_size=10, **options)
        kept = [map_batches(numbers, function, store, batch_size=10, **options) for _ in range(2)]
        assert {str(each.take_all()) for each in kept} == {str(plain.take_all())}


def _unit(batch: Any) -> Any:
    return pa.table({"unit": [batch.schema.metadata[b"unit"].decode()] * len(batch)})


def _doubled(batch: Any) -> Any:
    return {"length": [len(np.asarray(value + value)) for value in batch["a"]]}


def _texts(batch: Any) -> Any:
    return {"text": [str(value) for value in batch["a"]]}


def _above_one(batch: Any) -> Any:
    return pd.DataFrame({"is": ["high" if value > 1 else "low" for value in batch["a"]]})


def _missing(batch: Any) -> Any:
    column = batch["a"]
    return pd.DataFrame({"dtype": [str(column.dtype)], "missing": [int((column != column).sum())]})


def _large_ones(batch: Any) -> Any:
    for number in batch["a"]:
        if number >= 4:
            yield {"a": np.array([number])}


def _int_then_float(batch: Any) -> Any:
    yield {"a": np.array([1])}
    yield {"a": np.array([1.5])}


class _Async:
    async def __call__(self, batch: Any) -> Any:
        yield batch


def gives_what_ray_alone_gives(nodes: Nodes, store: Store) -> None:
    """Blocks of pandas reach the function as they are, and what makes batches differ tells them apart."""

    def frame(*values: Any) -> Any:
        return ray.data.from_pandas(pd.DataFrame({"a": [*values]}))

    table = pa.table({"a": [1, 2]})
    cases: list[tuple[Any, Any, str]] = [
        *((ray.data.from_arrow(table.replace_schema_metadata({"unit": unit})), _unit, "pyarrow")
          for unit in ("mm", "inch")),
        (frame([1], [2, 3]), _doubled, "numpy"),
        (frame({"x": 1}, {"y": 2}), _texts, "numpy"),
        (frame({"y": 2}, {"x": 1}), _texts, "numpy"),
        (frame(2.0, float("nan")), _above_one, "pandas"),
        (frame(2.0, float("nan")), _missing, "pandas"),
        (frame(*range(8)), _large_ones, "numpy"),
        (frame(*range(4)), _int_then_float, "numpy"),
    ]  # fmt: skip
    for data, function, batch_format in cases:
        plain = data.map_batches(function, batch_size=4, batch_format=batch_format).take_all()
        for _ in range(2):
            kept = map_batches(data, function, store, batch_size=4, batch_format=batch_format)
            assert str(kept.take_all()) == str(plain), function.__name__
    with pytest.raises(InvalidValueError, match="is async"):
        map_batches(frame(1), cast("Any", _Async), store)


def keeps_nothing_of_workers_with_other_code(nodes: Nodes, store: Store) -> None:
    """Ray sends functions of modules by name, and a worker may import another file by then."""
    modules = nodes.folder / "modules"
    code = "def scale():\n    return 2\n\ndef scaled(batch):\n    return {'made': batch['id'] * scale()}\n"
    (modules / "edited.py").write_text(code)
    scaled = importlib.import_module("edited").scaled

    def run_on_new_workers(begun: str) -> list[int]:
        runtime = {"env_vars": {"BEGUN": begun}}
        made = map_batches(ray.data.range(8), scaled, store, runtime_env=runtime)
        return sorted(row["made"] for row in made.take_all())

    (modules / "edited.py").write_text(code.replace("return 2", "return 33"))
    assert run_on_new_workers("edited") == [*range(0, 8 * 33, 33)], "as Ray alone does"
    (modules / "edited.py").write_text(code)
    assert run_on_new_workers("restored") == [*range(0, 16, 2)]


def keeps_batches_of_functions_that_load_what_they_use_late(nodes: Nodes, store: Store) -> None:
    """A global that a worker's first batch has filled makes no other function of it."""
    (nodes.folder / "modules" / "late.py").write_text(
        "from tests.adapters.ray.cluster_job import note\n\nMODEL = None\n\ndef late(batch):\n"
        "    global MODEL\n    if MODEL is None:\n        MODEL = 3\n"
        "    note(int(batch['id'][0]))\n    return {'made': batch['id'] * MODEL}\n"
    )
    late = importlib.import_module("late").late
    nodes.take_log()
    bucket = FolderBucket(nodes.folder / "bucket")
    before = len(list(bucket.listing("keys/")))
    for expected in (8, 0):
        kept = map_batches(ray.data.range(8, override_num_blocks=8), late, store, batch_size=1)
        assert sorted(row["made"] for row in kept.take_all()) == [*range(0, 24, 3)]
        assert len(nodes.take_log()) == expected
        # Results are offered in the background; the next run may be on another node.
        until(lambda: len(list(bucket.listing("keys/"))) == before + 8)


def refuses_nodes_with_other_code(nodes: Nodes, store: Store) -> None:
    code = "def longer(row):\n    return {'length': len(row['text']) + 1}\n"
    (nodes.folder / "modules" / "operators.py").write_text(code)
    longer = importlib.import_module("operators").longer
    (nodes.folder / "modules" / "operators.py").write_text(code.replace("+ 1", "+ 2"))
    with pytest.raises(InvalidValueError, match=r"longer .* is another operator on the node"):
        run(Pipeline([longer], store=store), rows())


def runs_a_recipe_by_the_command_line(nodes: Nodes, store: Store) -> None:
    texts = [{"text": f"A line of text, number {number}. " + _PAD} for number in range(1000)]
    (nodes.folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (nodes.folder / "recipe.yaml").write_text(
        "project_name: lines\ndataset_path: in.jsonl\nexport_path: out.jsonl\n"
        "process:\n  - whitespace_normalization_mapper:\n  - text_length_filter:\n      min_len: 10\n"
    )
    command = [
        sys.executable,
        "-m",
        "castore",
        "--store",
        str(store.path),
        "process",
        "--config",
        "recipe.yaml",
    ]
    done = subprocess.run(
        [*command, "--remote", "team", "--on", "ray", "--address", nodes.cluster.address, "--json"],
        cwd=nodes.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["rows_out"] == 1000
    assert {step["rows_run"] for step in told["steps"]} == {0}, "the driver has run rows"
    assert len((nodes.folder / "out.jsonl").read_text().splitlines()) == 1000


def main(folder: Path) -> None:
    loopback.bring_up()
    nodes = Nodes(folder)
    try:
        ray.init(address=nodes.cluster.address, log_to_driver=False)
        with Store(folder / "driver", remote="team") as store:
            for case in (
                runs_a_pipeline_while_a_node_is_killed_and_another_comes,
                runs_nothing_again,
                raises_what_an_operator_raises,
                refuses_stores_and_pipelines_that_share_nothing,
                keeps_batches,
                keeps_batches_of_all_kinds_of_functions,
                gives_what_ray_alone_gives,
                keeps_nothing_of_workers_with_other_code,
                keeps_batches_of_functions_that_load_what_they_use_late,
                refuses_nodes_with_other_code,
                runs_a_recipe_by_the_command_line,
            ):
                case(nodes, store)
                print(case.__name__, flush=True)
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
