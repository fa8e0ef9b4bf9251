"""A bucket block opens its store with one right, and says in a sentence what it cannot."""

import sys
from pathlib import Path

import pytest
from prefect_aws import AwsCredentials
from prefect_aws.client_parameters import AwsClientParameters
from pydantic import SecretStr, ValidationError

from blocks import Bucket, BucketRole, VastCredentials
from millrace.errors import ConfigurationError, DeniedError, NotFoundError
from millrace.storage import Right, list_objects, put, read
from millrace.testing.key import Key
from millrace.testing.rgw import RGW


def pair(key: Key, endpoint: str | None = None) -> AwsCredentials:
    return AwsCredentials(
        aws_access_key_id=key.access_key_id,
        aws_secret_access_key=SecretStr(key.secret_access_key),
        aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
    )


@pytest.fixture
def block(rgw: RGW, bucket: str) -> Bucket:
    """A bucket whose two key pairs can do what each is for."""
    return Bucket(
        role=BucketRole.DATASET,
        url=f"s3://{bucket}/part",
        read_credentials=pair(rgw.read_only, rgw.endpoint),
        write_credentials=pair(rgw.full, rgw.endpoint),
    )


def test_each_right_has_its_own_key(block: Bucket) -> None:
    put(block.open("write"), "key", b"bytes")
    reader = block.open(Right.READ)
    assert read(reader, "key") == b"bytes"
    with pytest.raises(DeniedError):
        put(reader, "key", b"others")


def test_checking_leaves_nothing_behind(block: Bucket) -> None:
    block.check("read", "words")
    block.check("write", "words")
    assert list(list_objects(block.open("read"))) == []


def test_a_key_that_may_not_write_is_refused_by_name(block: Bucket, rgw: RGW) -> None:
    block.write_credentials = pair(rgw.read_only, rgw.endpoint)
    with pytest.raises(DeniedError, match="does not let these credentials create objects") as error:
        block.check("write", "words")
    assert "write credentials of the bucket" in str(error.value)


def test_a_key_that_nobody_knows_is_refused(block: Bucket, rgw: RGW) -> None:
    block.read_credentials = pair(Key("nobody", "nothing"), rgw.endpoint)
    with pytest.raises(DeniedError, match="does not let these credentials list objects"):
        block.check("read")


def test_a_bucket_that_is_not_there_is_a_sentence(rgw: RGW) -> None:
    block = Bucket(
        role=BucketRole.DATASET, url="s3://no-such", write_credentials=pair(rgw.full, rgw.endpoint)
    )
    with pytest.raises(NotFoundError, match="there is no such bucket"):
        block.check("write")


def test_without_credentials_for_a_right_it_does_not_take_the_others() -> None:
    block = Bucket(role=BucketRole.DATASET, url="s3://x", write_credentials=pair(Key("a", "b")))
    with pytest.raises(ConfigurationError, match="read credentials are needed"):
        block.open("read")


def test_with_no_credentials_at_all_the_environment_is_asked() -> None:
    block = Bucket(role=BucketRole.DATASET, url="s3://x")
    assert block.make_spec("read").credentials is None


def test_an_r2_bucket_may_name_its_account_apart() -> None:
    account = "0123456789abcdef0123456789abcdef"
    block = Bucket(
        role=BucketRole.GRADIENTS, url="r2://runs/one", account_id=account,
        read_credentials=pair(Key("a", "b")),
    )  # fmt: skip
    assert block.open("read").url == f"r2://{account}/runs/one"


@pytest.mark.parametrize(
    "credentials",
    [
        AwsCredentials(profile_name="default"),
        AwsCredentials(aws_access_key_id="a"),
        AwsCredentials(
            aws_access_key_id="a",
            aws_secret_access_key=SecretStr("b"),
            assume_role_arn="arn:aws:iam:::role/x",
        ),
        AwsCredentials(
            aws_access_key_id="a",
            aws_secret_access_key=SecretStr("b"),
            aws_client_parameters=AwsClientParameters(verify=False),
        ),
    ],
)
def test_credentials_that_cannot_be_handed_on_are_refused(credentials: AwsCredentials) -> None:
    block = Bucket(role=BucketRole.DATASET, url="s3://x", read_credentials=credentials)
    with pytest.raises(ConfigurationError, match="read credentials"):
        block.open("read")


def test_a_certificate_authority_is_handed_on(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("certificate")
    credentials = pair(Key("a", "b"))
    credentials.aws_client_parameters = AwsClientParameters(verify_cert_path=tmp_path / "ca.pem")
    block = Bucket(role=BucketRole.DATASET, url="s3://x", read_credentials=credentials)
    assert block.make_spec("read").ca_file == tmp_path / "ca.pem"


def test_a_place_that_is_no_url_is_refused() -> None:
    with pytest.raises(ValidationError, match="write r2://"):
        Bucket(role=BucketRole.DATASET, url="my-bucket")


def test_vast_gives_its_own_client() -> None:
    client = VastCredentials(api_key=SecretStr("a key"), server_url="http://127.0.0.1:9")
    from vastai import VastAI

    assert isinstance(client.get_client(), VastAI)


def test_without_vasts_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vastai", None)
    with pytest.raises(ConfigurationError, match=r"millrace\[vast\]"):
        VastCredentials(api_key=SecretStr("a key")).get_client()
