"""fsspec's own suites for file systems, run against a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsspec.tests import abstract

from castore.adapters.filesystem import CastoreFileSystem


class Fixtures(abstract.AbstractFixtures):  # type: ignore[misc]  # fsspec has no types
    @pytest.fixture(scope="class")
    def fs(self, tmp_path_factory: pytest.TempPathFactory) -> CastoreFileSystem:
        return CastoreFileSystem(tmp_path_factory.mktemp("fs") / "store")

    @pytest.fixture
    def fs_path(self) -> str:
        return "root/deep"

    @pytest.fixture
    def fs_sanitize_path(self) -> Any:
        return lambda path: path

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return True  # folders of `mkdir`, for the instance that made them


class TestCopy(abstract.AbstractCopyTests, Fixtures):  # type: ignore[misc]
    test_copy_directory_without_files_with_same_name_prefix = None  # among those below


class TestFoldersThatWereNotMade(Fixtures):
    """A folder that exists only by its files vanishes with the last of them."""

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False

    test_copy = abstract.AbstractCopyTests.test_copy_directory_without_files_with_same_name_prefix
    test_put = abstract.AbstractPutTests.test_put_directory_without_files_with_same_name_prefix


class TestGet(abstract.AbstractGetTests, Fixtures):  # type: ignore[misc]
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):  # type: ignore[misc]
    test_put_directory_without_files_with_same_name_prefix = None  # among those below


class TestOpen(abstract.AbstractOpenTests, Fixtures):  # type: ignore[misc]
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):  # type: ignore[misc]
    pass


def test_every_suite_of_fsspec_is_run() -> None:
    """A new suite of a newer fsspec has to be added here."""
    suites = {name for name in vars(abstract) if name.startswith("Abstract") and name.endswith("Tests")}
    run = {
        base.__name__ for test in (TestCopy, TestGet, TestPut, TestOpen, TestPipe) for base in test.__mro__
    }
    assert suites <= run


def test_the_store_of_the_suites_is_a_folder(tmp_path: Path) -> None:
    assert CastoreFileSystem(tmp_path / "s").store.path == tmp_path / "s"
