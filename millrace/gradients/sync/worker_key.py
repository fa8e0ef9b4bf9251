"""Key by which a worker signs its registrations."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from millrace import errors
from millrace.schemas.registration import Registration

DEFAULT_KEY_FILE = Path(".millrace/worker.key")
"""File with the key of a worker, below the folder in which the worker runs."""
_MAX_KEY_BYTES = 1000


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """Ed25519 key of a worker, which proves that its registrations are all from the same worker."""

    _private: Ed25519PrivateKey

    @classmethod
    def generate(cls) -> "WorkerKey":
        """Return a new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path = DEFAULT_KEY_FILE) -> "WorkerKey":
        """Return the key in a file. A new key is written if the file is missing.

        Raises:
            ConfigurationError: The file has no key, or cannot be read or written.
        """
        try:
            try:
                text = _read_text(path)
            except FileNotFoundError:
                text = _write_new_key(path)
        except OSError as error:
            raise errors.ConfigurationError(
                f"The worker's key {path} cannot be read or written ({error.strerror}): allow it, "
                "or choose another file."
            ) from error
        try:
            return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))
        except ValueError:
            raise errors.ConfigurationError(
                f"{path} has no worker's key, which is 64 hexadecimal digits: restore the file, or "
                "remove it and join with another name."
            ) from None

    @property
    def public(self) -> str:
        """Public key in hexadecimal digits."""
        return self._private.public_key().public_bytes_raw().hex()

    def sign(self, registration: Registration) -> Registration:
        """Return a registration with this key and its signature."""
        unsigned = registration.model_copy(update={"key": self.public, "signature": ""})
        signature = self._private.sign(unsigned.signed_bytes).hex()
        return unsigned.model_copy(update={"signature": signature})


def is_signed(registration: Registration) -> bool:
    """Decide whether the signature of a registration is by its key."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(registration.key))
        key.verify(bytes.fromhex(registration.signature), registration.signed_bytes)
    except (ValueError, InvalidSignature):
        return False
    return True


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_KEY_BYTES).decode("ascii", "replace").strip()


def _write_new_key(path: Path) -> str:
    """Write a new key, and return it; that of another process which has written first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = Ed25519PrivateKey.generate().private_bytes_raw().hex()
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{text}\n")
        os.link(partial, path)
    except FileExistsError:
        return _read_text(path)
    finally:
        partial.unlink()
    return text
