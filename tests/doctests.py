"""A plugin of pytest, named in pyproject.toml, for the doctests of castore and castore_fuse, which no
conftest is above.
"""

from __future__ import annotations

import tempfile

import pytest


@pytest.fixture(autouse=True)
def _temporary_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a doctest makes with `tempfile` go when pytest's own folders go."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("doctest")))
