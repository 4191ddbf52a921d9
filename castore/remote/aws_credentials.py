"""Credentials for S3 that obstore does not find: those of a profile in ``~/.aws``, with region and endpoint.

Keys are read again when obstore asks, so a file that another program renews is followed. A profile that takes
its keys from elsewhere (a role, single sign-on, a command) is boto3's business, where boto3 is installed.

Without any credentials obstore asks the machine for a role, with all its patience, and most machines have
none. Whether anybody is there to ask is found out here, in a second.

A pull waits for each module that is imported here, so those that few need are imported where they are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from castore.errors import RemoteDeniedError

if TYPE_CHECKING:
    from obstore.store import S3Credential

# After it the files are read again.
_VALID = timedelta(minutes=5)
_ELSEWHERE = ("role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file")
# Credentials in the environment, which come before those of a profile, and those of a container, which come
# after.
_IN_ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
_CONTAINER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
# Seconds.
_ROLE_PATIENCE = 1.0


class Profile(NamedTuple):
    """The part of a profile that concerns S3.

    Attributes:
        keys: gives credentials to obstore; None where obstore finds them itself.
        region, endpoint: None where the profile has none.
    """

    keys: Callable[[], S3Credential] | None
    region: str | None
    endpoint: str | None


def read_profile() -> Profile:
    """The profile that ``AWS_PROFILE`` names, by default that of the name "default".

    Credentials in the environment come before those of a profile, as they do in AWS's own tools.

    Raises:
        RemoteDeniedError: there is no profile of that name, it has no keys that can be read, or there are no
            credentials anywhere.
    """
    files = _Files(
        os.environ.get("AWS_PROFILE") or "default",
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser(),
        Path(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(),
    )
    fields = files.read()
    if not fields and "AWS_PROFILE" in os.environ:
        raise RemoteDeniedError(f"there is no {files}; AWS_PROFILE names it")
    keys: Callable[[], S3Credential] | None = None
    if not any(map(os.environ.get, _IN_ENVIRONMENT)):
        if any(field in fields for field in _ELSEWHERE):
            keys = _by_boto3(files)
        elif "aws_access_key_id" in fields:
            keys = files.keys
            keys()  # an error here reaches the caller in its own words
        elif not (any(map(os.environ.get, _CONTAINER)) or _may_have_role()):
            raise RemoteDeniedError(
                "there are no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or keep"
                f" them as {files}; this machine has no role either"
            )
    return Profile(keys, fields.get("region"), fields.get("endpoint_url"))


class _Files(NamedTuple):
    """Where a profile stands."""

    name: str
    shared: Path
    config: Path

    def __str__(self) -> str:
        return f"profile {self.name!r} in {self.shared} and {self.config}"

    def read(self) -> dict[str, str]:
        """Fields of the profile. Those of the credentials file win."""
        section = self.name if self.name == "default" else f"profile {self.name}"
        return _section(self.config, section) | _section(self.shared, self.name)

    def keys(self) -> S3Credential:
        """Keys as they stand in the files now."""
        fields = self.read()
        try:
            return {
                "access_key_id": fields["aws_access_key_id"],
                "secret_access_key": fields["aws_secret_access_key"],
                "token": fields.get("aws_session_token"),
                "expires_at": datetime.now(timezone.utc) + _VALID,
            }
        except KeyError as missing:
            raise RemoteDeniedError(f"{self} has no {missing.args[0]}") from None


def _may_have_role() -> bool:
    """Whether something answers where AWS's machines say which role they have."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    place = urlsplit(os.environ.get("AWS_METADATA_ENDPOINT") or "http://169.254.169.254")
    import socket

    try:
        socket.create_connection((place.hostname, place.port or 80), timeout=_ROLE_PATIENCE).close()
    except OSError:
        return False
    return True


def _section(path: Path, section: str) -> dict[str, str]:
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise RemoteDeniedError(f"cannot read {path}: {type(error).__name__}") from None
    from configparser import ConfigParser, Error

    # A secret may hold a percent sign, and no section of these files has defaults for the others.
    parser = ConfigParser(interpolation=None, default_section="", strict=False)
    try:
        parser.read_string(text)
    except Error as error:
        # The error's own text quotes the line, which may be the one with the secret.
        raise RemoteDeniedError(f"{path} is no file of AWS profiles: {type(error).__name__}") from None
    return dict(parser[section]) if parser.has_section(section) else {}


def _by_boto3(files: _Files) -> Callable[[], S3Credential]:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise RemoteDeniedError(
            f"{files} takes its keys from elsewhere; install boto3, or set what"
            f" `aws configure export-credentials --profile {files.name} --format env` prints"
        ) from error
    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=files.name))
    except (BotoCoreError, ValueError) as error:
        raise RemoteDeniedError(f"{files} gives no keys: {error}") from None
