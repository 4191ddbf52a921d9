"""SeaweedFS on loopback, behind a link. Its bytes lie in memory (tmpfs), so no disk of the server counts.

Clients find the server by the environment variables of S3's own tools, which every process inherits that is
started in the block of `Storage`. Nothing here imports obstore: a process that has used it must not fork.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import boto3

from tools.bench.link import Link

#: Of the link: bytes a second each way, and the delay in seconds that stands for a round trip.
BANDWIDTH, DELAY = 100e6, 0.03
BUCKET = "bench"
#: A content type with which SeaweedFS keeps bytes as they are. It compresses text, and then it decompresses
#: megabytes for each range that somebody asks for.
NOT_COMPRESSIBLE = "application/zip"
_KEY, _SECRET, _REGION = "bench", "the-secret-of-the-bench", "us-east-1"
# Seconds in which the server must answer.
_PATIENCE = 60.0
_PORTS = ("s3.port", "master.port", "volume.port", "filer.port")


class Storage(AbstractContextManager["Storage"]):
    """A server with an empty bucket, and the link to it.

    Attributes:
        link: leads to the server.
        endpoint: the address that clients use: that of the link.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._ports = _free_ports(2 * len(_PORTS))
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Storage:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="castore-bench-"))
            self._folder = Path(folder)
            self.link = stack.enter_context(Link(self._ports[0]))
            self.endpoint = f"http://127.0.0.1:{self.link.port}"
            stack.callback(self._end)
            stack.enter_context(_environment(self._variables()))
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @staticmethod
    def url(prefix: str) -> str:
        """The URL of a prefix of the bucket."""
        return f"s3://{BUCKET}/{prefix}"

    def again(self) -> None:
        """Start the server anew, with an empty bucket."""
        self._end()
        self._start()

    def upload(self, key: str, path: Path) -> None:
        """Put a file into the bucket, past the link."""
        with path.open("rb") as file:
            self._direct().put_object(Bucket=BUCKET, Key=key, Body=file, ContentType=NOT_COMPRESSIBLE)

    def _variables(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": _REGION,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            # neither the user's files nor the machine's role
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "S3_ENDPOINT_URL": self.endpoint,  # mosaicml-streaming
            # a remote of rclone's that is called "bench"
            "RCLONE_CONFIG": os.devnull,
            "RCLONE_CONFIG_BENCH_TYPE": "s3",
            "RCLONE_CONFIG_BENCH_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_BENCH_ENV_AUTH": "true",
            "RCLONE_CONFIG_BENCH_ENDPOINT": self.endpoint,
        }

    def _direct(self) -> Any:
        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self._ports[0]}")

    def _start(self) -> None:
        shutil.rmtree(self._folder / "data", ignore_errors=True)
        (self._folder / "data").mkdir()
        user = {
            "name": "bench",
            "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (self._folder / "s3.json").write_text(json.dumps({"identities": [user]}))
        names = [*_PORTS, *(f"{name}.grpc" for name in _PORTS)]
        command = [
            program("weed"), "-logtostderr=true", "server", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.telemetry=false", f"-s3.config={self._folder / 's3.json'}",
            f"-filer.localSocket={self._folder / 'filer'}", f"-s3.localSocket={self._folder / 's3'}",
            "-volume.max=64", "-master.volumeSizeLimitMB=1024",
            *(f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)),
        ]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            # Ends with this process, however this process ends.
            mortal = ["setpriv", "--pdeathsig", "KILL", *command]
            self._server = subprocess.Popen(
                mortal, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )
        until = time.monotonic() + _PATIENCE
        while not self._answers():
            if self._server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"SeaweedFS does not start: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        client = self._direct()
        client.create_bucket(Bucket=BUCKET)
        # The first write of bytes waits for seconds, until the server has made volumes.
        client.put_object(Bucket=BUCKET, Key="made", Body=b"1")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[0]}/healthz", timeout=10):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def _end(self) -> None:
        if self._server is None:
            return
        self._server.kill()  # it would take ten seconds to say farewell
        self._server.wait()
        self._server = None
        for port in self._ports:  # the server leaves them behind
            for leftover in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                leftover.unlink()


def program(name: str) -> str:
    """A program that a package has brought beside the interpreter."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise RuntimeError(f"there is no {path}: make it with tools/setup.sh bench")
    return str(path)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _free_ports(count: int) -> list[int]:
    """Ports of loopback where nobody listens, and that the kernel gives to nobody by itself, the link say."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return list(islice(filter(_is_free, random.sample(range(low // 2, low), k=low // 2)), count))


def _is_free(port: int) -> bool:
    with socket.socket() as one, suppress(OSError):
        one.bind(("127.0.0.1", port))
        return True
    return False
