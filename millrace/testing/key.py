"""Access keys of the stand-ins, and S3 clients that sign with them."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import boto3
from botocore.config import Config


@dataclass(frozen=True, slots=True)
class Key:
    """Key pair that a client signs with."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@lru_cache(maxsize=32)
def connect(
    endpoint: str,
    key: Key,
    *,
    service: str = "s3",
    region: str = "us-east-1",
    verify: str | bool | None = None,
) -> Any:
    """Return a boto3 client: path-style URLs, no retries, checksums only where required.

    Calls with equal arguments return the same client. The client is thread-safe.
    """
    return cast("Any", boto3).client(
        service,
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=key.access_key_id,
        aws_secret_access_key=key.secret_access_key,
        aws_session_token=key.session_token,
        verify=verify,
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            max_pool_connections=50,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
