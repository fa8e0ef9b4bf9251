"""Prove what the credentials of buckets can do, by hand or every week."""

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks import Bucket
from millrace.audit import AuditedRole, AuditReport, AuditSettings
from millrace.errors import ConfigurationError, DeniedError
from millrace.storage import Right, StoreSpec
from tasks.auditing import audit_buckets, report_audit
from tasks.places import BucketLocation, known, named_bucket, skipped


class Audited(BaseModel):
    """A bucket whose credentials are audited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: BucketLocation = Field(description="A Millrace Bucket block, or its name.")
    scope: str = Field(
        default="",
        description="The prefix in it that its credentials are for. Left out: all of it.",
    )

    def role(self, bucket: Bucket) -> AuditedRole:
        """Return the credentials of the block, as the engine takes them.

        Raises:
            ConfigurationError: The block has none.
        """
        specs = {right: spec for right in Right if (spec := _spec(bucket, right)) is not None}
        if not specs:
            raise ConfigurationError(f"{bucket.url} has no credentials to audit: add some.")
        keys = {f"{right}": spec.credentials for right, spec in specs.items()}
        store = next(iter(specs.values())).model_copy(update={"credentials": None})
        return AuditedRole(store=store, scope=self.scope, **keys)


def _spec(bucket: Bucket, right: Right) -> StoreSpec | None:
    try:
        return bucket.spec(right)
    except ConfigurationError:
        return None


@flow(name="audit-access")
def audit_access(buckets: list[Audited]) -> AuditReport | None:
    """Prove that each credential can do what its role needs, and nothing else.

    Lists, reads, writes, overwrites, deletes: each is done once, on objects of its own that are
    removed again. Fails if anything is not as it should be, or is not known.

    Args:
        buckets: Buckets whose credentials are tried, of all roles together: it is tried whether
            those of one reach the bucket of another. A block that does not exist yet is left out.
    """
    roles: dict[str, AuditedRole] = {}
    missing: list[str] = []
    for one in buckets:
        bucket = known(one.bucket)
        if bucket is None:
            missing.append(named_bucket(one.bucket))
            continue
        if not isinstance(bucket, Bucket):
            raise ConfigurationError(
                f"{bucket} has no credentials to audit: name a Millrace Bucket block."
            )
        alike = sum(name.partition(" ")[0] == bucket.role for name in roles)
        roles[f"{bucket.role} {alike + 1}" if alike else f"{bucket.role}"] = one.role(bucket)
    if missing:
        nothing = skipped(missing, "no credential of it was tried")
        if not roles:
            return nothing  # pyright: ignore[reportReturnType] - Prefect's way
    found = audit_buckets(AuditSettings(roles=roles))
    report_audit(found)
    if found.wrong:
        first = "; ".join(
            f"{one.role}, to {one.right}: {one.operation} is {one.verdict}"
            for one in found.wrong[:3]
        )
        raise DeniedError(
            f"{len(found.wrong)} of {len(found.findings)} are not as they should be ({first}): the "
            "report says what to correct."
        )
    return found
