"""A process that dies in a crash window of a remote leaves what docs/format.md states. The next goes on."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.remote import crash_windows
from tests.remote.crash_windows import WINDOWS

PAGE = Path(__file__).parents[2] / "docs" / "format.md"

#: Kills in the window of a number, in a process that has started no thread.
Dies = Callable[[int], object]


def test_every_window_of_the_page_is_in_the_table_and_none_else() -> None:
    page = PAGE.read_text().partition("\n## The remote\n")[2].partition("\n# ")[0]
    named = set()
    for section in page.split("\n### ")[1:]:
        heading, _, rest = section.partition("\n")
        for table in re.split(r"^\| killed \| .* \|\n", rest, flags=re.M)[1:]:
            rows = re.findall(r"^\| (.*?) \| .* \| .* \|$", table.partition("\n\n")[0], re.M)
            named |= {(heading, killed) for killed in rows}
    assert {(window.section, window.killed) for window in WINDOWS} == named


@pytest.fixture(scope="module")
def dies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dies]:
    folder = tmp_path_factory.mktemp("windows")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(crash_windows.make_template, folder / "template").result()
        yield lambda number: pool.submit(
            crash_windows.dies_as_the_page_says, folder / "template", folder / str(number), number
        ).result()


def _numbers() -> Iterator[object]:
    """The windows: of each row of the page the first one, and in the long form all."""
    seen = set()
    for number, window in enumerate(WINDOWS):
        row = window.section, window.killed
        marks = [pytest.mark.matrix] if row in seen else []
        seen.add(row)
        yield pytest.param(number, marks=marks, id=": ".join(row))


@pytest.mark.parametrize("number", _numbers())
def test_killed_in_a_window_the_remote_and_its_stores_are_as_the_page_says(dies: Dies, number: int) -> None:
    dies(number)
