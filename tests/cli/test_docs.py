"""`docs/cli.md` names every command and every option, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from castore.cli.commands import COMMANDS, command
from tests.cli.conftest import Cli

#: Commands, and commands of commands.
ALL = [
    *COMMANDS,
    *(
        f"{name} {below}"
        for name, found in command().commands.items()
        for below in getattr(found, "commands", ())
    ),
]
PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("words", ALL)
def test_every_option_is_documented(cli: Cli, words: str) -> None:
    options = re.findall(r"^  +(?:-\w, )?(--[a-z-]+)", cli(*words.split(), "--help").out, re.M)
    name = words.partition(" ")[0]
    assert re.search(rf"^## .*\b{name}\b", PAGE, re.M)
    section = next(part for part in PAGE.split("\n## ")[1:] if re.search(rf"\b{name}\b", part.split("\n")[0]))
    assert [option for option in options if option != "--help" and option not in section] == []


def test_no_option_is_documented_that_is_not_there(cli: Cli) -> None:
    real = {option for name in ALL for option in re.findall(r"--[a-z-]+", cli(*name.split(), "--help").out)}
    real |= set(re.findall(r"--[a-z-]+", cli("--help").out))
    assert set(re.findall(r"(?<![\w|-])--[a-z][a-z-]*", PAGE)) - real == set()
