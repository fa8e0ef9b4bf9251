"""Options of a store under the names of other projects."""

import os
from typing import Any

from millrace.storage import StoreSpec


def make_boto3_options(spec: StoreSpec) -> dict[str, str]:
    """Return the options by which boto3 opens a store."""
    credentials = spec.credentials
    assert credentials is not None
    return {
        "endpoint_url": str(spec.endpoint),
        "aws_access_key_id": credentials.access_key_id,
        "aws_secret_access_key": credentials.secret_access_key.get_secret_value(),
        "region_name": "us-east-1",
    }


def make_s3fs_options(spec: StoreSpec) -> dict[str, Any]:
    """Return the options by which s3fs opens a store."""
    options = make_boto3_options(spec)
    return {
        "key": options["aws_access_key_id"],
        "secret": options["aws_secret_access_key"],
        "client_kwargs": {"endpoint_url": options["endpoint_url"]},
    }


def export_to_streaming(spec: StoreSpec) -> None:
    """Set the variables by which mosaicml-streaming opens a store."""
    options = make_boto3_options(spec)
    os.environ["S3_ENDPOINT_URL"] = options["endpoint_url"]
    os.environ["AWS_ACCESS_KEY_ID"] = options["aws_access_key_id"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = options["aws_secret_access_key"]
    os.environ["AWS_DEFAULT_REGION"] = options["region_name"]


def let_litdata_use_http() -> None:
    """Let litdata open a store without TLS in this process."""
    from litdata.streaming import downloader

    options: Any = getattr(downloader, "_OBSTORE_CLIENT_OPTIONS")  # noqa: B009 - it is private
    options["allow_http"] = True
