"""Prove the rights of the credentials of buckets, on demand or every week."""

from collections.abc import Iterable
from typing import Annotated, NamedTuple

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks import Bucket
from millrace.audit import AuditedRole, AuditReport, AuditSettings
from millrace.errors import ConfigurationError, DeniedError
from millrace.storage import Right
from tasks.auditing import audit_buckets, report_audit
from tasks.forms import draw_form
from tasks.locations import BucketLocation, find_location, skip_run
from tasks.run_names import make_name


class AuditedBucket(BaseModel):
    """A bucket whose credentials are audited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: BucketLocation = Field(description="A Millrace Bucket block, or its name.")
    prefix: str = Field(
        default="",
        description="Prefix that the credentials are for. By default the whole bucket.",
    )

    def make_role(self, bucket: Bucket) -> AuditedRole:
        """Return the role of the block for the engine, with the credentials of the block.

        Raises:
            ConfigurationError: Credentials of the block cannot be used.
        """
        pairs = {Right.READ: bucket.read_credentials, Right.WRITE: bucket.write_credentials}
        held = [right for right, pair in pairs.items() if pair is not None]
        specs = {right: bucket.make_spec(right) for right in held or Right}
        keys = {f"{right}_credentials": spec.credentials for right, spec in specs.items()}
        store = next(iter(specs.values())).model_copy(update={"credentials": None})
        return AuditedRole(store=store, prefix=self.prefix, **keys)


class FoundRoles(NamedTuple):
    """Roles of the buckets of an audit.

    Attributes:
        roles: Roles by their names.
        missing: Names of blocks that do not exist yet.
        notes: Sentences about buckets that are not audited.
    """

    roles: dict[str, AuditedRole]
    missing: list[Bucket | str]
    notes: list[str]


def find_roles(buckets: Iterable[AuditedBucket]) -> FoundRoles:
    """Look up the blocks of buckets, and return their roles.

    Raises:
        ConfigurationError: A bucket has no block, or its credentials cannot be used.
    """
    found = FoundRoles({}, [], [])
    for one in buckets:
        bucket = find_location(one.bucket)
        if bucket is None:
            found.missing.append(one.bucket)
            continue
        if not isinstance(bucket, Bucket):
            raise ConfigurationError(
                f"{bucket} has no credentials to audit: name a Millrace Bucket block."
            )
        if bucket.read_google_credentials or bucket.write_google_credentials:
            found.notes.append(
                f"The credentials of Google for {bucket.url} are not audited: only key pairs of S3 "
                "are."
            )
            continue
        same_role = sum(name.partition(" ")[0] == bucket.role for name in found.roles)
        name = f"{bucket.role} {same_role + 1}" if same_role else f"{bucket.role}"
        found.roles[name] = one.make_role(bucket)
    return found


@draw_form
@flow(name="audit-access", flow_run_name=make_name("audit", "buckets"))
def audit_access(
    buckets: Annotated[list[AuditedBucket], Field(min_length=1)],
) -> AuditReport | None:
    """Prove that each credential has the rights that its role needs, and no other rights.

    Each operation (list, read, write, overwrite, delete) is tried once, on objects that the audit
    creates and deletes. The flow fails if a right is wrong or unproven.

    Args:
        buckets: Buckets of all roles. The audit also tries the credentials of each role on the
            buckets of other roles. A block that does not exist yet is skipped, and so is one with
            credentials of Google: the report says so.
    """
    roles, missing, notes = find_roles(buckets)
    if notes and not roles:
        raise ConfigurationError(f"{' '.join(notes)} Name a Millrace Bucket block with a key pair.")
    if missing:
        skipped_state = skip_run(missing, "no credentials were tried there")
        if not roles:
            return skipped_state  # pyright: ignore[reportReturnType] - Prefect's way
        notes.append(skipped_state.message or "")
    found = audit_buckets(AuditSettings(roles=roles))
    found = found.model_copy(update={"notes": (*found.notes, *notes)})
    report_audit(found)
    if found.failures:
        first = "; ".join(
            f"{one.role}, to {one.right}: {one.operation} is {one.verdict}"
            for one in found.failures[:3]
        )
        raise DeniedError(
            f"{len(found.failures)} of {len(found.findings)} operations are not as they should be "
            f"({first}). Correct the credentials that the report names."
        )
    return found
