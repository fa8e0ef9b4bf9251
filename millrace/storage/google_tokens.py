"""Access tokens of Google for hosts that do not have the key of a service account.

Such a token ends within an hour. A process that has the key writes a new token into an object
before the last one ends (`seal_token`). The host reads the object by a signed URL (`TokenReader`).
The object is encrypted, so that a reader of the bucket cannot use the token.
"""

import http.client
import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from millrace.errors import ConfigurationError, UnavailableError, format_error

if TYPE_CHECKING:
    from cryptography.fernet import Fernet
    from obstore.store import GCSCredential

RENEWAL_MARGIN = timedelta(minutes=10)
"""Time before the end of a token at which its reader looks for the next one."""
_READ_TIMEOUT = 30.0  # seconds
_MAX_SIZE = 64 << 10  # bytes of a sealed token; Google's are below 16 KiB


class TokenSource(BaseModel):
    """Object with an access token of Google, which another process renews."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: SecretStr = Field(description="Signed URL of the object.")
    key: SecretStr = Field(description="Key that the token is encrypted with, of Fernet.")


@dataclass(frozen=True, slots=True)
class AccessToken:
    """Access token of Google.

    Attributes:
        token: Bearer token.
        expires_at: End of the token, with its time zone.
    """

    token: SecretStr
    expires_at: datetime


def seal_token(token: AccessToken, key: SecretStr) -> bytes:
    """Return a token encrypted, as the content of an object.

    Args:
        token: Token.
        key: Key of Fernet: 32 bytes, in URL-safe Base64.
    """
    content = {
        "token": token.token.get_secret_value(),
        "expires_at": token.expires_at.timestamp(),
    }
    return _make_cipher(key).encrypt(json.dumps(content).encode())


def _make_cipher(key: SecretStr) -> "Fernet":
    from cryptography.fernet import Fernet  # noqa: PLC0415 - few processes need it

    try:
        return Fernet(key.get_secret_value())
    except ValueError:
        raise ConfigurationError(
            "The key of `google_token` is not one of Fernet: 32 bytes, in URL-safe Base64."
        ) from None


class TokenReader:
    """Provider of credentials for obstore, which reads a token that another process renews.

    Args:
        source: Object with the token.
        now: Function that returns the time.
    """

    def __init__(
        self, source: TokenSource, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._source, self._now = source, now
        self._cipher = _make_cipher(source.key)
        self._last: AccessToken | None = None

    def __call__(self) -> "GCSCredential":
        """Return the newest token. A token that is valid stays in use while no other can be read.

        Raises:
            UnavailableError: There is no valid token.
        """
        from cryptography.fernet import InvalidToken  # noqa: PLC0415 - few processes need it

        reason = "it has ended"
        try:
            content = json.loads(self._cipher.decrypt(self._fetch()))
            expires_at = datetime.fromtimestamp(content["expires_at"], UTC)
            self._last = AccessToken(SecretStr(content["token"]), expires_at)
        except InvalidToken:
            reason = "it is encrypted with another key"
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = format_error(error)
        last, now = self._last, self._now()
        if last is None or last.expires_at <= now:
            raise UnavailableError(
                f"There is no valid access token of Google ({reason}): the process that renews "
                "it does not run, or cannot reach Google."
            )
        # After this time, the client asks for the next token, before each request if need be.
        return {
            "token": last.token.get_secret_value(),
            "expires_at": max(last.expires_at - RENEWAL_MARGIN, now),
        }

    def _fetch(self) -> bytes:
        url = self._source.url.get_secret_value()
        # A URL of whoever rents the machine; that of a file if the records are in a folder.
        with urllib.request.urlopen(url, timeout=_READ_TIMEOUT) as answer:  # noqa: S310
            return answer.read(_MAX_SIZE)
