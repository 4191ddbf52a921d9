"""`python -m tools.strangers` itself: made-up checkouts of a few lines, run whole, in own processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.strangers import for_erofs
from tools.strangers.__main__ import main
from tools.strangers.left_out import LEFT_OUT, reason_for
from tools.strangers.running import Result, run
from tools.strangers.suites import SUITES, Suite, missing
from tools.strangers.table import as_json, as_text, write

_ENDS = """\
import os
import pytest

def test_holds(): pass
def test_breaks(): assert 1 == 2
@pytest.fixture
def torn():
    yield
    raise OSError("not kept")
def test_breaks_at_its_end(torn): pass
@pytest.mark.skip(reason="needs a hub")
def test_is_skipped(): pass
def test_cache_size(): assert False
"""
_DIES = "def test_dies(): __import__('os')._exit(0)\ndef test_never_begins(): pass\n"


def suite(folder: Path, files: dict[str, str], plugin: str = "tools.strangers.recording") -> Suite:
    """A made-up stranger below a folder, under the name of a stranger whose `test_cache_size` is left out."""
    for name, text in files.items():
        (folder / "tiny").mkdir(exist_ok=True)
        (folder / "tiny" / name).write_text(text)
    return Suite(
        "stocaching", "nothing", "tiny", "https://example.org/tiny", tuple(files), tuple(files), plugin
    )


def ends(result: Result) -> dict[str, str]:
    return {case.name: case.end for case in result.cases}


def test_every_case_counts_as_it_ended_whatever_ends_it(tmp_path: Path) -> None:
    result = run(suite(tmp_path, {"test_ends.py": _ENDS}), tmp_path, log=tmp_path / "log")
    assert ends(result) == {
        "test_holds": "passed",
        "test_breaks": "failed",
        "test_breaks_at_its_end": "failed",
        "test_is_skipped": "left out",
        "test_cache_size": "left out",
    }
    why = {case.name: case.why for case in result.cases}
    assert "1 == 2" in why["test_breaks"]
    assert "not kept" in why["test_breaks_at_its_end"]
    assert "needs a hub" in why["test_is_skipped"]
    assert why["test_cache_size"] == LEFT_OUT["stocaching"]["test_cache_size"]
    assert result.problem is None
    assert not result.good
    assert "test_breaks" in as_text([result])
    assert json.loads(as_json([result]))[0]["failed"] == 2
    # The checkout is unchanged.
    assert [path.name for path in (tmp_path / "tiny").rglob("*")] == ["test_ends.py"]


def test_nothing_beside_or_above_a_checkout_is_looked_at(tmp_path: Path) -> None:
    tiny = suite(tmp_path, {"test_one.py": "def test_one(): pass\n"})
    (tmp_path / "conftest.py").write_text("raise OSError('looked at')\n")
    assert ends(run(tiny, tmp_path, log=tmp_path / "log")) == {"test_one": "passed"}
    assert "looked at" not in (tmp_path / "log").read_text()


def test_a_case_whose_process_dies_and_those_behind_it_have_failed(tmp_path: Path) -> None:
    result = run(suite(tmp_path, {"test_dies.py": _DIES}), tmp_path, log=tmp_path / "log")
    assert ends(result) == {"test_dies": "failed", "test_never_begins": "failed"}
    assert not result.good


def test_a_file_that_cannot_be_imported_is_no_good_run(tmp_path: Path) -> None:
    result = run(suite(tmp_path, {"test_broken.py": "import not_there\n"}), tmp_path, log=tmp_path / "log")
    assert not result.good
    assert result.problem is not None


def test_what_is_left_out_and_no_case_any_more_is_told(tmp_path: Path) -> None:
    result = run(suite(tmp_path, {"test_one.py": "def test_one(): pass\n"}), tmp_path, log=tmp_path / "log")
    assert result.problem is not None
    assert "test_cache_size" in result.problem


def test_left_out_cases_are_run_when_asked_for(tmp_path: Path) -> None:
    result = run(suite(tmp_path, {"test_ends.py": _ENDS}), tmp_path, log=tmp_path / "log", left_out=True)
    assert ends(result) == {"test_cache_size": "failed"}


def test_missing_checkouts_are_named_with_the_command_that_gets_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--logs", str(tmp_path / "logs")]) == 1
    message = capsys.readouterr().out
    for each in SUITES:
        assert f"git clone {each.url} {tmp_path / each.folder}" in message


def test_a_checkout_that_lacks_a_file_is_told(tmp_path: Path) -> None:
    tiny = suite(tmp_path, {"test_ends.py": _ENDS})._replace(needs=("test_ends.py", "conftest.py"))
    assert str(tmp_path / "tiny" / "conftest.py") in (missing(tiny, tmp_path) or "")


def test_every_case_that_is_left_out_has_a_reason_and_a_suite() -> None:
    names = {each.name for each in SUITES}
    for name, patterns in LEFT_OUT.items():
        assert name in names
        for pattern, reason in patterns.items():
            re.compile(pattern)
            assert len(reason.split()) > 4, f"{pattern} of {name} needs a reason"
    assert reason_for("stocaching", "test_cache_size") is not None
    assert reason_for("stocaching", "test_cache_size_again") is None


# --- the tests really run castore ---------------------------------------------------------------------------

_MAPS = """\
from datasets import Dataset, DatasetDict
from tools.strangers.for_datasets import _stores

def kept():
    from castore.adapters.datasets import wait
    wait()
    return len(list(_stores[-1].entries("steps")))

def test_map():
    rows = Dataset.from_dict({"a": [1, 2]})
    assert rows.map(lambda row: {"b": row["a"]})["b"][:] == [1, 2]
    assert rows.filter(lambda a: a > 1, input_columns="a")["a"][:] == [2]
    assert kept() >= 2

def test_dict():
    rows = DatasetDict({"train": Dataset.from_dict({"a": [1, 2]})})
    assert rows.map(lambda row: {"b": row["a"]})["train"]["b"][:] == [1, 2]
    assert kept() >= 1
"""
_CACHES = """\
import diskcache

def test_store():
    with diskcache.Cache() as cache:
        cache["a"] = 1
        assert cache["a"] == 1 and len(cache) == 1 and list(cache) == ["a"]
        assert len(list(cache._store.entries("cache"))) == 1
"""
_SHARED = """\
from stocaching import SharedCache

def test_ours():
    assert SharedCache.__module__.startswith("castore.")
"""
_HASHES = """\
from datasets.fingerprint import Hasher
from castore.adapters.datasets import operator_fingerprint

def test_ours():
    assert Hasher.hash([1]) == operator_fingerprint([1])
"""


@pytest.mark.parametrize(
    ("plugin", "text"),
    [
        ("for_datasets_kept", _MAPS),
        ("for_diskcache", _CACHES),
        ("for_stocaching", _SHARED),
        ("for_fingerprints", _HASHES),
    ],
)
def test_castore_stands_where_the_strangers_code_was(tmp_path: Path, plugin: str, text: str) -> None:
    if plugin == "for_stocaching":
        pytest.importorskip("torch")
    tiny = suite(tmp_path, {"test_ours.py": text}, f"tools.strangers.{plugin}")
    result = run(tiny, tmp_path, log=tmp_path / "log")
    assert set(ends(result).values()) == {"passed"}, (tmp_path / "log").read_text()


@pytest.mark.parametrize(("compare", "found"), [("cmp", False), ("! cmp", True)])
def test_stress_has_a_mount_beside_the_folder_and_a_difference_counts(
    tmp_path: Path, compare: str, found: bool
) -> None:
    program = tmp_path / "stress"
    program.write_text(
        '#!/bin/sh\ncd "$4" && find . -type f'
        f' | while read -r f; do {compare} "$f" "$5/$f" || exit 1; done && echo read_f\n'
    )
    program.chmod(0o700)
    assert bool(for_erofs.stress(program, tmp_path, "lz4", 1, files=12)) == found
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_page_keeps_the_rows_of_suites_that_did_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- strangers -->\n<!-- /strangers -->\nafter\n")
    one, two = (Result(each, [], None) for each in SUITES[:2])
    write(page, [one], "Monday")
    write(page, [two], "Tuesday")
    text = page.read_text()
    assert text.count("| datasets") == 2
    assert "Monday" in text
    assert "Tuesday" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
