"""Credentials of a store, from an access key of a stand-in."""

from pydantic import SecretStr

from millrace.storage import Credentials
from millrace.testing.key import Key


def make_credentials(key: Key) -> Credentials:
    """Return the credentials with which Millrace signs by a key."""
    return Credentials(
        access_key_id=key.access_key_id,
        secret_access_key=SecretStr(key.secret_access_key),
        session_token=SecretStr(key.session_token) if key.session_token else None,
    )
