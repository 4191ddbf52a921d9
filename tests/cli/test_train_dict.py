"""`castore train-dict` and `castore add --dict`: their sentences, their JSON, and their effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from castore import Store
from tests.cli.conftest import Cli
from tests.helpers import noise, records

SEEN, NEW = records(500, 1), records(40, 2)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of similar files."""
    folder = tmp_path / "rec"
    (folder / "below").mkdir(parents=True)
    for number, data in enumerate(SEEN):
        (folder / ("below" if number % 2 else "") / f"{number}.json").write_bytes(data)
    return folder


def test_train_says_what_it_gains_and_new_files_take_less(
    cli: Cli, sources: Path, tmp_path: Path, folder: Path
) -> None:
    cli("add", sources)
    ran = cli("train-dict", "rec")
    assert (ran.code, ran.err) == (0, "")
    first, second, third = ran.out.splitlines()
    assert first.startswith("rec: dictionary ")
    assert first.endswith("from 400 samples")
    assert "100 samples that it has not seen: 1." in second
    assert "fewer bytes" in second
    assert "--recompress" in third
    (tmp_path / "one").write_bytes(NEW[0])
    (tmp_path / "two").write_bytes(NEW[1])
    cli("add", tmp_path / "one", "--as", "rec/one")
    cli("add", tmp_path / "two", "--as", "two")
    assert cli("stat", "rec/one", "--json").json["stored"] < 0.7 * cli("stat", "two", "--json").json["stored"]
    assert cli("cat", "rec/one").raw == NEW[0]
    (shown,) = cli("stat", "--json").json["dictionaries"]
    assert shown["prefix"] == "rec"
    assert shown["id"] in cli("stat").out


def test_recompress_and_off(cli: Cli, sources: Path) -> None:
    cli("add", sources)
    before = cli("stat", "--json").json["stored"]
    ran = cli("train-dict", "rec", "--recompress", "--json").json
    assert ran["rewritten"]["blobs"] == len(SEEN)
    assert ran["saving"] > 0.3
    assert cli("stat", "--json").json["stored"] < 0.7 * before
    assert "compressed again" in cli("train-dict", "rec", "--recompress").out
    assert cli("verify").code == 0
    assert "without a dictionary again" in cli("train-dict", "rec", "--off").out
    ran = cli("train-dict", "rec", "--off")
    assert (ran.code, ran.err) == (
        1,
        "castore: rec has no dictionary; `castore stat` lists those there are\n",
    )
    assert cli("train-dict", "rec", "--off", "--recompress").code == 2


def test_what_cannot_be_trained_is_one_sentence(cli: Cli, sources: Path) -> None:
    cli("add", sources)
    ran = cli("train-dict", "nothing")
    assert ran.code == 1
    assert ran.err.startswith("castore: there are too few samples below 'nothing' for a dictionary: ")
    assert cli("train-dict", "../x").code == 2
    assert cli("add", sources, "--dict", "--codec", "lz4").code == 2
    assert cli("train-dict", "rec", "--size", "2GB").code == 2
    assert "castore found 50;" in cli("train-dict", "rec", "--samples", "50").err


def test_add_dict_learns_before_it_adds(cli: Cli, sources: Path, folder: Path) -> None:
    report = cli("add", sources, "--as", "data", "--dict", "--json").json
    (learnt,) = report["dictionaries"]
    assert (learnt["prefix"], learnt["samples"]) == ("data", 400)
    assert learnt["saving"] > 0.3
    assert report["stored_bytes"] < 0.7 * learnt["before"] * 5
    # The existing dictionary is used.
    assert cli("add", sources, "--as", "data", "--dict", "--json").json["dictionaries"] == []
    with Store(folder, memory=0) as store:
        assert store.get("data/below/1.json") == SEEN[1]
    assert "fewer bytes on samples" in cli("add", sources, "--as", "again", "--dict").out


def test_add_dict_adds_also_what_nothing_can_be_learnt_from(cli: Cli, tmp_path: Path) -> None:
    for number in range(150):
        (tmp_path / "noise").mkdir(exist_ok=True)
        (tmp_path / "noise" / str(number)).write_bytes(noise(800, number))
    ran = cli("add", tmp_path / "noise", "--dict")
    assert ran.code == 0
    assert "no dictionary: a dictionary does not pay below 'noise'" in ran.out
    assert "150 new blobs" in ran.out
    ran = cli("add", tmp_path / "noise" / "1", "--dict")
    assert (ran.code, ran.err) == (
        2,
        "castore: --dict trains on folders of small files, and none of these is a folder\n",
    )
