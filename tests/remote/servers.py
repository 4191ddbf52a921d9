"""Servers of object storage on loopback, each with ports of its own, for one run of the tests.

A server is started with a folder that goes with the test run, is waited for until it answers, and is ended at
the end of the block. `Place` says how castore reaches it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import NamedTuple

from castore.remote.bucket import Bucket
from castore.remote.urls import open_bucket
from tests.warm import PYTHON

KEY, SECRET = "castore-tests", "the-secret-of-the-tests"
READER, READERS_SECRET = "castore-reader", "the-readers-secret"
BUCKET = "tests"
# Azurite's own, known to everybody.
_AZURE_ACCOUNT = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_PATIENT = 60.0  # seconds until a server answers
_PREFIXES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_")


class Place(NamedTuple):
    """Where castore finds a bucket.

    Attributes:
        url: of the bucket, without a prefix.
        environment: variables that lead to it, credentials among them.
        port: where the server listens; 0 for a folder.
    """

    url: str
    environment: Mapping[str, str]
    port: int

    def open(self, prefix: str = "", **changes: str) -> Bucket:
        """The bucket, or a part of it. Takes other variables than the place's own too."""
        from castore.remote.bucket import Patience

        with environment({**self.environment, **changes}):
            patience = Patience(connect=2, silence=30, retries=3, deadline=10)
            return settled(open_bucket(f"{self.url}/{prefix}", patience))

    def fresh(self, **changes: str) -> Bucket:
        """A part of the bucket that nobody uses."""
        return self.open(uuid.uuid4().hex, **changes)


def settled(bucket: Bucket) -> Bucket:
    """The bucket, once it has read the environment for large uploads, too: it does so late."""
    _ = getattr(bucket, "_upload_store", None)
    return bucket


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Exactly these variables of storages, and no files of the user nor roles of the machine."""
    mine = {
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_METADATA_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}",
    }
    before = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    for name in before:
        del os.environ[name]
    os.environ.update(mine | dict(variables))
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
            del os.environ[name]
        os.environ.update(before)


def free_ports(count: int) -> list[int]:
    """Ports of loopback where nobody listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def s3_place(port: int, key: str = KEY, secret: str = SECRET) -> Place:
    """A server that speaks S3."""
    variables = {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }
    return Place(f"s3://{BUCKET}", variables, port)


@contextmanager
def folder(path: Path) -> Iterator[Place]:
    """No server: a folder."""
    yield Place((path / "bucket").as_uri(), {}, 0)


@contextmanager
def seaweedfs(path: Path) -> Iterator[Place]:
    """SeaweedFS with two users, one of whom may only read."""
    users = [
        _user("writer", KEY, SECRET, ["Admin", "Read", "Write", "List"]),
        _user("reader", READER, READERS_SECRET, ["Read", "List"]),
    ]
    (path / "s3.json").write_text(json.dumps({"identities": users}))

    def command(ports: list[int]) -> list[str]:
        names = ["master.port", "volume.port", "filer.port", "s3.port"]
        names += [f"{name}.grpc" for name in names]
        return [
            _program("weed"), "-logtostderr=true", "server", f"-dir={path}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
            f"-s3.config={path / 's3.json'}", f"-filer.localSocket={path / 'filer'}",
            f"-s3.localSocket={path / 's3'}",
            "-volume.max=8", "-master.volumeSizeLimitMB=256",
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
        ]  # fmt: skip

    with _running(command, 8, path, lambda ports: _answers(f"http://127.0.0.1:{ports[3]}/healthz")) as ports:
        place = s3_place(ports[3])
        # Makes the bucket too. The first write of bytes waits for seconds, until the server has made volumes.
        assert place.open().create("made", b"1")
        try:
            yield place
        finally:
            for port in ports:  # the server leaves them behind
                for leftover in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    leftover.unlink()


def _user(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


@contextmanager
def moto(path: Path) -> Iterator[Place]:
    """moto's server."""

    def command(ports: list[int]) -> list[str]:
        return [PYTHON, str(Path(__file__).with_name("moto_server.py")), str(ports[0])]

    with _running(
        command, 1, path, lambda ports: _answers(f"http://127.0.0.1:{ports[0]}/moto-api/")
    ) as ports:
        _ask("PUT", f"http://127.0.0.1:{ports[0]}/{BUCKET}", {})
        yield s3_place(ports[0])


@contextmanager
def gcs(path: Path) -> Iterator[Place]:
    """Google Cloud Storage, as `gcs_server` speaks its language."""

    def command(ports: list[int]) -> list[str]:
        return [PYTHON, str(Path(__file__).with_name("gcs_server.py")), str(ports[0]), BUCKET]

    with _running(command, 1, path, lambda ports: _answers(f"http://127.0.0.1:{ports[0]}/")) as ports:
        account = {"gcs_base_url": f"http://127.0.0.1:{ports[0]}", "disable_oauth": True, "client_email": ""}
        (path / "account.json").write_text(json.dumps({**account, "private_key": "", "private_key_id": ""}))
        variables = {"GOOGLE_SERVICE_ACCOUNT": str(path / "account.json"), "GOOGLE_ALLOW_HTTP": "true"}
        yield Place(f"gs://{BUCKET}", variables, ports[0])


@contextmanager
def rclone(path: Path) -> Iterator[Place]:
    """A storage that is unfit: rclone over a folder."""
    (path / BUCKET).mkdir()

    def command(ports: list[int]) -> list[str]:
        options = ["--addr", f"127.0.0.1:{ports[0]}", "--auth-key", f"{KEY},{SECRET}", "--config", ""]
        return [_program("rclone"), "serve", "s3", *options, str(path)]

    with _running(command, 1, path, lambda ports: _answers(f"http://127.0.0.1:{ports[0]}/")) as ports:
        yield s3_place(ports[0])


def has_azurite() -> bool:
    """Whether Azure's emulator is here (npm install -g azurite)."""
    return shutil.which("azurite-blob") is not None


@contextmanager
def azurite(path: Path) -> Iterator[Place]:
    """Azure's emulator."""

    def command(ports: list[int]) -> list[str]:
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), "--location", str(path)]
        return ["azurite-blob", *options, "--skipApiVersionCheck", "--silent", "--disableTelemetry"]

    with _running(command, 1, path, lambda ports: _answers(f"http://127.0.0.1:{ports[0]}/")) as ports:
        account = f"http://127.0.0.1:{ports[0]}/{_AZURE_ACCOUNT}"
        date, version = formatdate(usegmt=True), "2021-12-02"
        resource = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
        text = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
        digest = hmac.digest(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256)
        signature = f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": signature}
        _ask("PUT", f"{account}/{BUCKET}?restype=container", headers)
        variables = {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{ports[0]}",
            "AZURE_ALLOW_HTTP": "true",
        }
        yield Place(f"az://{BUCKET}", variables, ports[0])


def _program(name: str) -> str:
    """A program that a package has brought beside the interpreter."""
    found = shutil.which(name, path=f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"there is no {name}; `make test` installs it"
    return found


@contextmanager
def _running(
    command: Callable[[list[int]], list[str]], count: int, path: Path, answers: Callable[[list[int]], bool]
) -> Iterator[list[int]]:
    """A server that answers. Another program may take a port first, so there are three tries."""
    for _ in range(3):
        ports = free_ports(count)
        with open(path / "log", "ab") as log, environment({}):
            # A test that takes too long ends the run without any farewell, and the server with it.
            mortal = ["setpriv", "--pdeathsig", "KILL", *command(ports)]
            server = subprocess.Popen(mortal, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=path)
        try:
            if _is_up(server, partial(answers, ports)):
                yield ports
                return
        finally:
            server.kill()  # SeaweedFS would take ten seconds to say farewell
            server.wait()
    raise AssertionError((path / "log").read_text()[-4000:])


def _is_up(server: subprocess.Popen[bytes], answers: Callable[[], bool]) -> bool:
    until = time.monotonic() + _PATIENT
    while server.poll() is None and time.monotonic() < until:
        if answers():
            return True
        time.sleep(0.02)
    return False


def _answers(url: str) -> bool:
    try:
        _ask("GET", url, {})
    except urllib.error.HTTPError as error:
        with error:
            return True
    except OSError:
        return False
    return True


def _ask(method: str, url: str, headers: dict[str, str]) -> None:
    request = urllib.request.Request(url, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        answer.read()
