"""Servers for the tests of remotes, each started once, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.remote import servers
from tests.remote.servers import Place


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """An object storage that people run."""
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as place:
        yield place


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """S3 as AWS's libraries are tested with."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as place:
        yield place


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A storage that is unfit."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as place:
        yield place


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Azure's emulator, where it is installed."""
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as place:
        yield place


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A folder that stores share."""
    with servers.folder(tmp_path_factory.mktemp("folder")) as place:
        yield place
