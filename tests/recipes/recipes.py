"""A folder with real text, a recipe and the user's own operators, for the tests on `castore process`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from castore.cli.main import main
from tests.cli.conftest import Ran, folder  # noqa: F401 - a fixture
from tests.warm import Started, WarmPython

MODULE = '''
"""Operators of the user's own, beside the recipe."""
import os, pathlib, signal, time

class MyCustomMapper:
    def __init__(self, param: str):
        self.param = param
    def process(self, sample):
        return {**sample, "text": sample["text"] + self.param}

class LanguageIdScoreFilter:
    """Stands in for a model: what is mostly ASCII is English."""
    def __init__(self, lang: str = "en", min_score: float = 0.8):
        self.lang, self.min_score = lang, min_score
    def compute_stats(self, sample):
        text = sample["text"]
        sample["__dj__stats__"]["lang_score"] = sum(map(str.isascii, text)) / max(1, len(text))
        return sample
    def process(self, sample):
        return sample["__dj__stats__"]["lang_score"] >= self.min_score

def breaks(sample):
    if sample["n"] == 30:
        raise RuntimeError("cannot\\nstand 30")
    return sample

def ends(sample):
    raise SystemExit(3)

def marks(sample):
    with open("marks", "a") as file:
        file.write("x")
    return sample

def goes_on():
    """One more row, for whoever waits for it."""
    with open("rows", "a") as file:
        file.write("x")
    if not os.path.exists("quick"):
        time.sleep(0.002)

def slow(sample):
    goes_on()
    return {"text": sample["text"] + " slow"}

def slower(sample):
    goes_on()
    return {"text": sample["text"] + " slower"}

def tells(sample):
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    if not os.path.exists("quick"):
        time.sleep(0.1)
    return sample

class Tells:
    def compute_stats(self, sample):
        return tells(sample)
    def process(self, sample):
        return True

def interrupted(sample):
    if sample["n"] == 50 and os.path.exists("interrupt"):
        os.remove("interrupt")
        os.kill(os.getpid(), signal.SIGINT)
    return sample

def grows(sample):
    return {"text": os.urandom(20_000).hex()}
'''

STEPS: list[Any] = [
    {"text_length_filter": {"min_len": 100}},
    "clean_links_mapper",
    "whitespace_normalization_mapper",
    {"character_repetition_filter": {"max_ratio": 0.4}},
    "document_deduplicator",
]
NAMES = [
    "text_length_filter (stats)",
    "text_length_filter",
    "clean_links_mapper",
    "whitespace_normalization_mapper",
    "character_repetition_filter (stats)",
    "character_repetition_filter",
    "document_deduplicator",
]


@pytest.fixture
def place(folder: Path, sources: dict[str, list[Any]]) -> Iterator[Path]:  # noqa: F811
    """A folder with real text and a module of operators, which is the working folder."""
    root = folder.parent
    rows = zip(sources["text"], range(len(sources["text"])), strict=True)
    (root / "data").mkdir()
    # Operators take longer for longer texts, and no promise is about the length.
    lines = [json.dumps({"text": text[:600], "n": n}) for text, n in rows]
    # Every filter finds something here.
    lines += [
        json.dumps({"text": text, "n": -1})
        for text in ("short", "-" * 500, *(text[:600] for text in sources["text"][:5]))
    ]
    (root / "data" / "demo.jsonl").write_text("\n".join(lines) + "\n")
    (root / "my_ops.py").write_text(MODULE)
    before = sys.path.copy()
    yield root
    sys.path[:] = before
    sys.modules.pop("my_ops", None)


@pytest.fixture
def castore(folder: Path, warm_datasets: WarmPython) -> Callable[..., Started]:  # noqa: F811
    """Start a command in a process of its own, as a shell does, but with the imports of `castore process`."""

    def start(*words: str | Path, env: dict[str, str] | None = None, **options: Any) -> Started:
        command = ["-m", "castore", "--store", folder, *words]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return warm_datasets.start(command, env=os.environ | (env or {}), **streams | options)

    return start


@pytest.fixture
def here(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., Ran]:
    """Run `castore process` with the place of the store in the environment."""
    monkeypatch.setenv("CASTORE_DIR", str(place / "store"))

    def run(*words: str | Path) -> Ran:
        capfdbinary.readouterr()
        code = main(["process", *map(str, words)])
        out, err = capfdbinary.readouterr()
        return Ran(code, out, err.decode())

    return run


def recipe(place: Path, steps: list[Any] = STEPS, **keys: Any) -> Path:
    """A recipe's file."""
    values = {
        "dataset_path": "./data/demo.jsonl",
        "export_path": "./outputs/demo.jsonl",
        **keys,
        "process": steps,
    }
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def hits(ran: Any) -> list[bool]:
    return [step["hit"] for step in ran.json["steps"]]


def exported(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "outputs/demo.jsonl").read_text().splitlines()]


def expected(place: Path) -> list[dict[str, Any]]:
    """The same result by a loop, with nothing of castore but the cleaning itself."""
    from castore.recipes import registry

    links, spaces = registry.make("clean_links_mapper"), registry.make("whitespace_normalization_mapper")
    repetition = registry.make("character_repetition_filter", {"max_ratio": 0.4})
    seen, rows = set(), []
    for line in (place / "data/demo.jsonl").read_text().splitlines():
        row = json.loads(line)
        if len(row["text"]) < 100:
            continue
        row["text"] = spaces.clean(links.clean(row["text"]))
        if repetition.measure(row["text"]) > 0.4 or row["text"] in seen:
            continue
        seen.add(row["text"])
        rows.append(row)
    return rows
