"""Describe stores by their URLs, settings and credentials."""

import os
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from millrace.errors import ConfigurationError
from millrace.settings import Duration
from millrace.storage.google_tokens import TokenSource
from millrace.storage.locations import SCHEME, Backend, Location, escape_key

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Variables with the endpoint of S3, the strongest first. boto3 does not read the last one."""
_ENVIRONMENT = "env://"


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
        if SCHEME.match(self.url):
            inner = escape_key(inner)
        return self.model_copy(update={"url": f"{self.url.removesuffix('/')}/{inner}"})

    def resolve_endpoint(self, location: Location) -> str | None:
        """Return the S3 endpoint of the store; None for Amazon's endpoint of the region."""
        if self.endpoint:
            return self.endpoint.rstrip("/")
        if location.backend is Backend.R2:
            return f"https://{location.account}.r2.cloudflarestorage.com"
        return None

    def reveal_options(self) -> dict[str, str]:
        """Return the further options of the store in plain text."""
        return {name: value.get_secret_value() for name, value in self.options.items()}

    def reveal_secrets(self) -> dict[str, Any]:
        """Return the spec as plain JSON values, secrets included, for the pipe to a process."""
        data = self.model_dump(mode="json")
        data["options"] = self.reveal_options()
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
    if missing == ["LOCAL_STORAGE_PATH"] and "STORAGE_BACKEND" not in env:
        raise ConfigurationError(
            "No store is named: write it in the settings, or set LOCAL_STORAGE_PATH, or "
            "STORAGE_BACKEND=s3 and CHECKPOINT_BUCKET."
        )
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
        endpoint=read_endpoint(env) if is_s3 else None,
        region=(env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")) if is_s3 else None,
        account_id=env.get("R2_ACCOUNT_ID"),
        ca_file=Path(env["AWS_CA_BUNDLE"]) if env.get("AWS_CA_BUNDLE") else None,
    )


def read_endpoint(environ: Mapping[str, str]) -> str | None:
    """Return the endpoint of S3 that an environment names; None if it names none."""
    return next(filter(None, map(environ.get, _ENDPOINT_VARIABLES)), None)
