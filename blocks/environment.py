"""Buckets as the environment describes them: ``R2_{ROLE}_*`` and ``R2_DATASET_BUCKET_LIST``."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefect_aws import AwsCredentials
from prefect_aws.client_parameters import AwsClientParameters
from pydantic import SecretStr

from blocks.bucket import Bucket, BucketRole
from millrace.errors import ConfigurationError
from millrace.storage import Right

LIST = "R2_DATASET_BUCKET_LIST"
_ACCOUNT = re.compile(r"[0-9a-f]{32}(\.(eu|fedramp))?")


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """One bucket to make a block of.

    Attributes:
        name: Of the block.
        role: What it is for.
        account_id: Its R2 account.
        bucket: Its name there.
        pairs: A key pair for each right.
        mirrors: As the block's field.
    """

    name: str
    role: BucketRole
    account_id: str
    bucket: str
    pairs: Mapping[Right, AwsCredentials] = field(repr=False)
    mirrors: tuple[str, ...] = ()

    def block(self, credentials: Mapping[Right, AwsCredentials]) -> Bucket:
        """Return the block, with these credentials, which may have been saved."""
        return Bucket(
            role=self.role,
            url=f"r2://{self.account_id}/{self.bucket}",
            account_id=self.account_id,
            read_credentials=credentials.get(Right.READ),
            write_credentials=credentials.get(Right.WRITE),
            mirrors=list(self.mirrors),
        )


def buckets_of(
    environ: Mapping[str, str], roles: Iterable[BucketRole], rights: Iterable[Right]
) -> list[BucketSettings]:
    """Return the buckets that the environment describes, mirrors first.

    Args:
        environ: The environment.
        roles: Which roles.
        rights: Which credentials each must have.

    Raises:
        ConfigurationError: Variables are missing (all of them are named, with what each is for),
            or one does not make sense. No value is repeated.
    """
    missing: dict[str, str] = {}
    found: list[BucketSettings] = []
    endpoint = environ.get("R2_ENDPOINT") or None
    wanted = list(rights)
    for role in roles:
        if role is BucketRole.DATASET:
            found += _dataset(environ, wanted, endpoint, missing)
        else:
            found += _bucket(environ, role, wanted, endpoint, missing)
    if missing:
        lines = "\n".join(f"  {name}: {purpose}" for name, purpose in missing.items())
        raise ConfigurationError(
            f"These variables are not set:\n{lines}\nExport them, or choose with --role and "
            "--right what to set up without them."
        )
    return found


def _bucket(
    environ: Mapping[str, str],
    role: BucketRole,
    rights: list[Right],
    endpoint: str | None,
    missing: dict[str, str],
    mirrors: tuple[str, ...] = (),
) -> list[BucketSettings]:
    given = {name: environ.get(name, "").strip() for name in _purposes(role, rights)}
    absent = {name: _purposes(role, rights)[name] for name, value in given.items() if not value}
    if absent:
        missing.update(absent)
        return []
    prefix = f"R2_{role.upper()}"
    pairs = {
        right: _pair(
            given[f"{prefix}_{right.upper()}_ACCESS_KEY_ID"],
            given[f"{prefix}_{right.upper()}_SECRET_ACCESS_KEY"],
            endpoint,
        )
        for right in rights
    }
    account = _account(given[f"{prefix}_ACCOUNT_ID"], f"{prefix}_ACCOUNT_ID")
    name = given[f"{prefix}_BUCKET_NAME"]
    return [BucketSettings(role.value, role, account, name, pairs, mirrors)]


def _purposes(role: BucketRole, rights: list[Right]) -> dict[str, str]:
    prefix = f"R2_{role.upper()}"
    purposes = {
        f"{prefix}_ACCOUNT_ID": f"the Cloudflare account that the {role} bucket is in",
        f"{prefix}_BUCKET_NAME": f"the name of the {role} bucket",
    }
    for right in rights:
        what = "list and read" if right is Right.READ else "read, write and delete in"
        purposes |= {
            f"{prefix}_{right.upper()}_ACCESS_KEY_ID": f"the id of a key that may {what} it",
            f"{prefix}_{right.upper()}_SECRET_ACCESS_KEY": "the secret of that key",
        }
    return purposes


def _dataset(
    environ: Mapping[str, str],
    rights: list[Right],
    endpoint: str | None,
    missing: dict[str, str],
) -> list[BucketSettings]:
    """Return the dataset bucket and its mirrors.

    Where only the list is there, its first entry is the bucket itself, as Templar has it.
    """
    entries = list(enumerate(_entries(environ.get(LIST, "").strip()), start=1))
    own = any(environ.get(name, "").strip() for name in _purposes(BucketRole.DATASET, list(Right)))
    bucket: BucketSettings | None = None
    if entries and not own and isinstance(entries[0][1], dict):
        number, entry = entries.pop(0)
        bucket = _listed(entry, number, BucketRole.DATASET.value, endpoint)
    names: list[str] = []
    mirrors: list[BucketSettings] = []
    for number, entry in entries:
        if isinstance(entry, str):
            names.append(entry)
        else:
            mirrors.append(
                _listed(entry, number, f"{BucketRole.DATASET}-mirror-{number}", endpoint)
            )
            names.append(mirrors[-1].name)
    if bucket:
        return [*mirrors, replace(bucket, mirrors=tuple(names))]
    return mirrors + _bucket(environ, BucketRole.DATASET, rights, endpoint, missing, tuple(names))


def _entries(value: str) -> list[Any]:
    if not value:
        return []
    if not value.startswith("["):
        if "://" in value:
            return [url.strip() for url in value.split(",") if url.strip()]
        try:
            value = Path(value).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"{LIST} is neither a JSON list, nor URLs with commas between them, nor a file "
                f"that can be read ({error.strerror})."
            ) from None
    try:
        entries = json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{LIST} is not valid JSON: {error.msg}.") from None
    if not isinstance(entries, list):
        raise ConfigurationError(f"{LIST} should be a JSON list.")
    return entries


def _listed(entry: Any, number: int, name: str, endpoint: str | None) -> BucketSettings:
    try:
        given = entry["credentials"]
        pairs = {
            right: _pair(
                given[right.value]["access_key_id"],
                given[right.value]["secret_access_key"],
                entry.get("endpoint", endpoint),
            )
            for right in Right
            if right is Right.READ or right.value in given
        }
        account = _account(entry["account_id"], f"account_id of entry {number} of {LIST}")
        bucket = str(entry["name"] if "name" in entry else entry["bucket_name"])
    except (KeyError, TypeError, AttributeError) as error:
        what = f" has no {error}" if isinstance(error, KeyError) else " is of another form"
        raise ConfigurationError(
            f"Entry {number} of {LIST}{what}. Write a URL, or "
            '{"account_id": ..., "name": ..., "credentials": {"read": {"access_key_id": ..., '
            '"secret_access_key": ...}}}.'
        ) from None
    return BucketSettings(name, BucketRole.DATASET, account, bucket, pairs)


def _account(value: str, where: str) -> str:
    if not _ACCOUNT.fullmatch(value):
        raise ConfigurationError(
            f"{where} is no R2 account: it has 32 hexadecimal digits, and .eu after them if its "
            "bucket is bound to the European Union."
        )
    return value


def _pair(key_id: str, secret: str, endpoint: str | None) -> AwsCredentials:
    return AwsCredentials(
        aws_access_key_id=key_id,
        aws_secret_access_key=SecretStr(secret),
        region_name="auto",
        aws_client_parameters=AwsClientParameters(
            endpoint_url=endpoint,
            # For boto3 in other people's hands: R2 refuses checksums that come as a trailer.
            config={
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        ),
    )
