"""Give back all machines of a rental."""

from prefect import flow

from blocks import VastCredentials
from tasks.places import BucketLocation
from tasks.renting import needed_stand, release_machines, report_rentals
from tasks.reports import bold, write
from tasks.words import format_count


@flow(name="release", flow_run_name="release-{name}")
def release(name: str, bucket: BucketLocation, vast: VastCredentials | str = "vast") -> int:
    """Give back all machines of a rental, and see that they are gone.

    Args:
        name: The rental's.
        bucket: The Millrace Bucket block, or its name, where the rental is written down.
        vast: The Vast.ai Credentials block that has paid, or its name.
    """
    stand = needed_stand(bucket, vast)
    returned = release_machines(stand, name)
    gone = format_count(returned, "machine")
    report_rentals(write("{}: {} given back; a listing shows none.", bold(name), gone), [])
    return returned
