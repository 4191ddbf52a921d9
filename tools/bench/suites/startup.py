"""The wait before anything happens: the import and the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import castore
from tools.bench import corpus
from tools.bench.harness import Bench, Contestant, Goal, Row, milliseconds, seconds
from tools.bench.peers import castore as command
from tools.bench.peers import run

TITLE = "Starting up"
ABOUT = (
    "Each figure is a process of its own. `import` is timed inside the process, without the interpreter's "
    "start. Cold means that the kernel's caches were dropped, so Python itself comes from the disk as well."
)


def rows(bench: Bench) -> Iterator[Row]:
    folder = bench.work / "castore"
    with castore.Store(folder) as store:
        values = corpus.records(bench.size(10_000, 1000), 2048, "startup")
        store.put_many((f"records/{number:06}", value) for number, value in enumerate(values))
    yield Row(
        "import",
        milliseconds(),
        [
            Contestant("from castore import Store", _imports("from castore import Store"), ours=True),
            Contestant("import diskcache", _imports("import diskcache")),
        ],
        reference="import diskcache",
        goals=[Goal("from castore import Store", at_most=60)],
    )
    for cold in (False, True):
        yield Row(
            f"castore stat, {'cold' if cold else 'warm'} file caches",
            seconds(),
            [
                Contestant("castore stat", lambda: run(*command("--store", folder, "stat")), ours=True),
            ],
            reference="castore stat",
            cold=cold,
            goals=[Goal("castore stat", at_most=0.25)],
        )


def _imports(statement: str) -> Callable[[], float]:
    program = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return lambda: float(subprocess.check_output([sys.executable, "-c", program]))
