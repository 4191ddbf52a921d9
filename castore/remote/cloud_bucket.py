"""A bucket on object storage (S3, GCS, Azure) by obstore, which is Rust's object_store.

obstore is not fork-safe: a child that was forked after its parent's first request waits for ever. So the
process that imports this module must never fork afterwards, and a forked child gets an error here instead.

obstore's errors carry the request's address and the storage's whole answer, where a signature or an access
token may stand. Of those texts only the status, the host and the storage's own error code go on.

Requests are tried again here (retries.py) and not by obstore, which does not report how often. Parts of an
upload are the exception.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from castore.errors import (
    MissingDependencyError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
)
from castore.remote.aws_credentials import read_profile
from castore.remote.bucket import SMALL, Listed, Patience, Versioned, pieces
from castore.remote.retries import Tries

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
    from obstore.store import AzureStore, GCSStore, S3Store
except ImportError as _missing:
    raise MissingDependencyError.of("obstore", "remote") from _missing

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

    from castore.records import Buffer

_T = TypeVar("_T")
OnRetry = Callable[[], object]

# Bytes.
_PIECE = 4 << 20
_PART = 8 << 20
# S3 takes 10,000 parts a file.
_MOST_PARTS = 9000
# At one time. All parts under way share the link, and each must be through within `Patience.silence`.
_PARTS_AT_ONCE = 4
_KEYS_A_REQUEST = 1000
# Seconds. Ends a request whose bytes never stop trickling.
_LONGEST_REQUEST = 6 * 3600.0

_STATUS = re.compile(r"(?:status code|error response): (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,80})</Code>|\(code: (\w{1,80})\)")
_HOST = re.compile(r"https?://(?:[^/@\s]*@)?([^/?#\s,]{1,255})")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?", re.IGNORECASE)
# Words of obstore's errors without credentials: neither the machine's role nor a setting gave any.
_NO_CREDENTIALS = re.compile(
    r"/latest/api/token|/latest/meta-data/|token request|Account must be specified|Invalid Access Key:"
    r"|service account file|CryptoProvider error"
)
_CONDITION_FAILED = (AlreadyExistsError, PreconditionError)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_OTHER_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
_HTTP_VARIABLES = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
_CREDENTIALS = {
    "s3": (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), the profile AWS_PROFILE in"
        " ~/.aws/credentials, or the machine's role"
    ),
    "gs": (
        "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT (the file of a key),"
        " `gcloud auth application-default login`, or the machine's service account"
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN,"
        " AZURE_CLIENT_ID with its secret and tenant, or the machine's identity"
    ),
}


def open_s3(bucket: str, prefix: str, patience: Patience, retried: OnRetry) -> CloudBucket:
    """A bucket of S3, or of a storage that speaks its language.

    obstore reads the environment itself: keys, token, region, ``AWS_ENDPOINT_URL``, ``AWS_ALLOW_HTTP``, web
    identities, container and machine roles. Profiles, ``AWS_ENDPOINT_URL_S3`` and ``AWS_CA_BUNDLE`` are
    added to that.

    Raises:
        RemoteDeniedError: the profile is missing, or has no keys that can be read.
        RemoteError: the endpoint is no address, or there is no file that ``AWS_CA_BUNDLE`` names.
    """
    profile = read_profile()
    config: S3Config = {}
    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next(filter(None, map(os.environ.get, endpoints)), profile.endpoint)
    if endpoint:
        if not _ENDPOINT.fullmatch(endpoint):  # obstore would panic
            raise RemoteError(
                "the endpoint of S3 in AWS_ENDPOINT_URL or the profile is no address: write"
                " https://host:port, without user and password"
            )
        config["endpoint"] = endpoint
    if profile.region and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        config["region"] = profile.region
    options = _client(patience, "AWS")
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        try:
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as error:
            raise RemoteError(f"AWS_CA_BUNDLE names {bundle}, and there is {error.strerror}") from None
    return CloudBucket(
        f"s3://{bucket}/{prefix}".rstrip("/"),
        lambda retries: S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            credential_provider=profile.keys,
            client_options=options,
            retry_config=retries,
        ),
        patience,
        retried,
    )


def open_gcs(bucket: str, prefix: str, patience: Patience, retried: OnRetry) -> CloudBucket:
    """A bucket of Google Cloud Storage. obstore reads the environment and gcloud's files itself."""
    return _open(GCSStore, f"gs://{bucket}/{prefix}", bucket, prefix, "GOOGLE", patience, retried)


def open_azure(bucket: str, prefix: str, patience: Patience, retried: OnRetry) -> CloudBucket:
    """A container of Azure's blob storage. obstore reads the environment itself, the account's name too."""
    return _open(AzureStore, f"az://{bucket}/{prefix}", bucket, prefix, "AZURE", patience, retried)


def _open(
    store: type[GCSStore | AzureStore],
    url: str,
    bucket: str,
    prefix: str,
    kind: str,
    patience: Patience,
    retried: OnRetry,
) -> CloudBucket:
    return CloudBucket(
        url.rstrip("/"),
        lambda retries: store(
            bucket, prefix=prefix or None, client_options=_client(patience, kind), retry_config=retries
        ),
        patience,
        retried,
    )


def _client(patience: Patience, kind: str) -> ClientConfig:
    # obstore reads options of its client from the environment only where it is given none.
    allowed = os.environ.get(f"{kind}_ALLOW_HTTP", "").lower() in ("1", "true", "yes", "on")
    return {
        "allow_http": allowed,
        "connect_timeout": timedelta(seconds=patience.connect),
        "read_timeout": timedelta(seconds=patience.silence),
        "timeout": timedelta(seconds=_LONGEST_REQUEST),
    }


def _upload_retries(patience: Patience) -> RetryConfig:
    """Of obstore, for parts of an upload: only obstore can send one part again."""
    return {
        "max_retries": patience.retries,
        "retry_timeout": timedelta(seconds=patience.deadline),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=10),
            "base": 2,
        },
    }


class CloudBucket:
    """See `castore.remote.bucket.Bucket`.

    Args:
        url: without credentials.
        make_store: gives the store of obstore, with its prefix and these retries.
        patience: of each request.
        retried: called before a request is tried again, but not by `upload`, where obstore tries again.
    """

    def __init__(
        self,
        url: str,
        make_store: Callable[[RetryConfig], ObjectStore],
        patience: Patience,
        retried: OnRetry,
    ) -> None:
        self.url = url
        self._pid = os.getpid()
        self._patience = patience
        self._retried = retried
        with _translated(self, ""):
            try:
                self._store = make_store({"max_retries": 0})
            except ValueError:
                raise RemoteError(
                    f"AWS_CA_BUNDLE, a setting for {url}, names no file of certificates"
                ) from None
        self._make_upload_store = partial(make_store, _upload_retries(patience))

    @cached_property
    def _upload_store(self) -> ObjectStore:
        """The store of large uploads. It is seldom needed, and to make one reads all certificates."""
        return self._make_upload_store()

    def _tries(self) -> Tries:
        return Tries(self._patience, self._retried)

    def _ask(self, key: str, request: Callable[[], _T]) -> _T:
        """Do a request until it is answered."""
        tries = self._tries()
        while True:
            try:
                with _translated(self, key):
                    return request()
            except _MAY_PASS:
                if not tries.wait():
                    raise

    def get(self, key: str) -> Versioned:
        """See `Bucket`."""
        meta, data = self._ask(key, lambda: self._get(key))
        if len(data) != meta["size"]:
            raise RemoteError(f"{self.url} gave {len(data)} bytes of {key}, which has {meta['size']}")
        version = {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
        return Versioned(data, version, meta["last_modified"].timestamp())

    def _get(self, key: str) -> tuple[ObjectMeta, bytes]:
        found = obstore.get(self._store, key)
        if found.meta["size"] > SMALL:
            raise RemoteError(f"{key} in {self.url} is larger than castore writes it")
        return found.meta, bytes(found.bytes())

    def size(self, key: str) -> int | None:
        """See `Bucket`."""
        try:
            return self._ask(key, lambda: obstore.head(self._store, key)["size"])
        except RemoteMissingError:
            return None

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Bucket`."""
        try:
            return self._range(key, start, end)
        except _ShortError:
            size = self.size(key) or 0
            return self._range(key, min(start, size), min(end, size))

    def _range(self, key: str, start: int, end: int) -> bytes:
        """`get_range` of an object that ends behind the range."""
        if start >= end:
            return b""
        got = bytes(self._ask(key, lambda: obstore.get_range(self._store, key, start=start, end=end)))
        if len(got) != end - start:
            raise _ShortError(
                f"{self.url} gave {len(got)} bytes where bytes {start} to {end} of {key} were asked for:"
                " the storage ignores ranges"
            )
        return got

    def stream(self, key: str) -> Iterator[bytes]:
        """See `Bucket`."""
        seen, size, tag, tries = 0, 0, None, self._tries()
        while True:
            options: GetOptions = {"range": {"offset": seen}} if seen else {}
            if seen and tag is not None:
                options["if_match"] = tag
            try:
                with _translated(self, key):
                    found = obstore.get(self._store, key, options=options)
                    size, tag = found.meta["size"], found.meta["e_tag"]
                    for piece in found.stream(min_chunk_size=_PIECE):
                        seen += len(piece)
                        yield bytes(piece)
                        tries = self._tries()
                break
            except _MAY_PASS:
                if not tries.wait():
                    raise
        if seen != size:
            raise RemoteError(f"{self.url} gave {seen} bytes of {key}, which has {size}")

    def put(self, key: str, data: Buffer) -> None:
        """See `Bucket`."""
        self._ask(
            key,
            lambda: obstore.put(self._store, key, data, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE),
        )

    def upload(self, key: str, path: Path, progress: Callable[[int], object]) -> None:
        """See `Bucket`."""
        part = max(_PART, path.stat().st_size // _MOST_PARTS + 1)
        with open(path, "rb") as file, _translated(self, key):
            read = pieces(file, part, progress)
            obstore.put(self._upload_store, key, read, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

    def create(self, key: str, data: bytes) -> bool:
        """See `Bucket`."""
        return self._put_if(key, data, "create")

    def replace(self, key: str, data: bytes, version: Any) -> bool:
        """See `Bucket`."""
        if not version:
            raise RemoteError(f"{self.url} gives objects no version, so {key} cannot be changed safely")
        return self._put_if(key, data, version)

    def renew(self, key: str, seen: Versioned) -> None:
        """See `Bucket`."""
        self.replace(key, seen.data, seen.version)

    def _put_if(self, key: str, data: bytes, mode: Any) -> bool:
        def write() -> bool:
            try:
                obstore.put(self._store, key, data, mode=mode)
            except _CONDITION_FAILED:
                return False
            except FileNotFoundError as error:
                # S3's answer for a replaced object that is gone.
                if mode == "create" or _code(str(error)) in _NO_BUCKET:
                    raise
                return False
            return True

        return self._ask(key, write)

    def listing(self, prefix: str) -> Iterator[Listed]:
        """See `Bucket`."""
        last, tries = None, self._tries()
        while True:
            try:
                with _translated(self, prefix):
                    for found in obstore.list(
                        self._store, prefix or None, offset=last, chunk_size=_KEYS_A_REQUEST
                    ):
                        for meta in found:
                            yield Listed(meta["path"], meta["size"], meta["last_modified"].timestamp())
                            last = meta["path"]
                        tries = self._tries()
                return
            except _MAY_PASS:
                if not tries.wait():
                    raise

    def delete(self, keys: Iterable[str]) -> None:
        """See `Bucket`."""
        pending = iter(keys)
        while some := list(islice(pending, _KEYS_A_REQUEST)):
            try:
                self._ask(some[0], partial(obstore.delete, self._store, some))
            except RemoteMissingError:
                for key in some:
                    with suppress(RemoteMissingError):
                        self._ask(key, partial(obstore.delete, self._store, key))

    def remove_unfinished(self, before: float) -> None:
        """See `Bucket`. Parts of uploads are the business of a life-cycle rule of the bucket."""


class _NoCredentialsError(RemoteDeniedError):
    """Nobody gave any. A machine's role does, if its service answers."""


class _ShortError(RemoteError):
    """A range ends behind the object, or the storage gave another number of bytes."""


_MAY_PASS = (RemoteUnreachableError, _NoCredentialsError)


class _translated:  # noqa: N801
    """Turns what obstore raises into errors of remotes, without its texts and its traceback."""

    def __init__(self, bucket: CloudBucket, key: str) -> None:
        self._bucket, self._key = bucket, key

    def __enter__(self) -> None:
        if os.getpid() != self._bucket._pid:
            raise RemoteError(
                f"{self._bucket.url} was opened before this process was forked, and would hang; start the"
                " process by spawn or forkserver"
            )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BaseError | FileNotFoundError):
            raise _translate(error, self._bucket.url, self._key) from None
        if error is not None and type(error).__name__ == "PanicException":
            # No `Exception`, and it would end a thread without a word.
            raise RemoteError(
                f"obstore has failed at {self._key or 'opening'} in {self._bucket.url}, by an error of its"
                " own or an odd setting in the environment; its words are above"
            ) from None


def _translate(error: Exception, url: str, key: str) -> RemoteError:
    text = str(error)
    status, code, host = _status(text), _code(text), _host(text)
    what = f"{key} in {url}" if key else url
    answer = " ".join(str(part) for part in (status, code) if part)
    if setting := _setting(text, code, host, url):
        return RemoteError(setting)
    if _NO_CREDENTIALS.search(text):
        return _NoCredentialsError(_denied(what, "", "", url.partition(":")[0]))
    if _is_denied(error, status, code):
        return RemoteDeniedError(_denied(what, answer, code, url.partition(":")[0]))
    if isinstance(error, FileNotFoundError):
        return RemoteMissingError(f"{url} has no {key}")
    if status == 416 or "StartTooLarge" in text:
        return _ShortError(f"{what} is shorter than the tree says; `castore remote check` tells more")
    if "NotPartial" in text:
        return RemoteError(f"{url} answers a range of {key} with the whole object: it is unfit for a remote")
    if status == 501:
        return RemoteError(f"{host} does not offer what castore asks for {what} ({answer}): it is unfit")
    if status == 429 or (status is not None and status >= 500):
        return RemoteUnreachableError(f"{host} answers {answer} for {what}, after retries; try again later")
    if "HttpError" in text or "reqwest::Error" in text:
        return RemoteUnreachableError(
            f"no answer from {host or 'the storage'} for {what}, after retries ({_reason(text)}); check the"
            " network and the endpoint"
        )
    return RemoteError(f"{host or 'the storage'} refuses {what}: {answer or type(error).__name__}")


def _setting(text: str, code: str, host: str, url: str) -> str:
    """A sentence on the setting that is wrong, or "" if none is."""
    if code in _NO_BUCKET:
        return f"there is no bucket for {url} at {host}; make it, or mend the URL"
    if code in _OTHER_REGION or "incorrectly configured region" in text:
        return f"the bucket of {url} is in another region; set AWS_REGION"
    if "Config error" in text:
        return f"obstore cannot read a setting for {url} in one of its environment variables"
    if "BadScheme" in text:
        return (
            f"the endpoint {host} is plain HTTP, so anybody on the way can read and change what is sent; set"
            f" {_HTTP_VARIABLES[url.partition(':')[0]]}=true if that is meant"
        )
    return ""


def _is_denied(error: Exception, status: int | None, code: str) -> bool:
    denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403)
    return denied or code in _EXPIRED or (status is None and code == "AccessDenied")


def _denied(what: str, answer: str, code: str, kind: str) -> str:
    if code == "RequestTimeTooSkewed":
        return f"{what} is refused ({answer}), because this machine's clock is wrong; set it"
    if code in _EXPIRED:
        return f"the credentials for {what} have expired ({answer}); renew {_CREDENTIALS[kind]}"
    if not answer:
        return f"there are no credentials for {what}, or none that can be read; give {_CREDENTIALS[kind]}"
    return (
        f"no permission for {what} ({answer}): check the bucket's policy, and the credentials from"
        f" {_CREDENTIALS[kind]}"
    )


def _reason(text: str) -> str:
    reasons = {
        "dns error": "the host's name is unknown",
        "ConnectionRefused": "connection refused",
        "InvalidContentType": "it speaks no TLS",
        "certificate": "its certificate is not trusted",
        "TimedOut": "timed out",
        "Timeout": "timed out",
    }
    return next((reason for word, reason in reasons.items() if word in text), "the connection broke")


def _status(text: str) -> int | None:
    match = _STATUS.search(text)
    return int(match[1]) if match else None


def _code(text: str) -> str:
    match = _CODE.search(text)
    return match[1] or match[2] if match else ""


def _host(text: str) -> str:
    match = _HOST.search(text)
    return match[1] if match else ""
