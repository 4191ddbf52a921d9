"""`castore process`: the seed's recipes and command lines, what is printed, what goes wrong, and what is left after a kill."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from castore import Store
from castore.cli.main import main
from tests.cli.conftest import Cli, Ran, castore, cli, folder  # noqa: F401 - fixtures
from tests.helpers import flip, payload

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

def marks(sample):
    with open("marks", "a") as file:
        file.write("x")
    return sample

def slow(sample):
    time.sleep(0.01)
    return {"text": sample["text"] + " slow"}

def slower(sample):
    time.sleep(0.012)
    return {"text": sample["text"] + " slower"}

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
    lines = [json.dumps({"text": text, "n": n}) for text, n in rows]
    # Something for every filter to find.
    lines += [json.dumps({"text": text, "n": -1}) for text in ("short", "-" * 500, *sources["text"][:5])]
    (root / "data" / "demo.jsonl").write_text("\n".join(lines) + "\n")
    (root / "my_ops.py").write_text(MODULE)
    before = sys.path.copy()
    yield root
    sys.path[:] = before
    sys.modules.pop("my_ops", None)


@pytest.fixture
def here(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Callable[..., Ran]:
    """Run `castore process` as somebody does who has said where the store is once and for all."""
    monkeypatch.setenv("CASTORE_DIR", str(place / "store"))

    def run(*words: str | Path) -> Ran:
        capfdbinary.readouterr()
        code = main(["process", *map(str, words)])
        out, err = capfdbinary.readouterr()
        return Ran(code, out, err.decode())

    return run


def recipe(place: Path, steps: list[Any] = STEPS, **keys: Any) -> Path:
    """A recipe's file."""
    told = {
        "dataset_path": "./data/demo.jsonl",
        "export_path": "./outputs/demo.jsonl",
        **keys,
        "process": steps,
    }
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    return path


def hits(ran: Any) -> list[bool]:
    return [step["hit"] for step in ran.json["steps"]]


def exported(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "outputs/demo.jsonl").read_text().splitlines()]


def expected(place: Path) -> list[dict[str, Any]]:
    """The same with a loop and nothing of ours but the cleaning itself."""
    from castore.adapters.datasets import registry

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


# The seed's page


def test_a_rerun_hits_every_step_and_gives_the_same(cli: Cli, place: Path) -> None:  # noqa: F811
    path = recipe(place)
    first = cli("process", "--config", path, "--json")
    assert first.code == 0
    assert [step["name"] for step in first.json["steps"]] == NAMES
    assert hits(first) == [False] * 7
    rows = expected(place)
    assert exported(place) == rows
    (place / "outputs/demo.jsonl").unlink()
    second = cli("process", "--config", path, "--json")
    assert hits(second) == [True] * 7
    assert exported(place) == rows
    assert [(s["rows_in"], s["rows_out"]) for s in second.json["steps"]] == [
        (s["rows_in"], s["rows_out"]) for s in first.json["steps"]
    ]
    assert second.json["rows_out"] == len(rows)
    assert 0 < second.json["steps"][0]["stored"] < second.json["steps"][0]["logical"]


SEED = {
    "basic": """
project_name: 'demo-cache'
dataset_path: './data/demo.jsonl'
export_path: './outputs/demo.jsonl'

use_cache: true  # 默认值，可省略

process:
  - text_length_filter:
      min_len: 100
  - my_ops.LanguageIdScoreFilter:
      lang: 'en'
      min_score: 0.8
""",
    "compressed": """
project_name: 'demo-cache-compress'
dataset_path: './data/demo.jsonl'
export_path: './outputs/demo.jsonl'

use_cache: true
cache_compress: 'zstd'  # 推荐
ds_cache_dir: '{dir}/large_disk/dj_cache'  # 可选：使用空间更大的磁盘

process:
  - text_length_filter:
      min_len: 100
  - my_ops.LanguageIdScoreFilter:
      lang: 'en'
      min_score: 0.8
""",
    "no cache": """
project_name: 'demo-no-cache'
dataset_path: './data/demo.jsonl'
export_path: './outputs/demo.jsonl'

use_cache: false
temp_dir: '{dir}/dj_temp'  # 可选：指定临时文件位置

process:
  - my_ops.MyCustomMapper:
      param: value
""",
}


@pytest.mark.parametrize("name", SEED)
@pytest.mark.parametrize("words", [[], ["--cache_compress", "zstd"], ["--use_cache", "false"]], ids=" ".join)
def test_the_seeds_examples_run(here: Callable[..., Ran], place: Path, name: str, words: list[str]) -> None:
    (place / "your_config.yaml").write_text(SEED[name].replace("{dir}", str(place)))
    ran = here("--config", "your_config.yaml", *words)
    assert (ran.code, ran.err) == (0, "")
    rows = exported(place)
    if name == "no cache":
        assert all(row["text"].endswith("value") for row in rows)
    else:
        assert 50 < len(rows) < len((place / "data/demo.jsonl").read_text().splitlines())
    assert all(set(row) == {"text", "n"} for row in rows)
    kept = (place / "large_disk/dj_cache" if name == "compressed" else place / "store") / "castore.json"
    assert kept.exists()


def test_what_was_uncompressed_on_the_way_is_gone_in_the_end(
    castore: Callable[..., subprocess.Popen[bytes]],  # noqa: F811
    place: Path,
) -> None:
    start = castore("process", "--config", recipe(place, temp_dir=str(place / "temp")))
    assert start.communicate()[1] == b""
    assert [path for path in place.rglob("*.arrow") if "hugging face" not in str(path)] == []


@pytest.mark.parametrize("codec", ["gzip", "lz4", "zstd", "none"])
def test_every_codec_keeps_and_gives_the_same(cli: Cli, place: Path, codec: str) -> None:  # noqa: F811
    path = recipe(place, cache_compress=codec)
    assert hits(cli("process", "--config", path, "--json")) == [False] * 7
    with Store(place / "store") as store:
        data = [entry for entry in store.entries("steps") if entry.name.endswith(".arrow")]
        assert {entry.codec for entry in data} == {codec}
    rows = exported(place)
    assert hits(cli("process", "--config", path, "--json")) == [True] * 7
    assert exported(place) == rows == expected(place)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--use-cache"], True),
        (["--no-use-cache"], False),
        (["--use_cache", "true"], True),
        (["--use_cache", "False"], False),
        (["--use-checkpoint"], False),
        (["--use_checkpoint", "true"], False),
    ],
)
def test_the_command_line_overrules_the_file(cli: Cli, place: Path, words: list[str], kept: bool) -> None:  # noqa: F811
    path = recipe(place, ["clean_links_mapper"], use_cache=not kept)
    assert cli("process", "--config", path, *words).code == 0
    with Store(place / "store") as store:
        assert any(store.entries("steps")) == kept
        assert any(store.entries("checkpoints")) == ("checkpoint" in words[0])


def test_every_key_can_be_given_on_the_command_line(cli: Cli, place: Path) -> None:  # noqa: F811
    (place / "other.jsonl").write_text('{"content": "see http://x.y"}\n')
    for style in ("-", "_"):
        words = {
            "dataset-path": "other.jsonl", "export-path": f"out{style}.json", "project-name": "p", "text-keys": "content",
            "num-proc": "2", "cache-compress": "lz4", "ds-cache-dir": f"cache{style}", "temp-dir": f"temp{style}",
        }  # fmt: skip
        options = [word for name, value in words.items() for word in (f"--{name.replace('-', style)}", value)]
        path = recipe(place, ["clean_links_mapper"])
        ran = cli("process", "--config", path, *options)
        # --store beside --ds-cache-dir is one word too many.
        assert (ran.code, ran.err) == (
            2, "castore: --store and --ds-cache-dir both name the store; give one of them\n",
        )  # fmt: skip
        assert main(["process", "--config", str(path), *options]) == 0
        assert json.loads((place / f"out{style}.json").read_text()) == [{"content": "see "}]
        assert (place / f"cache{style}" / "castore.json").exists()
        assert (place / f"temp{style}").exists()


def test_store_on_the_command_line_comes_before_the_recipe(cli: Cli, place: Path) -> None:  # noqa: F811
    assert (
        cli("process", "--config", recipe(place, ["clean_links_mapper"], ds_cache_dir="elsewhere")).code == 0
    )
    assert (place / "store").exists()
    assert not (place / "elsewhere").exists()


# What is printed


def test_the_table_says_what_the_json_says(cli: Cli, place: Path) -> None:  # noqa: F811
    path = recipe(place)
    told = cli("process", "--config", path, "--json").json
    ran = cli("process", "--config", path)
    assert ran.err == ""
    lines = ran.out.splitlines()
    rows = [line for line in lines if " hit " in line]
    for step, line in zip(told["steps"], rows, strict=True):
        assert line.startswith(f" {step['name']} ")
        cells = line.removeprefix(f" {step['name']} ").split()
        assert cells[:3] == ["hit", f"{step['rows_in']:,}", f"{step['rows_out']:,}"]
    assert lines[-1].startswith(
        f"{told['rows_out']} rows of {told['rows_in']} in {place}/outputs/demo.jsonl ("
    )
    assert "\x1b" not in ran.out


def test_bars_are_drawn_on_a_terminal(castore: Callable[..., subprocess.Popen[bytes]], place: Path) -> None:  # noqa: F811
    from tests.cli.test_terminal import drawn

    seen, _ = drawn(castore, "process", "--config", recipe(place, ["my_ops.slow", "clean_links_mapper"]))
    assert b"1/2 slow" in seen
    assert b"rows" in seen
    seen, _ = drawn(castore, "process", "--config", recipe(place, ["my_ops.slow", "clean_links_mapper"]))
    assert b"from the cache" in seen


def test_explain_says_what_would_run_and_why(cli: Cli, place: Path) -> None:  # noqa: F811
    assert cli("process", "--config", recipe(place)).code == 0
    changed = [*STEPS]
    changed[1] = {"clean_links_mapper": {"repl": "<link>"}}
    path = recipe(place, changed)
    before = (place / "outputs/demo.jsonl").stat()
    ran = cli("process", "--config", path, "--explain")
    assert ran.out.splitlines()[:4] == [
        "text_length_filter (stats): hit",
        "text_length_filter: hit",
        "clean_links_mapper: miss: the parameter 'repl' was [''] and is ['<link>']",
        "whitespace_normalization_mapper: miss: its input is new, since 'clean_links_mapper' runs again",
    ]
    told = cli("process", "--config", path, "--explain", "--json").json
    assert [step["hit"] for step in told] == [True] * 2 + [False] * 5
    assert (place / "outputs/demo.jsonl").stat() == before
    assert hits(cli("process", "--config", path, "--json")) == [True] * 2 + [False] * 5


def test_estimate_says_what_it_would_take(cli: Cli, place: Path) -> None:  # noqa: F811
    told = cli("process", "--config", recipe(place), "--estimate", "--json").json
    assert (told["mappers"], told["filters"], told["deduplicators"]) == (2, 2, 1)
    assert told["formula"] == 7 * told["size"]
    assert told["problems"] == []
    lines = cli("process", "--config", recipe(place), "--estimate").out.splitlines()
    assert [line.split()[0] for line in lines] == ["input", "formula", "peak", "store", "work"]
    assert not (place / "outputs").exists()


def test_what_will_not_fit_is_said_before_it_starts(cli: Cli, place: Path) -> None:  # noqa: F811
    assert cli("init", "--max-size", "3MB").code == 0
    ran = cli("process", "--config", recipe(place))
    assert ran.code == 0
    assert "castore: the steps take about" in ran.err
    assert "in a store that may hold 3 MB" in ran.err
    assert exported(place) == expected(place)


# What goes wrong


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"steps": ["clean_link_mapper"]}, 2, "recipe.yaml:4: there is no operator 'clean_link_mapper'; did you mean 'clean_links_mapper'?"),
        ({"use_cash": True}, 2, "recipe.yaml:3: there is no key 'use_cash'; did you mean 'use_cache'?"),
        ({"dataset_path": "data/dem.jsonl"}, 1, "there is no data at dataset_path 'data/dem.jsonl'; did you mean 'demo.jsonl'?"),
        ({"export_path": "out.xml"}, 2, "export_path 'out.xml' ends in '.xml'"),
        ({"text_keys": "content"}, 2, "there is no column 'content' for CleanLinksMapper, only 'text', 'n'"),
        ({"steps": ["my_ops.breaks"]}, 1, "step 'breaks' failed at {place}/my_ops.py:24: RuntimeError: cannot stand 30; the steps before it are kept"),
        ({"steps": ["my_ops.Nothing"]}, 2, "recipe.yaml:4: my_ops has no 'Nothing'"),
        ({"ds_cache_dir": "/proc/nowhere"}, 1, "cannot make a store at /proc/nowhere"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_says_what_to_do(
    here: Callable[..., Ran], place: Path, change: dict[str, Any], code: int, words: str
) -> None:
    keys = {"export_path": "out.jsonl", **change}
    ran = here("--config", recipe(place, keys.pop("steps", ["clean_links_mapper"]), **keys))
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert words.replace("{place}", str(place)) in ran.err


def test_a_missing_recipe_and_a_truth_that_is_none_are_said(cli: Cli, place: Path) -> None:  # noqa: F811
    ran = cli("process", "--config", "nowhere.yaml")
    assert (ran.code, ran.err) == (1, "castore: nowhere.yaml: No such file or directory\n")
    ran = cli("process", "--config", recipe(place), "--use_cache", "maybe")
    assert (ran.code, "'maybe' is neither true nor false" in ran.err) == (2, True)
    ran = cli("process", "--config", recipe(place), "--cache-compress", "zip")
    assert (ran.code, "cache_compress must be 'zstd'" in ran.err) == (2, True)


def test_a_damaged_step_runs_again_and_is_said(cli: Cli, place: Path) -> None:  # noqa: F811
    path = recipe(place)
    assert cli("process", "--config", path).code == 0
    rows = exported(place)
    with Store(place / "store") as store:
        name = next(
            entry.name
            for entry in store.entries("steps")
            if "deduplicator" in entry.name and entry.name.endswith(".arrow")
        )
        file, offset, length = payload(store, name)
        flip(file, offset + length // 2)
    ran = cli("process", "--config", path, "--json")
    assert ran.code == 0
    assert "is damaged and runs again" in ran.err
    assert ran.err.count("\n") == 1
    assert hits(ran) == [True] * 6 + [False]
    assert exported(place) == rows
    assert hits(cli("process", "--config", path, "--json")) == [True] * 7


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    disk = place / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12M", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("mode", [{}, {"use_checkpoint": True}, {"use_cache": False}], ids=str)
def test_a_disk_that_fills_up_in_a_step_is_said_and_the_rest_goes_on_later(
    place: Path, small_disk: Path, castore: Callable[..., subprocess.Popen[bytes]], mode: dict[str, Any]  # noqa: F811
) -> None:  # fmt: skip
    (place / "tiny.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(2000)))
    given = {"dataset_path": "tiny.jsonl", "temp_dir": str(small_disk / "temp"), **mode}
    start = castore("process", "--config", recipe(place, ["my_ops.marks", "my_ops.grows"], **given))
    _, err = start.communicate()
    assert start.returncode == 1
    last = err.decode().splitlines()[-1]
    assert "is full" in last
    assert "free some space" in last
    assert not (place / "outputs").exists()
    assert (place / "marks").stat().st_size == 2000
    assert list(small_disk.rglob("*.arrow")) == []
    # With another second step the first is not run again, where it was kept.
    start = castore("process", "--config", recipe(place, ["my_ops.marks", "clean_links_mapper"], **given))
    _, err = start.communicate()
    assert (start.returncode, err) == (0, b"")
    assert (place / "marks").stat().st_size == (4000 if mode == {"use_cache": False} else 2000)


# What is left after a kill


def test_ctrl_c_leaves_what_is_done(place: Path, castore: Callable[..., subprocess.Popen[bytes]]) -> None:  # noqa: F811
    (place / "interrupt").touch()
    path = recipe(place, ["my_ops.marks", "my_ops.interrupted"])
    start = castore("process", "--config", path)
    _, err = start.communicate(timeout=60)
    assert (start.returncode, err) == (130, b"castore: interrupted\n")
    rows = (place / "marks").stat().st_size
    start = castore("process", "--config", path, "--json")
    out, err = start.communicate(timeout=60)
    assert (start.returncode, err) == (0, b"")
    assert [step["hit"] for step in json.loads(out)["steps"]] == [True, False]
    assert (place / "marks").stat().st_size == rows


SLOW = ["my_ops.slow", {"text_length_filter": {"min_len": 100}}, "my_ops.slower", "document_deduplicator"]


@pytest.mark.parametrize("mode", ["use_cache", "use_checkpoint"])
def test_runs_killed_at_random_points_come_to_the_same_end(
    place: Path, castore: Callable[..., subprocess.Popen[bytes]], mode: str  # noqa: F811
) -> None:  # fmt: skip
    chance = random.Random(mode)
    path = recipe(place, SLOW, **{mode: True})
    kills = 0
    for _ in range(30):
        start = castore("process", "--config", path, "--json")
        try:
            out, err = start.communicate(timeout=1.2 + chance.random() * 2.4 if kills < 4 else 60)
            break
        except subprocess.TimeoutExpired:
            start.send_signal(signal.SIGKILL)
            start.communicate()
            kills += 1
    assert kills > 0
    assert start.returncode == 0, err
    survived = exported(place)
    (place / "outputs/demo.jsonl").unlink()
    plain = castore("process", "--config", path, "--no-use-checkpoint", "--no-use-cache")
    plain.communicate()
    assert plain.returncode == 0
    assert survived == exported(place)
    start = castore("process", "--config", path, "--json")
    out, _ = start.communicate()
    assert all(step["hit"] for step in json.loads(out)["steps"])
    start = castore("verify")
    start.communicate()
    assert start.returncode == 0


def test_two_at_once_run_each_step_once(place: Path, castore: Callable[..., subprocess.Popen[bytes]]) -> None:  # noqa: F811
    path = recipe(place, ["my_ops.marks", "my_ops.slow", "document_deduplicator"])
    both = [
        castore("process", "--config", path, "--export-path", f"out{n}.jsonl", "--json") for n in range(2)
    ]
    told = [json.loads(start.communicate(timeout=60)[0]) for start in both]
    assert (place / "marks").stat().st_size == told[0]["rows_in"]
    for steps in zip(*(run["steps"] for run in told), strict=True):
        assert sum(not step["hit"] for step in steps) == 1
    assert (place / "out0.jsonl").read_text() == (place / "out1.jsonl").read_text()


def test_several_processes_give_what_one_gives(cli: Cli, place: Path) -> None:  # noqa: F811
    assert hits(cli("process", "--config", recipe(place), "--np", "2", "--json")) == [False] * 7
    assert exported(place) == expected(place)
    assert hits(cli("process", "--config", recipe(place), "--json")) == [True] * 7


def test_startup_of_other_commands_does_not_pay_for_this_one() -> None:
    code = "import sys, castore.cli.main as m; m.main(['ls', '--help']); print({'datasets', 'yaml'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "set()"
