"""Open stores with obstore, from their URLs, settings and credentials."""

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from obstore.store import MemoryStore, ObjectStore

from millrace.environment import drop_empty_variables, read_variable
from millrace.errors import ConfigurationError
from millrace.storage.forks import are_folders_lost, is_client_lost, note_opened
from millrace.storage.locations import Backend, Location, escape_key
from millrace.storage.obstore_clients import (
    CHECKED_BY_CRC,
    make_retry_configs,
    open_folder,
    open_gcs,
    open_s3,
    open_twice,
)
from millrace.storage.spec import Credentials, StoreSpec, read_endpoint

_ENDPOINT = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?$")
_AMAZON_ENDPOINT = "https://s3.amazonaws.com"
_GOOGLE_ENDPOINT = "https://storage.googleapis.com"
_SETTINGS_OF_OPTIONS = {
    "endpoint": "endpoint",
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "region": "region",
    "default_region": "region",
    "access_key_id": "credentials",
    "secret_access_key": "credentials",
    "session_token": "credentials",
    "token": "credentials",
}
"""Options of obstore for S3 that are settings of a store, by their names without ``aws_``."""
_MOST_FOREIGN_REQUESTS = 8  # at once to one foreign store
_memory: dict[str, MemoryStore] = {}


@dataclass(slots=True)
class ThrottleState:
    """State that all threads which use a store share.

    Attributes:
        resume_at: End of the pause that the store asked for, by the monotonic clock.
        warned_at: Time of the last warning that the store does not answer, by the same clock.
        can_list: Whether the credentials may list objects; None before the first check.
        foreign_requests: Requests to a foreign store that may be made at once.
        lock: Lock of the other attributes.
    """

    resume_at: float = 0.0
    warned_at: float | None = None
    can_list: bool | None = None
    foreign_requests: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(_MOST_FOREIGN_REQUESTS)
    )
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Open store. The verbs are functions of this package: ``read``, ``put``, ``list_objects``.

    Attributes:
        spec: Settings that the store was opened with. Its secrets are not printed.
        location: Parsed URL.
        raw: Store of obstore that tries each request once. The verbs retry by themselves.
        retrying: Store of obstore that retries, for verbs of several requests (multipart
            uploads, pages of a listing).
        is_foreign: Whether the endpoint is not trusted. Then `list_objects`, `list_folders` and
            `read_range` use boto3, and read answers up to a limit of size and time, however slowly
            the bytes arrive. obstore allocates the length that a listing or an error announces: an
            absurd length ends the process.
        warmed: Folders of this machine with files of the store below their keys, as a prewarm
            leaves them. The files of checkpoints are read there if their digests are right.
    """

    spec: StoreSpec
    location: Location
    raw: ObjectStore
    retrying: ObjectStore
    throttle: ThrottleState = field(default_factory=ThrottleState, repr=False)
    is_foreign: bool = False
    warmed: tuple[Path, ...] = ()

    def __reduce__(self) -> "tuple[Callable[..., Store], tuple[StoreSpec, bool, tuple[Path, ...]]]":
        """Pickle a store as its spec with credentials, so that another machine can open it."""
        if self.location.backend is Backend.MEMORY:
            raise ConfigurationError(
                f"{self.url} is in the memory of this process, which other processes cannot reach. "
                "Choose a bucket, or a folder that all processes share."
            )
        # The spec has the endpoint and the region of the environment, but not its credentials.
        spec = self.spec.model_copy(update={"url": self.url})
        return _reopen_store, (spec, self.is_foreign, self.warmed)

    @property
    def url(self) -> str:
        """URL of the store, without credentials."""
        return str(self.location)

    @property
    def bucket_url(self) -> str:
        """URL of the whole bucket, without credentials."""
        return str(replace(self.location, prefix=""))

    def with_retry_timeout(self, retry_timeout: timedelta) -> "Store":
        """Return the same store with another limit on the time for retries."""
        return replace(self, spec=self.spec.model_copy(update={"retry_timeout": retry_timeout}))

    def with_warmed(self, *folders: Path | str) -> "Store":
        """Return the same store, whose checkpoints are first read in folders of this machine."""
        return replace(self, warmed=tuple(map(Path, folders)))

    def make_url(self, key: str) -> str:
        """Return the URL of one object."""
        return f"{self.url}/{escape_key(key)}"

    @property
    def endpoint(self) -> str | None:
        """S3 endpoint of the store; None for Amazon's endpoint of the region."""
        return self.spec.resolve_endpoint(self.location)

    @property
    def bucket_id(self) -> tuple[str, str]:
        """Server and name of the bucket: equal for all URLs and endpoints of one bucket.

        ``s3://`` with the endpoint of R2 or of Google names a bucket that ``r2://`` or ``gs://``
        names, too. Amazon's names of buckets are unique in all regions.
        """
        location = self.location
        if not self.is_remote:
            return f"{location.backend}:", location.bucket
        google = _GOOGLE_ENDPOINT if location.backend is Backend.GS else None
        return _normalize_endpoint(self.endpoint or google or _AMAZON_ENDPOINT), location.bucket

    @property
    def region(self) -> str | None:
        """Region of the signatures; None for the region of the environment."""
        return "auto" if self.location.backend is Backend.R2 else self.spec.region

    @property
    def is_s3_compatible(self) -> bool:
        """True if boto3 can open the store."""
        return self.location.backend in {Backend.S3, Backend.R2}

    @property
    def is_remote(self) -> bool:
        """True if requests go over a network."""
        return self.location.backend not in {Backend.FILE, Backend.MEMORY}

    @property
    def has_lost_client(self) -> bool:
        """True if obstore would hang, since this process was forked."""
        if self.location.backend is Backend.FILE:
            return are_folders_lost()
        return self.is_remote and is_client_lost()


def open_store(
    url: str | StoreSpec,
    *,
    credentials: Credentials | None = None,
    endpoint: str | None = None,
    region: str | None = None,
    account_id: str | None = None,
    ca_file: Path | None = None,
    retry_timeout: timedelta | None = None,
    make_folder: bool = True,
    is_foreign: bool = False,
) -> Store:
    """Open the store at a URL. Nothing is sent until a verb is called.

    Args:
        url: ``file://``, ``s3://``, ``r2://`` (account id and bucket), ``gs://``, ``env://`` (the
            store of the environment), ``memory://`` (for tests: one store per name and process),
            or a `StoreSpec`.
        credentials: Key pair. By default obstore reads the environment.
        endpoint: S3 endpoint. The endpoint of R2 follows from the account.
        region: S3 region. The region of R2 is always ``auto``.
        account_id: R2 account, if the URL does not name it.
        ca_file: PEM file of certificate authorities to trust.
        retry_timeout: Longest time that a request is retried before its error is raised.
        make_folder: Whether a missing folder of a ``file://`` URL is made.
        is_foreign: Whether the endpoint is not trusted; see `Store`.

    Raises:
        NotFoundError: There is no such folder, and ``make_folder`` is false.
        ConfigurationError: The URL names no store, or the settings do not fit it. Or the folder
            cannot be made or opened.
    """
    if isinstance(url, StoreSpec):
        spec = url
    else:
        spec = StoreSpec(
            url=url,
            credentials=credentials,
            endpoint=endpoint,
            region=region,
            account_id=account_id,
            ca_file=ca_file,
        )
    if retry_timeout is not None:
        spec = spec.model_copy(update={"retry_timeout": retry_timeout})
    location = Location.parse(
        spec.url, account_id=spec.account_id or read_variable("R2_ACCOUNT_ID")
    )
    if location.backend in {Backend.S3, Backend.R2, Backend.GS}:
        note_opened()
        drop_empty_variables()
        if location.backend is not Backend.GS:
            _check_options(spec)
        spec = _apply_environment(spec, location)
    match location.backend:
        case Backend.MEMORY:
            raw = retrying = _memory.setdefault(location.bucket, MemoryStore())
            if location.prefix:
                raise ConfigurationError("memory://name takes no path: it is for tests.")
        case Backend.FILE:
            raw = retrying = open_folder(location, make=make_folder)
        case Backend.GS:
            raw, retrying = open_twice(open_gcs, spec, location)
        case Backend.S3 | Backend.R2:
            raw, retrying = open_twice(open_s3, spec, location)
    return Store(spec, location, raw, retrying, is_foreign=is_foreign)


def open_scratch_store() -> Store:
    """Open an empty store in memory, which no other call opens. It is freed when it is unused."""
    spec, raw = StoreSpec(url="memory://scratch"), MemoryStore()
    return Store(spec, Location.parse(spec.url), raw, raw)


def open_with_crc(store: Store) -> ObjectStore:
    """Open the store of obstore that retries, and has each body checked against a CRC-64/NVME.

    The bodies are not signed, and obstore computes no SHA-256: 0.3 instead of 0.9 CPU seconds per
    GB. Only for an S3-compatible store that is known to check the CRC, over TLS.
    """
    _, retry = make_retry_configs(store.spec.retry_timeout)
    return open_s3(store.spec, store.location, retry, CHECKED_BY_CRC)


def _check_options(spec: StoreSpec) -> None:
    """Check the options of an S3-compatible store.

    boto3 and the signed requests do not read options. They would use another endpoint or key than
    obstore.

    Raises:
        ConfigurationError: An option has a setting of its own.
    """
    for name in spec.options:
        setting = _SETTINGS_OF_OPTIONS.get(name.lower().removeprefix("aws_"))
        if setting is not None:
            raise ConfigurationError(
                f"{spec.url} has {name!r} in its `options`, which only a part of the requests "
                f"would follow. Write it as `{setting}`, beside the URL."
            )


def _apply_environment(spec: StoreSpec, location: Location) -> StoreSpec:
    """Return the spec with the endpoint and the region that the environment names.

    obstore and boto3 read different variables. obstore also refuses plain HTTP to an endpoint of
    the environment.
    """
    if location.backend is Backend.S3 and not spec.endpoint:
        endpoint = read_endpoint(os.environ)
        region = spec.region or read_variable("AWS_REGION") or read_variable("AWS_DEFAULT_REGION")
        spec = spec.model_copy(update={"endpoint": endpoint, "region": region})
    if spec.endpoint and not _ENDPOINT.match(spec.endpoint):
        if "@" in spec.endpoint:
            raise ConfigurationError(
                f"The endpoint of {spec.url} has a user or a password in it: write https://HOST or "
                "http://HOST:PORT, and the keys in `credentials`."
            )
        raise ConfigurationError(
            f"The endpoint {spec.endpoint!r} is not a URL: write https://HOST or http://HOST:PORT, "
            "in `endpoint` or AWS_ENDPOINT_URL."
        )
    return spec


def _reopen_store(
    spec: StoreSpec,
    is_foreign: bool,  # noqa: FBT001 - of a pickle
    warmed: tuple[Path, ...],
) -> Store:
    return open_store(spec, make_folder=False, is_foreign=is_foreign).with_warmed(*warmed)


def _normalize_endpoint(endpoint: str) -> str:
    """Return an endpoint in one spelling, and one endpoint for all regions of Amazon."""
    parts = urlsplit(endpoint)
    host = parts.netloc.lower().removesuffix(":80" if parts.scheme == "http" else ":443")
    if host.endswith(".amazonaws.com"):
        return _AMAZON_ENDPOINT
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
