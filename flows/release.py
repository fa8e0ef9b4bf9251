"""Give back all machines of a rental."""

from prefect import flow

from blocks import Bucket, VastCredentials
from millrace.errors import ConfigurationError
from tasks.renting import release_machines, report_rentals, stand_of
from tasks.words import count


@flow(name="release", flow_run_name="release-{name}")
def release(name: str, bucket: Bucket | str, vast: VastCredentials | str = "vast") -> int:
    """Give back all machines of a rental, and see that they are gone.

    Args:
        name: The rental's.
        bucket: The Millrace Bucket block, or its name, where the rental is written down.
        vast: The Vast.ai Credentials block that has paid, or its name.
    """
    stand = stand_of(bucket, vast)
    if stand is None:
        raise ConfigurationError("A block is missing: the log says which.")
    returned = release_machines(stand, name)
    said = f"{count(returned, 'machine')} given back; a listing shows none."
    report_rentals(f"**{name}**: {said}", [])
    return returned
