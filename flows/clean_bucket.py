"""Delete what is not needed from a bucket, on demand or every night."""

from typing import Annotated, Any, cast

from prefect import flow
from pydantic import BeforeValidator

from blocks import CleaningRules
from millrace.cleanup import CleanupBucketPreset, CleanupPlan, CleanupResult, Rule, VerifyDepth
from millrace.errors import ConfigurationError
from millrace.settings import validate_settings
from tasks.cleaning import clean_with_rules
from tasks.forms import draw_form
from tasks.locations import BucketLocation
from tasks.run_names import make_name
from tasks.schedules import check_schedule


def _check_rules(given: Any) -> Any:
    """Check a list of rules by itself, so that its errors do not name the block's class, too."""
    if not isinstance(given, list):
        return given
    try:
        return [
            one
            if isinstance(one, Rule)
            else validate_settings(Rule, one, source=f"rule {number + 1}")
            for number, one in enumerate(cast("list[Any]", given))
        ]
    except ConfigurationError as error:
        raise ValueError(str(error)) from None


Rules = Annotated[list[Rule] | CleaningRules, BeforeValidator(_check_rules)]
"""Rules, or a block of them."""


@draw_form
@flow(name="clean-bucket", flow_run_name=make_name("clean"))
def clean_bucket(
    bucket: BucketLocation,
    rules: Rules = list(CleanupBucketPreset().make_rules()),  # noqa: B006, B008 - it is drawn
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
    related_buckets: list[BucketLocation] = [],  # noqa: B006 - Prefect draws it
    pins: list[str] = [],  # noqa: B006
    plan: str = "",
    verify_depth: VerifyDepth = VerifyDepth.DIGESTS,
) -> CleanupResult | CleanupPlan | None:
    """Delete the objects that rules select, except what a live run or the newest weights need.

    A dry run writes the plan into the bucket and shows the plan. A later run can execute it.

    Args:
        bucket: A Millrace Bucket block with write credentials, its name, or a URL.
        rules: Rules for what is deleted, or a Millrace Cleaning Rules block. An object is deleted
            by the first rule whose conditions it all meets, unless a rule before keeps it.
        dry_run: Only show what would be deleted.
        related_buckets: Other buckets of the same runs, such as the aggregator's. Leases there
            protect objects here.
        pins: Keys and folders that are never deleted, with all that is below them.
        plan: Name of an earlier plan to execute. The rules are then those of the plan.
        verify_depth: Check of the newest checkpoint. If it fails, no older checkpoint is deleted.
            `digests` reads all of its bytes, `sizes` takes one request per file.
    """
    check_schedule()
    if isinstance(rules, CleaningRules):
        rules, pins = rules.rules, [*rules.pins, *pins]
    return clean_with_rules(
        bucket,
        rules,
        related_buckets=related_buckets,
        pins=pins,
        dry_run=dry_run,
        plan=plan,
        verify_depth=verify_depth,
    )
