"""The five steps of the tests on pipelines, and a program that runs them: two mappers, two filters, a
deduplicator.

Every operator appends a letter to the file that ``CASTORE_TEST_RUNS`` names when it begins. So runs can be
counted, whatever process does them. Run as a program, with a store, a mode and a pause for each sample, the
module prints the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import datasets

from castore import Store
from castore.adapters.datasets import Pipeline

STATS = "__dj__stats__"


class Noted:
    """Notes which step runs; does not count in keys."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __castore_key__(self) -> str:
        return "Noted"

    def __call__(self, step: str) -> None:
        pause = float(os.environ.get("CASTORE_TEST_PAUSE", "0"))
        if pause:
            time.sleep(pause)
        if step not in self.seen:
            self.seen.add(step)
            with open(os.environ["CASTORE_TEST_RUNS"], "a", encoding="ascii") as file:
                file.write(step)


noted = Noted()


def strip_comments(sample: dict[str, Any]) -> dict[str, Any]:
    """Step 1."""
    noted("1")
    return {"text": re.sub(r"#.*", "", sample["text"])}


def lower(sample: dict[str, Any]) -> dict[str, Any]:
    """Step 2."""
    noted("2")
    return {"text": sample["text"].lower()}


class LengthFilter:
    """Step 3, with its statistics."""

    def __init__(self, least: int) -> None:
        self.least = least

    def compute_stats(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Measure the length of the text."""
        noted("s")
        sample[STATS]["length"] = len(sample["text"])
        return sample

    def process(self, sample: dict[str, Any]) -> bool:
        """Whether the text is long enough."""
        noted("3")
        return bool(sample[STATS]["length"] >= self.least)


class LettersFilter:
    """Step 4, with its statistics."""

    def compute_stats(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Measure the share of letters in the text."""
        noted("t")
        sample[STATS]["letters"] = sum(map(str.isalpha, sample["text"][:2000])) / max(
            1, len(sample["text"][:2000])
        )
        return sample

    def process(self, sample: dict[str, Any]) -> bool:
        """Whether the share of letters is large enough."""
        noted("4")
        return bool(sample[STATS]["letters"] > 0.4)


class Deduplicator:
    """Step 5."""

    def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Hash the first words."""
        noted("5")
        return {**sample, "hash": hashlib.sha256(sample["text"][:40].encode()).hexdigest()}

    def process(self, data: datasets.Dataset) -> datasets.Dataset:
        """Keep the first sample of each hash."""
        seen: set[str] = set()
        keep = [
            at
            for at, digest in enumerate(data["hash"])
            if not (digest in seen or seen.add(digest))  # type: ignore[func-returns-value]
        ]
        return data.select(keep)


def operators(least: int = 3000) -> list[Any]:
    """All five steps."""
    return [strip_comments, lower, LengthFilter(least), LettersFilter(), Deduplicator()]


def plainly(data: datasets.Dataset, least: int = 3000) -> datasets.Dataset:
    """The result of the five steps, computed by datasets alone."""
    data = data.map(strip_comments).map(lower)
    first, second, third = LengthFilter(least), LettersFilter(), Deduplicator()
    data = data.map(lambda sample: first.compute_stats({**sample, STATS: {}})).filter(first.process)
    data = data.map(second.compute_stats, try_original_type=False).filter(second.process)
    return third.process(data.map(third.compute_hash)).remove_columns("hash")


def texts() -> datasets.Dataset:
    """The standard library's sources, some of them twice."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:90]
    files += files[20:30]
    # Operators take longer for longer texts, and the filters look at the first thousands of letters.
    text = [path.read_text(encoding="utf-8", errors="replace")[:12_000] for path in files]
    return datasets.Dataset.from_dict({"text": text, "name": [path.name for path in files]})


def main(store: str, mode: str, pause: str) -> None:
    """Run the pipeline and print its reports and a digest of its result."""
    datasets.disable_progress_bars()
    os.environ["CASTORE_TEST_PAUSE"] = pause
    pipeline = Pipeline(operators(), store=Store(store), use_checkpoint=mode == "checkpoint")
    result = pipeline.run(texts())
    report = {"hits": [step.hit for step in result.steps], "rows": result.dataset["name"][:]}
    print(json.dumps({**report, "digest": hashlib.sha256(repr(result.dataset[:]).encode()).hexdigest()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
