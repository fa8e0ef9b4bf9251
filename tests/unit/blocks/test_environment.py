"""Buckets as the environment describes them."""

import json
from pathlib import Path

import pytest

from blocks import BucketRole
from blocks.environment import (
    BUCKET_LIST_VARIABLE,
    BucketSettings,
    read_buckets,
    read_dataset_specs,
)
from millrace.errors import ConfigurationError
from millrace.storage import Right

ACCOUNT = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
RIGHTS = list(Right)
PAIR = {"access_key_id": "id", "secret_access_key": "a secret"}


def variables(*roles: BucketRole) -> dict[str, str]:
    """All that is asked for."""
    found: dict[str, str] = {}
    for role in roles:
        prefix = f"R2_{role.upper()}"
        found |= {f"{prefix}_ACCOUNT_ID": ACCOUNT, f"{prefix}_BUCKET_NAME": role.value}
        for right in RIGHTS:
            found |= {
                f"{prefix}_{right.upper()}_ACCESS_KEY_ID": f"{role}-{right}",
                f"{prefix}_{right.upper()}_SECRET_ACCESS_KEY": f"secret-{role}-{right}",
            }
    return found


def test_every_missing_variable_is_named_at_once_with_its_purpose() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read_buckets(
            {"R2_DATASET_BUCKET_NAME": "x", "R2_DATASET_ACCOUNT_ID": ""}, list(BucketRole), RIGHTS
        )
    lines = str(refusal.value).splitlines()[1:-1]
    named = {line.split(":")[0].strip() for line in lines}
    assert named == set(variables(*BucketRole)) - {"R2_DATASET_BUCKET_NAME"}
    assert all(line.split(": ")[1] for line in lines)


def test_each_role_becomes_a_bucket_with_two_key_pairs() -> None:
    found = read_buckets(variables(*BucketRole), list(BucketRole), RIGHTS)
    assert [bucket.name for bucket in found] == [role.value for role in BucketRole]
    block = found[1].make_block(found[1].key_pairs)
    assert block.url == f"r2://{ACCOUNT}/dataset"
    reading, writing = block.make_spec("read").credentials, block.make_spec("write").credentials
    assert reading is not None
    assert writing is not None
    assert (reading.access_key_id, writing.access_key_id) == ("dataset-read", "dataset-write")
    assert reading.secret_access_key.get_secret_value() == "secret-dataset-read"


def test_one_right_asks_only_for_its_keys() -> None:
    given = {n: v for n, v in variables(BucketRole.DATASET).items() if "WRITE" not in n}
    (found,) = read_buckets(given, [BucketRole.DATASET], [Right.READ])
    assert list(found.key_pairs) == [Right.READ]


def test_another_endpoint_is_used_for_all() -> None:
    given = {**variables(BucketRole.DATASET), "R2_ENDPOINT": "http://127.0.0.1:9"}
    (found,) = read_buckets(given, [BucketRole.DATASET], RIGHTS)
    assert found.make_block(found.key_pairs).make_spec("read").endpoint == "http://127.0.0.1:9"


def dataset(value: str, *, own: bool = True) -> list[BucketSettings]:
    given = {**(variables(BucketRole.DATASET) if own else {}), BUCKET_LIST_VARIABLE: value}
    return read_buckets(given, [BucketRole.DATASET], RIGHTS)


def test_the_bucket_list_may_be_urls() -> None:
    urls = [f"r2://{OTHER}/one", "s3://two"]
    for value in (json.dumps(urls), ", ".join(urls), f"'{json.dumps(urls)}'"):
        (found,) = dataset(value)
        assert list(found.mirrors) == urls


def test_the_bucket_list_may_be_buckets_with_keys_of_their_own(tmp_path: Path) -> None:
    entries = [
        {"account_id": OTHER, "name": "one", "credentials": {"read": PAIR, "write": PAIR}},
        {"account_id": OTHER, "bucket_name": "two", "credentials": {"read": PAIR}},
    ]
    file = tmp_path / "buckets.json"
    file.write_text(json.dumps(entries))
    for value in (json.dumps(entries), f"'{json.dumps(entries)}'", str(file)):
        one, two, bucket = dataset(value)
        assert bucket.mirrors == ("dataset-mirror-1", "dataset-mirror-2")
        assert (one.name, one.bucket, list(one.key_pairs)) == ("dataset-mirror-1", "one", RIGHTS)
        assert (two.name, two.bucket, list(two.key_pairs)) == (
            "dataset-mirror-2",
            "two",
            [Right.READ],
        )


def test_alone_the_bucket_list_begins_with_the_bucket_itself() -> None:
    entries = [
        {"account_id": ACCOUNT, "name": "first", "credentials": {"read": PAIR}},
        {"account_id": OTHER, "name": "second", "credentials": {"read": PAIR}},
    ]
    second, first = dataset(json.dumps(entries), own=False)
    assert (first.name, first.bucket, first.mirrors) == ("dataset", "first", ("dataset-mirror-2",))
    assert (second.name, second.bucket) == ("dataset-mirror-2", "second")


def test_the_bucket_itself_may_be_in_the_list_as_in_templar() -> None:
    own = {"account_id": ACCOUNT, "name": "dataset-bucket", "credentials": {"read": PAIR}}
    nothing = {"access_key_id": None, "secret_access_key": None}
    other = {
        "account_id": OTHER, "name": "one", "credentials": {"read": PAIR, "write": nothing},
    }  # fmt: skip
    url = f"r2://{ACCOUNT}/dataset-bucket"
    given = {**variables(BucketRole.DATASET), "R2_DATASET_BUCKET_NAME": "dataset-bucket"}
    entries = [own, other, url, own, other, "s3://x", "s3://x"]
    given[BUCKET_LIST_VARIABLE] = json.dumps(entries)
    mirror, bucket = read_buckets(given, [BucketRole.DATASET], RIGHTS)
    assert bucket.mirrors == ("dataset-mirror-2", "s3://x")
    assert (mirror.bucket, list(mirror.key_pairs)) == ("one", [Right.READ])


def test_a_loader_gets_the_bucket_and_its_mirrors_without_a_server() -> None:
    entries = [
        {"account_id": ACCOUNT, "name": "first", "credentials": {"read": PAIR}},
        {"account_id": OTHER, "name": "second", "credentials": {"read": PAIR}},
        f"r2://{OTHER}/third",
    ]
    given = {BUCKET_LIST_VARIABLE: json.dumps(entries), "R2_ENDPOINT": "http://127.0.0.1:9"}
    specs = read_dataset_specs(given, "data/shards/pages/train/")
    assert [spec.url for spec in specs] == [
        f"r2://{ACCOUNT}/first/data/shards/pages/train",
        f"r2://{OTHER}/second/data/shards/pages/train",
        f"r2://{OTHER}/third/data/shards/pages/train",
    ]
    assert {spec.endpoint for spec in specs} == {"http://127.0.0.1:9"}
    assert all(spec.credentials for spec in specs)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("[", "not valid JSON"),
        ('{"a": 1}', "neither a JSON list"),
        (json.dumps(["s3://x", {"account_id": ACCOUNT}]), "Entry 2 .* has no 'credentials'"),
        ('["s3://x", 7]', "Entry 2 .* is of another form"),
        (json.dumps([{"account_id": "x", "credentials": {"read": PAIR}}]), "no R2 account"),
        (json.dumps({"endpoint": "https://x", "credentials": {"read": PAIR}}), "neither a JSON"),
        (json.dumps(["s3://x", f"s3://y {json.dumps(PAIR)}"]), "Entry 2 .* neither a URL"),
        ("s3://x, a secret", "neither a JSON list, nor URLs"),
    ],
)
def test_a_bucket_list_of_another_form_is_refused_without_its_secrets(
    value: str, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as refusal:
        dataset(value)
    assert "a secret" not in str(refusal.value)


def test_an_account_is_32_hexadecimal_digits() -> None:
    given = {**variables(BucketRole.DATASET), "R2_DATASET_ACCOUNT_ID": "my-account"}
    with pytest.raises(ConfigurationError, match="R2_DATASET_ACCOUNT_ID is no R2 account"):
        read_buckets(given, [BucketRole.DATASET], RIGHTS)


def test_a_bucket_list_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "buckets.json"
    path.write_bytes(b"[\xff]")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        dataset(str(path))


@pytest.mark.parametrize("endpoint", ["minio:9000", "minio", "https://", "http:// minio"])
def test_an_endpoint_without_its_scheme_is_refused(endpoint: str) -> None:
    given = {**variables(BucketRole.DATASET), "R2_ENDPOINT": endpoint}
    with pytest.raises(ConfigurationError, match="R2_ENDPOINT is no URL: it begins with https://"):
        read_buckets(given, [BucketRole.DATASET], RIGHTS)


def test_white_space_around_an_endpoint_is_no_part_of_it() -> None:
    given = {**variables(BucketRole.DATASET), "R2_ENDPOINT": "http://127.0.0.1:9000\r"}
    (found,) = read_buckets(given, [BucketRole.DATASET], RIGHTS)
    assert found.make_block(found.key_pairs).make_spec("read").endpoint == "http://127.0.0.1:9000"
