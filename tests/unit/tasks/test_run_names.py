"""Names of flow runs."""

from types import SimpleNamespace
from typing import Any

import pytest

from blocks import Bucket, BucketRole
from flows.audit_access import AuditedBucket
from tasks import run_names


@pytest.mark.parametrize(
    ("subject", "parameters", "name"),
    [
        ("bucket", {"bucket": "gradients", "dry_run": True}, "clean-gradients-dry-run"),
        ("bucket", {"bucket": "s3://shop/a/b/", "dry_run": False}, "clean-b"),
        ("bucket", {"bucket": "r2://account/words"}, "clean-words"),
        ("bucket", {"bucket": "millrace-bucket/dataset"}, "clean-dataset"),
        ("bucket", {"bucket": Bucket(role=BucketRole.DATASET, url="s3://mine")}, "clean-mine"),
        ("bucket", {}, "clean-bucket"),
        ("buckets", {"buckets": ["a", "b"]}, "clean-a-b"),
        ("buckets", {"buckets": list("abcde")}, "clean-a-b-c-2-more"),
        ("buckets", {"buckets": [AuditedBucket(bucket="a")]}, "clean-a"),
    ],
)
def test_a_run_is_named_after_its_work_and_its_buckets(
    subject: str, parameters: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_names, "flow_run", SimpleNamespace(parameters=parameters))
    assert run_names.make_name("clean", subject)() == name
