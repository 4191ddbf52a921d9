"""Google Cloud Storage on a port of 127.0.0.1: what obstore asks of its XML interface, as documented.

The servers that packages bring (gcp-storage-emulator) lack the lists and the conditions of this interface. So
it is written here after Google's reference, https://docs.cloud.google.com/storage/docs/xml-api/overview and
the pages below it. Objects are in memory, and each write has a generation of its own. No credential is
checked.

    python tests/remote/gcs_server.py PORT BUCKET
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import threading
import time
from collections.abc import Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

#: Names of a page of a list, far fewer than the 1,000 of Google's: lists go on.
_PAGE = 50
_XML = {"Content-Type": "application/xml"}
_NO_HEADERS: Mapping[str, str] = {}
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class _Stored(NamedTuple):
    data: bytes
    generation: int
    at: float

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'

    def headers(self) -> dict[str, str]:
        return {
            "ETag": self.tag,
            "Last-Modified": formatdate(self.at, usegmt=True),
            "x-goog-generation": str(self.generation),
            "x-goog-stored-content-length": str(len(self.data)),
        }


class _Bucket:
    """The objects of the bucket, and uploads in parts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.objects: dict[str, _Stored] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.generations = itertools.count(time.time_ns() // 1000)

    def write(self, key: str, data: bytes, condition: str | None) -> _Stored | None:
        """Write an object; None if it has another generation than the condition says. 0 means none at all."""
        with self.lock:
            there = self.objects.get(key)
            if condition is not None and int(condition) != (there.generation if there else 0):
                return None
            stored = self.objects[key] = _Stored(data, next(self.generations), time.time())
            return stored


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: _Bucket

    def log_message(self, *args: Any) -> None:
        """Nothing: a log has what goes wrong."""

    def handle_one_request(self) -> None:
        """Answer a request. One for another bucket than the only one there is gets an error."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline:
            self.close_connection = True
        elif self.parse_request():
            self._answer()
            self.wfile.flush()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        _, bucket, *rest = unquote(parts.path).split("/", 2)
        if bucket != self.bucket.name:
            self._refuse(404, "NoSuchBucket")
            return
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        methods = {"GET": self._get, "HEAD": self._get, "PUT": self._put, "POST": self._post}
        methods.get(self.command, self._delete)("".join(rest), query, body)

    def _end(self, status: int, body: bytes = b"", headers: Mapping[str, str] = _NO_HEADERS) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        message = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self._end(status, message.encode(), _XML)

    def _get(self, key: str, query: dict[str, str], body: bytes) -> None:
        if not key and "list-type" in query:
            self._end(200, self._list(query), _XML)
            return
        stored = self.bucket.objects.get(key)
        if stored is None:
            self._refuse(404, "NoSuchKey")
        elif self.headers.get("If-Match", stored.tag) != stored.tag:
            self._refuse(412, "PreconditionFailed")
        elif asked := _RANGE.fullmatch(self.headers.get("Range", "")):
            self._part(stored, asked)
        else:
            self._end(200, stored.data, stored.headers())

    def _part(self, stored: _Stored, asked: re.Match[str]) -> None:
        size = len(stored.data)
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if start >= size:
            self._refuse(416, "InvalidRange")
            return
        where = f"bytes {start}-{end - 1}/{size}"
        self._end(206, stored.data[start:end], {"Content-Range": where, **stored.headers()})

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "partNumber" in query:
            self.bucket.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._end(200, b"", {"ETag": _Stored(body, 0, 0).tag})
            return
        stored = self.bucket.write(key, body, self.headers.get("x-goog-if-generation-match"))
        if stored is None:
            self._refuse(412, "PreconditionFailed")
        else:
            self._end(200, b"", stored.headers())

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            number = str(next(self.bucket.generations))
            self.bucket.uploads[number] = {}
            begun = (
                f"<Bucket>{self.bucket.name}</Bucket><Key>{escape(key)}</Key><UploadId>{number}</UploadId>"
            )
            whole = f"<InitiateMultipartUploadResult>{begun}</InitiateMultipartUploadResult>"
            self._end(200, whole.encode())
            return
        parts = self.bucket.uploads.pop(query["uploadId"])
        data = b"".join(parts[number] for number in sorted(parts))
        stored = self.bucket.write(key, data, self.headers.get("x-goog-if-generation-match"))
        if stored is None:
            self._refuse(412, "PreconditionFailed")
            return
        tag = f"<ETag>{escape(stored.tag)}</ETag>"
        whole = f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>"
        self._end(200, whole.encode(), stored.headers())

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.bucket.uploads.pop(query["uploadId"], None)
            self._end(204)
        elif self.bucket.objects.pop(key, None) is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._end(204)

    def _list(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        found = sorted(
            (key, stored)
            for key, stored in list(self.bucket.objects.items())
            if key.startswith(prefix) and key > after
        )
        lines, folders = [], set()
        for key, stored in found[:_PAGE]:
            inside, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.add(prefix + inside + cut)
                continue
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(stored.at))
            at += f".{int(stored.at % 1 * 1000):03}Z"
            lines.append(
                f"<Contents><Key>{escape(key)}</Key><Generation>{stored.generation}</Generation>"
                f"<LastModified>{at}</LastModified><ETag>{escape(stored.tag)}</ETag>"
                f"<Size>{len(stored.data)}</Size></Contents>"
            )
        lines += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders]
        more = len(found) > _PAGE
        if more:
            lines.append(f"<NextContinuationToken>{escape(found[_PAGE - 1][0])}</NextContinuationToken>")
        whole = f"<IsTruncated>{str(more).lower()}</IsTruncated>" + "".join(lines)
        return f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult>{whole}</ListBucketResult>".encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    _Answering.bucket = _Bucket(sys.argv[2])
    _Server(("127.0.0.1", int(sys.argv[1])), _Answering).serve_forever()
