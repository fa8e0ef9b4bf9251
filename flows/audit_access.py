"""Prove what the credentials of buckets can do, by hand or every week."""

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from blocks import Bucket
from millrace.errors import ConfigurationError, DeniedError
from millrace.housekeeping import Audit, AuditSettings, Role
from millrace.storage import Right, StoreSpec
from tasks.auditing import audit_buckets, report_audit


class Audited(BaseModel):
    """A bucket whose credentials are audited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: Bucket = Field(description="A Millrace Bucket block.")
    scope: str = Field(
        default="",
        description="The prefix in it that its credentials are for. Left out: all of it.",
    )

    def role(self) -> Role:
        """The same, as the engine is told."""
        specs = {right: spec for right in Right if (spec := self._spec(right)) is not None}
        if not specs:
            raise ConfigurationError(f"{self.bucket.url} has no credentials to audit: add some.")
        keys = {f"{right}": spec.credentials for right, spec in specs.items()}
        store = next(iter(specs.values())).model_copy(update={"credentials": None})
        return Role(store=store, scope=self.scope, **keys)

    def _spec(self, right: Right) -> StoreSpec | None:
        try:
            return self.bucket.spec(right)
        except ConfigurationError:
            return None


@flow(name="audit-access")
def audit_access(buckets: list[Audited]) -> Audit:
    """Prove that each credential can do what its role needs, and nothing else.

    Lists, reads, writes, overwrites, deletes: each is done once, on objects of its own that are
    removed again. Fails if anything is not as it should be, or is not known.

    Args:
        buckets: Whose credentials, of all roles together: it is tried whether those of one reach
            the bucket of another.
    """
    roles: dict[str, Role] = {}
    for one in buckets:
        alike = sum(name.partition(" ")[0] == one.bucket.role for name in roles)
        roles[f"{one.bucket.role} {alike + 1}" if alike else f"{one.bucket.role}"] = one.role()
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
