"""A process that runs a recipe once, and prints its time and a digest of its result.

    python -m tools.bench.textrun WAY RECIPE THIRD INPUT CACHE

After all imports it prints "begins", so that its caller can kill it at work; at the end it prints one line of
JSON. The time is that of the run, with reading the input and hashing the operators, without imports and
making a vocabulary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from castore.adapters.datasets import CacheWarning
from castore.store import Store
from tools.bench import recipe

#: Plain `datasets`, castore's cached calls, its Pipeline with the cache, its Pipeline with a checkpoint.
WAYS = ("datasets", "calls", "cache", "checkpoint")
_PROJECT = Path(__file__).resolve().parents[2]
_DOCUMENTS = 2000


class Ran(NamedTuple):
    """The figures of a run.

    Attributes:
        seconds: its time.
        hits: for each step, whether it came from the cache; empty if unknown.
        rows: number of rows of the result.
        digest: of the result; "" if not asked for.
        warned: castore's warnings.
        stored: bytes of each step in the store; empty if unknown.
        reused: for each step, the rows that did not run; empty if unknown.
    """

    seconds: float
    hits: list[bool]
    rows: int
    digest: str
    warned: list[str]
    stored: list[int]
    reused: list[int]


def run(
    way: str,
    chain: list[Any],
    source: Path,
    cache: Path,
    *,
    check: bool = True,
    last: bool = False,
    num_proc: int | None = None,
) -> Ran:
    """Run a chain of operators in one of the ways.

    Args:
        way: one of `WAYS`.
        chain: of `recipe.operators`.
        source: a folder of `texts.saved`; plain `datasets` keeps its cache there.
        cache: the folder of the store.
        check: also make the digest of the result, untimed.
        last: also read the last row.
        num_proc: processes that share the rows of a step; not for `"calls"`.
    """
    hits: list[bool] = []
    stored: list[int] = []
    reused: list[int] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", CacheWarning)
        began = time.perf_counter()
        dataset = datasets.load_from_disk(source)
        if way == "datasets":
            dataset = recipe.plain(dataset, chain, num_proc)
            _read_ends(dataset, last)
            seconds = time.perf_counter() - began
            return Ran(seconds, hits, len(dataset), recipe.digest(dataset) if check else "", [], [], [])
        with Store(cache) as store:
            if way == "calls":
                dataset = recipe.calls(dataset, chain, store)
            else:
                made = recipe.pipeline(chain, store, checkpoint=way == "checkpoint", num_proc=num_proc)
                result = made.run(dataset)
                dataset, hits = result.dataset, [step.hit for step in result.steps]
                stored = [step.stored for step in result.steps]
                reused = [step.rows_reused for step in result.steps]
            _read_ends(dataset, last)
            seconds = time.perf_counter() - began
        messages = [str(item.message) for item in warned if issubclass(item.category, CacheWarning)]
        digest = recipe.digest(dataset) if check else ""
        return Ran(seconds, hits, len(dataset), digest, messages, stored, reused)


def _read_ends(dataset: datasets.Dataset, last: bool) -> None:
    dataset[:1]
    if last:
        dataset[len(dataset) - 1]


def documents(source: Path) -> list[str]:
    """Documents for a vocabulary, spread over the whole input."""
    dataset = datasets.load_from_disk(source)
    texts: list[str] = dataset.select(range(0, len(dataset), max(1, len(dataset) // _DOCUMENTS)))["text"][:]
    return texts


class Process:
    """A running process of this module.

    Args:
        way, name, third: as for `run` and `recipe.operators`.
        source, cache: as for `run`; the cache that `datasets` keeps elsewhere lies beside ``cache``.
        check, last, num_proc: as for `run`.
        counter: a file whose size becomes the number of rows that run, in all steps.
    """

    def __init__(
        self,
        way: str,
        name: str,
        third: int,
        source: Path,
        cache: Path,
        *,
        check: bool = True,
        last: bool = False,
        num_proc: int | None = None,
        counter: Path | None = None,
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "tools.bench.textrun",
            way,
            name,
            str(third),
            str(source),
            str(cache),
        ]
        self._process = subprocess.Popen(
            [
                *command,
                *(["--check"] if check else []),
                *(["--last"] if last else []),
                *([f"--num-proc={num_proc}"] if num_proc else []),
                *([f"--counter={counter}"] if counter else []),
            ],
            cwd=_PROJECT,
            env={**os.environ, "HF_DATASETS_CACHE": str(cache.parent / "hugging-face")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "begins\n":
            self.end()

    def end(self) -> Ran:
        """Wait for its end; returns its figures.

        Raises:
            RuntimeError: it failed.
        """
        output, errors = self._process.communicate()
        if self._process.returncode != 0 or not output:
            raise RuntimeError(f"a run failed ({self._process.returncode}): {errors.strip()[-2000:]}")
        return Ran(**json.loads(output))

    def peak(self, folder: Path) -> int:
        """The most bytes that the files below a folder take until it has ended.

        Looks every 10 ms. An unlinked file that is still open is not seen.
        """
        most = 0
        while self._process.poll() is None:
            most = max(most, recipe.size_on_disk(folder))
            time.sleep(0.01)
        return max(most, recipe.size_on_disk(folder))

    def has_ended(self) -> bool:
        """Whether it has ended by itself, or of an error."""
        return self._process.poll() is not None

    def kill(self) -> bool:
        """Kill it with SIGKILL; False if it had ended."""
        self._process.kill()
        self._process.communicate()
        return self._process.returncode < 0


def main() -> None:
    way, name, third, source, cache, *rest = sys.argv[1:]
    datasets.disable_progress_bars()
    chain = recipe.operators(name, int(third), lambda: documents(Path(source)))
    given = dict(word.split("=", 1) for word in rest if "=" in word)
    if "--counter" in given:
        chain = recipe.counted(chain, given["--counter"])
    print("begins", flush=True)
    ran = run(
        way, chain, Path(source), Path(cache), check="--check" in rest, last="--last" in rest,
        num_proc=int(given["--num-proc"]) if "--num-proc" in given else None,
    )  # fmt: skip
    print(json.dumps(ran._asdict()), flush=True)


if __name__ == "__main__":
    main()
