"""Parse the URLs of stores."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from millrace.errors import ConfigurationError
from millrace.formatting import shorten_url

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Control characters, which no key has."""
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
"""Beginning of a URL. Text without it is the path of a folder."""
_ACCOUNT = re.compile(r"[0-9a-f]{32}(\.(eu|fedramp))?")
_DAMAGED_URL = re.compile(r"://|^(s3|r2|gs|hf|env|file|memory)//")
"""Part of a text that is no path of a folder, but a URL with an error in it."""
_RESERVED = re.compile(r"[%?#\x00-\x1f\x7f]")  # characters with a meaning in a URL


class Backend(StrEnum):
    """Kind of storage behind a URL."""

    FILE = "file"
    S3 = "s3"
    R2 = "r2"
    GS = "gs"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Location:
    """Parsed URL of a store.

    Attributes:
        backend: Kind of storage.
        bucket: Name of the bucket. For a folder its absolute path, in memory the store's name.
        prefix: Prefix of every key, without slashes at its ends.
        account: Account of R2, with its jurisdiction (``0123…ef.eu``); empty for other stores.
    """

    backend: Backend
    bucket: str
    prefix: str = ""
    account: str = ""

    @classmethod
    def parse(cls, url: str, *, account_id: str | None = None) -> "Location":
        """Parse a URL.

        Raises:
            ConfigurationError: The URL is not that of a store.
        """
        shown = shorten_url(url)
        no_store = ConfigurationError(
            f"{shown!r} names no store: write file:///folder, s3://bucket/prefix, "
            "r2://account/bucket/prefix or gs://bucket/prefix."
        )
        if url != url.strip():
            raise ConfigurationError(f"{shown!r} begins or ends with white space: remove it.")
        if url and not SCHEME.match(url):
            if _DAMAGED_URL.search(url):
                raise no_store
            return cls._parse_folder(url)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigurationError(f"The URL of the store is invalid: {error}.") from None
        is_file = parts.scheme == "file"
        if parts.query or parts.fragment or (not is_file and re.search("[@:]", parts.netloc)):
            raise ConfigurationError(
                f"The URL {shown!r} has credentials or options in it: write credentials, endpoint "
                "and region in their own settings. In the name of a prefix, write %3F for a "
                "question mark and %23 for #."
            )
        path = unquote(parts.path)
        if is_file and parts.netloc in {"", "localhost"} and path:
            return cls._parse_folder("/" + path.strip("/"))
        _check_path(path, url)
        path = path.strip("/")
        match parts.scheme:
            case "s3" | "gs" if parts.netloc:
                return cls(Backend(parts.scheme), parts.netloc, path)
            case "r2" if parts.netloc:
                return cls._parse_r2(parts.netloc, path, account_id)
            case "memory":
                return cls(Backend.MEMORY, parts.netloc, path)
            case _:
                raise no_store

    @classmethod
    def _parse_folder(cls, path: str) -> "Location":
        folder = Path(path).expanduser().absolute()
        return cls(Backend.FILE, str(folder.resolve() if ".." in folder.parts else folder))

    @classmethod
    def _parse_r2(cls, host: str, path: str, account_id: str | None) -> "Location":
        if _ACCOUNT.fullmatch(host):
            bucket, _, prefix = path.partition("/")
            if not bucket:
                raise ConfigurationError(
                    "An R2 URL is r2://account/bucket/prefix: the bucket is missing."
                )
            return cls(Backend.R2, bucket, prefix, host)
        if not account_id:
            raise ConfigurationError(
                f"r2://{host} names no account: write r2://account/bucket/prefix with the "
                "account's 32 hexadecimal digits, or give account_id."
            )
        return cls(Backend.R2, host, path, account_id)

    def __str__(self) -> str:
        if self.backend is Backend.FILE:
            return Path(self.bucket).as_uri()
        parts = [self.account, self.bucket, escape_key(self.prefix)]
        return f"{self.backend}://" + "/".join(part for part in parts if part)


def _check_path(path: str, url: str) -> None:
    """Check the path of the URL of a bucket.

    Raises:
        ConfigurationError: No prefix of keys can be like this.
    """
    is_relative = not {".", ".."}.isdisjoint(path.split("/"))
    if "//" in path or is_relative or CONTROL.search(path):
        raise ConfigurationError(
            f"{shorten_url(url)!r} has two slashes in a row, a relative segment or a control "
            "character behind the bucket. Correct the URL: a prefix is folder names with one slash "
            "between them."
        )


def escape_key(text: str) -> str:
    """Return text as a part of a URL, without the characters that have a meaning there."""
    return _RESERVED.sub(lambda match: quote(match[0]), text)
