"""A program that runs steps in small blocks, each time in a child of its own that tests may kill.

It reads one job a line, in JSON, forks a child for it, and prints the child's process id, then the status
that the child ended with. So a kill costs no start of Python. The child writes one byte for each row that
runs, whatever process runs it, and what it made of all rows.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import datasets

from castore import Store
from castore.adapters.datasets import Pipeline, cached_map, wait
from tests.adapters.datasets.small_blocks import small_blocks, told

#: Rows of the input, and bytes and rows of a block.
COUNT, BYTES, ROWS = 5000, 8192, 100


class Ran:
    """Counts rows in a file; does not count in keys."""

    file = -1
    #: At that row of all, wait until a file is there.
    stop: tuple[int, str] | None = None

    def __castore_key__(self) -> str:
        return "Ran"

    def __call__(self) -> None:
        os.write(self.file, b".")
        if self.stop is not None and os.fstat(self.file).st_size >= self.stop[0]:
            while not os.path.exists(self.stop[1]):
                time.sleep(0.001)


ran = Ran()


def texts(count: int = COUNT) -> datasets.Dataset:
    """The input."""
    rows = {"number": list(range(count)), "text": [f"{n} " + "word " * (n * 7 % 13) for n in range(count)]}
    return datasets.Dataset.from_dict(rows)


def longer(sample: dict[str, Any]) -> dict[str, Any]:
    """A mapper."""
    ran()
    return {"text": sample["text"] + "!", "size": len(sample["text"])}


class Short:
    """A filter with a statistic."""

    def compute_stats(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Measure the text."""
        ran()
        sample["__dj__stats__"]["length"] = len(sample["text"])
        return sample

    def process(self, sample: dict[str, Any]) -> bool:
        """Whether it is short."""
        ran()
        return bool(sample["__dj__stats__"]["length"] % 3)


def pipeline(data: datasets.Dataset, store: Store, num_proc: int) -> datasets.Dataset:
    """Four steps: a map, a filter and its statistics, a map."""
    return Pipeline([longer, Short(), shout], store=store, num_proc=num_proc).run(data).dataset


def shout(sample: dict[str, Any]) -> dict[str, Any]:
    """Another mapper."""
    ran()
    return {"text": sample["text"].upper()}


def one_step(data: datasets.Dataset, store: Store, num_proc: int) -> datasets.Dataset:
    """One step."""
    return cached_map(data, longer, store=store, num_proc=num_proc)


def drawing(data: datasets.Dataset, store: Store, num_proc: int) -> datasets.Dataset:
    """One step, which has the lock of the bars while a row runs."""

    def function(sample: dict[str, Any]) -> dict[str, Any]:
        with datasets.utils.tqdm.get_lock():
            return longer(sample)

    return cached_map(data, function, store=store, num_proc=num_proc)


def plainly(what: str) -> datasets.Dataset:
    """The result of `datasets` alone."""
    data, short = texts().map(longer), Short()
    if what in ("one_step", "drawing"):
        return data
    data = data.map(lambda sample: short.compute_stats({**sample, "__dj__stats__": {}}))
    return data.filter(short.process).map(shout)


def run(job: dict[str, Any]) -> None:
    """Do one job, in this process."""
    Ran.file = os.open(job["counter"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    Ran.stop = tuple(job["stop"]) if "stop" in job else None
    with small_blocks(BYTES, ROWS), Store(job["store"], memory=0) as store:
        if "started" in job:
            Path(job["started"]).touch()
        result = globals()[job["what"]](texts(), store, job["num_proc"])
        Path(job["out"]).write_text(json.dumps(told(result)))
        wait()


def main() -> None:
    """Do jobs, each in a child, until the input ends."""
    datasets.disable_progress_bars()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                run(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
