"""URLs of remotes, and where the credentials for them come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from castore.errors import InvalidValueError, RemoteDeniedError, RemoteError, RemoteUnreachableError
from castore.remote import aws_credentials
from castore.remote.folder_bucket import FolderBucket
from castore.remote.urls import Place as Parsed
from castore.remote.urls import open_bucket, parse_url
from tests.remote.servers import KEY, SECRET, Place


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("s3://team", ("s3", "team", "")),
        ("s3://team/", ("s3", "team", "")),
        ("gs://team-1/castore/v=1/", ("gs", "team-1", "castore/v=1")),
        ("az://container/a/b_c.d", ("az", "container", "a/b_c.d")),
        ("file:///mnt/shared/castore/", ("file", "", "/mnt/shared/castore")),
        ("file:///mnt/with%20space", ("file", "", "/mnt/with space")),
    ],
)
def test_a_url_says_where_a_remote_is(url: str, parsed: tuple[str, str, str]) -> None:
    assert parse_url(url) == Parsed(*parsed)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://key:open-sesame@team/prefix", "no user and password"),
        ("s3://open-sesame@team/prefix", "no user and password"),
        ("s3://team/prefix?token=open-sesame", "no options"),
        ("s3://team/prefix#open-sesame", "no options"),
        ("s3://team/prefix?", "no options"),
        ("file:///mnt/a\nb", "has a control character"),
        ("s3://team/a\tb", "has a control character"),
        ("s3:///prefix", "names no bucket"),
        ("s3:team", "names no bucket"),
        ("s3://team:9000/x", "names no bucket"),
        ("s3://té/x", "names no bucket"),
        ("s3://team/a//b", "cannot be used"),
        ("s3://team/../other", "cannot be used"),
        ("s3://team/a b", "cannot be used"),
        ("s3://team/a%2Fb", "cannot be used"),
        ("http://team/prefix", "is no URL of a remote"),
        ("/mnt/shared", "is no URL of a remote: write file:///mnt/shared for that folder"),
        ("some folder", f"write {Path('some folder').absolute().as_uri()} for that folder"),
        ("", "is no URL of a remote"),
        ("s3://[team", "this is no URL"),
        ("file://host/mnt", "has no absolute path"),
        ("file:mnt", "has no absolute path"),
        ("file:///", "names no folder"),
        ("file:///mnt/../etc", "names no folder"),
    ],
)
def test_another_url_is_refused_in_a_sentence_without_its_password(url: str, told: str) -> None:
    with pytest.raises(InvalidValueError, match=told) as caught:
        open_bucket(url)
    assert "open-sesame" not in "".join(traceback.format_exception(caught.value))
    assert "\n" not in str(caught.value)


def test_a_folder_needs_no_library_and_a_bucket_says_which_one_is_missing(tmp_path: Path) -> None:
    bucket = open_bucket(tmp_path.as_uri())
    assert isinstance(bucket, FolderBucket)
    assert bucket.url == tmp_path.as_uri()
    script = """
import sys
sys.modules["obstore"] = None
from castore import MissingDependencyError
from castore.remote.urls import open_bucket
open_bucket("file:///mnt/shared")
try:
    open_bucket("s3://team")
except MissingDependencyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (
        done.stdout == 'this needs the package obstore; install it with: pip install "castore[remote]"\n'
    ), done.stderr


# --- credentials ---------------------------------------------------------------------------------


def profile(place: Place, folder: Path, *, config: str = "", shared: str = "", **variables: str) -> Place:
    """The place for a user who has files in ``~/.aws`` and no keys in the environment."""
    (folder / "config").write_text(config)
    (folder / "credentials").write_text(shared)
    files = {
        "AWS_CONFIG_FILE": str(folder / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
        "AWS_ALLOW_HTTP": "true",
    }
    return place._replace(environment=files | variables)


def keys(secret: str = SECRET) -> str:
    return f"aws_access_key_id = {KEY}\naws_secret_access_key = {secret}\n"


def test_the_profile_that_is_named_gives_keys_region_and_endpoint(seaweedfs: Place, tmp_path: Path) -> None:
    at = f"region = us-east-1\nendpoint_url = {seaweedfs.environment['AWS_ENDPOINT_URL']}\n"
    config = f"[default]\n[profile team]\n{at}"
    shared = f"[default]\n{keys('100%(wrong)s')}[team]\n{keys()}"
    place = profile(seaweedfs, tmp_path, config=config, shared=shared, AWS_PROFILE="team")
    bucket = place.fresh()
    bucket.put("one", b"1")
    assert bucket.get("one").data == b"1"
    with pytest.raises(RemoteDeniedError, match="SignatureDoesNotMatch"):
        place.fresh(AWS_PROFILE="default", AWS_ENDPOINT_URL=seaweedfs.environment["AWS_ENDPOINT_URL"]).get(
            "one"
        )


def test_keys_in_the_environment_come_before_those_of_the_default_profile(
    seaweedfs: Place, tmp_path: Path
) -> None:
    place = profile(
        seaweedfs, tmp_path, shared=f"[default]\n{keys('wrong')}", **seaweedfs.environment
    )  # fmt: skip
    place.fresh().put("one", b"1")


def test_keys_that_another_program_renews_are_followed(
    seaweedfs: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws_credentials, "_VALID", timedelta(0))
    endpoint = seaweedfs.environment["AWS_ENDPOINT_URL"]
    shared = f"[default]\n{keys('expired')}"
    bucket = profile(
        seaweedfs, tmp_path, shared=shared, AWS_REGION="us-east-1", AWS_ENDPOINT_URL=endpoint
    ).fresh()
    with pytest.raises(RemoteDeniedError):
        bucket.put("one", b"1")
    (tmp_path / "credentials").write_text(f"[default]\n{keys()}")
    bucket.put("one", b"1")


# botocore leaves the streams of the command to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_keys_that_a_command_gives_are_asked_for_by_boto3(seaweedfs: Place, tmp_path: Path) -> None:
    answer = f'{{"Version": 1, "AccessKeyId": "{KEY}", "SecretAccessKey": "{SECRET}"}}'
    (tmp_path / "answer").write_text(answer)
    config = f"[default]\nregion = us-east-1\ncredential_process = cat {tmp_path / 'answer'}\n"
    endpoint = seaweedfs.environment["AWS_ENDPOINT_URL"]
    place = profile(seaweedfs, tmp_path, config=config, AWS_ENDPOINT_URL=endpoint)
    place.fresh().put("one", b"1")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("[default]\n", "there is no profile 'nobody' in "),
        (f"[profile nobody]\naws_access_key_id = {KEY}\n", "has no aws_secret_access_key"),
        ("[profile nobody]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = none\n", "gives no keys"),
        (f"[profile nobody]\naws_secret_access_key open-sesame\n{keys()}", "no file of AWS profiles"),
    ],
)
def test_a_profile_without_keys_is_told_without_a_secret(
    seaweedfs: Place, tmp_path: Path, config: str, told: str
) -> None:
    place = profile(seaweedfs, tmp_path, config=config, AWS_PROFILE="nobody", AWS_REGION="us-east-1")
    with pytest.raises(RemoteDeniedError, match=told) as caught:
        place.fresh(AWS_ENDPOINT_URL=seaweedfs.environment["AWS_ENDPOINT_URL"]).get("one")
    message = "".join(traceback.format_exception(caught.value))
    assert "open-sesame" not in message
    assert SECRET not in message


def test_a_profile_is_of_no_use_without_the_library_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[default]\nsso_session = team\n")
    script = """
import sys
sys.modules["boto3"] = None
from castore import CastoreError
from castore.remote.urls import open_bucket
try:
    open_bucket("s3://team")
except CastoreError as error:
    print(error)
"""
    variables = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("AWS_")
    } | variables
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert "install boto3, or set what `aws configure export-credentials --profile default" in done.stdout, (
        done.stderr
    )


def without_keys(place: Place) -> Place:
    variables = {name: value for name, value in place.environment.items() if "KEY" not in name}
    return place._replace(environment=variables)


def test_a_machine_without_any_credentials_is_told_so_at_once(seaweedfs: Place) -> None:
    began = time.monotonic()
    with pytest.raises(RemoteDeniedError, match="no credentials for S3: set AWS_ACCESS_KEY_ID"):
        without_keys(seaweedfs).fresh()
    with pytest.raises(RemoteDeniedError, match="this machine has no role"):
        without_keys(seaweedfs).fresh(AWS_EC2_METADATA_DISABLED="true")
    assert time.monotonic() - began < 60


def test_a_machine_whose_role_is_refused_is_told_of_credentials(seaweedfs: Place) -> None:
    endpoint = seaweedfs.environment["AWS_ENDPOINT_URL"]  # answers, and knows of no roles
    with pytest.raises(RemoteDeniedError, match="no credentials for one in s3://"):
        without_keys(seaweedfs).fresh(AWS_METADATA_ENDPOINT=endpoint).get("one")


AZURE = {
    "no account": {},
    "a key that is none": {
        "AZURE_STORAGE_ACCOUNT_NAME": "castoretests",
        "AZURE_STORAGE_ACCOUNT_KEY": "open sesame!",
    },
}


@pytest.mark.parametrize("case", AZURE)
def test_azure_without_credentials_is_told_which_ones_it_takes(case: str) -> None:
    with pytest.raises(RemoteDeniedError, match="AZURE_STORAGE_ACCOUNT_NAME") as caught:
        Place("az://team", AZURE[case], 0).open()
    assert "sesame" not in "".join(traceback.format_exception(caught.value))


def test_google_without_its_file_is_told_where_that_is_looked_for(tmp_path: Path) -> None:
    no_key = {"type": "service_account", "client_email": "", "private_key": "", "private_key_id": ""}
    for number, text in enumerate([None, "{}", json.dumps(no_key)]):
        file = tmp_path / f"{number}.json"
        if text:
            file.write_text(text)
        with pytest.raises(RemoteDeniedError, match="GOOGLE_APPLICATION_CREDENTIALS"):
            Place("gs://team", {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}, 0).open()


@pytest.mark.parametrize(
    "endpoint", ["localhost:9000", "127.0.0.1", "http://", "http://me:open-sesame@host", "ftp://a"]
)
def test_an_endpoint_that_is_no_address_is_told_without_its_password(seaweedfs: Place, endpoint: str) -> None:
    with pytest.raises(RemoteError, match="is no address: write https://host:port") as caught:
        seaweedfs.fresh(AWS_ENDPOINT_URL=endpoint)
    assert "open-sesame" not in "".join(traceback.format_exception(caught.value))


def test_a_panic_of_obstore_is_an_error_like_others(seaweedfs: Place) -> None:
    """As it is, it would pass every `except Exception`."""
    with pytest.raises(RemoteError, match="obstore has failed at one in s3://"):
        seaweedfs.fresh(AWS_ENDPOINT_URL="http://castore.invalid:99999").get("one")


@pytest.mark.parametrize("bundle", ["/none", os.devnull])
def test_a_bundle_of_certificates_that_is_none_is_told(seaweedfs: Place, bundle: str) -> None:
    with pytest.raises(RemoteError, match="AWS_CA_BUNDLE"):
        seaweedfs.fresh(AWS_CA_BUNDLE=bundle)


def test_a_setting_that_obstore_cannot_read_is_told(seaweedfs: Place) -> None:
    with pytest.raises(RemoteError, match="obstore cannot read a setting"):
        seaweedfs.fresh(AWS_CONDITIONAL_PUT="nonsense")


def test_a_server_without_tls_is_told_of(seaweedfs: Place) -> None:
    with pytest.raises(RemoteUnreachableError, match="it speaks no TLS"):
        seaweedfs.fresh(AWS_ENDPOINT_URL=f"https://127.0.0.1:{seaweedfs.port}").get("one")


def test_two_remotes_in_one_bucket_do_not_see_each_other(seaweedfs: Place) -> None:
    one, other = seaweedfs.open(name := uuid.uuid4().hex), seaweedfs.open(name + "x")
    one.put("key", b"1")
    other.put("key", b"2")
    assert (one.get("key").data, other.get("key").data) == (b"1", b"2")
    assert [listed.key for listed in one.listing("")] == ["key"]
