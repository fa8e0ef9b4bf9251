"""Make temporary credentials for some prefixes of a bucket, and signed URLs.

Credentials for R2 are made without a request: a JWT that is signed with the parent's secret
(https://developers.cloudflare.com/r2/api/s3/tokens/, temporary access credentials). Credentials
for S3 come from STS: the parent assumes a role with a session policy for the prefixes.
"""

import base64
import hashlib
import hmac
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, cast
from urllib.parse import urlsplit

import obstore
import orjson
from obstore.exceptions import BaseError
from pydantic import SecretStr

from millrace.errors import ConfigurationError, DeniedError, format_error
from millrace.storage.clients import make_key_pair
from millrace.storage.locations import Backend
from millrace.storage.object_keys import check_key
from millrace.storage.open import Store, open_store
from millrace.storage.spec import Credentials

_MIN_STS_TTL = timedelta(minutes=15)
MAX_TTL = timedelta(days=7)


class Right(StrEnum):
    """Right of a scoped credential."""

    READ = "read"
    WRITE = "write"


def open_scoped_store(
    store: Store,
    prefix: str | Sequence[str],
    ttl: timedelta,
    *,
    access: Right = Right.READ,
    role_arn: str | None = None,
) -> Store:
    """Return the same store with temporary credentials for one prefix or several.

    Args:
        store: Store of R2 or S3. Its key pair has the right for all of the prefixes.
        prefix: Prefix, or several, below the store's URL. The credentials allow no other keys.
        ttl: Lifetime of the credentials. R2 allows 7 days. For STS, the role sets the limit.
        access: Right of the credentials. The right to write includes the right to read.
        role_arn: Role to assume, for S3. R2 needs none.

    Raises:
        ConfigurationError: The store has no temporary credentials, the prefix is empty, or the
            lifetime is out of range.
        DeniedError: STS refuses the request.
    """
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    if not prefixes or not all(one.strip("/") for one in prefixes):
        raise ConfigurationError(
            f"{store.url}: scoped credentials need a prefix. Name at least one."
        )
    if not timedelta(0) < ttl <= MAX_TTL:
        raise ConfigurationError(
            f"{store.url}: scoped credentials for {ttl} are not possible. Choose at most 7 days."
        )
    above = f"{store.location.prefix}/" if store.location.prefix else ""
    full = [f"{above}{one}" for one in prefixes]
    match store.location.backend:
        case Backend.R2:
            credentials = _make_r2_credentials(store, full, ttl, access)
        case Backend.S3 if ttl < _MIN_STS_TTL:
            raise ConfigurationError(
                f"{store.url}: STS gives no credentials for {ttl}. Choose at least 15 minutes."
            )
        case Backend.S3 if role_arn:
            credentials = _request_sts_credentials(store, full, ttl, access, role_arn)
        case Backend.S3:
            raise ConfigurationError(
                f"{store.url}: STS needs a role for scoped credentials. Name it: role_arn=..."
            )
        case _:
            raise ConfigurationError(
                f"{store.url} has no scoped credentials: use a bucket of R2 or S3."
            )
    return open_store(store.spec.model_copy(update={"credentials": credentials}))


def sign_url(store: Store, key: str, ttl: timedelta, *, access: Right = Right.READ) -> str:
    """Return a URL by which a client without credentials can read or write one object.

    The URL is made without a request, and is valid until the end of its lifetime.

    Args:
        store: Store of R2, S3, or GCS with a service account.
        key: Key of the object.
        ttl: Lifetime of the URL; at most 7 days.
        access: Right of the URL's holder: read with GET, or write with PUT.

    Raises:
        ConfigurationError: The store cannot sign, or the key is invalid.
    """
    check_key(store, key)
    if not timedelta(0) < ttl <= MAX_TTL:
        raise ConfigurationError(
            f"{store.url}: a signed URL for {ttl} is not possible. Choose at most 7 days."
        )
    try:
        method = "GET" if access is Right.READ else "PUT"
        return obstore.sign(cast("Any", store.raw), method, key, ttl)
    except (BaseError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{store.url} cannot sign URLs ({format_error(error)}): open it as S3 or R2 with a key "
            "pair, or as GCS with a service account."
        ) from error


def _make_r2_credentials(
    store: Store, prefixes: list[str], ttl: timedelta, access: Right
) -> Credentials:
    parent = store.spec.credentials
    endpoint = store.endpoint
    if parent is None or endpoint is None:
        raise ConfigurationError(
            f"{store.url}: scoped credentials of R2 are made from a key pair. Open the store with "
            "a key pair."
        )
    now = int(time.time())
    claims: dict[str, Any] = {
        "bucket": store.location.bucket,
        "scope": "object-read-write" if access is Right.WRITE else "object-read-only",
        "paths": {"prefixPaths": prefixes, "objectPaths": []},
        "sub": store.location.account.partition(".")[0],
        "iss": parent.access_key_id,
        "aud": urlsplit(endpoint).netloc,
        "iat": now,
        "exp": now + int(ttl.total_seconds()),
    }
    token = _make_jwt(claims, parent.secret_access_key.get_secret_value())
    return Credentials(
        access_key_id=parent.access_key_id,
        secret_access_key=SecretStr(hashlib.sha256(token.encode()).hexdigest()),
        session_token=SecretStr(base64.b64encode(b"jwt/" + token.encode()).decode()),
        expires_at=datetime.fromtimestamp(claims["exp"], UTC),
    )


def _make_jwt(claims: dict[str, Any], secret: str) -> str:
    """Return a JSON Web Token, HS256 (RFC 7519)."""

    def encode_part(data: bytes) -> bytes:
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    signed = (
        encode_part(orjson.dumps({"alg": "HS256", "typ": "JWT"}))
        + b"."
        + encode_part(orjson.dumps(claims))
    )
    signature = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
    return (signed + b"." + encode_part(signature)).decode()


def _request_sts_credentials(
    store: Store, prefixes: list[str], ttl: timedelta, access: Right, role_arn: str
) -> Credentials:
    import boto3  # noqa: PLC0415
    from botocore.exceptions import ClientError  # noqa: PLC0415

    client = boto3.client(  # pyright: ignore[reportUnknownMemberType]
        "sts",
        endpoint_url=store.endpoint,
        region_name=store.region or "us-east-1",
        verify=str(store.spec.ca_file) if store.spec.ca_file else None,
        **make_key_pair(store),
    )
    try:
        answer = client.assume_role(
            RoleArn=role_arn,
            RoleSessionName="millrace",
            DurationSeconds=int(ttl.total_seconds()),
            Policy=orjson.dumps(
                make_session_policy(store.location.bucket, prefixes, access)
            ).decode(),
        )
    except ClientError as error:
        raise DeniedError(
            f"{store.url}: STS does not let these credentials assume {role_arn} "
            f"({error.response.get('Error', {}).get('Code', 'no reason given')}). "
            "Check the role's trust policy."
        ) from error
    given = answer["Credentials"]
    return Credentials(
        access_key_id=given["AccessKeyId"],
        secret_access_key=SecretStr(given["SecretAccessKey"]),
        session_token=SecretStr(given["SessionToken"]),
        expires_at=given["Expiration"],
    )


def make_session_policy(bucket: str, prefixes: Sequence[str], access: Right) -> dict[str, Any]:
    """Return an IAM policy for some prefixes of a bucket."""
    actions = ["s3:GetObject"]
    if access is Right.WRITE:
        actions += ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": actions,
                "Resource": [f"arn:aws:s3:::{bucket}/{prefix}*" for prefix in prefixes],
            },
            {
                "Effect": "Allow",
                "Action": ["s3:ListBucket"],
                "Resource": [f"arn:aws:s3:::{bucket}"],
                "Condition": {"StringLike": {"s3:prefix": [f"{prefix}*" for prefix in prefixes]}},
            },
        ],
    }
