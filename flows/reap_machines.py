"""Release machines without an owner, on demand or every quarter of an hour."""

from prefect import State, flow

from blocks import VastCredentials
from millrace.rentals import ReapResult
from tasks.formatting import format_count
from tasks.forms import draw_form
from tasks.locations import BucketLocation
from tasks.renting import find_ledger, report_rentals, run_reaper
from tasks.run_names import make_name
from tasks.schedules import check_schedule


@draw_form
@flow(name="reap-machines", flow_run_name=make_name("reap-machines"))
def reap_machines(
    bucket: BucketLocation,
    vast: VastCredentials | str = "vast",
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> ReapResult | None:
    """Release machines that have no living owner, or have passed their deadline.

    Detached machines are also released when they cost more than their owner has allowed.

    Only machines with this installation's label are touched. The flow fails if the list of machines
    cannot be read: an unreadable list is not an empty one.

    Args:
        bucket: The Millrace Bucket block of the ledger of rentals, or its name.
        vast: The Vast.ai Credentials block that pays, or its name.
        dry_run: Only show the machines that would be released.
    """
    check_schedule()
    ledger = find_ledger(bucket, vast)
    if isinstance(ledger, State):
        return ledger  # pyright: ignore[reportReturnType] - Prefect's way
    found = run_reaper(ledger, dry_run=dry_run)
    word = "would be released" if dry_run else "released"
    headline = f"{format_count(len(found.released), 'machine')} {word}, {len(found.kept)} stay."
    if found.foreign_attempts:
        headline += (
            f" Another account pays for {found.foreign_attempts} more: run this with its API key."
        )
    report_rentals(headline, (*found.released, *found.kept), key="reaper")
    return found
