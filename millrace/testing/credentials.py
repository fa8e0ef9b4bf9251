"""Conversion of a stand-in's access key to the credentials of a store."""

from pydantic import SecretStr

from millrace.storage import Credentials
from millrace.testing.key import Key


def make_credentials(key: Key) -> Credentials:
    """Return the credentials of a store for an access key."""
    return Credentials(
        access_key_id=key.access_key_id,
        secret_access_key=SecretStr(key.secret_access_key),
        session_token=SecretStr(key.session_token) if key.session_token else None,
    )
