"""`castore init`."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

import pytest

from castore import Store, settings
from tests.cli.conftest import Cli


def test_init_makes_a_store_that_says_what_it_will_do(cli: Cli, folder: Path) -> None:
    ran = cli("init", "--codec", "lz4", "--level", "1", "--max-size", "2GB", "--ttl", "30d")
    assert ran.code == 0
    assert ran.out.splitlines()[0] == f"{folder}: made"
    kept = settings.load(folder)
    assert kept == settings.Settings("lz4", 1, 2 * 10**9, 30 * 86400.0, None)
    assert (folder / "index.sqlite").exists()


def test_init_again_changes_only_what_is_given(cli: Cli, folder: Path) -> None:
    cli("init", "--codec", "gzip", "--max-size", "2GB", "--ttl", "1d")
    report = cli("init", "--max-size", "3GB", "--json").json
    assert report == {
        "path": str(folder), "result": "changed", "codec": "gzip", "level": None, "max_size": 3 * 10**9,
        "ttl": 86400.0, "shared": None,
    }  # fmt: skip
    assert cli("init", "--json").json["result"] == "unchanged"


@pytest.mark.parametrize(("max_size", "ttl"), [("none", "none"), ("unlimited", "never")])
def test_a_word_takes_a_bound_away(cli: Cli, folder: Path, max_size: str, ttl: str) -> None:
    cli("init", "--max-size", "2GB", "--ttl", "1d")
    cli("init", "--max-size", max_size, "--ttl", ttl)
    assert settings.load(folder) == settings.Settings()


def test_wrong_settings_leave_the_store_as_it_was(cli: Cli, folder: Path) -> None:
    cli("init", "--codec", "lz4")
    assert cli("init", "--codec", "rar").code == 2
    assert cli("init", "--codec", "zstd", "--level", "1000").code == 2
    assert settings.load(folder) == settings.Settings("lz4")


def test_folder_with_other_things_is_refused(cli: Cli, folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("dear reader")
    ran = cli("init")
    assert ran.code == 1
    assert "is not empty and no store" in ran.err


def test_sharing_a_store_in_use_opens_what_is_in_it_to_the_group(
    cli: Cli, folder: Path, store: Store
) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    assert cli("init", "--shared", group).code == 0
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert (mode & 0o070) >> 3 == (mode & 0o700) >> 6, path
        assert mode & 0o007 == 0 or path.name in (".gitignore", "CACHEDIR.TAG"), path
        assert not path.is_dir() or mode & 0o2000, path


def test_unknown_group_is_an_error(cli: Cli) -> None:
    ran = cli("init", "--shared", "no-such-group")
    assert ran.code == 1
    assert "no-such-group" in ran.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max-size", "0"), "leaves room for nothing"),
        (("--max-size", "0GB"), "leaves room for nothing"),
        (("--ttl", "0s"), "expire before they can be read"),
    ],
)
def test_bounds_of_nothing_are_refused(cli: Cli, folder: Path, words: tuple[str, ...], says: str) -> None:
    ran = cli("init", *words)
    assert ran.code == 2
    assert says in ran.err
    assert not folder.exists()
