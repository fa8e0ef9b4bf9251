"""A URL that the environment completes, on a real store."""

import os
import pickle

import pytest

from millrace.storage import list_objects, open_store, put, read


@pytest.fixture
def no_aws(monkeypatch):
    """An environment that says nothing of S3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_bare_s3_url_reaches_the_endpoint_of_the_environment(rgw, bucket, no_aws):
    no_aws.setenv("AWS_ENDPOINT_URL", rgw.endpoint)  # plain HTTP
    no_aws.setenv("AWS_ACCESS_KEY_ID", rgw.full.access_key_id)
    no_aws.setenv("AWS_SECRET_ACCESS_KEY", rgw.full.secret_access_key)
    store = open_store(f"s3://{bucket}")
    put(store, "a/b", b"data")
    assert [stat.key for stat in list_objects(store)] == ["a/b"]
    assert read(store, "a/b") == b"data"
    no_aws.delenv("AWS_ENDPOINT_URL")
    assert pickle.loads(pickle.dumps(store)).endpoint == rgw.endpoint
