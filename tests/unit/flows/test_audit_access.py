"""Roles of the flow audit-access, from the blocks of buckets."""

import pytest
from prefect_aws import AwsCredentials
from pydantic import SecretStr

from blocks import Bucket, BucketRole
from flows.audit_access import AuditedBucket, audit_access, find_roles
from millrace.errors import ConfigurationError


def make_pair(**more: str) -> AwsCredentials:
    return AwsCredentials(aws_access_key_id="id", aws_secret_access_key=SecretStr("secret"), **more)  # pyright: ignore[reportArgumentType]


def test_credentials_that_cannot_be_used_fail_the_audit() -> None:
    bucket = Bucket(
        role=BucketRole.DATASET,
        url="s3://dataset",
        read_credentials=make_pair(aws_session_token="token"),
        write_credentials=make_pair(),
    )
    with pytest.raises(ConfigurationError, match="have a session token"):
        AuditedBucket(bucket=bucket).make_role(bucket)


def test_credentials_that_a_block_does_not_have_are_left_out() -> None:
    bucket = Bucket(role=BucketRole.DATASET, url="s3://dataset", write_credentials=make_pair())
    role = AuditedBucket(bucket=bucket).make_role(bucket)
    assert role.read_credentials is None
    assert role.write_credentials is not None


def test_credentials_of_google_are_said_to_be_left_out() -> None:
    google = Bucket(role=BucketRole.DATASET, url="gs://b", read_google_credentials="/keys/b.json")
    pair = Bucket(role=BucketRole.AGGREGATOR, url="s3://b", write_credentials=make_pair())
    found = find_roles([AuditedBucket(bucket=google), AuditedBucket(bucket=pair)])
    assert list(found.roles) == ["aggregator"]
    assert found.missing == []
    assert found.notes == [
        "The credentials of Google for gs://b are not audited: only key pairs of S3 are."
    ]
    with pytest.raises(ConfigurationError, match="gs://b are not audited"):
        audit_access.fn([AuditedBucket(bucket=google)])
