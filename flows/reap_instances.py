"""Give back what nobody has any more, by hand or every quarter of an hour."""

from prefect import State, flow

from blocks import VastCredentials
from millrace.rentals import Reaped
from tasks.places import BucketLocation
from tasks.renting import reap_machines, report_rentals, stand_of
from tasks.words import format_count


@flow(name="reap-instances")
def reap_instances(
    bucket: BucketLocation,
    vast: VastCredentials | str = "vast",
    dry_run: bool = True,  # noqa: FBT001, FBT002 - Prefect passes it by name
) -> Reaped | None:
    """Give back machines that have no living owner, or are over their time.

    Only what bears this installation's label is touched. Fails if it cannot be read what is
    rented: that is not the same as nothing.

    Args:
        bucket: The Millrace Bucket block, or its name, where rentals are written down.
        vast: The Vast.ai Credentials block that pays, or its name.
        dry_run: Only show what would be given back.
    """
    stand = stand_of(bucket, vast)
    if isinstance(stand, State):
        return stand  # pyright: ignore[reportReturnType] - Prefect's way
    found = reap_machines(stand, dry_run=dry_run)
    word = "would be given back" if dry_run else "given back"
    headline = f"{format_count(len(found.returned), 'machine')} {word}, {len(found.kept)} stay."
    if found.elsewhere:
        headline += f" Another account pays for {found.elsewhere} more: look with its API key."
    report_rentals(headline, (*found.returned, *found.kept), key="reaper")
    return found
