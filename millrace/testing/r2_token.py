"""Temporary credentials of R2: a JWT, signed offline with the parent's secret.

The session token is ``base64("jwt/" + JWT)``. The secret is the SHA-256 of the JWT in hex. The
access key ID is that of the parent. Source: Cloudflare R2 documentation, "Temporary credentials"
and "Authenticate against R2 with temporary credentials".
"""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from millrace.testing.key import Key

LONGEST = 7 * 24 * 3600
SKEW = 300

READ = frozenset(
    {
        "HeadObject", "GetObject", "GetBucketLocation", "ListObjectsV1", "ListObjectsV2",
        "ListMultipartUploads", "ListParts",
    }
)  # fmt: skip
WRITE = frozenset(
    {
        "PutObject", "DeleteObject", "DeleteObjects", "CopyObject", "CreateMultipartUpload",
        "UploadPart", "UploadPartCopy", "AbortMultipartUpload", "CompleteMultipartUpload",
    }
)  # fmt: skip
ADMIN_READ = frozenset({"GetBucketCors", "GetBucketLifecycle", "GetBucketEncryption"})
ADMIN_WRITE = frozenset({"PutBucketCors", "PutBucketLifecycle", "DeleteBucketCors"})
SCOPES = {
    "object-read-only": READ | {"HeadBucket"},
    "object-read-write": READ | WRITE | {"HeadBucket"},
    "admin-read-only": READ | ADMIN_READ | {"HeadBucket"},
    "admin-read-write": READ | WRITE | ADMIN_READ | ADMIN_WRITE | {"HeadBucket"},
}
_PATHS = TypeAdapter(dict[str, tuple[str, ...]])


class TokenError(Exception):
    """A session token is refused."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of a session token."""

    bucket: str
    operations: frozenset[str]
    prefixes: tuple[str, ...] | None
    """Prefixes of the allowed keys; None for the whole bucket."""
    objects: tuple[str, ...]
    secret: str
    """Secret access key that signs requests."""

    def allows_key(self, key: str) -> bool:
        """Decide whether a request may access the object ``key``."""
        if self.prefixes is None:
            return True
        return key in self.objects or key.startswith(self.prefixes)

    def allows_listing(self, prefix: str) -> bool:
        """Decide whether a request may list all keys that start with ``prefix``."""
        return self.prefixes is None or prefix.startswith(self.prefixes)


def mint(
    parent: Key,
    *,
    bucket: str,
    audience: str,
    scope: str | None = "object-read-write",
    actions: Sequence[str] = (),
    prefixes: Sequence[str] | None = None,
    objects: Sequence[str] = (),
    lifetime: float = 900,
    issued: float | None = None,
    **claims: Any,
) -> Key:
    """Create temporary credentials as in the example of Cloudflare's documentation.

    Args:
        parent: Key that signs the credentials. They cannot exceed its permissions.
        bucket: Only bucket that the credentials can access.
        audience: Host of the endpoint, with the port.
        scope: Scope such as ``object-read-only``, ``object-read-write`` or ``admin-read-only``.
        actions: S3 operations to which the scope is limited; empty for no limit.
        prefixes: Prefixes of the allowed keys. All keys are allowed without prefixes and objects.
        objects: Further allowed keys.
        lifetime: Lifetime in seconds.
        issued: Start of the lifetime, in seconds since 1970; now by default.
        claims: Claims of the JWT that replace the computed ones.
    """
    issued = time.time() if issued is None else issued
    body: dict[str, Any] = {"bucket": bucket}
    if scope is not None:
        body["scope"] = scope
    if actions:
        body["actions"] = list(actions)
    if prefixes is not None or objects:
        body["paths"] = {"prefixPaths": list(prefixes or ()), "objectPaths": list(objects)}
    body |= {
        "sub": "account",
        "iss": parent.access_key_id,
        "aud": audience,
        "iat": int(issued),
        "exp": int(issued + lifetime),
    }
    signed = f"{_encode_json({'alg': 'HS256', 'typ': 'JWT'})}.{_encode_json(body | claims)}"
    jwt = f"{signed}.{_encode_base64(_sign(parent.secret_access_key, signed))}"
    token = base64.b64encode(f"jwt/{jwt}".encode()).decode()
    return Key(parent.access_key_id, hashlib.sha256(jwt.encode()).hexdigest(), token)


def verify(token: str, *, access_key_id: str, parent_secret: str, host: str) -> Grant:
    """Verify a session token, and return its rights.

    Args:
        token: Value of ``x-amz-security-token``.
        access_key_id: ID of the access key in the signature of the request.
        parent_secret: Secret of that access key.
        host: Header ``Host`` of the request.

    Raises:
        TokenError: The token is malformed, forged, expired, or for another endpoint.
    """
    jwt, claims = _open_token(token, parent_secret)
    if claims.get("iss") != access_key_id or not claims.get("sub"):
        raise TokenError(401, "Unauthorized", "iss must be the parent's id, sub the account.")
    if claims.get("aud") != host:
        raise TokenError(401, "Unauthorized", f"aud must be the endpoint's host, {host}.")
    _check_time(claims)
    return Grant(
        bucket=str(claims.get("bucket")),
        operations=_list_operations(claims),
        prefixes=_list_paths(claims, "prefixPaths") if "paths" in claims else None,
        objects=_list_paths(claims, "objectPaths") if "paths" in claims else (),
        secret=hashlib.sha256(jwt.encode()).hexdigest(),
    )


def _open_token(token: str, secret: str) -> tuple[str, dict[str, Any]]:
    refused = TokenError(401, "Unauthorized", "The session token is not valid.")
    try:
        text = base64.b64decode(token, validate=True).decode()
        signed, _, signature = text.removeprefix("jwt/").rpartition(".")
        header, claims = (json.loads(_decode_base64(part)) for part in signed.split("."))
    except ValueError:
        raise refused from None
    if not text.startswith("jwt/") or header.get("alg") != "HS256" or not isinstance(claims, dict):
        raise refused
    if not hmac.compare_digest(_encode_base64(_sign(secret, signed)), signature):
        raise refused
    return text.removeprefix("jwt/"), cast("dict[str, Any]", claims)


def _check_time(claims: dict[str, Any]) -> None:
    now = time.time()
    issued, expires = claims.get("iat"), claims.get("exp")
    if not isinstance(issued, int | float) or not isinstance(expires, int | float):
        raise TokenError(401, "Unauthorized", "iat and exp must be numbers.")
    if expires <= now:
        raise TokenError(403, "ExpiredToken", "The provided token has expired.")
    if issued > now + SKEW or expires - issued > LONGEST:
        raise TokenError(401, "Unauthorized", "A token begins now and lasts for 7 days at most.")


def _list_operations(claims: dict[str, Any]) -> frozenset[str]:
    scope, actions = claims.get("scope"), claims.get("actions")
    if scope is None and not actions:
        raise TokenError(403, "AccessDenied", "A token needs a scope or actions.")
    if scope is not None and scope not in SCOPES:
        raise TokenError(403, "AccessDenied", f"The scope {scope} is unknown.")
    allowed = SCOPES[scope] if scope is not None else READ | WRITE
    return frozenset(allowed) & frozenset(actions) if actions else frozenset(allowed)


def _list_paths(claims: dict[str, Any], name: str) -> tuple[str, ...]:
    try:
        return _PATHS.validate_python(claims["paths"]).get(name, ())
    except ValidationError:
        message = f"paths.{name} must be a list of strings."
        raise TokenError(401, "Unauthorized", message) from None


def _sign(secret: str, text: str) -> bytes:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).digest()


def _encode_json(body: dict[str, Any]) -> str:
    return _encode_base64(json.dumps(body, separators=(",", ":")).encode())


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
