"""The folder that a store's path stands for."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from castore import InvalidValueError, Store
from castore.adapters.filesystem import CastoreFileSystem
from castore.settings import store_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder; the working folder is another."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    return home


def _castore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "castore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_tilde_at_the_beginning_is_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("~/x", Path("~/x")):
        with Store(path) as store:
            assert store.path == home / "x"
    monkeypatch.setenv("CASTORE_DIR", "~/y")
    with Store() as store:
        assert store.path == home / "y"
    assert CastoreFileSystem().store.path == home / "y"
    assert CastoreFileSystem("~/x").store.path == home / "x"
    assert _castore("init").returncode == 0
    assert _castore("--store=~/z", "init").returncode == 0
    assert sorted(os.listdir(home)) == ["x", "y", "z"]
    assert os.listdir() == []


def test_a_tilde_with_a_name_is_the_home_folder_of_that_user(home: Path) -> None:
    user = pwd.getpwuid(os.geteuid())
    # Nothing is made: the folder may be somebody else's.
    assert store_folder(f"~{user.pw_name}/x") == Path(user.pw_dir, "x")
    with pytest.raises(InvalidValueError, match=r"a user that there is not; write \./~nobody-of-that-name"):
        Store("~nobody-of-that-name/x")
    with Store("./~nobody-of-that-name") as store:
        assert store.path == Path.cwd() / "~nobody-of-that-name"


@pytest.mark.parametrize("url", ["s3://b/x", "file:///mnt/x", "https://host/x", Path("s3://b/x"), "hf://x/y"])
def test_a_url_is_no_store(home: Path, monkeypatch: pytest.MonkeyPatch, url: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"not a URL .* `castore remote add`"):
        Store(url)
    monkeypatch.setenv("CASTORE_DIR", str(url))
    done = _castore("init")
    assert done.returncode != 0
    assert "castore remote add" in done.stderr
    assert os.listdir() == []


@pytest.mark.parametrize("path", [b"x", 3, 1.5, [], True])
def test_the_folder_of_a_store_is_a_path(home: Path, path: Any) -> None:
    with pytest.raises(InvalidValueError, match="the folder of a store is a path as text, not"):
        Store(path)
    assert os.listdir() == []


def test_an_empty_path_is_no_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is not set would make a store of the folder that the program runs in."""
    monkeypatch.chdir(home)
    with pytest.raises(InvalidValueError, match="is an empty text"):
        Store("")
    assert list(home.iterdir()) == []
