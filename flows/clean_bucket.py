"""Delete what nobody needs from a bucket, by hand or every night."""

from prefect import flow

from blocks import CleaningRules
from millrace.housekeeping import Check, Cleaned, CleaningPlan, CleanupBucket, Rule
from tasks.cleaning import clean_by
from tasks.places import BucketLocation


@flow(name="clean-bucket")
def clean_bucket(
    bucket: BucketLocation,
    rules: list[Rule] | CleaningRules = list(CleanupBucket().rules()),  # noqa: B006, B008 - it is drawn
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
    beside: list[BucketLocation] = [],  # noqa: B006 - Prefect draws it
    pinned: list[str] = [],  # noqa: B006
    plan: str = "",
    check: Check = Check.DIGESTS,
) -> Cleaned | CleaningPlan | None:
    """Delete what the rules take, but for what a live run or the newest weights need.

    A dry run writes the plan into the bucket and shows it; that very plan can be executed.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        rules: What may go, or a Millrace Cleaning Rules block. An object goes by the first rule
            that all of is true of it.
        dry_run: Only show what would be deleted.
        beside: Other buckets of the same runs, such as the aggregator's: leases there protect
            what is here.
        pinned: Keys and folders that never go, nor what is below them.
        plan: Execute a plan that was made before, by its name; the rules are then the plan's.
        check: How the newest checkpoint is verified, without which none before it goes: `digests`
            reads all of it, `sizes` takes a request a file.
    """
    if isinstance(rules, CleaningRules):
        rules, pinned = rules.rules, [*rules.pinned, *pinned]
    return clean_by(
        bucket, rules, beside=beside, pinned=pinned, dry_run=dry_run, plan=plan, check=check
    )
