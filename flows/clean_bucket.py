"""Delete what nobody needs from a bucket, by hand or every night."""

from typing import Annotated, Any, cast

from prefect import flow
from pydantic import BeforeValidator

from blocks import CleaningRules
from millrace.cleanup import Cleaned, CleaningPlan, CleanupBucket, Rule, VerifyDepth
from millrace.errors import ConfigurationError
from millrace.settings import validated
from tasks.cleaning import clean_by
from tasks.places import BucketLocation


def _checked(given: Any) -> Any:
    """Check a list of rules by itself, so that its errors do not name the block's class, too."""
    if not isinstance(given, list):
        return given
    try:
        return [
            one if isinstance(one, Rule) else validated(Rule, one, where=f"rule {number + 1}")
            for number, one in enumerate(cast("list[Any]", given))
        ]
    except ConfigurationError as error:
        raise ValueError(str(error)) from None


Rules = Annotated[list[Rule] | CleaningRules, BeforeValidator(_checked)]
"""Rules, or a block of them."""


@flow(name="clean-bucket")
def clean_bucket(
    bucket: BucketLocation,
    rules: Rules = list(CleanupBucket().rules()),  # noqa: B006, B008 - it is drawn
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
    beside: list[BucketLocation] = [],  # noqa: B006 - Prefect draws it
    pinned: list[str] = [],  # noqa: B006
    plan: str = "",
    check: VerifyDepth = VerifyDepth.DIGESTS,
) -> Cleaned | CleaningPlan | None:
    """Delete what the rules take, but for what a live run or the newest weights need.

    A dry run writes the plan into the bucket and shows it; that very plan can be executed.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        rules: Rules for what is deleted, or a Millrace Cleaning Rules block. An object goes by the
            first rule that all of is true of it.
        dry_run: Only show what would be deleted.
        beside: Other buckets of the same runs, such as the aggregator's: leases there protect
            what is here.
        pinned: Keys and folders that never go, nor what is below them.
        plan: Execute a plan that was made before, by its name; the rules are then the plan's.
        check: Check of the newest checkpoint, without which none before it goes: `digests`
            reads all of it, `sizes` takes a request a file.
    """
    if isinstance(rules, CleaningRules):
        rules, pinned = rules.rules, [*rules.pinned, *pinned]
    return clean_by(
        bucket, rules, beside=beside, pinned=pinned, dry_run=dry_run, plan=plan, check=check
    )
