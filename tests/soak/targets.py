"""Boundaries at which a driver, a worker or all of them can be killed.

A boundary is an event that the killed process waits in: it cannot be elsewhere. Besides those,
processes are killed at an event counted from the start, whichever it is (``any event``), and a few
milliseconds after one, anywhere in the work (``between``).
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
    "shard.half",
    "shard.encoded",
    "shard.put",
    "shard.committed",
    "partition.ending",
    "partition.ended",
)
DRIVERS_LAST = ("manifest.sealing", "index.put")
COMPLETE = "manifest.sealed"  # from here on the dataset is complete: such a kill is not counted
BOUNDARIES = (*DRIVERS_FIRST, *PARTITIONS, *DRIVERS_LAST, ANY, BETWEEN)


class Victim(StrEnum):
    """Process that is killed."""

    DRIVER = "driver"
    WORKER = "worker"
    GROUP = "group"
    ALONE = "alone"
    """A driver that has no workers and does their work itself."""


@dataclass(frozen=True, slots=True)
class Target:
    """One kill to come.

    Attributes:
        boundary: Kind of an event, `ANY` or `BETWEEN`.
        victim: Who.
        nth: At which of the events that fit.
        delay: For `BETWEEN`: seconds after it.
    """

    boundary: str
    victim: Victim
    nth: int = 1
    delay: float = 0.0


def combinations() -> list[tuple[str, Victim]]:
    """Every boundary with everybody who can be killed there."""
    return [
        (boundary, victim)
        for boundary in (*BOUNDARIES, COMPLETE)
        for victim in Victim
        if victim is not Victim.WORKER or boundary in {*PARTITIONS, ANY, BETWEEN}
    ]


def draw(dice: Random, kills: int) -> list[Target]:
    """Targets for at least so many counted kills, all combinations in turn."""
    pairs = combinations()
    counted = [pair for pair in pairs if pair[0] != COMPLETE]
    chosen = list(pairs)
    while len(chosen) < kills + len(pairs) - len(counted):
        chosen += dice.sample(counted, len(counted))
    chosen = chosen[: max(len(pairs), kills + len(pairs) - len(counted))]
    dice.shuffle(chosen)
    return [target_at(dice, boundary, victim) for boundary, victim in chosen]


def target_at(dice: Random, boundary: str, victim: Victim) -> Target:
    """A kill at a boundary: which of the events, and how long after it, by chance."""
    match boundary:
        case "partition.opened":
            return Target(boundary, victim, dice.randint(1, 2))
        case "shard.half" | "shard.encoded" | "shard.put" | "shard.committed":
            return Target(boundary, victim, dice.randint(1, 5))
        case _ if boundary == ANY:
            return Target(boundary, victim, dice.randint(1, 12))
        case _ if boundary == BETWEEN:
            return Target(boundary, victim, dice.randint(1, 9), dice.choice([0, 1, 2, 4, 8]) / 1000)
        case _:
            return Target(boundary, victim)


def in_order(dice: Random, targets: Iterable[Target]) -> deque[Target]:
    """Those of one case, in an order in which all can happen.

    Kills at finalizing come last; where a driver begins, one must have been killed before, or none.
    """
    at: dict[int, list[Target]] = {0: [], 1: [], 2: [], 3: []}
    for target in targets:
        stage = 1
        if target.boundary in DRIVERS_FIRST:
            stage = 0
        elif target.boundary in DRIVERS_LAST:
            stage = 2
        elif target.boundary == COMPLETE:
            stage = 3
        at[stage].append(target)
    order = dice.sample(at[1], len(at[1]))
    for target in at[0]:
        deaths = [i + 1 for i, one in enumerate(order) if one.victim is not Victim.WORKER]
        order.insert(dice.choice([0, *deaths]), target)
    return deque([*order, *at[2], *at[3]])
