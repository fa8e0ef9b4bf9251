"""Show rented machines, their times and their costs."""

from prefect import flow

from blocks import VastCredentials
from millrace.rentals import MachineStatus
from tasks.formatting import format_count
from tasks.forms import draw_form
from tasks.locations import BucketLocation
from tasks.renting import fetch_machines, report_rentals, require_ledger
from tasks.run_names import make_name


@draw_form
@flow(name="list-machines", flow_run_name=make_name("list-machines"))
def list_machines(
    bucket: BucketLocation, vast: VastCredentials | str = "vast"
) -> list[MachineStatus]:
    """Show the machines that this installation has rented.

    Args:
        bucket: The Millrace Bucket block of the ledger of rentals, or its name.
        vast: The Vast.ai Credentials block that pays, or its name.
    """
    ledger = require_ledger(bucket, vast)
    found = fetch_machines(ledger)
    dollars, hourly = (
        sum(one.cost for one in found),
        sum(one.instance.dollars_per_hour for one in found),
    )
    machines = format_count(len(found), "machine")
    report_rentals(f"{machines} rented, ${hourly:.2f} an hour, ${dollars:.2f} so far.", found)
    return found
