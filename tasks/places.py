"""Places as a person names them, and whether we may do there what we must."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from blocks import Bucket
from millrace.storage import Right, StoreSpec, check, open_store
from tasks.retries import PAUSES, passing


def spec_of(place: Bucket | str, right: Right) -> StoreSpec:
    """The store of a block or a URL, with credentials for one right.

    Raises:
        ConfigurationError: The block has no credentials for it.
    """
    return place.spec(right) if isinstance(place, Bucket) else StoreSpec(url=place)


@task(cache_policy=NO_CACHE, retries=2, retry_delay_seconds=PAUSES, retry_condition_fn=passing)
def check_right(place: Bucket | str, right: Right, scope: str = "") -> None:
    """Refuse a run whose credentials will not do, before it has read anything.

    Args:
        place: A block, or a URL for the credentials of the environment.
        right: What the run must be able to do there.
        scope: The prefix that it works under.
    """
    if isinstance(place, Bucket):
        place.check(right, scope)
    else:
        check(open_store(place), right, scope)
