"""Choose the boundaries at which a driver, a worker, or a driver with its workers is killed.

A boundary is a kind of event. The process waits at the event until it is killed. Two further
boundaries are not kinds of events: ``any event`` is an event of any kind, and ``between`` is a few
milliseconds after such an event.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

ANY, BETWEEN = "any event", "between"
DRIVERS_FIRST = ("plan.committed",)
PARTITIONS = (
    "partition.opened",
    "shard.halfway",
    "shard.encoded",
    "shard.uploaded",
    "shard.committed",
    "partition.ending",
    "partition.ended",
)
DRIVERS_LAST = ("manifest.computed", "index.uploaded")
COMPLETE = (
    "manifest.committed"  # the dataset is complete, so that kills at this event are not counted
)
BOUNDARIES = (*DRIVERS_FIRST, *PARTITIONS, *DRIVERS_LAST, ANY, BETWEEN)


class Victim(StrEnum):
    """Processes that are killed."""

    DRIVER = "driver"
    WORKER = "worker"
    GROUP = "group"
    ALONE = "alone"
    """Driver without workers, which makes the shards itself."""


@dataclass(frozen=True, slots=True)
class Target:
    """Planned kill.

    Attributes:
        boundary: Kind of an event, `ANY` or `BETWEEN`.
        victim: Processes that are killed.
        nth: Number of the event among those that match, from 1.
        delay: Seconds between the event and the kill, for `BETWEEN`.
    """

    boundary: str
    victim: Victim
    nth: int = 1
    delay: float = 0.0


def list_combinations() -> list[tuple[str, Victim]]:
    """Return all pairs of a boundary and the processes that can be killed there."""
    return [
        (boundary, victim)
        for boundary in (*BOUNDARIES, COMPLETE)
        for victim in Victim
        if victim is not Victim.WORKER or boundary in {*PARTITIONS, ANY, BETWEEN}
    ]


def draw_targets(generator: Random, kills: int) -> list[Target]:
    """Return targets for at least so many counted kills, with every combination."""
    pairs = list_combinations()
    counted = [pair for pair in pairs if pair[0] != COMPLETE]
    chosen = list(pairs)
    while len(chosen) < kills + len(pairs) - len(counted):
        chosen += generator.sample(counted, len(counted))
    chosen = chosen[: max(len(pairs), kills + len(pairs) - len(counted))]
    generator.shuffle(chosen)
    return [make_target(generator, boundary, victim) for boundary, victim in chosen]


def make_target(generator: Random, boundary: str, victim: Victim) -> Target:
    """Return a target at a boundary, with a random number of the event and a random delay."""
    match boundary:
        case "partition.opened":
            return Target(boundary, victim, generator.randint(1, 2))
        case "shard.halfway" | "shard.encoded" | "shard.uploaded" | "shard.committed":
            return Target(boundary, victim, generator.randint(1, 5))
        case _ if boundary == ANY:
            return Target(boundary, victim, generator.randint(1, 12))
        case _ if boundary == BETWEEN:
            return Target(
                boundary, victim, generator.randint(1, 9), generator.choice([0, 1, 2, 4, 8]) / 1000
            )
        case _:
            return Target(boundary, victim)


def order_targets(generator: Random, targets: Iterable[Target]) -> deque[Target]:
    """Return the targets of a case in a random order in which all of them can be reached.

    Kills while the dataset is finalized come last. A kill at the start of a driver comes first, or
    after the kill of another driver.
    """
    stages: dict[int, list[Target]] = {0: [], 1: [], 2: [], 3: []}
    for target in targets:
        stage = 1
        if target.boundary in DRIVERS_FIRST:
            stage = 0
        elif target.boundary in DRIVERS_LAST:
            stage = 2
        elif target.boundary == COMPLETE:
            stage = 3
        stages[stage].append(target)
    order = generator.sample(stages[1], len(stages[1]))
    for target in stages[0]:
        deaths = [i + 1 for i, other in enumerate(order) if other.victim is not Victim.WORKER]
        order.insert(generator.choice([0, *deaths]), target)
    return deque([*order, *stages[2], *stages[3]])
