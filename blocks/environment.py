"""Settings of buckets from the environment: ``R2_{ROLE}_*``, ``R2_DATASET_BUCKET_LIST``."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from prefect_aws import AwsCredentials
from prefect_aws.client_parameters import AwsClientParameters
from pydantic import SecretStr

from blocks.bucket import Bucket, BucketRole
from millrace.errors import ConfigurationError
from millrace.storage import Backend, Location, Right, StoreSpec

BUCKET_LIST_VARIABLE = "R2_DATASET_BUCKET_LIST"
_ACCOUNT_ID = re.compile(r"[0-9a-f]{32}(\.(eu|fedramp))?")
_STORE_URL = re.compile(r"""[A-Za-z0-9+.-]+://[^\s"'{}\[\]]+""")
_BLOCK_NAME = re.compile(r"[a-z0-9-]+")
_WEB_URL = re.compile(r"https?://[^/\s]\S*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """Settings of one bucket for its block.

    Attributes:
        name: Name of the block.
        role: Role of the bucket.
        account_id: R2 account of the bucket.
        bucket: Name of the bucket.
        key_pairs: A key pair for each right.
        mirrors: Mirrors, as in the block; None if the environment does not name any.
    """

    name: str
    role: BucketRole
    account_id: str
    bucket: str
    key_pairs: Mapping[Right, AwsCredentials] = field(repr=False)
    mirrors: tuple[str, ...] | None = None

    @property
    def location(self) -> tuple[str, str]:
        """Account and name of the bucket."""
        return self.account_id, self.bucket

    @property
    def is_mirror(self) -> bool:
        """True if the bucket is a mirror of the bucket of its role."""
        return self.name != self.role

    def make_block(
        self, credentials: Mapping[Right, AwsCredentials], existing: Bucket | None = None
    ) -> Bucket:
        """Return the block, with these credentials, which may be saved blocks.

        Args:
            credentials: Credentials for each right.
            existing: Block of this name on the server. If its bucket is the same, the new block
                keeps its prefix, its credentials for the other rights, and its mirrors unless
                the environment names some.
        """
        url = f"r2://{self.account_id}/{self.bucket}"
        pairs, mirrors = dict(credentials), self.mirrors
        if existing is not None and self._is_bucket_of(existing):
            url = existing.url
            mirrors = existing.mirrors if mirrors is None else mirrors
            for right, pair in (
                (Right.READ, existing.read_credentials),
                (Right.WRITE, existing.write_credentials),
            ):
                if pair is not None:
                    pairs.setdefault(right, pair)
        return Bucket(
            role=self.role,
            url=url,
            account_id=self.account_id,
            read_credentials=pairs.get(Right.READ),
            write_credentials=pairs.get(Right.WRITE),
            mirrors=list(mirrors or ()),
        )

    def _is_bucket_of(self, block: Bucket) -> bool:
        try:
            location = Location.parse(block.url, account_id=block.account_id)
        except ConfigurationError:
            return False
        own = (Backend.R2, self.account_id, self.bucket)
        return (location.backend, location.account, location.bucket) == own


def read_buckets(
    environ: Mapping[str, str], roles: Iterable[BucketRole], rights: Iterable[Right]
) -> list[BucketSettings]:
    """Return the buckets that the environment describes, mirrors first.

    Args:
        environ: The environment.
        roles: Roles of the buckets.
        rights: Rights whose credentials each bucket must have.

    Raises:
        ConfigurationError: Variables are missing, or one is invalid. The message names all missing
            variables and their purposes, and shows no value.
    """
    missing: dict[str, str] = {}
    found: list[BucketSettings] = []
    endpoint = check_web_url(environ.get("R2_ENDPOINT", ""), "R2_ENDPOINT") or None
    wanted = list(rights)
    for role in roles:
        if role is BucketRole.DATASET:
            found += _read_dataset_buckets(environ, wanted, endpoint, missing)
        else:
            found += _read_bucket(environ, role, wanted, endpoint, missing)
    if missing:
        lines = "\n".join(f"  {name}: {purpose}" for name, purpose in missing.items())
        raise ConfigurationError(
            f"These variables are not set:\n{lines}\nExport them, or choose with --role and "
            "--right what to set up without them."
        )
    return found


def read_dataset_specs(environ: Mapping[str, str], prefix: str = "") -> list[StoreSpec]:
    """Return the dataset bucket and its mirrors from the environment, without a Prefect server.

    A training script passes them to a loader:
    `PageLoader(read_dataset_specs(os.environ, "my-dataset/shards/pages/train"))`.

    Args:
        environ: The environment, with `R2_DATASET_*` or `R2_DATASET_BUCKET_LIST`.
        prefix: Folder of the files, which is the same in each bucket.

    Raises:
        ConfigurationError: Variables are missing, or one is invalid.
    """
    *mirrors, bucket = read_buckets(environ, [BucketRole.DATASET], [Right.READ])
    block = bucket.make_block(bucket.key_pairs)
    named = {mirror.name: mirror.make_block(mirror.key_pairs) for mirror in mirrors}
    specs = [
        named[mirror].make_spec(Right.READ)
        if mirror in named
        else block.make_url_spec(mirror, Right.READ)
        for mirror in bucket.mirrors or ()
    ]
    return [spec.with_prefix(prefix) for spec in (block.make_spec(Right.READ), *specs)]


def _read_bucket(
    environ: Mapping[str, str],
    role: BucketRole,
    rights: list[Right],
    endpoint: str | None,
    missing: dict[str, str],
    mirrors: tuple[str, ...] | None = None,
) -> list[BucketSettings]:
    given = {name: environ.get(name, "").strip() for name in _describe_variables(role, rights)}
    absent = {
        name: _describe_variables(role, rights)[name] for name, value in given.items() if not value
    }
    if absent:
        missing.update(absent)
        return []
    prefix = f"R2_{role.upper()}"
    pairs = {
        right: _make_key_pair(
            given[f"{prefix}_{right.upper()}_ACCESS_KEY_ID"],
            given[f"{prefix}_{right.upper()}_SECRET_ACCESS_KEY"],
            endpoint,
        )
        for right in rights
    }
    account = _check_account_id(given[f"{prefix}_ACCOUNT_ID"], f"{prefix}_ACCOUNT_ID")
    name = given[f"{prefix}_BUCKET_NAME"]
    return [BucketSettings(role.value, role, account, name, pairs, mirrors)]


def _describe_variables(role: BucketRole, rights: list[Right]) -> dict[str, str]:
    prefix = f"R2_{role.upper()}"
    purposes = {
        f"{prefix}_ACCOUNT_ID": f"the Cloudflare account that the {role} bucket is in",
        f"{prefix}_BUCKET_NAME": f"the name of the {role} bucket",
    }
    for right in rights:
        access = "list and read" if right is Right.READ else "read, write and delete in"
        purposes |= {
            f"{prefix}_{right.upper()}_ACCESS_KEY_ID": f"the id of a key that may {access} it",
            f"{prefix}_{right.upper()}_SECRET_ACCESS_KEY": "the secret of that key",
        }
    return purposes


def _read_dataset_buckets(
    environ: Mapping[str, str],
    rights: list[Right],
    endpoint: str | None,
    missing: dict[str, str],
) -> list[BucketSettings]:
    """Return the dataset bucket and its mirrors.

    If only the list is set, its first entry is the bucket itself, as in Templar. Templar's list has
    all buckets, so an entry may be the bucket of the other variables. That entry is no mirror.
    """
    listed = environ.get(BUCKET_LIST_VARIABLE, "").strip()
    entries = list(enumerate(_read_entries(listed), start=1))
    own = any(
        environ.get(name, "").strip()
        for name in _describe_variables(BucketRole.DATASET, list(Right))
    )
    bucket: BucketSettings | None = None
    if entries and not own and isinstance(entries[0][1], dict):
        number, entry = entries.pop(0)
        bucket = _parse_entry(entry, number, BucketRole.DATASET.value, endpoint)
    known = {bucket.location if bucket else _read_own_location(environ)}
    names: list[str] = []
    mirrors: list[BucketSettings] = []
    for number, entry in entries:
        if isinstance(entry, str):
            if entry not in names and entry.rstrip("/") not in {f"r2://{a}/{b}" for a, b in known}:
                names.append(entry)
            continue
        mirror = _parse_entry(entry, number, f"{BucketRole.DATASET}-mirror-{number}", endpoint)
        if mirror.location not in known:
            known.add(mirror.location)
            mirrors.append(mirror)
            names.append(mirror.name)
    if bucket:
        return [*mirrors, replace(bucket, mirrors=tuple(names))]
    return mirrors + _read_bucket(
        environ, BucketRole.DATASET, rights, endpoint, missing, tuple(names) if listed else None
    )


def _read_own_location(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the account and the name of the dataset bucket, as its own variables have them."""
    prefix = f"R2_{BucketRole.DATASET.upper()}"
    return (
        environ.get(f"{prefix}_ACCOUNT_ID", "").strip(),
        environ.get(f"{prefix}_BUCKET_NAME", "").strip(),
    )


def _read_entries(value: str) -> list[Any]:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1].strip()  # `docker --env-file` keeps the quotes of a line
    if not value:
        return []
    if not value.startswith("["):
        if "://" in value:
            urls = [url.strip() for url in value.split(",") if url.strip()]
            if all(map(_STORE_URL.fullmatch, urls)):
                return urls
            raise ConfigurationError(
                f"{BUCKET_LIST_VARIABLE} is neither a JSON list, nor URLs with commas between them."
            )
        try:
            value = Path(value).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"{BUCKET_LIST_VARIABLE} is neither a JSON list, nor URLs with commas between "
                f"them, nor a file that can be read ({error.strerror})."
            ) from None
        except UnicodeError:
            raise ConfigurationError(
                f"{BUCKET_LIST_VARIABLE} names a file whose text is not UTF-8: save it with this "
                "encoding."
            ) from None
    try:
        entries = json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"{BUCKET_LIST_VARIABLE} is not valid JSON: {error.msg}."
        ) from None
    if not isinstance(entries, list):
        raise ConfigurationError(f"{BUCKET_LIST_VARIABLE} should be a JSON list.")
    for number, entry in enumerate(entries, start=1):
        if isinstance(entry, str) and not (
            _STORE_URL.fullmatch(entry) or _BLOCK_NAME.fullmatch(entry)
        ):
            raise ConfigurationError(
                f"Entry {number} of {BUCKET_LIST_VARIABLE} is neither a URL nor the name of a "
                "block. Correct it."
            )
    return entries


def _parse_entry(entry: Any, number: int, name: str, endpoint: str | None) -> BucketSettings:
    try:
        given = entry["credentials"]
        pairs = {
            right: _make_key_pair(
                given[right.value]["access_key_id"],
                given[right.value]["secret_access_key"],
                entry.get("endpoint", endpoint),
            )
            for right in Right
            if right is Right.READ or _has_pair(given.get(right.value))
        }
        account = _check_account_id(
            entry["account_id"], f"account_id of entry {number} of {BUCKET_LIST_VARIABLE}"
        )
        bucket = str(entry["name"] if "name" in entry else entry["bucket_name"])
    except (KeyError, TypeError, AttributeError) as error:
        fault = f" has no {error}" if isinstance(error, KeyError) else " is of another form"
        raise ConfigurationError(
            f"Entry {number} of {BUCKET_LIST_VARIABLE}{fault}. Write a URL, or "
            '{"account_id": ..., "name": ..., "credentials": {"read": {"access_key_id": ..., '
            '"secret_access_key": ...}}}.'
        ) from None
    return BucketSettings(name, BucketRole.DATASET, account, bucket, pairs)


def _has_pair(pair: Any) -> bool:
    """Decide whether an entry has a key pair. Templar's entries may have one without values."""
    return isinstance(pair, dict) and any(cast("dict[str, Any]", pair).values())


def check_web_url(value: str, source: str) -> str:
    """Return the URL of a web server, without white space around it; empty if there is none.

    Args:
        value: Value of a variable.
        source: Name of the variable, for the error.

    Raises:
        ConfigurationError: The value is no such URL. The message does not show it: a webhook's is
            a secret.
    """
    url = value.strip()
    if url and not _WEB_URL.fullmatch(url):
        raise ConfigurationError(f"{source} is no URL: it begins with https:// or http://.")
    return url


def _check_account_id(value: str, source: str) -> str:
    if not _ACCOUNT_ID.fullmatch(value):
        raise ConfigurationError(
            f"{source} is no R2 account: it has 32 hexadecimal digits, and .eu after them if its "
            "bucket is bound to the European Union."
        )
    return value


def _make_key_pair(key_id: str, secret: str, endpoint: str | None) -> AwsCredentials:
    return AwsCredentials(
        aws_access_key_id=key_id,
        aws_secret_access_key=SecretStr(secret),
        region_name="auto",
        aws_client_parameters=AwsClientParameters(
            endpoint_url=endpoint,
            # For other users of boto3: R2 refuses checksums that come as a trailer.
            config={
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        ),
    )
