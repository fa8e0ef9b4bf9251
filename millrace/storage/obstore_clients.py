"""Open stores of obstore."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from obstore.exceptions import BaseError
from obstore.store import GCSStore, LocalStore, ObjectStore, S3Store

from millrace.errors import ConfigurationError, NotFoundError, format_error
from millrace.formatting import clean_text
from millrace.storage.google_tokens import TokenReader
from millrace.storage.locations import Backend, Location
from millrace.storage.spec import Credentials, StoreSpec

if TYPE_CHECKING:
    from obstore.store import S3Credential

CONNECT_TIMEOUT = timedelta(seconds=10)
"""Longest time that a connection to a store takes."""
READ_TIMEOUT = timedelta(seconds=30)
"""Longest time without a moved byte before a request to a store is given up."""
# The checksum of the whole body is sent as a header: R2 refuses trailers. A signed SHA-256 is
# accepted everywhere. obstore does not tell whether a store checks a CRC.
_CHECKED_BY_SHA256 = {"checksum_algorithm": "SHA256"}
CHECKED_BY_CRC = {"checksum_algorithm": "CRC64NVME", "unsigned_payload": True}
"""Options of a store of obstore whose uploads the store checks against a CRC-64/NVME."""


def open_folder(location: Location, *, make: bool) -> LocalStore:
    """Open a folder.

    Args:
        location: Parsed URL of the folder.
        make: Whether a missing folder is made.

    Raises:
        NotFoundError: There is no such folder, and none is made.
        ConfigurationError: The folder cannot be made or opened.
    """
    folder = Path(location.bucket)
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigurationError(f"{folder} is a file: write the URL of a folder.")
        if not (make or folder.exists()):
            raise NotFoundError(f"There is no folder {folder}. Correct the URL.")
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        return LocalStore(folder)
    except (OSError, ValueError) as error:  # also of a NUL byte in the path
        why = getattr(error, "strerror", None) or format_error(error)
        raise ConfigurationError(
            f"The folder {clean_text(str(folder))} cannot be {'made' if make else 'opened'} "
            f"({why}). Correct the URL, or the permissions of the folders above it."
        ) from error


def open_twice(
    open_raw: Callable[[StoreSpec, Location, Any], ObjectStore], spec: StoreSpec, location: Location
) -> tuple[ObjectStore, ObjectStore]:
    """Return a store of obstore that tries each request once, and one that retries."""
    try:
        once, retried = (
            open_raw(spec, location, retry) for retry in make_retry_configs(spec.retry_timeout)
        )
    except BaseError as error:
        raise ConfigurationError(
            f"{spec.url} cannot be opened ({format_error(error)}). Correct its `options`, the file "
            "of its credentials, or the variables AWS_* and GOOGLE_* of the environment."
        ) from error
    return once, retried


def open_s3(
    spec: StoreSpec, location: Location, retry: Any, checked: Mapping[str, Any] = _CHECKED_BY_SHA256
) -> S3Store:
    """Open a bucket of S3 or R2.

    Args:
        spec: Settings of the store.
        location: Parsed URL.
        retry: Retries of obstore; see `make_retry_configs`.
        checked: Options that say how the store checks the bodies of uploads.
    """
    endpoint = spec.resolve_endpoint(location)
    region = "auto" if location.backend is Backend.R2 else spec.region
    config: dict[str, Any] = {**checked, "conditional_put": "etag"}
    if endpoint:
        # AWS_ENDPOINT_URL_S3 has its own name in obstore, and would be stronger than `endpoint`.
        config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
        config["virtual_hosted_style_request"] = False
    if endpoint or region:
        config["region"] = region or "us-east-1"
    return S3Store(
        location.bucket,
        prefix=location.prefix or None,
        config=cast("Any", {**config, **spec.reveal_options()}),
        client_options=_make_client_options(spec, endpoint),
        retry_config=retry,
        credential_provider=_make_provider(spec.credentials) if spec.credentials else None,
    )


def open_gcs(spec: StoreSpec, location: Location, retry: Any) -> GCSStore:
    """Open a bucket of Google; the arguments are those of `open_s3`.

    Raises:
        ConfigurationError: The settings have a key pair, which Google does not take.
    """
    if spec.credentials:
        raise ConfigurationError(
            "gs:// takes Google's credentials, not a key pair: set GOOGLE_APPLICATION_CREDENTIALS, "
            "or options: {service_account: FILE}."
        )
    base = {"base_url": spec.endpoint} if spec.endpoint else {}
    return GCSStore(
        location.bucket,
        prefix=location.prefix or None,
        config=cast("Any", {**base, **spec.reveal_options()}),
        client_options=_make_client_options(spec, spec.endpoint),
        retry_config=retry,
        credential_provider=TokenReader(spec.google_token) if spec.google_token else None,
    )


def make_retry_configs(retry_timeout: timedelta) -> tuple[Any, Any]:
    """Return the settings of obstore for one try of each request, and for retries."""
    once = {"max_retries": 0, "retry_timeout": timedelta(0)}
    retrying = {
        "max_retries": 100,
        "retry_timeout": retry_timeout,
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=10),
            "base": 2,
        },
    }
    return once, retrying


def _make_client_options(spec: StoreSpec, endpoint: str | None) -> Any:
    client: dict[str, Any] = {
        "timeout": "30m",
        "read_timeout": READ_TIMEOUT,
        "connect_timeout": CONNECT_TIMEOUT,
        "pool_idle_timeout": "20s",
        "user_agent": "millrace",
    }
    if endpoint and endpoint.startswith("http://"):
        client["allow_http"] = True
    if spec.ca_file:
        client["root_certificate"] = _read_pem(spec.ca_file)
    return client


def _read_pem(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigurationError(f"ca_file {path} cannot be read: {error.strerror}.") from None


def _make_provider(credentials: Credentials) -> "Callable[[], S3Credential]":
    """Return a provider of these credentials, without a token of the environment."""
    token = credentials.session_token
    pair: S3Credential = {
        "access_key_id": credentials.access_key_id,
        "secret_access_key": credentials.secret_access_key.get_secret_value(),
        "token": token.get_secret_value() if token else None,
        "expires_at": None,
    }
    return lambda: pair
