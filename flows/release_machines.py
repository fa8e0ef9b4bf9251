"""Release all machines of a rental."""

from prefect import flow

from blocks import VastCredentials
from tasks.formatting import format_count
from tasks.forms import draw_form
from tasks.locations import BucketLocation
from tasks.renting import release_rental, report_rentals, require_ledger
from tasks.reports import format_bold, format_markdown


@draw_form
@flow(name="release-machines", flow_run_name="release-{name}")
def release_machines(
    name: str, bucket: BucketLocation, vast: VastCredentials | str = "vast"
) -> int:
    """Release all machines of a rental, and check that a listing shows none.

    Args:
        name: Name of the rental.
        bucket: The Millrace Bucket block of the ledger of rentals, or its name.
        vast: The Vast.ai Credentials block that has paid, or its name.
    """
    ledger = require_ledger(bucket, vast)
    released = release_rental(ledger, name)
    gone = format_count(released, "machine")
    report_rentals(
        format_markdown("{}: {} released; a listing shows none.", format_bold(name), gone), []
    )
    return released
