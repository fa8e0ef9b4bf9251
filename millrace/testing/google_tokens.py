"""Google's tokens and signatures, for the stand-in of Cloud Storage.

Once the key of a service account is registered, each request needs one of four proofs: a token that
the account signed (RFC 7519), an access token issued in exchange for such a token (RFC 7523), an
access token with fewer rights (RFC 8693, with a Credential Access Boundary), or a signature in the
URL (V4). Source: "OAuth 2.0 for service accounts", "Downscope with Credential Access Boundaries",
"V4 signing process" of Google's documentation.
"""

import base64
import binascii
import hashlib
import itertools
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

LIFETIME = 3600.0
_HOST = "storage.googleapis.com"  # host that object_store signs, with any endpoint
_VIEWER = {"storage.objects.get", "storage.objects.list"}
_ROLES = {
    "inRole:roles/storage.objectViewer": _VIEWER,
    "inRole:roles/storage.objectUser": _VIEWER
    | {
        "storage.objects.create",
        "storage.objects.delete",
        "storage.objects.update",
        "storage.multipartUploads.create",
        "storage.multipartUploads.abort",
        "storage.multipartUploads.listParts",
    },
}
_CONDITION = re.compile(
    r"resource\.name\.startsWith\('projects/_/buckets/([^/']+)/objects/((?:[^'\\]|\\.)*)'\) \|\| "
    r"api\.getAttribute\('storage\.googleapis\.com/objectListPrefix', ''\)"
    r"\.startsWith\('((?:[^'\\]|\\.)*)'\)"
)


class UnauthorizedError(Exception):
    """A request has no valid token and no valid signature."""


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """Rule of a Credential Access Boundary."""

    bucket: str
    permissions: frozenset[str]
    objects: str
    listings: str

    @classmethod
    def parse(cls, rule: dict[str, Any]) -> "BoundaryRule":
        """Parse a rule.

        Raises:
            ValueError: The condition has another form than the conditions of Millrace.
        """
        bucket = rule["availableResource"].removeprefix(
            "//storage.googleapis.com/projects/_/buckets/"
        )
        match = _CONDITION.fullmatch(rule["availabilityCondition"]["expression"])
        if match is None or match[1] != bucket:
            raise ValueError("the condition has another form")
        permissions = frozenset[str]().union(
            *(_ROLES[role] for role in rule["availablePermissions"])
        )
        objects, listings = (re.sub(r"\\(.)", r"\1", match[n]) for n in (2, 3))
        return cls(bucket, permissions, objects, listings)

    def allows(self, permission: str, bucket: str, key: str, prefix: str) -> bool:
        """Decide whether the rule allows a permission on an object or on a listing of a prefix."""
        if permission not in self.permissions or bucket != self.bucket:
            return False
        if permission == "storage.objects.list":
            return prefix.startswith(self.listings)
        return key.startswith(self.objects)


@dataclass(slots=True)
class _Token:
    ends: float
    rules: tuple[BoundaryRule, ...] | None  # None means all rights of the account


@dataclass(slots=True)
class GoogleAuthority:
    """Registered accounts and valid tokens.

    Attributes:
        lifetime: Lifetime of a new token in seconds.
    """

    lifetime: float = LIFETIME
    _accounts: dict[str, rsa.RSAPublicKey] = field(default_factory=dict[str, rsa.RSAPublicKey])
    _tokens: dict[str, _Token] = field(default_factory=dict[str, _Token])
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def is_asked(self) -> bool:
        """Decide whether requests need a token."""
        return bool(self._accounts)

    def configure(self, settings: dict[str, Any]) -> None:
        """Register an account, set the lifetime of new tokens, or revoke all tokens."""
        if "account" in settings:
            key = load_pem_public_key(settings["public_key"].encode())
            assert isinstance(key, rsa.RSAPublicKey)
            self._accounts[settings["account"]] = key
        self.lifetime = settings.get("lifetime", self.lifetime)
        if settings.get("revoke"):
            self._tokens.clear()

    def grant(self, path: str, body: bytes) -> web.Response:
        """Answer a request for a token."""
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        try:
            if path == "/token":
                self._check_jwt(form["assertion"])
                rules, ends = None, time.time() + self.lifetime
            else:
                source = self._find_token(form["subject_token"])
                boundary = json.loads(unquote(form["options"]))["accessBoundary"]
                rules = tuple(BoundaryRule.parse(one) for one in boundary["accessBoundaryRules"])
                ends = source.ends
        except UnauthorizedError as error:
            return _refuse("invalid_grant", error)
        except (KeyError, ValueError) as error:
            return _refuse("invalid_request", error)
        name = f"ya29.{next(self._numbers)}"
        self._tokens[name] = _Token(ends, rules)
        answer = {
            "access_token": name, "token_type": "Bearer", "expires_in": int(ends - time.time()),
            "issued_token_type": "urn:ietf:params:oauth:token-type:access_token",
        }  # fmt: skip
        return web.json_response(answer)

    def find_rules(self, request: web.BaseRequest) -> tuple[BoundaryRule, ...] | None:
        """Return the rules that limit the caller; None for all rights of the account.

        Raises:
            UnauthorizedError: The request has no valid token and no valid signature.
        """
        kind, _, value = request.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and value.count(".") == 2:
            self._check_jwt(value)
            return None
        if kind == "Bearer":
            return self._find_token(value).rules
        if "X-Goog-Signature" in request.query:
            self._check_signature(request)
            return None
        raise UnauthorizedError("no token")

    def _find_token(self, name: str) -> _Token:
        token = self._tokens.get(name)
        if token is None or token.ends <= time.time():
            raise UnauthorizedError("the token is not known, or has ended")
        return token

    def _check_jwt(self, text: str) -> None:
        signed, _, signature = text.rpartition(".")
        try:
            claims = json.loads(_decode(signed.partition(".")[2]))
            self._verify(claims["iss"], _decode(signature), signed.encode())
        except (KeyError, ValueError) as error:
            raise UnauthorizedError("the assertion is invalid") from error
        if claims["exp"] <= time.time():
            raise UnauthorizedError("the assertion has ended")

    def _check_signature(self, request: web.BaseRequest) -> None:
        """Check a signature in the URL. It covers all parameters except itself."""
        path, _, query = request.raw_path.partition("?")
        pairs = [pair for pair in query.split("&") if not pair.startswith("X-Goog-Signature=")]
        names = request.query["X-Goog-SignedHeaders"].split(";")
        if names != ["host"]:
            raise UnauthorizedError("other headers are signed")
        canonical = "\n".join(
            [request.method, path, "&".join(sorted(pairs)), f"host:{_HOST}\n", "host",
             "UNSIGNED-PAYLOAD"]
        )  # fmt: skip
        account, _, scope = request.query["X-Goog-Credential"].partition("/")
        at = request.query["X-Goog-Date"]
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = "\n".join([request.query["X-Goog-Algorithm"], at, scope, digest])
        try:
            signature = binascii.unhexlify(request.query["X-Goog-Signature"])
            self._verify(account, signature, text.encode())
        except (KeyError, ValueError) as error:
            raise UnauthorizedError("the signature is invalid") from error

    def _verify(self, account: str, signature: bytes, signed: bytes) -> None:
        try:
            self._accounts[account].verify(signature, signed, PKCS1v15(), SHA256())
        except InvalidSignature as error:
            raise ValueError("another key has signed it") from error


def _refuse(code: str, error: Exception) -> web.Response:
    return web.json_response({"error": code, "error_description": str(error)}, status=400)


def make_key(account: str, endpoint: str) -> tuple[dict[str, str], str]:
    """Generate a key pair. Return the key file of a service account, and the public key as PEM."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    key = {
        "type": "service_account",
        "client_email": account,
        "private_key": text,
        "private_key_id": "1",
        "token_uri": f"{endpoint}/token",
        "gcs_base_url": endpoint,
    }
    return key, public.decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
