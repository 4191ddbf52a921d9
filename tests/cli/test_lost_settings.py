"""A store whose `castore.json` is gone: everything else is there, and no command may lose it."""

from __future__ import annotations

import grp
import os
from pathlib import Path
from typing import Any

import pytest

from castore import Store, settings
from castore.errors import LostSettingsWarning
from tests.cli.conftest import Cli


def _without_settings(path: Path, **options: Any) -> Path:
    with Store(path, memory=0, **options) as store:
        store.put("a", b"kept")
    (path / "castore.json").unlink()
    return path


def test_doctor_writes_lost_settings_again(cli: Cli, folder: Path) -> None:
    _without_settings(folder, max_size="1GB")
    (folder / "of a user").touch()
    ran = cli("ls")
    assert ran.code == 1
    assert "has lost its castore.json; `castore doctor` writes it again" in ran.err
    told = cli("doctor").out
    assert told.startswith(
        f"mended: {folder}/castore.json was missing and has been written again: codec auto, no budget,"
    )
    assert cli("doctor").out == f"{folder}: all in order\n"
    assert cli("cat", "a").out == "kept"


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\0" * 90, b"[1]", b"{}", b"[" * 60_000, b'"format"'], ids=repr
)
def test_doctor_sets_damaged_settings_aside_and_writes_them_again(
    cli: Cli, folder: Path, damage: bytes
) -> None:
    _without_settings(folder)
    (folder / "castore.json").write_bytes(damage)
    ran = cli("ls")
    assert ran.code == 1
    assert f"{folder}/castore.json is damaged (" in ran.err
    assert "`castore doctor` sets it aside and writes it again, with the defaults" in ran.err
    told = cli("doctor").out
    assert told.startswith(f"mended: {folder}/castore.json was damaged, and has been moved to {folder}/quara")
    assert "has been written again: codec auto, no budget" in told
    [aside] = (folder / "quarantine").iterdir()
    assert aside.read_bytes() == damage
    assert cli("doctor").out == f"{folder}: all in order\n"
    assert cli("cat", "a").out == "kept"


def test_damaged_settings_of_a_folder_that_was_never_used_are_left_to_the_user(
    cli: Cli, folder: Path
) -> None:
    folder.mkdir()
    (folder / "castore.json").write_bytes(b"{")
    for command in ("ls", "doctor"):
        assert "delete it and run `castore init` there" in cli(command).err
    assert (folder / "castore.json").read_bytes() == b"{"


def test_settings_of_a_newer_format_are_not_touched(cli: Cli, folder: Path) -> None:
    _without_settings(folder)
    (folder / "castore.json").write_bytes(b'{"format": 2}')
    assert "has format 2, and this castore knows format 1; upgrade castore" in cli("doctor").err
    assert (folder / "castore.json").read_bytes() == b'{"format": 2}'


def test_init_writes_lost_settings_again_whatever_else_lies_there(cli: Cli, folder: Path) -> None:
    _without_settings(folder)
    (folder / "of a user").touch()
    assert cli("init", "--codec", "lz4").code == 0
    assert cli("cat", "a").out == "kept"
    loaded = settings.load(folder)
    assert loaded is not None
    assert loaded.codec == "lz4"


def test_a_store_that_lost_its_settings_stays_shared(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    kept = settings.Settings(shared=group)
    settings.create(tmp_path / "store", kept)
    path = _without_settings(tmp_path / "store")
    with pytest.warns(LostSettingsWarning, match=f"shared with the group {group}"):
        Store(path).close()
    assert settings.load(path) == kept
    assert path.stat().st_mode & 0o7777 == 0o2770
