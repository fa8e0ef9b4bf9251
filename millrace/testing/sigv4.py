"""AWS Signature Version 4 for S3, independent of the clients whose signatures it checks.

A signature is in the ``Authorization`` header, or in the query of a presigned URL. Source:
"Authenticating Requests (AWS Signature Version 4)", Amazon S3 API reference.
"""

import hashlib
import hmac
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote_to_bytes

ALGORITHM = "AWS4-HMAC-SHA256"
TOKEN = "x-amz-security-token"
UNRESERVED = "-_.~"


class MalformedError(ValueError):
    """A signature has a wrong format."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of a request."""

    access_key_id: str
    scope: str
    """Credential scope, ``date/region/service/aws4_request``."""
    signed_headers: tuple[str, ...]
    value: str
    presigned: bool
    """True if the signature is in the query."""

    @property
    def region(self) -> str:
        """Region of the scope."""
        return self.scope.split("/")[1]


def find_signature(headers: Mapping[str, str], query: str) -> Signature | None:
    """Return the signature of a request; None if it is anonymous.

    Raises:
        MalformedError: The signature cannot be parsed.
    """
    authorization = headers.get("Authorization", "")
    presigned = dict(_parse_query(query))
    try:
        if authorization.startswith(ALGORITHM):
            words = authorization.removeprefix(ALGORITHM).split(",")
            fields = dict(word.strip().split("=", 1) for word in words)
            return _parse_signature(
                fields["Credential"], fields["SignedHeaders"], fields["Signature"], presigned=False
            )
        if "X-Amz-Signature" in presigned:
            return _parse_signature(
                unquote_to_bytes(presigned["X-Amz-Credential"]).decode(),
                unquote_to_bytes(presigned["X-Amz-SignedHeaders"]).decode(),
                presigned["X-Amz-Signature"],
                presigned=True,
            )
    except (KeyError, ValueError) as error:
        raise MalformedError("The signature is not readable.") from error
    if authorization:
        raise MalformedError(f"The authorization is not {ALGORITHM}.")
    return None


def compute(
    secret: str,
    *,
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    signature: Signature,
) -> str:
    """Compute the expected signature of a request.

    Args:
        secret: Secret access key.
        method: HTTP method.
        path: Encoded path of the request line.
        query: Encoded query of the request line.
        headers: Headers, by case-insensitive names.
        signature: Signature of the request, with its signed headers and its scope.
    """
    query_fields = dict(_parse_query(query))
    if signature.presigned:
        stamp = query_fields.get("X-Amz-Date", "")
        payload = "UNSIGNED-PAYLOAD"
    else:
        stamp = headers.get("x-amz-date", "")
        payload = headers.get("x-amz-content-sha256", "")
    listed = "".join(
        f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in signature.signed_headers
    )
    canonical = "\n".join(
        (
            method,
            quote(unquote_to_bytes(path), safe="/" + UNRESERVED),
            "&".join(
                f"{name}={value}"
                for name, value in sorted(_parse_query(query))
                if name != "X-Amz-Signature"
            ),
            listed,
            ";".join(signature.signed_headers),
            payload,
        )
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return _hmac(
        _derive_key(secret, signature.scope), "\n".join((ALGORITHM, stamp, signature.scope, digest))
    ).hex()


def drop_token(
    signature: Signature, headers: MutableMapping[str, str], query: str
) -> tuple[Signature, str]:
    """Remove the session token from ``headers``. Return the signature and the query without it."""
    headers.pop(TOKEN, None)
    signed = tuple(name for name in signature.signed_headers if name != TOKEN)
    kept = [word for word in query.split("&") if word.split("=", 1)[0].lower() != TOKEN]
    return (
        Signature(
            signature.access_key_id, signature.scope, signed, signature.value, signature.presigned
        ),
        "&".join(kept),
    )


def make_authorization(signature: Signature, value: str) -> str:
    """Return the ``Authorization`` header for a new value of a signature."""
    return (
        f"{ALGORITHM} Credential={signature.access_key_id}/{signature.scope}, "
        f"SignedHeaders={';'.join(signature.signed_headers)}, Signature={value}"
    )


def _parse_signature(credential: str, headers: str, value: str, *, presigned: bool) -> Signature:
    access_key_id, scope = credential.split("/", 1)
    if scope.count("/") != 3:
        raise MalformedError(f"The scope {scope} is not date/region/service/aws4_request.")
    return Signature(access_key_id, scope, tuple(headers.split(";")), value, presigned)


def _parse_query(query: str) -> list[tuple[str, str]]:
    """Return the names and values of a query in canonical encoding."""
    words = (word.partition("=") for word in query.split("&") if word)
    return [(encode(name), encode(value)) for name, _, value in words]


@lru_cache(maxsize=4096)  # most texts are the same in every request
def encode(text: str) -> str:
    """Percent-encode a name or value of a query canonically. The text may already be encoded."""
    return quote(unquote_to_bytes(text.replace("+", "%20")), safe=UNRESERVED)


@lru_cache(maxsize=64)
def _derive_key(secret: str, scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = _hmac(key, part)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
