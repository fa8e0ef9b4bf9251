"""Run the cases with a store that fails: each kind of fault is injected in 5 % of all requests."""

from collections.abc import Callable
from random import Random
from typing import Any

from millrace.testing.faults import Fault, Faults
from millrace.testing.key import Key
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.soak.concurrent_drivers import run_concurrent_case, share_work
from tests.soak.kills import KillMatrix
from tests.soak.shared_stores import BucketStore
from tests.soak.targets import COMPLETE, Target, Victim, list_combinations, make_target

PROBABILITY = 0.05
_MAX_CASES = 60  # limit for faults that are injected too rarely


def make_faults(
    seed: int,
    *,
    retry_after: float | None = None,
    stall_seconds: float = 0.5,
    probability: float = PROBABILITY,
    damage: float | None = None,
) -> Faults:
    """Return faults of all kinds with equal probabilities.

    Args:
        seed: Seed of the random choices.
        retry_after: Seconds of the header ``Retry-After`` of errors. None for no header.
        stall_seconds: Seconds after which the proxy closes a stalled connection.
        probability: Probability of each kind.
        damage: Probability of damage, which only uploads can have; by default ``probability``.
    """
    chances: dict[str, Any] = {kind.value: probability for kind in Fault}
    if damage is not None:
        chances[Fault.DAMAGE.value] = damage
    return Faults(**chances, seed=seed, retry_after=retry_after, stall_seconds=stall_seconds)


def run_faults(
    matrix: KillMatrix,
    proxy: R2Proxy,
    generator: Random,
    *,
    cases: int,
    at_least: int,
    report: Callable[[str], None] = print,
) -> dict[str, int]:
    """Run cases until each kind of fault was injected often enough. Two of three have kills.

    In the last case, two drivers run at once.

    Args:
        matrix: Kill matrix whose store is behind the proxy.
        proxy: Proxy that injects the faults.
        generator: Generator of all random choices. Which requests have a fault also depends on the
            order in which they arrive.
        cases: Smallest number of cases.
        at_least: Smallest number of injections of each kind.
        report: Function that is called with a line of progress.

    Returns:
        Number of injections of each kind, as the proxy counts them.
    """
    proxy.reset()
    number = 0
    pending: dict[bool, list[Target]] = {True: [], False: []}
    while (number < cases or min(proxy.count_fired().values()) < at_least) and number < _MAX_CASES:
        seed, delay = generator.randrange(1 << 30), generator.choice([None, None, 1.0])
        proxy.set_faults(make_faults(seed, retry_after=delay))
        case = matrix.make_case(number % 4)
        case.store_source = True
        is_alone = case.workers == 0
        if number % 3:
            pending[is_alone] = matrix.run_case_with_kills(
                case, pending[is_alone] or _draw_targets(generator, is_alone=is_alone)
            )
        else:
            matrix.run_case_with_kills(case, [])
        number += 1
        report(f"{case}: {matrix.tally.counted} kills, {proxy.count_fired()}")
    proxy.set_faults(make_faults(generator.randrange(1 << 30)))
    case = matrix.make_case(2)
    case.store_source = True
    run_concurrent_case(case, share_work, matrix.references, matrix.tally)
    report(f"{case}: two drivers at once, {proxy.count_fired()}")
    fired = proxy.count_fired()
    proxy.reset()
    return fired


def run_long_stalls(matrix: KillMatrix, proxy: R2Proxy, *, seconds: float) -> dict[str, int]:
    """Run a case with stalls that last longer than the timeout of a client.

    Returns:
        Number of injections of each kind.
    """
    proxy.reset()
    proxy.fail_next(Fault.STALL, 1, "PUT", "/shards/", stall_seconds=seconds)
    proxy.fail_next(Fault.STALL, 1, "GET", "/commits/", stall_seconds=seconds)
    matrix.run_case_with_kills(matrix.make_case(1), [])
    fired = proxy.count_fired()
    proxy.reset()
    return fired


def _draw_targets(generator: Random, *, is_alone: bool) -> list[Target]:
    pairs = [
        (boundary, victim)
        for boundary, victim in list_combinations()
        if boundary != COMPLETE and (victim is Victim.ALONE) == is_alone
    ]
    return [make_target(generator, *pair) for pair in generator.sample(pairs, 4)]


def make_rgw_store(rgw: RGW, bucket: str) -> BucketStore:
    """Return a new bucket of RGW, without a proxy."""
    return _make_store("rgw", rgw.endpoint, rgw, bucket)


def make_r2_store(rgw: RGW, proxy: R2Proxy, bucket: str) -> BucketStore:
    """Return a new bucket of RGW behind the proxy, with TLS and the rules of R2."""
    store = _make_store("r2", proxy.endpoint, rgw, bucket)
    store.region = "auto"
    store.ca_file = proxy.ca_file
    return store


def _make_store(name: str, endpoint: str, rgw: RGW, bucket: str) -> BucketStore:
    key: Key = rgw.full
    return BucketStore(
        name,
        endpoint,
        key.access_key_id,
        key.secret_access_key,
        rgw.make_client(key),
        rgw.create_bucket(bucket),
    )
