"""Machines of a campaign's workers: rented, warmed and released."""

from collections.abc import Generator
from contextlib import contextmanager

from flows.prewarm import FilesRequest, RentedMachines, prewarm
from flows.release_machines import release_machines
from flows.rent_machines import await_machines
from millrace.campaigns import CampaignWorkers, Training, renew_prewarm_marker
from tasks import campaign_tasks
from tasks.renting import RentalReference, require_ledger
from tasks.retries import tolerate


@contextmanager
def rent_workers(training: Training, rental: RentalReference) -> Generator[CampaignWorkers]:
    """Rent machines that train, and release them when the block ends.

    After an error, machines of a provider that does not answer are left to the rental's monitor.
    """
    name, bucket, vast = rental
    has_marker = campaign_tasks.commit_prewarm_marker(training)
    with campaign_tasks.supervise_machines(training, require_ledger(bucket, vast)) as supervisor:
        with renew_prewarm_marker(training):
            await_machines(supervisor)
            if has_marker:  # the machines wait for their files
                with tolerate(Exception, "Workers read the store themselves"):
                    data = training.dataset
                    files = [FilesRequest(bucket=bucket, dataset=data)] if data else []
                    files.append(FilesRequest(bucket=bucket, checkpoint=training.weights_job))
                    prewarm(files, cluster=RentedMachines(rental=name, bucket=bucket, vast=vast))
        if has_marker:
            campaign_tasks.delete_prewarm_marker(training)
        yield supervisor
    # The exit of the supervisor has released all, unless Vast.ai did not answer.
    consequence = (
        f"If a machine stays, run `millrace machine release {name}` with a settings file, whose "
        "`store` is the bucket of the campaign, and whose `account` is the one that pays"
    )
    with tolerate(Exception, consequence):
        release_machines(*rental)
