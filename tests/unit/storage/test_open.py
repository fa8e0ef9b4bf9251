import os
import pickle
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store
from pydantic import SecretStr

from millrace import errors
from millrace.storage import (
    Backend,
    Credentials,
    StoreSettings,
    StoreSpec,
    make_boto3_client,
    open_store,
    put,
    read,
    read_spec_from_environment,
)
from millrace.storage.locations import Location
from millrace.storage.signed import _get_endpoint

ACCOUNT = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("url", "backend", "bucket", "prefix"),
    [
        ("file:///data/sets", Backend.FILE, "/data/sets", ""),
        ("s3://bucket/a/b/", Backend.S3, "bucket", "a/b"),
        (f"r2://{ACCOUNT}/bucket/a", Backend.R2, "bucket", "a"),
        (f"r2://{ACCOUNT}.eu/bucket", Backend.R2, "bucket", ""),
        ("gs://bucket/a", Backend.GS, "bucket", "a"),
        ("memory://name", Backend.MEMORY, "name", ""),
    ],
)
def test_a_url_names_its_place(url, backend, bucket, prefix):
    location = Location.parse(url)
    assert (location.backend, location.bucket, location.prefix) == (backend, bucket, prefix)


KEY = Credentials(access_key_id="id", secret_access_key=SecretStr("secret"))
R2 = f"https://{ACCOUNT}.r2.cloudflarestorage.com"
MINIO = "http://minio:9000"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ((f"r2://{ACCOUNT}/b/x", None), ("s3://b", R2), True),
        ((f"r2://{ACCOUNT}/b", None), ("s3://b/y", f"{R2}:443/"), True),
        ((f"r2://{ACCOUNT}.eu/b", None), ("s3://b", R2), False),
        ((f"r2://{ACCOUNT}/b", None), ("s3://c", R2), False),
        ((f"r2://{ACCOUNT}/b", None), ("s3://b", None), False),
        (("s3://b", None), ("s3://b", "https://s3.eu-west-1.amazonaws.com"), True),
        (("s3://b", MINIO), ("s3://b", f"{MINIO.replace('minio', 'MinIO')}/"), True),
        (("s3://b", MINIO), ("s3://b", None), False),
        (("gs://b", None), ("s3://b", "https://storage.googleapis.com"), True),
        (("gs://b", None), ("s3://b", None), False),
        (("memory://b", None), ("memory://b", None), True),
        (("memory://b", None), ("memory://c", None), False),
    ],
)
def test_one_bucket_has_one_id_whatever_its_url(one, other, is_same, monkeypatch):
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    found = [
        open_store(StoreSpec(url=url, endpoint=endpoint, region="auto")).bucket_id
        for url, endpoint in (one, other)
    ]
    assert (found[0] == found[1]) is is_same


@pytest.mark.parametrize(
    "url",
    ["", "ftp://host/x", "s3://", f"r2://{ACCOUNT}", "r2://bucket/x", "file://host/x",
     "s3://key:secret@bucket/x", "s3://bucket/x?secret=1", "file://", "s3://secret@[x",
     "s3://key:a/secret@bucket/x", "s3:/key:secret@bucket/x", "r2://a:secret", "s3://key:secret",
     " s3://bucket", "s3://bucket\n", "s3//bucket/x", "r2//x/y", "“s3://bucket", "x/s3://bucket"],
)  # fmt: skip
def test_what_is_no_place_is_refused_with_what_to_write(url, monkeypatch):
    monkeypatch.delenv("R2_ACCOUNT_ID", raising=False)
    with pytest.raises(errors.ConfigurationError) as refusal:
        open_store(url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    ["s3://b/x//", "s3://b//x", "s3://b//", "s3://b/x//y", "s3://b/x%2F/y", "gs://b//x",
     f"r2://{ACCOUNT}//b", f"r2://{ACCOUNT}/b//x", "s3://b/../x", "s3://b/x/./y", "s3://b/a%0Ab"],
)  # fmt: skip
def test_a_url_whose_prefix_no_key_can_have_is_refused(url):
    with pytest.raises(errors.ConfigurationError, match="two slashes in a row"):
        Location.parse(url)


PREFIXES = ["a%41", "50% #1", "a?b", "a#b/c", "a b+ü", "%25", "a&b=c;d"]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("url", ["s3://bucket/above", f"r2://{ACCOUNT}/bucket", "folder", "path"])
def test_the_url_of_a_store_names_the_same_prefix_again(url, prefix, tmp_path):
    url = {"folder": tmp_path.as_uri(), "path": str(tmp_path)}.get(url, url)
    store = open_store(StoreSpec(url=url, region="eu").with_prefix(prefix))
    path = (
        store.location.bucket if store.location.backend is Backend.FILE else store.location.prefix
    )
    assert path.endswith(prefix)
    for other in (open_store(store.url), pickle.loads(pickle.dumps(store))):
        assert other.location == store.location
    assert Location.parse(store.make_url("k%20#")) == Location.parse(
        store.spec.with_prefix("k%20#").url
    )


@pytest.mark.parametrize("name", ["pp#1", "pq?x", "p@h", "p%41", "a b", "[x", "x//y"])
def test_a_path_is_a_path_whatever_is_in_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(parents=True)
    for path in (name, str(tmp_path / name)):
        assert Location.parse(path).bucket == str(tmp_path / name)
    spec = read_spec_from_environment({"LOCAL_STORAGE_PATH": str(tmp_path / name)})
    assert open_store(spec).location.bucket == str(tmp_path / name)


def test_a_relative_segment_of_a_folder_is_resolved(tmp_path):
    (tmp_path / "up/x").mkdir(parents=True)
    (tmp_path / "link").symlink_to("up/x")
    for path in (f"{tmp_path}/up/x/..", f"file://{tmp_path}/link/..", f"{tmp_path}/up/./x/../"):
        assert Location.parse(path).bucket == str(tmp_path / "up")
    assert Location.parse(f"{tmp_path}/link").bucket == str(tmp_path / "link")


def test_an_r2_account_leads_to_its_endpoint_and_region():
    store = open_store(f"r2://{ACCOUNT}.eu/bucket/a")
    assert store.endpoint == f"https://{ACCOUNT}.eu.r2.cloudflarestorage.com"
    assert store.region == "auto"
    assert store.url == f"r2://{ACCOUNT}.eu/bucket/a"
    named = open_store("r2://bucket/a", account_id=ACCOUNT)
    assert named.url == f"r2://{ACCOUNT}/bucket/a"


def test_secrets_do_not_print_and_go_only_where_they_are_revealed():
    spec = StoreSpec(
        url="s3://bucket",
        credentials=Credentials(
            access_key_id="id",
            secret_access_key=SecretStr("hush-hush"),
            session_token=SecretStr("hush-token"),
        ),
    )
    store = open_store(spec)
    shown = f"{spec!r} {spec} {store!r} {store.raw!r} {spec.model_dump_json()}"
    assert "hush" not in shown
    assert StoreSpec.model_validate(spec.reveal_secrets()) == spec


def test_a_store_can_be_sent_to_another_process_unless_it_is_in_the_memory_of_this(
    tmp_path, monkeypatch
):
    store = open_store(tmp_path.as_uri())
    put(store, "a", b"1")
    assert read(pickle.loads(pickle.dumps(store)), "a") == b"1"
    monkeypatch.setenv("R2_ACCOUNT_ID", ACCOUNT)
    known = pickle.dumps(open_store("r2://bucket/below"))
    monkeypatch.delenv("R2_ACCOUNT_ID")
    assert pickle.loads(known).url == f"r2://{ACCOUNT}/bucket/below"
    with pytest.raises(errors.ConfigurationError, match="in the memory of this process"):
        pickle.dumps(open_store("memory://here"))


def test_the_environment_names_a_folder(tmp_path):
    spec = read_spec_from_environment(
        {"STORAGE_BACKEND": "local", "LOCAL_STORAGE_PATH": str(tmp_path)}
    )
    assert open_store(spec).url == tmp_path.as_uri()


def test_the_environment_names_a_bucket_and_its_credentials():
    spec = read_spec_from_environment(
        {
            "STORAGE_BACKEND": "s3",
            "CHECKPOINT_BUCKET": "bucket",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "AWS_REGION": "auto",
        }
    )
    assert (spec.url, spec.endpoint, spec.region) == ("s3://bucket", "http://127.0.0.1:1", "auto")
    assert spec.credentials.secret_access_key.get_secret_value() == "secret"


@pytest.mark.parametrize(
    ("url", "has_endpoint", "has_key"),
    [
        ("bucket", True, True),
        ("s3://bucket/a", True, True),
        (f"r2://{ACCOUNT}/bucket", False, True),
        ("gs://bucket/a", False, False),
    ],
)
def test_a_url_of_the_environment_takes_the_variables_of_its_store(
    url, has_endpoint, has_key, no_aws
):
    no_aws.setenv("STORAGE_BACKEND", "s3")
    no_aws.setenv("CHECKPOINT_BUCKET", url)
    no_aws.setenv("AWS_ENDPOINT_URL", MINIO)
    no_aws.setenv("AWS_REGION", "eu-west-1")
    no_aws.setenv("AWS_ACCESS_KEY_ID", "id")
    no_aws.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    spec = StoreSpec(url="env://")
    assert (spec.endpoint, spec.region) == ((MINIO, "eu-west-1") if has_endpoint else (None, None))
    assert (spec.credentials == KEY) is has_key
    no_aws.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert open_store("env://").bucket_id == open_store(spec.url).bucket_id
    no_aws.delenv("AWS_SECRET_ACCESS_KEY")
    if has_key:
        with pytest.raises(errors.ConfigurationError, match="set AWS_SECRET_ACCESS_KEY"):
            open_store("env://")
    else:
        assert open_store("env://").url == url


def test_a_url_can_be_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("STORAGE_BACKEND", "s3")
    monkeypatch.setenv("CHECKPOINT_BUCKET", "s3://bucket/below")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = open_store("env://runs/one")
    assert store.url == "s3://bucket/below/runs/one"
    assert store.spec.credentials.access_key_id == "id"
    assert store.endpoint == "http://127.0.0.1:1"
    given = StoreSpec(url="env://", region="eu", endpoint="http://127.0.0.1:2")
    assert (given.url, given.region) == ("s3://bucket/below", "eu")
    assert given.endpoint == "http://127.0.0.1:2"
    settings = StoreSettings.model_validate({"url": "env://runs"})
    assert settings.store.url == "s3://bucket/below/runs"
    assert open_store("env://50%25/x").location.prefix == "below/50%/x"
    with pytest.raises(errors.ConfigurationError, match="two slashes in a row"):
        open_store("env://x//")
    monkeypatch.delenv("CHECKPOINT_BUCKET")
    with pytest.raises(errors.ConfigurationError, match="set CHECKPOINT_BUCKET"):
        open_store("env://")
    monkeypatch.setenv("CHECKPOINT_BUCKET", "env://")
    with pytest.raises(errors.ConfigurationError, match="Write the "):
        open_store("env://")


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, "LOCAL_STORAGE_PATH"),
        ({"STORAGE_BACKEND": "s3"}, "CHECKPOINT_BUCKET"),
        ({"STORAGE_BACKEND": "s3", "AWS_ACCESS_KEY_ID": "i"}, "CHECKPOINT_BUCKET and AWS_SECRET"),
        ({"STORAGE_BACKEND": "", "LOCAL_STORAGE_PATH": ""}, "LOCAL_STORAGE_PATH"),
        ({"STORAGE_BACKEND": "tape"}, "tape"),
    ],
)
def test_what_the_environment_lacks_is_named_at_once(environ, named):
    with pytest.raises(errors.ConfigurationError, match=named):
        read_spec_from_environment(environ)


@pytest.fixture
def no_aws(monkeypatch):
    """An environment that says nothing of S3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_an_empty_variable_is_no_endpoint_no_region_and_no_key(no_aws):
    for name in ("ENDPOINT_URL", "REGION", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        no_aws.setenv(f"AWS_{name}", "")
    no_aws.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing leaves this machine
    store = open_store("s3://bucket", credentials=KEY, retry_timeout=timedelta(seconds=0.1))
    assert (store.endpoint, store.region) == (None, None)
    with pytest.raises(errors.UnavailableError, match=r"s3\.us-east-1\.amazonaws\.com"):
        read(store, "a")  # obstore panicked at an empty endpoint
    assert [name for name in os.environ if name.startswith("AWS_")] == []  # boto3 reads them too


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "minio.example.org", "https://", "s3://x"])
def test_an_endpoint_that_is_no_url_is_refused_with_what_to_write(endpoint, no_aws):
    no_aws.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(errors.ConfigurationError, match="write https://HOST"):
        open_store("s3://bucket")
    with pytest.raises(errors.ConfigurationError, match="write https://HOST"):
        open_store(f"r2://{ACCOUNT}/bucket", endpoint=endpoint)


@pytest.mark.parametrize("url", ["s3://bucket", f"r2://{ACCOUNT}/bucket"])
@pytest.mark.parametrize("endpoint", [None, "https://given.example"])
@pytest.mark.parametrize(
    "names",
    [
        (),
        ("AWS_ENDPOINT",),
        ("AWS_ENDPOINT_URL",),
        ("AWS_ENDPOINT_URL_S3",),
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    ],
)
def test_all_clients_of_a_store_use_one_endpoint(url, endpoint, names, no_aws, tmp_path):
    file = tmp_path / "config"
    file.write_text("[default]\nendpoint_url = https://file.example\n")
    no_aws.setenv("AWS_CONFIG_FILE", str(file))
    for number, name in enumerate(names):
        no_aws.setenv(name, f"https://variable{number}.example")
    store = open_store(url, credentials=KEY, endpoint=endpoint, region="eu-west-1")
    named = "https://variable0.example" if names else "https://s3.eu-west-1.amazonaws.com"
    expected = endpoint or (named if url.startswith("s3") else R2)
    assert isinstance(store.raw, S3Store)
    link = obstore.sign(store.raw, "GET", "a", timedelta(minutes=1))
    assert link.startswith(f"{expected}/bucket/a?")
    assert _get_endpoint(store) == expected
    of_boto3 = make_boto3_client(store).meta.endpoint_url
    assert of_boto3 == (store.endpoint or "https://s3.eu-west-1.amazonaws.com")
    if names and not endpoint:
        environ = {**os.environ, "STORAGE_BACKEND": "s3", "CHECKPOINT_BUCKET": "bucket"}
        assert read_spec_from_environment(environ).endpoint == named


@pytest.mark.parametrize("url", ["s3://bucket", f"r2://{ACCOUNT}/bucket"])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("endpoint", "endpoint"),
        ("aws_endpoint", "endpoint"),
        ("AWS_ENDPOINT_URL", "endpoint"),
        ("aws_endpoint_url_s3", "endpoint"),
        ("default_region", "region"),
        ("aws_access_key_id", "credentials"),
        ("token", "credentials"),
    ],
)
def test_options_that_only_obstore_would_follow_are_refused(url, name, setting, no_aws):
    with pytest.raises(errors.ConfigurationError, match=f"{name}.*Write it as `{setting}`"):
        open_store(StoreSpec(url=url, options={name: SecretStr("https://minio.example")}))


@pytest.mark.parametrize("url", ["s3://bucket", f"r2://{ACCOUNT}/bucket", "gs://bucket"])
@pytest.mark.parametrize("scheme", ["http://", "https://", ""])
def test_an_endpoint_with_a_password_is_refused_and_not_shown(url, scheme, no_aws):
    with pytest.raises(errors.ConfigurationError, match="in `credentials`") as refusal:
        open_store(url, endpoint=f"{scheme}user:secret@minio.example:9000")
    assert "secret" not in str(refusal.value)
    assert open_store("s3://bucket", endpoint="https://minio.example/a@b").endpoint


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("gs://bucket", {"service_account": "/no/such/key.json"}, r"/no/such/key\.json: No such"),
        ("gs://bucket", {"service_account_key": "{"}, "Unable to decode service account file"),
        ("gs://bucket", {"strange": "x"}, "'strange' is not valid"),
        ("s3://bucket", {"strange": "x"}, "'strange' is not valid"),
    ],
)
def test_options_that_obstore_refuses_are_a_sentence(url, options, named, no_aws):
    with pytest.raises(errors.ConfigurationError, match=f"{named}.*Correct its `options`"):
        open_store(StoreSpec(url=url, options=options))


@pytest.mark.parametrize("make", [True, False])
def test_a_folder_that_cannot_be_there_is_a_sentence(make, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.ConfigurationError, match="file is a file: write the URL of a fol"):
        open_store((tmp_path / "file").as_uri(), make_folder=make)
    kinds = errors.ConfigurationError if make else (errors.ConfigurationError, errors.NotFoundError)
    for path in (tmp_path / "file/below", Path("/proc/millrace/refused"), tmp_path / ("x" * 300)):
        with pytest.raises(kinds, match=r"cannot be|There is no folder") as error:
            open_store(path.as_uri(), make_folder=make)
        assert str(path)[:200] in str(error.value)
        assert "Correct the URL" in str(error.value)


def test_settings_without_a_store_say_where_one_is_named():
    with pytest.raises(errors.ConfigurationError, match="No store is named: write it in the"):
        read_spec_from_environment({})
    with pytest.raises(errors.ConfigurationError, match="STORAGE_BACKEND=local, set LOCAL_STOR"):
        read_spec_from_environment({"STORAGE_BACKEND": "local"})
