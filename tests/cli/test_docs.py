"""`docs/cli.md` names every command and every option, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from castore.cli.commands import COMMANDS
from tests.cli.conftest import Cli

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(cli: Cli, name: str) -> None:
    options = re.findall(r"^  +(?:-\w, )?(--[a-z-]+)", cli(name, "--help").out, re.M)
    assert re.search(rf"^## .*\b{name}\b", PAGE, re.M)
    section = next(part for part in PAGE.split("\n## ")[1:] if re.search(rf"\b{name}\b", part.split("\n")[0]))
    assert [option for option in options if option != "--help" and option not in section] == []


def test_no_option_is_documented_that_is_not_there(cli: Cli) -> None:
    real = {option for name in COMMANDS for option in re.findall(r"--[a-z-]+", cli(name, "--help").out)}
    real |= set(re.findall(r"--[a-z-]+", cli("--help").out))
    assert set(re.findall(r"(?<![\w|-])--[a-z][a-z-]*", PAGE)) - real == set()
