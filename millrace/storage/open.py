"""Open stores with obstore, from their URLs, settings and credentials."""

import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote, unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import GCSStore, LocalStore, MemoryStore, ObjectStore, S3Store
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from millrace.environment import drop_empty_variables, read_variable
from millrace.errors import ConfigurationError, NotFoundError, format_error
from millrace.formatting import clean_text
from millrace.settings import Duration
from millrace.storage.forks import are_folders_lost, is_client_lost, note_opened
from millrace.storage.google_tokens import TokenReader, TokenSource

if TYPE_CHECKING:
    from obstore.store import S3Credential

CONNECT_TIMEOUT = timedelta(seconds=10)
"""Longest time that a connection to a store takes."""
READ_TIMEOUT = timedelta(seconds=30)
"""Longest time without a moved byte before a request to a store is given up."""
_ACCOUNT = re.compile(r"[0-9a-f]{32}(\.(eu|fedramp))?")
_ENDPOINT = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?$")
_AMAZON_ENDPOINT = "https://s3.amazonaws.com"
_GOOGLE_ENDPOINT = "https://storage.googleapis.com"
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""Control characters, which no key has."""
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Variables with the endpoint of S3, the strongest first. boto3 does not read the last one."""
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
_ENVIRONMENT = "env://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_RESERVED = re.compile(r"[%?#\x00-\x1f\x7f]")  # characters with a meaning in a URL
_MOST_FOREIGN_REQUESTS = 8  # at once to one foreign store
_memory: dict[str, MemoryStore] = {}
# The checksum of the whole body is sent as a header: R2 refuses trailers. A signed SHA-256 is
# accepted everywhere. obstore does not tell whether a store checks a CRC.
_CHECKED_BY_SHA256 = {"checksum_algorithm": "SHA256"}
_CHECKED_BY_CRC = {"checksum_algorithm": "CRC64NVME", "unsigned_payload": True}


class Backend(StrEnum):
    """Kind of storage behind a URL."""

    FILE = "file"
    S3 = "s3"
    R2 = "r2"
    GS = "gs"
    MEMORY = "memory"


class Credentials(BaseModel):
    """Access key of S3, with a token if the key is temporary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    access_key_id: str = Field(description="Id of the access key.")
    secret_access_key: SecretStr = Field(description="Secret of the access key.")
    session_token: SecretStr | None = Field(
        default=None, description="Token of a temporary access key."
    )
    expires_at: datetime | None = Field(
        default=None, description="End of a temporary access key, with its time zone."
    )


class StoreSpec(BaseModel):
    """URL and credentials of a store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(
        description="URL of the store: `file:///folder`, `s3://bucket/prefix`, "
        "`r2://account/bucket/prefix`, `gs://bucket/prefix` or `memory://name`. `env://` is the "
        "store that STORAGE_BACKEND and its companions name, and `env://prefix` a part of it."
    )
    credentials: Credentials | None = Field(
        default=None,
        description="Access key; by default that of the environment (`AWS_*`, `GOOGLE_*`).",
    )
    endpoint: str | None = Field(
        default=None,
        description="URL of another S3 endpoint than those of Amazon and R2, such as of Ceph, "
        "MinIO, Backblaze B2 or Wasabi. By default AWS_ENDPOINT_URL or AWS_ENDPOINT for an "
        "`s3://` URL. For `gs://`, URL of another server of Google's API.",
    )
    region: str | None = Field(
        default=None, description="Region of S3. That of R2 is always `auto`."
    )
    account_id: str | None = Field(
        default=None, description="Account of R2, if the URL does not name it."
    )
    ca_file: Path | None = Field(
        default=None, description="PEM file of certificate authorities that are trusted for TLS."
    )
    google_token: TokenSource | None = Field(
        default=None,
        description="Access token for `gs://` that another process renews. Rented machines get it.",
    )
    options: dict[str, SecretStr] = Field(
        default_factory=dict[str, SecretStr],
        description="Further options of the store, by the names of obstore. They are kept as "
        "secrets. Endpoint, region and keys of S3 are no options, but settings of their own.",
    )
    retry_timeout: Duration = Field(
        default=timedelta(minutes=2),
        description="Longest time that a request is retried before its error is raised.",
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve_environment(cls, data: Any) -> Any:
        """Replace ``env://`` by the store that the environment names; given fields stay."""
        written = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        url = written.get("url")
        if not isinstance(url, str) or not url.startswith(_ENVIRONMENT):
            return data  # pyright: ignore[reportUnknownVariableType] - pydantic's
        named = read_spec_from_environment()
        if below := url.removeprefix(_ENVIRONMENT).removeprefix("/"):
            below_url = f"{named.url.removesuffix('/')}/{below}"
            named = named.model_copy(update={"url": below_url})
        given = {name: value for name, value in written.items() if value is not None}
        fields = {name: getattr(named, name) for name in StoreSpec.model_fields}
        return {**fields, **given, "url": named.url}

    def with_prefix(self, prefix: str) -> Self:
        """Return the same store with its keys below a prefix.

        Args:
            prefix: Text of the prefix, as in keys. In the URL, it is escaped.
        """
        inner = prefix.strip("/")
        if not inner:
            return self
        if _SCHEME.match(self.url):
            inner = _escape(inner)
        return self.model_copy(update={"url": f"{self.url.removesuffix('/')}/{inner}"})

    def reveal_secrets(self) -> dict[str, Any]:
        """Return the spec as plain JSON values, secrets included, for the pipe to a process."""
        data = self.model_dump(mode="json")
        data["options"] = _reveal_options(self.options)
        if self.credentials is not None:
            data["credentials"]["secret_access_key"] = (
                self.credentials.secret_access_key.get_secret_value()
            )
            if self.credentials.session_token is not None:
                data["credentials"]["session_token"] = (
                    self.credentials.session_token.get_secret_value()
                )
        if self.google_token is not None:
            data["google_token"] = {
                "url": self.google_token.url.get_secret_value(),
                "key": self.google_token.key.get_secret_value(),
            }
        return data


class StoreSettings(StoreSpec):
    """Base of settings that name a store and an object or a prefix of the store.

    A settings file has the fields of the store beside the other fields, such as
    ``source: {url: ..., job: ...}``.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_nesting(cls, data: Any) -> Any:
        if isinstance(data, dict) and "store" in data:
            own = next((n for n in cls.model_fields if n not in StoreSpec.model_fields), "...")
            raise ValueError(
                "the settings of its store stand beside its other settings: write "
                f"{{url: ..., credentials: ..., {own}: ...}}, without `store`"
            )
        return data  # pyright: ignore[reportUnknownVariableType] - pydantic's

    @property
    def store(self) -> StoreSpec:
        """Settings of the store, without the other fields."""
        return StoreSpec(**{name: getattr(self, name) for name in StoreSpec.model_fields})


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
        if url and not _SCHEME.match(url):
            return cls._parse_folder(url)
        no_store = ConfigurationError(
            f"{url!r} names no store: write file:///folder, s3://bucket/prefix, "
            "r2://account/bucket/prefix or gs://bucket/prefix."
        )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigurationError(f"The URL of the store is invalid: {error}.") from None
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ConfigurationError(
                f"The URL of {parts.scheme}://{parts.hostname or ''} has credentials or options in "
                "it: write credentials, endpoint and region in their own settings. In the name of "
                "a prefix, write %3F for a question mark and %23 for #."
            )
        path = unquote(parts.path)
        if parts.scheme == "file" and parts.netloc in {"", "localhost"} and path:
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
        parts = [self.account, self.bucket, _escape(self.prefix)]
        return f"{self.backend}://" + "/".join(part for part in parts if part)


def _check_path(path: str, url: str) -> None:
    """Check the path of the URL of a bucket.

    Raises:
        ConfigurationError: No prefix of keys can be like this.
    """
    is_relative = not {".", ".."}.isdisjoint(path.split("/"))
    if "//" in path or is_relative or CONTROL.search(path):
        raise ConfigurationError(
            f"{url!r} has two slashes in a row, a relative segment or a control character behind "
            "the bucket. Correct the URL: a prefix is folder names with one slash between them."
        )


def _escape(text: str) -> str:
    """Return text as a part of a URL, without the characters that have a meaning there."""
    return _RESERVED.sub(lambda match: quote(match[0]), text)


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

    def with_retry_timeout(self, retry_timeout: timedelta) -> "Store":
        """Return the same store with another limit on the time for retries."""
        return replace(self, spec=self.spec.model_copy(update={"retry_timeout": retry_timeout}))

    def with_warmed(self, *folders: Path | str) -> "Store":
        """Return the same store, whose checkpoints are first read in folders of this machine."""
        return replace(self, warmed=tuple(map(Path, folders)))

    def make_url(self, key: str) -> str:
        """Return the URL of one object."""
        return f"{self.url}/{_escape(key)}"

    @property
    def endpoint(self) -> str | None:
        """S3 endpoint of the store; None for Amazon's endpoint of the region."""
        return resolve_endpoint(self.spec, self.location)

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
            raw = retrying = _open_folder(location, make=make_folder)
        case Backend.GS:
            raw, retrying = _open_twice(_open_gcs, spec, location)
        case Backend.S3 | Backend.R2:
            raw, retrying = _open_twice(_open_s3, spec, location)
    return Store(spec, location, raw, retrying, is_foreign=is_foreign)


def _open_twice(
    open_raw: Callable[[StoreSpec, Location, Any], ObjectStore], spec: StoreSpec, location: Location
) -> tuple[ObjectStore, ObjectStore]:
    """Return a store of obstore that tries each request once, and one that retries."""
    try:
        once, retried = (
            open_raw(spec, location, retry) for retry in _make_retry_configs(spec.retry_timeout)
        )
    except BaseError as error:
        raise ConfigurationError(
            f"{spec.url} cannot be opened ({format_error(error)}). Correct its `options`, the file "
            "of its credentials, or the variables AWS_* and GOOGLE_* of the environment."
        ) from error
    return once, retried


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
        endpoint = _read_endpoint(os.environ)
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


def _read_endpoint(environ: Mapping[str, str]) -> str | None:
    """Return the endpoint of S3 that an environment names; None if it names none."""
    return next(filter(None, map(environ.get, _ENDPOINT_VARIABLES)), None)


def _reopen_store(
    spec: StoreSpec,
    is_foreign: bool,  # noqa: FBT001 - of a pickle
    warmed: tuple[Path, ...],
) -> Store:
    return open_store(spec, make_folder=False, is_foreign=is_foreign).with_warmed(*warmed)


def read_spec_from_environment(environ: Mapping[str, str] | None = None) -> StoreSpec:
    """Return the store that the environment names.

    ``STORAGE_BACKEND=local`` with ``LOCAL_STORAGE_PATH``, or ``STORAGE_BACKEND=s3`` with
    ``CHECKPOINT_BUCKET`` (a bucket, or any URL) and ``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_ENDPOINT_URL`` or
    ``AWS_ENDPOINT``, ``AWS_REGION``, ``AWS_CA_BUNDLE``. Only an ``s3://`` URL takes the
    endpoint and the region, and no ``gs://`` URL takes the keys. An empty variable counts as unset.

    Raises:
        ConfigurationError: Variables are missing. The message names all of them.
    """
    variables = os.environ if environ is None else environ
    env = {name: value for name, value in variables.items() if value}
    backend = env.get("STORAGE_BACKEND", "local").lower()
    needed = {"local": ["LOCAL_STORAGE_PATH"], "s3": ["CHECKPOINT_BUCKET"]}.get(backend)
    if needed is None:
        raise ConfigurationError(f"STORAGE_BACKEND is {backend!r}: write local or s3.")
    bucket = env.get("CHECKPOINT_BUCKET", "")
    url = bucket if "://" in bucket else f"s3://{bucket}"
    scheme = url.partition(":")[0].lower()
    is_s3, takes_pair = scheme == Backend.S3, scheme in {Backend.S3, Backend.R2}
    has_pair = bool(env.get("AWS_ACCESS_KEY_ID") or env.get("AWS_SECRET_ACCESS_KEY"))
    if backend == "s3" and takes_pair and has_pair:
        needed += ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    missing = [name for name in needed if not env.get(name)]
    if missing:
        raise ConfigurationError(f"With STORAGE_BACKEND={backend}, set {' and '.join(missing)}.")
    if backend == "local":
        return StoreSpec(url=str(Location.parse(env["LOCAL_STORAGE_PATH"])))
    if bucket.startswith(_ENVIRONMENT):
        raise ConfigurationError(
            f"CHECKPOINT_BUCKET is {bucket}, which is the store that it names itself. Write the "
            "bucket, or a URL such as s3://bucket/prefix."
        )
    credentials = None
    if takes_pair and has_pair:
        token = env.get("AWS_SESSION_TOKEN")
        credentials = Credentials(
            access_key_id=env["AWS_ACCESS_KEY_ID"],
            secret_access_key=SecretStr(env["AWS_SECRET_ACCESS_KEY"]),
            session_token=SecretStr(token) if token else None,
        )
    return StoreSpec(
        url=url,
        credentials=credentials,
        endpoint=_read_endpoint(env) if is_s3 else None,
        region=(env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")) if is_s3 else None,
        account_id=env.get("R2_ACCOUNT_ID"),
        ca_file=Path(env["AWS_CA_BUNDLE"]) if env.get("AWS_CA_BUNDLE") else None,
    )


def resolve_endpoint(spec: StoreSpec, location: Location) -> str | None:
    """Return the S3 endpoint of a store; None for Amazon's endpoint of the region."""
    if spec.endpoint:
        return spec.endpoint.rstrip("/")
    if location.backend is Backend.R2:
        return f"https://{location.account}.r2.cloudflarestorage.com"
    return None


def _normalize_endpoint(endpoint: str) -> str:
    """Return an endpoint in one spelling, and one endpoint for all regions of Amazon."""
    parts = urlsplit(endpoint)
    host = parts.netloc.lower().removesuffix(":80" if parts.scheme == "http" else ":443")
    if host.endswith(".amazonaws.com"):
        return _AMAZON_ENDPOINT
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def _open_folder(location: Location, *, make: bool) -> LocalStore:
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


def _make_retry_configs(retry_timeout: timedelta) -> tuple[Any, Any]:
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


def open_with_crc(store: Store) -> ObjectStore:
    """Open the store of obstore that retries, and has each body checked against a CRC-64/NVME.

    The bodies are not signed, and obstore computes no SHA-256: 0.3 instead of 0.9 CPU seconds per
    GB. Only for an S3-compatible store that is known to check the CRC, over TLS.
    """
    _, retry = _make_retry_configs(store.spec.retry_timeout)
    return _open_s3(store.spec, store.location, retry, _CHECKED_BY_CRC)


def _open_s3(
    spec: StoreSpec, location: Location, retry: Any, checked: Mapping[str, Any] = _CHECKED_BY_SHA256
) -> S3Store:
    endpoint = resolve_endpoint(spec, location)
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
        config=cast("Any", {**config, **_reveal_options(spec.options)}),
        client_options=_make_client_options(spec, endpoint),
        retry_config=retry,
        credential_provider=_make_provider(spec.credentials) if spec.credentials else None,
    )


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


def _reveal_options(options: Mapping[str, SecretStr]) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in options.items()}


def _open_gcs(spec: StoreSpec, location: Location, retry: Any) -> GCSStore:
    if spec.credentials:
        raise ConfigurationError(
            "gs:// takes Google's credentials, not a key pair: set GOOGLE_APPLICATION_CREDENTIALS, "
            "or options: {service_account: FILE}."
        )
    base = {"base_url": spec.endpoint} if spec.endpoint else {}
    return GCSStore(
        location.bucket,
        prefix=location.prefix or None,
        config=cast("Any", {**base, **_reveal_options(spec.options)}),
        client_options=_make_client_options(spec, spec.endpoint),
        retry_config=retry,
        credential_provider=TokenReader(spec.google_token) if spec.google_token else None,
    )
