"""`castore process`: the seed's recipes and command lines, the output, and concurrent runs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.cli.main import main
from tests.cli.conftest import Cli, Ran, cli, folder  # noqa: F401 - fixtures
from tests.cli.test_terminal import drawn, read_all
from tests.recipes.recipes import (
    NAMES,
    STEPS,
    expected,
    exported,
    hits,
    recipe,
)
from tests.remote.nodes import end_fetcher, know
from tests.warm import Started

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


def test_a_second_node_takes_the_rows_of_the_first(here: Callable[..., Ran], place: Path) -> None:
    path, ran = recipe(place), []
    for node in (place / "node0", place / "node1"):
        with Store(node) as store:
            know(store, "team", (place / "bucket").as_uri())
            words = ["--config", path, "--ds-cache-dir", node, "--remote", "team", "--json"]
            ran.append(here(*words, "--shard", "1/2"))
            end_fetcher(store)
    first, second = ran
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    assert sum(step["rows_reused"] for step in first.json["steps"]) == 0
    reused = {step["name"]: step["rows_in"] - step["rows_reused"] for step in second.json["steps"]}
    assert reused == dict.fromkeys(reused, 0)
    assert exported(place) == expected(place)
    for shard, why in (("2/2", "there is no shard 2 of 2"), ("1", "--shard is I/N, such as 0/8")):
        wrong = here("--config", path, "--ds-cache-dir", node, "--remote", "team", "--shard", shard)
        assert (wrong.code, why in wrong.err) == (2, True)
    alone = here("--config", path, "--shard", "0/2")
    assert (alone.code, "give the store one with remote=" in alone.err) == (2, True)
    unknown = here("--config", path, "--remote", "nobody")
    assert (unknown.code, "castore remote add nobody" in unknown.err) == (1, True)


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


_WORDS: list[list[str]] = [[], ["--cache_compress", "zstd"], ["--use_cache", "false"]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        # Each example alone, and one after the other with some words more; `make torture` has all of both.
        pytest.param(name, words, marks=[pytest.mark.matrix] * (at > 0 and at != place))
        for at, words in enumerate(_WORDS)
        for place, name in enumerate(SEED)
    ],
)
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


def test_a_terminal_gets_a_bar_for_each_step_and_says_what_is_from_the_cache(
    castore: Callable[..., Any],
    place: Path,
) -> None:
    path = recipe(place)
    for cached in (False, True):
        seen, _ = drawn(castore, "process", "--config", path)
        assert [name for name in NAMES if f"/{len(NAMES)} {name}".encode() not in seen] == []
        assert (b"from the cache" in seen) == cached
        assert b"exporting" in seen


def test_what_was_uncompressed_on_the_way_is_gone_in_the_end(
    castore: Callable[..., Started],
    place: Path,
) -> None:
    start = castore("process", "--config", recipe(place, temp_dir=str(place / "temp")))
    assert start.communicate()[1] == b""
    assert [path for path in place.rglob("*.arrow") if "hugging face" not in str(path)] == []


def test_a_cache_that_was_emptied_by_hand_is_a_new_one(here: Callable[..., Ran], place: Path) -> None:
    words = ["--config", recipe(place, ds_cache_dir="dj_cache"), "--json"]
    assert hits(here(*words)) == [False] * 7
    subprocess.run("rm -rf dj_cache/*", shell=True, check=True, cwd=place)  # as on the seed's page
    again = here(*words)
    assert (again.code, again.err) == (0, "")
    assert hits(again) == [False] * 7
    assert hits(here(*words)) == [True] * 7


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
def test_the_command_line_overrules_the_file(
    cli: Cli,  # noqa: F811
    place: Path,
    words: list[str],
    kept: bool,
) -> None:
    path = recipe(place, ["clean_links_mapper"], use_cache=not kept)
    assert cli("process", "--config", path, *words).code == 0
    with Store(place / "store") as store:
        assert any(store.entries("steps")) == kept
        assert any(store.entries("checkpoints")) == ("checkpoint" in words[0])


def test_every_key_can_be_given_on_the_command_line(cli: Cli, place: Path) -> None:  # noqa: F811
    (place / "other.jsonl").write_text('{"content": "see http://x.y"}\n')
    for style in ("-", "_"):
        words = {
            "dataset-path": "other.jsonl", "export-path": f"out{style}.json", "project-name": "p",
            "text-keys": "content",
            "num-proc": "2", "cache-compress": "lz4", "ds-cache-dir": f"cache{style}",
            "temp-dir": f"temp{style}",
        }  # fmt: skip
        options = [word for name, value in words.items() for word in (f"--{name.replace('-', style)}", value)]
        path = recipe(place, ["clean_links_mapper"])
        ran = cli("process", "--config", path, *options)
        # --store and --ds-cache-dir exclude each other.
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


# Output


def test_the_table_says_what_the_json_says(cli: Cli, place: Path) -> None:  # noqa: F811
    path = recipe(place)
    report = cli("process", "--config", path, "--json").json
    ran = cli("process", "--config", path)
    assert ran.err == ""
    lines = ran.out.splitlines()
    rows = [line for line in lines if " hit " in line]
    for step, line in zip(report["steps"], rows, strict=True):
        assert line.startswith(f" {step['name']} ")
        cells = line.removeprefix(f" {step['name']} ").split()
        assert cells[:4] == ["hit", "0", *(f"{step[name]:,}" for name in ("rows_in", "rows_out"))]
        assert (step["rows_reused"], step["rows_run"]) == (0, step["rows_in"])
    assert lines[-1].startswith(
        f"{report['rows_out']} rows of {report['rows_in']} in {place}/outputs/demo.jsonl ("
    )
    assert "\x1b" not in ran.out


def test_the_table_fits_a_terminal_of_80_columns(
    castore: Callable[..., Started],
    place: Path,
) -> None:
    (place / "data/demo.jsonl").write_text(json.dumps({"text": "word " * 500}) + "\n")
    path = recipe(place)
    for _ in range(2):
        master, slave = pty.openpty()
        process = castore(
            "process", "--config", path, stdout=slave, env={"TERM": "xterm-256color", "COLUMNS": "80"}
        )
        os.close(slave)
        seen = re.sub(rb"\x1b\[[0-9;]*m", b"", read_all(master)).decode()
        process.communicate()
        assert process.returncode == 0
        table = seen.splitlines()[:-1]  # the last line has a path
        assert any("rows run" in line and "saved" in line for line in table)
        assert max(len(line.rstrip()) for line in table) <= 80


def test_bars_are_drawn_on_a_terminal(
    castore: Callable[..., Any],
    place: Path,
) -> None:
    (place / "quick").touch()
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
        "clean_links_mapper: miss: the parameter 'repl' was [''] and is now ['<link>']",
        "whitespace_normalization_mapper: miss: its input changes, since 'clean_links_mapper' runs again",
    ]
    report = cli("process", "--config", path, "--explain", "--json").json
    assert [step["hit"] for step in report] == [True] * 2 + [False] * 5
    assert (place / "outputs/demo.jsonl").stat() == before
    assert hits(cli("process", "--config", path, "--json")) == [True] * 2 + [False] * 5


@pytest.mark.parametrize(
    "words",
    [(), ("--use_checkpoint", "true"), pytest.param(("--use_cache", "false"), marks=pytest.mark.matrix)],
)
def test_explain_says_hit_where_the_run_hits(
    cli: Cli,  # noqa: F811
    place: Path,
    words: tuple[str, ...],
) -> None:
    """Holds whatever the next run keeps, and whatever runs of another kind have kept."""
    changed = [*STEPS]
    changed[2] = {"text_length_filter": {"min_len": 3}}
    assert cli("process", "--config", recipe(place), "--json").code == 0
    for steps in (STEPS, STEPS, changed, STEPS):
        path = recipe(place, steps)
        report = cli("process", "--config", path, "--explain", "--json", *words).json
        assert [step["hit"] for step in report] == [not step["changes"] for step in report]
        ran = cli("process", "--config", path, "--json", *words)
        assert [step["hit"] for step in report] == hits(ran), steps


def test_explain_and_estimate_are_two_questions(cli: Cli, place: Path) -> None:  # noqa: F811
    ran = cli("process", "--config", recipe(place), "--explain", "--estimate")
    assert (ran.code, ran.out) == (2, "")
    assert "--explain and --estimate answer two questions; ask one at a time" in ran.err


def test_estimate_says_what_it_would_take(cli: Cli, place: Path) -> None:  # noqa: F811
    report = cli("process", "--config", recipe(place), "--estimate", "--json").json
    assert (report["mappers"], report["filters"], report["deduplicators"]) == (2, 2, 1)
    assert report["formula"] == 7 * report["size"]
    assert report["problems"] == []
    lines = cli("process", "--config", recipe(place), "--estimate").out.splitlines()
    assert [line.split()[0] for line in lines] == ["input", "formula", "peak", "store", "work"]
    assert not (place / "outputs").exists()


def test_what_will_not_fit_is_said_before_it_starts(cli: Cli, place: Path) -> None:  # noqa: F811
    assert cli("init", "--max-size", "100KB").code == 0
    ran = cli("process", "--config", recipe(place))
    assert ran.code == 0
    assert "castore: the steps take about" in ran.err
    assert "in a store that may hold 100 KB" in ran.err
    assert exported(place) == expected(place)


# Concurrent runs


def test_two_at_once_run_each_step_once(
    place: Path,
    castore: Callable[..., Started],
) -> None:
    path = recipe(place, ["my_ops.marks", "my_ops.slow", "document_deduplicator"])
    both = [
        castore("process", "--config", path, "--export-path", f"out{n}.jsonl", "--json") for n in range(2)
    ]
    report = [json.loads(start.communicate(timeout=300)[0]) for start in both]
    assert (place / "marks").stat().st_size == report[0]["rows_in"]
    for steps in zip(*(run["steps"] for run in report), strict=True):
        assert sum(not step["hit"] for step in steps) == 1
    assert (place / "out0.jsonl").read_text() == (place / "out1.jsonl").read_text()


def test_several_processes_give_what_one_gives(cli: Cli, place: Path) -> None:  # noqa: F811
    assert hits(cli("process", "--config", recipe(place), "--np", "2", "--json")) == [False] * 7
    assert exported(place) == expected(place)
    assert hits(cli("process", "--config", recipe(place), "--json")) == [True] * 7


def test_several_processes_hash_many_blocks(tmp_path: Path, cli: Cli) -> None:  # noqa: F811
    # Regression: the processes that hashed blocks waited for threads of their parent.
    rows = "".join(json.dumps({"text": f"{number // 2:09} Word"}) + "\n" for number in range(24_000))
    (tmp_path / "data.jsonl").write_text(rows)
    (tmp_path / "recipe.yaml").write_text(
        f"dataset_path: {tmp_path}/data.jsonl\nexport_path: {tmp_path}/out.jsonl\n"
        "process:\n  - document_deduplicator\n"
    )
    cli("process", "--config", str(tmp_path / "recipe.yaml"), "--np", "2")
    assert (tmp_path / "out.jsonl").read_text() == "".join(rows.splitlines(keepends=True)[::2])


def test_startup_of_other_commands_does_not_pay_for_this_one() -> None:
    code = (
        "import sys, castore.cli.main as m; m.main(['ls', '--help']); "
        "print({'datasets', 'yaml'} & {*sys.modules})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "set()"
