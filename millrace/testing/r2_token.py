"""R2's temporary credentials: a JWT signed with the parent's secret, minted offline.

The token is ``base64("jwt/" + JWT)``, the secret is the SHA-256 of the JWT in hex, the access key
id is the parent's. Source: Cloudflare R2 documentation, "Temporary credentials" and "Authenticate
against R2 with temporary credentials".
"""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class TokenError(Exception):
    """A token that is refused."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """Say how the refusal is answered."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Grant:
    """Right of a token."""

    bucket: str
    operations: frozenset[str]
    prefixes: tuple[str, ...] | None
    """None: the whole bucket."""
    objects: tuple[str, ...]
    secret: str
    """Credentials that sign requests, with their rights."""

    def allows_key(self, key: str) -> bool:
        """Decide whether a request may name the object ``key``."""
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
    """Make temporary credentials as Cloudflare's own example makes them.

    Args:
        parent: The key that signs, and whose permissions they cannot exceed.
        bucket: The one bucket that they reach.
        audience: The endpoint's host, with its port.
        scope: ``object-read-only``, ``object-read-write``, ``admin-read-only``, ...
        actions: S3 operations that narrow the scope.
        prefixes: Restrict them to keys that start so.
        objects: And to these keys.
        lifetime: Seconds.
        issued: When they begin, in seconds since 1970; now by default.
        claims: Claims that replace what would stand in the JWT.
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
    signed = f"{_base64({'alg': 'HS256', 'typ': 'JWT'})}.{_base64(body | claims)}"
    jwt = f"{signed}.{_url64(_sign(parent.secret_access_key, signed))}"
    token = base64.b64encode(f"jwt/{jwt}".encode()).decode()
    return Key(parent.access_key_id, hashlib.sha256(jwt.encode()).hexdigest(), token)


def verify(token: str, *, access_key_id: str, parent_secret: str, host: str) -> Grant:
    """Return the rights of a session token.

    Args:
        token: What ``x-amz-security-token`` carries.
        access_key_id: The id that the request is signed with.
        parent_secret: The secret of that id.
        host: The ``Host`` that the request names.

    Raises:
        TokenError: It is malformed, forged, expired, or for another endpoint.
    """
    jwt, claims = _opened(token, parent_secret)
    if claims.get("iss") != access_key_id or not claims.get("sub"):
        raise TokenError(401, "Unauthorized", "iss must be the parent's id, sub the account.")
    if claims.get("aud") != host:
        raise TokenError(401, "Unauthorized", f"aud must be the endpoint's host, {host}.")
    _check_time(claims)
    return Grant(
        bucket=str(claims.get("bucket")),
        operations=_operations(claims),
        prefixes=_paths(claims, "prefixPaths") if "paths" in claims else None,
        objects=_paths(claims, "objectPaths") if "paths" in claims else (),
        secret=hashlib.sha256(jwt.encode()).hexdigest(),
    )


def _opened(token: str, secret: str) -> tuple[str, dict[str, Any]]:
    refused = TokenError(401, "Unauthorized", "The session token is not valid.")
    try:
        text = base64.b64decode(token, validate=True).decode()
        signed, _, signature = text.removeprefix("jwt/").rpartition(".")
        header, claims = (json.loads(_unurl64(part)) for part in signed.split("."))
    except ValueError:
        raise refused from None
    if not text.startswith("jwt/") or header.get("alg") != "HS256" or not isinstance(claims, dict):
        raise refused
    if not hmac.compare_digest(_url64(_sign(secret, signed)), signature):
        raise refused
    return text.removeprefix("jwt/"), claims


def _check_time(claims: dict[str, Any]) -> None:
    now = time.time()
    issued, expires = claims.get("iat"), claims.get("exp")
    if not isinstance(issued, int | float) or not isinstance(expires, int | float):
        raise TokenError(401, "Unauthorized", "iat and exp must be numbers.")
    if expires <= now:
        raise TokenError(403, "ExpiredToken", "The provided token has expired.")
    if issued > now + SKEW or expires - issued > LONGEST:
        raise TokenError(401, "Unauthorized", "A token begins now and lasts for 7 days at most.")


def _operations(claims: dict[str, Any]) -> frozenset[str]:
    scope, actions = claims.get("scope"), claims.get("actions")
    if scope is None and not actions:
        raise TokenError(403, "AccessDenied", "A token needs a scope or actions.")
    if scope is not None and scope not in SCOPES:
        raise TokenError(403, "AccessDenied", f"The scope {scope} is unknown.")
    allowed = SCOPES[scope] if scope is not None else READ | WRITE
    return frozenset(allowed) & frozenset(actions) if actions else frozenset(allowed)


def _paths(claims: dict[str, Any], name: str) -> tuple[str, ...]:
    paths = claims["paths"]
    listed = paths.get(name, []) if isinstance(paths, dict) else None
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        raise TokenError(401, "Unauthorized", f"paths.{name} must be a list of strings.")
    return tuple(listed)


def _sign(secret: str, text: str) -> bytes:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).digest()


def _base64(body: dict[str, Any]) -> str:
    return _url64(json.dumps(body, separators=(",", ":")).encode())


def _url64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unurl64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
