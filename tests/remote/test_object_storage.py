"""Stores on two nodes share a bucket of object storage, each through a process of its own."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from castore import Store
from castore.errors import RemoteDeniedError, RemoteUnreachableError
from tests.helpers import noise, text
from tests.remote.servers import Place, environment, free_ports


def test_what_one_node_pushes_to_object_storage_another_pulls(seaweedfs: Place, tmp_path: Path) -> None:
    url = f"{seaweedfs.url}/{uuid.uuid4().hex}"
    contents = {f"small/{number}": text(3000, number) for number in range(50)} | {"large": noise(20 << 20)}
    with Store(tmp_path / "one") as one, Store(tmp_path / "two") as two, environment(seaweedfs.environment):
        one.put_many(contents.items())
        one.add_remote("team", url)
        assert one.push(to="team").added == len(contents)
        two.add_remote("team", url, read_only=True)
        assert two.pull(remote="team").added == len(contents)
        assert {name: two.get(name) for name in contents} == contents


def test_an_error_of_object_storage_comes_through_the_process(seaweedfs: Place, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    with Store(tmp_path / "one") as store:
        store.put("a", b"1")
        with environment(seaweedfs.environment):
            store.add_remote("team", f"{seaweedfs.url}/{uuid.uuid4().hex}")
        with (
            environment({**seaweedfs.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}),
            pytest.raises(RemoteDeniedError, match="SignatureDoesNotMatch"),
        ):
            store.push(to="team")
        with (
            environment({**seaweedfs.environment, "AWS_ENDPOINT_URL": nobody}),
            pytest.raises(RemoteUnreachableError, match="connection refused"),
        ):
            store.push(to="team")
