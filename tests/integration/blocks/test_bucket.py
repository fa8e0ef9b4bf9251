"""A bucket block opens its store with one right, and says in a sentence what it cannot."""

import json
import sys
import traceback
from pathlib import Path
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from prefect.types import SecretDict
from prefect_aws import AwsCredentials
from prefect_aws.client_parameters import AwsClientParameters
from prefect_gcp import GcpCredentials
from pydantic import SecretStr, ValidationError

from blocks import Bucket, BucketRole, VastCredentials
from blocks.loading import find_block
from millrace.errors import ConfigurationError, DeniedError, NotFoundError
from millrace.storage import Right, Store, list_objects, open_store, put, read
from millrace.testing.gcs import GCSServer
from millrace.testing.key import Key
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer
from tests.support.blocks import save_document


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


@pytest.mark.parametrize("url", ["s3://x", "gs://x"])
def test_a_block_without_credentials_uses_the_environment_only_if_it_says_so(url: str) -> None:
    block = Bucket(role=BucketRole.DATASET, url=url)
    with pytest.raises(ConfigurationError, match=r"has none: .* or switch on `use_environment`"):
        block.make_spec("read")
    block.use_environment = True
    spec = block.make_spec("read")
    assert spec.credentials is None
    assert spec.options == {}


def test_a_block_may_name_the_store_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_BACKEND", "s3")
    monkeypatch.setenv("CHECKPOINT_BUCKET", "s3://bucket")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    block = Bucket(role=BucketRole.DATASET, url="env://words")
    with pytest.raises(ConfigurationError, match="switch on `use_environment`"):
        block.make_spec("read")
    block.use_environment = True
    spec = block.make_spec("read")
    assert (spec.url, spec.credentials and spec.credentials.access_key_id) == (
        "s3://bucket/words",
        "id",
    )


def test_a_block_whose_key_pairs_were_deleted_does_not_use_the_environment(
    prefect_api: PrefectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    name = f"pairs-{uuid4().hex[:8]}"
    names, pairs = [f"{name}-read", f"{name}-write"], [pair(Key("r", "r")), pair(Key("w", "w"))]
    for one, saved in zip(names, pairs, strict=True):
        saved.save(one)
    Bucket(
        role=BucketRole.DATASET, url="s3://x", read_credentials=pairs[0], write_credentials=pairs[1]
    ).save(name)
    for one in names:
        AwsCredentials.delete(one)
    found = find_block(Bucket, name)
    assert found is not None
    with pytest.raises(ConfigurationError, match=f"block '{name}' has none"):
        found.open("write")


def test_a_block_that_was_filled_in_wrongly_names_the_field_and_no_secret(
    prefect_api: PrefectServer,
) -> None:
    name = save_document(prefect_api, Bucket, {
        "role": "Dataset", "url": "my-bucket",
        "read_credentials": {"aws_secret_access_key": "hunter2", "region_name": {"a": "hunter2"}},
    })  # fmt: skip
    with pytest.raises(ConfigurationError, match=f"Bucket block '{name}' is not valid") as refused:
        find_block(Bucket, name)
    assert "url: write r2://" in str(refused.value)
    assert "role: Input should be" in str(refused.value)
    assert "read_credentials" in str(refused.value)
    shown = "".join(traceback.format_exception(refused.value))
    assert "hunter2" not in shown
    assert "validate=False" not in shown
    block = Bucket(role=BucketRole.DATASET, url="file:///x", mirrors=[name])
    with pytest.raises(ConfigurationError, match="url: write r2://"):
        block.make_mirror_specs()
    block.mirrors = ["no-such-block"]
    with pytest.raises(ConfigurationError, match=r"mirror 'no-such-block' of .* is no URL"):
        block.make_mirror_specs()
    assert find_block(Bucket, "no-such-block") is None


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


def open_google(block: Bucket, right: str, gcs: GCSServer) -> Store:
    """Open the bucket of a block at the stand-in, whose endpoint a block cannot name."""
    spec = block.make_spec(Right(right)).model_copy(update={"endpoint": gcs.endpoint})
    return open_store(spec)


def test_google_is_reached_by_the_key_files_of_two_service_accounts(
    gcs: GCSServer, tmp_path: Path
) -> None:
    key = gcs.make_store_config()["config"]["service_account_key"]
    (tmp_path / "key.json").write_text(key)
    block = Bucket(
        role=BucketRole.DATASET,
        url=f"gs://bucket/{tmp_path.name}",
        read_google_credentials=str(tmp_path / "key.json"),
        write_google_credentials=str(tmp_path / "missing.json"),
    )
    with pytest.raises(ConfigurationError, match=r"missing\.json"):
        open_google(block, "write", gcs)
    assert list(list_objects(open_google(block, "read", gcs))) == []


def test_google_is_reached_by_blocks_of_prefect_gcp(
    gcs: GCSServer,
    prefect_api: PrefectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    key = {
        **json.loads(gcs.make_store_config()["config"]["service_account_key"]),
        "client_email": "one@project.example",
        "private_key": private.decode(),
        "token_uri": "https://oauth2.googleapis.com/token",
    }
    name = f"google-{uuid4().hex[:8]}"
    GcpCredentials(service_account_info=SecretDict(key)).save(name)
    (tmp_path / "key.json").write_text(json.dumps({**key, "type": "service_account"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    GcpCredentials().save(f"{name}-empty")
    block = Bucket(
        role=BucketRole.DATASET,
        url=f"gs://bucket/{tmp_path.name}",
        read_google_credentials=f"{name}-empty",
        write_google_credentials=name,
    )
    assert "gcs_base_url" not in str(block.make_spec("write"))
    put(open_google(block, "write", gcs), "key", b"bytes")
    with pytest.raises(ConfigurationError, match=r"need a service account.*has none: add its key"):
        block.make_spec("read")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    with pytest.raises(ConfigurationError, match="default credentials were not found"):
        block.make_spec("read")  # on a machine outside of Google's cloud
    block.read_google_credentials = f"{name}-nobody"
    with pytest.raises(
        ConfigurationError, match=r"no GCP Credentials block: there is no .*-nobody"
    ):
        block.make_spec("read")


def test_google_takes_no_key_pair() -> None:
    block = Bucket(role=BucketRole.DATASET, url="gs://x", read_credentials=pair(Key("a", "b")))
    with pytest.raises(ConfigurationError, match="read credentials are needed"):
        block.make_spec("read")
    block.write_google_credentials = "/key.json"
    with pytest.raises(ConfigurationError, match="read credentials are needed"):
        block.make_spec("read")
