"""Block of a bucket with a role and credentials."""

import json
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeVar

from prefect.blocks.core import Block
from prefect_aws import AwsCredentials
from pydantic import (
    Field,
    SecretStr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
)

from blocks.loading import find_block
from millrace import errors
from millrace.audit import check_access as check_store
from millrace.storage import Backend, Credentials, Location, Right, Store, StoreSpec, open_store

T = TypeVar("T")

_HIDDEN = "*" * 8


class BucketRole(StrEnum):
    """Purpose of a bucket."""

    GRADIENTS = "gradients"
    DATASET = "dataset"
    AGGREGATOR = "aggregator"


class Bucket(Block):
    """A bucket with a role, and credentials for reading and for writing.

    A flow opens the bucket with the right that it needs and gets no other right.

    Example:
        Open a bucket for reading:
        ```python
        from blocks import Bucket

        bucket = Bucket.load("BLOCK_NAME")
        store = bucket.open("read")
        ```
    """

    _block_type_name = "Millrace Bucket"
    _block_type_slug = "millrace-bucket"
    _documentation_url: ClassVar[Any] = "https://developers.cloudflare.com/r2/api/tokens/"
    _description = (
        "A bucket in Cloudflare R2, any S3 or Google Cloud Storage with one role (gradients, "
        "dataset or aggregator), and credentials for reading and for writing it."
    )
    _code_example = """
from blocks import Bucket

bucket = Bucket.load("BLOCK_NAME")
store = bucket.open("read")
"""

    role: BucketRole = Field(description="Purpose of the bucket.")
    url: str = Field(
        description="URL of the bucket: `r2://account/bucket`, `s3://bucket` or `gs://bucket`, "
        "with `/prefix` after it if the role has only a part of the bucket."
    )
    account_id: str | None = Field(
        default=None,
        title="Account ID",
        description="The R2 account, if the URL does not name it.",
    )
    read_credentials: AwsCredentials | None = Field(
        default=None,
        repr=False,
        title="Read credentials",
        description="A key pair that may list and read.",
    )
    write_credentials: AwsCredentials | None = Field(
        default=None,
        repr=False,
        title="Write credentials",
        description="A key pair that may list, read, write and delete.",
    )
    read_google_credentials: str | None = Field(
        default=None,
        title="Read credentials of Google",
        description="For a `gs://` URL: name of a GCP Credentials block, or path of a service "
        "account's key file on each machine that runs flows. It may list and read.",
    )
    write_google_credentials: str | None = Field(
        default=None,
        title="Write credentials of Google",
        description="The same for a service account that may list, read, write and delete.",
    )
    use_environment: bool = Field(
        default=False,
        title="Use the environment",
        description="Open the bucket with the credentials and the endpoint in the environment of "
        "the process that opens it. Only for a block without credentials.",
    )
    mirrors: list[str] = Field(
        default_factory=list,
        description="Mirrors with the same objects: URLs that the read credentials reach too, "
        "or names of other Millrace Bucket blocks. Loaders, `prewarm` and the workers of a "
        "campaign on its own machine read them too. `verify-datasets` verifies them. Sharding, "
        "merging and checkpoints do not use them.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if "://" not in url:
            raise ValueError("write r2://account/bucket, s3://bucket, gs://bucket or file:///path")
        return url

    @field_serializer("read_credentials", "write_credentials", mode="wrap")
    def _hide_session_token(
        self, value: Any, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> Any:
        # prefect-aws does not treat a session token as a secret.
        data = handler(value)
        if isinstance(data, dict) and not (info.context or {}).get("include_secrets"):
            return {**data, "aws_session_token": data.get("aws_session_token") and _HIDDEN}
        return data

    def make_spec(self, right: Right | Literal["read", "write"]) -> StoreSpec:
        """Return the store of the bucket, with the credentials for one right.

        Raises:
            ConfigurationError: The block has no such credentials, or their kind does not work
                outside of this process.
        """
        return self.make_url_spec(self.url, Right(right))

    def open(self, right: Right | Literal["read", "write"]) -> Store:
        """Return the bucket's store, with only this right. Nothing is sent yet.

        Raises:
            ConfigurationError: As for `make_spec`.
        """
        return open_store(self.make_spec(right), make_folder=Right(right) is Right.WRITE)

    def check(self, right: Right | Literal["read", "write"], scope: str = "") -> None:
        """Check that the credentials have their right, with at most five small requests.

        Args:
            right: Right of the credentials to check.
            scope: Prefix that a run works below, such as a dataset's name.

        Raises:
            DeniedError: The credentials lack the right.
            ConfigurationError: As for `make_spec`.
        """
        try:
            check_store(self.open(right), Right(right), scope)
        except errors.DeniedError as error:
            raise errors.DeniedError(
                f"{error} They are the {Right(right)} credentials of {self._display_name}: correct "
                "them there (`millrace setup` writes them from R2_* variables)."
            ) from error

    def make_mirror_specs(self) -> list[StoreSpec]:
        """Return the mirrors, with their read credentials.

        Raises:
            ConfigurationError: As for `make_spec`, or a mirror is the name of a block that does not
                exist.
        """
        return [
            self.make_url_spec(mirror, Right.READ)
            if "://" in mirror
            else self._load_mirror(mirror).make_spec(Right.READ)
            for mirror in self.mirrors
        ]

    def make_read_specs(self, prefix: str = "") -> list[StoreSpec]:
        """Return the bucket and its mirrors, for a loader: `PageLoader(bucket.make_read_specs())`.

        Args:
            prefix: Folder of the files, which is the same in the bucket and in each mirror.

        Raises:
            ConfigurationError: As for `make_mirror_specs`.
        """
        specs = [self.make_spec(Right.READ), *self.make_mirror_specs()]
        return [spec.with_prefix(prefix) for spec in specs]

    @property
    def _display_name(self) -> str:
        name = self._block_document_name
        return f"the Millrace Bucket block {name!r}" if name else f"the bucket {self.url}"

    def _load_mirror(self, name: str) -> "Bucket":
        mirror = find_block(Bucket, name)
        if mirror is None:
            raise errors.ConfigurationError(
                f"The mirror {name!r} of {self._display_name} is no URL and no Millrace Bucket "
                "block. Correct `mirrors` of the block."
            )
        return mirror

    def make_url_spec(self, url: str, right: Right) -> StoreSpec:
        """Return the store of a URL that the credentials of the bucket reach too.

        Raises:
            ConfigurationError: As for `make_spec`.
        """
        spec = StoreSpec(url=url, account_id=self.account_id)
        backend = Location.parse(spec.url, account_id=self.account_id).backend
        match backend:
            case Backend.S3 | Backend.R2:
                pair = self._choose(self.read_credentials, self.write_credentials, url, right)
                fields = {} if pair is None else self._convert_credentials(pair, right)
            case Backend.GS:
                both = self.read_google_credentials, self.write_google_credentials
                named = self._choose(*both, url, right)
                fields = {} if named is None else {"options": self._find_google_key(named, right)}
            case _:
                fields = dict[str, Any]()
        return spec.model_copy(update=fields)

    def _choose(self, reading: T | None, writing: T | None, url: str, right: Right) -> T | None:
        """Return the credentials for a right; None to use the environment.

        Prefect removes a key pair from this block when the pair's own block is deleted. So a block
        without any credentials uses those of the environment only if it says so.
        """
        chosen, other = (reading, writing) if right is Right.READ else (writing, reading)
        if chosen is None and (other is not None or not self.use_environment):
            environment = (
                "" if other else ", or switch on `use_environment` for those of the environment"
            )
            raise errors.ConfigurationError(
                f"To {right} {url}, {right} credentials are needed, and {self._display_name} has "
                f"none: add them there, or run `millrace setup`{environment}."
            )
        return chosen

    def _find_google_key(self, named: str, right: Right) -> dict[str, SecretStr]:
        """Return the options of a `StoreSpec` for a block or a file with a service account."""
        if "/" in named:
            return {"service_account": SecretStr(named)}
        whose = f"The {right} credentials of {self._display_name}"
        try:
            from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415 - an extra
            from prefect_gcp import GcpCredentials  # noqa: PLC0415 - an extra
        except ImportError:
            raise errors.ConfigurationError(
                f"{whose} are the GCP Credentials block {named!r}, which needs prefect-gcp: "
                "pip install 'millrace[gcs]', or name the path of a key file."
            ) from None
        try:
            google = find_block(GcpCredentials, named)
        except GoogleAuthError as error:
            raise errors.ConfigurationError(f"{whose} cannot be used: {error}") from error
        if google is None:
            raise errors.ConfigurationError(
                f"{whose} name no GCP Credentials block: there is no {named!r}. Create it in the "
                "UI, or name the path of a key file."
            )
        if google.service_account_info is not None:
            key = json.dumps(google.service_account_info.get_secret_value())
            return {"service_account_key": SecretStr(key)}
        if google.service_account_file is not None:
            return {"service_account": SecretStr(str(google.service_account_file))}
        raise errors.ConfigurationError(
            f"{whose} need a service account, and the GCP Credentials block {named!r} has none: "
            "add its key there (Service Account Info)."
        )

    def _convert_credentials(self, aws: AwsCredentials, right: Right) -> dict[str, Any]:
        """Return the fields of a `StoreSpec` that a prefect-aws block holds."""
        if aws.assume_role_arn or aws.profile_name or not aws.aws_access_key_id:
            raise errors.ConfigurationError(
                f"The {right} credentials of {self._display_name} need an access key id and its "
                "secret: a profile or an assumed role does not reach the worker processes."
            )
        if aws.aws_session_token:
            raise errors.ConfigurationError(
                f"The {right} credentials of {self._display_name} have a session token. Prefect "
                "shows the token in its events, and the token ends within hours: use a lasting "
                "key, for this bucket only."
            )
        client = aws.aws_client_parameters
        if client.verify is False:
            raise errors.ConfigurationError(
                f"The {right} credentials of {self._display_name} turn the verification of TLS "
                "off: name the authority's certificate instead (Certificate Authority Bundle)."
            )
        secret = aws.aws_secret_access_key
        if secret is None:
            raise errors.ConfigurationError(
                f"The {right} credentials of {self._display_name} have no secret access key."
            )
        return {
            "credentials": Credentials(
                access_key_id=aws.aws_access_key_id,
                secret_access_key=secret,
            ),
            "endpoint": client.endpoint_url,
            "region": aws.region_name,
            "ca_file": client.verify_cert_path,
        }
