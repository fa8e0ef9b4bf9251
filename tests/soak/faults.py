"""The same cases with a store that fails: each kind of fault befalls 5 % of all requests."""

from collections.abc import Callable
from random import Random

from millrace.testing.faults import Fault, Faults
from millrace.testing.key import Key
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.soak.kills import Kills
from tests.soak.place import S3Place
from tests.soak.targets import COMPLETE, Target, Victim, combinations, target_at
from tests.soak.together import meet, share

EACH = 0.05
_MOST = 60  # cases


def bad_weather(
    seed: int,
    *,
    retry_after: float | None = None,
    stall_seconds: float = 0.5,
    each: float = EACH,
    damage: float | None = None,
) -> Faults:
    """All kinds, each at 5 % of the requests. A stall ends when the proxy hangs up.

    Args:
        seed: Seed of all chance.
        retry_after: Seconds that an error asks a client to wait.
        stall_seconds: Seconds of a stall.
        each: Probability of each kind.
        damage: Probability of damage, which only uploads can meet; by default ``each``.
    """
    chances = {kind.value: each for kind in Fault}
    if damage is not None:
        chances[Fault.DAMAGE.value] = damage
    return Faults(**chances, seed=seed, retry_after=retry_after, stall_seconds=stall_seconds)


def run_faults(
    kills: Kills,
    proxy: R2Proxy,
    dice: Random,
    *,
    cases: int,
    at_least: int,
    tell: Callable[[str], None] = print,
) -> dict[str, int]:
    """Run cases until each kind of fault has fired often enough, two of three with kills.

    In a last one two drivers meet.

    Args:
        kills: Whose cases go through the proxy.
        proxy: The proxy.
        dice: All chance comes from it, save which request meets which fault first.
        cases: At least so many.
        at_least: How often each kind shall fire.

    Returns:
        How often each kind fired, by the proxy's own count.
    """
    proxy.reset()
    number = 0
    waiting: dict[bool, list[Target]] = {True: [], False: []}
    while (number < cases or min(proxy.count_fired().values()) < at_least) and number < _MOST:
        chance, asked = dice.randrange(1 << 30), dice.choice([None, None, 1.0])
        proxy.set_faults(bad_weather(chance, retry_after=asked))
        case = kills.make_case(number % 4)
        case.store_source = True
        alone = case.workers == 0
        if number % 3:
            waiting[alone] = kills.kill_in(case, waiting[alone] or _some(dice, alone=alone))
        else:
            kills.kill_in(case, [])
        number += 1
        tell(f"{case}: {kills.tally.counted} kills, {proxy.count_fired()}")
    proxy.set_faults(bad_weather(dice.randrange(1 << 30)))
    case = kills.make_case(2)
    case.store_source = True
    meet(case, share, kills.references, kills.tally)
    tell(f"{case}: two drivers at once, {proxy.count_fired()}")
    fired = proxy.count_fired()
    proxy.reset()
    return fired


def outlast(kills: Kills, proxy: R2Proxy, *, seconds: float) -> dict[str, int]:
    """One case in which stalls last longer than a client waits for a byte.

    Returns:
        How often each kind fired.
    """
    proxy.reset()
    proxy.fail_next(Fault.STALL, 1, "PUT", "/shards/", stall_seconds=seconds)
    proxy.fail_next(Fault.STALL, 1, "GET", "/commits/", stall_seconds=seconds)
    kills.kill_in(kills.make_case(1), [])
    fired = proxy.count_fired()
    proxy.reset()
    return fired


def _some(dice: Random, *, alone: bool) -> list[Target]:
    pairs = [
        (boundary, victim)
        for boundary, victim in combinations()
        if boundary != COMPLETE and (victim is Victim.ALONE) == alone
    ]
    return [target_at(dice, *pair) for pair in dice.sample(pairs, 4)]


def rgw_place(rgw: RGW, bucket: str) -> S3Place:
    """A bucket of RGW, spoken to directly."""
    return _place("rgw", rgw.endpoint, rgw, bucket)


def r2_place(rgw: RGW, proxy: R2Proxy, bucket: str) -> S3Place:
    """The same through the proxy, over TLS and with R2's rules."""
    place = _place("r2", proxy.endpoint, rgw, bucket)
    place.region = "auto"
    place.ca_file = proxy.ca_file
    return place


def _place(name: str, endpoint: str, rgw: RGW, bucket: str) -> S3Place:
    key: Key = rgw.full
    return S3Place(
        name,
        endpoint,
        key.access_key_id,
        key.secret_access_key,
        rgw.make_client(key),
        rgw.create_bucket(bucket),
    )
