"""A plugin of pytest, named in pyproject.toml, for the doctests of castore and castore_fuse, which no
conftest is above.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Pass over modules without tests and examples, which would be imported for nothing: some import
    libraries that take seconds.
    """
    path = collection_path
    if path.suffix != ".py" or path.name == "conftest.py" or path.name.startswith("test_"):
        return None
    return ">>>" not in path.read_text() or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Seek no examples in files of tests without any: pytest would look at each docstring."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule) or ">>>" in file_path.read_text()]


@pytest.fixture(autouse=True)
def _temporary_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a doctest makes with `tempfile` go when pytest's own folders go."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("doctest")))
