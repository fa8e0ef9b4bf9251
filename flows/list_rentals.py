"""Show what is rented, for how long, and what it has cost."""

from prefect import flow

from blocks import VastCredentials
from millrace.rentals import Rented
from tasks.places import BucketLocation
from tasks.renting import list_machines, needed_stand, report_rentals
from tasks.words import format_count


@flow(name="list-rentals")
def list_rentals(bucket: BucketLocation, vast: VastCredentials | str = "vast") -> list[Rented]:
    """Show what this installation has rented.

    Args:
        bucket: The Millrace Bucket block, or its name, where rentals are written down.
        vast: The Vast.ai Credentials block that pays, or its name.
    """
    stand = needed_stand(bucket, vast)
    found = list_machines(stand)
    dollars, hourly = sum(one.cost for one in found), sum(one.instance.dph for one in found)
    machines = format_count(len(found), "machine")
    report_rentals(f"{machines} rented, ${hourly:.2f} an hour, ${dollars:.2f} so far.", found)
    return found
