"""Two drivers on one dataset at once, and one that takes over from another that only sleeps."""

import select
import signal
from collections.abc import Callable
from enum import StrEnum

from tests.soak.case import Case, CaseError, References, finished, nobody_died
from tests.soak.child import HANGS, Child, Ended, HungError, Said
from tests.soak.tally import Tally

Hold = Callable[[Child, Said], bool]


def share(case: Case) -> tuple[int, int]:
    """Two drivers make a dataset; each holds a partition before either goes on.

    Returns:
        How many shards each of them made.

    Raises:
        CaseError: One of them failed, or made nothing.
    """
    opened: dict[Child, Said] = {}

    def hold(child: Child, said: Said) -> bool:
        if said.kind != "partition.opened" or len(opened) == 2:
            return False
        opened[child] = said
        if len(opened) == 1:
            return True
        other = next(one for one in opened if one is not child)
        other.go()
        return False

    with case.start() as first, case.start() as second:
        ends = conduct([first, second], hold)
    made = tuple(int(finished(ends[child])["made"]) for child in (first, second))
    if not all(made) or len({said.partition for said in opened.values()}) != 2:
        raise CaseError(f"two drivers did not share the work: they made {made} shards")
    return made[0], made[1]


class Wakes(StrEnum):
    """Moment at which a stopped driver continues."""

    MIDWAY = "midway"
    """As soon as another works on a partition that it holds."""
    AFTERWARDS = "afterwards"
    """After the other driver has finalized the dataset."""


def take_over(case: Case, *, workers_too: bool, wakes: Wakes) -> None:
    """A driver is stopped with SIGSTOP, another takes its partitions over, and the first wakes.

    Args:
        case: Of which dataset.
        workers_too: Stop the workers of the first too; else they wait for it.
        wakes: When.

    Raises:
        CaseError: One of them failed, or nothing was taken over.
    """
    opened: set[str] = set()
    with case.start() as first, case.start() as second:
        commits = 0
        while commits < 2:
            said = first.hear()
            if not isinstance(said, Said):
                raise CaseError("the first driver ended before it was stopped")
            if said.kind == "partition.opened":
                opened.add(said.partition)
            elif said.kind == "partition.ended":
                opened.discard(said.partition)
            commits += said.kind == "shard.committed"
            if commits < 2:
                first.go()
        first.stop(workers_too=workers_too)
        first.go()  # it will take note of that when it wakes
        taken: list[str] = []

        def wake(child: Child, said: Said) -> bool:
            if child is second and said.kind == "partition.opened" and said.partition in opened:
                taken.append(said.partition)
                if wakes is Wakes.MIDWAY:
                    first.signal_group(signal.SIGCONT)
            return False

        if wakes is Wakes.MIDWAY:
            ends = conduct([second, first], wake)
        else:
            ends = conduct([second], wake)
            first.signal_group(signal.SIGCONT)
            ends |= conduct([first], wake)
    for child in (first, second):
        finished(ends[child])
    if not taken:
        raise CaseError("the second driver took nothing over")


def conduct(children: list[Child], hold: Hold) -> dict[Child, Ended]:
    """Let several drivers go on, event by event, until all have ended.

    Args:
        children: The drivers.
        hold: Told of every event; where it is true, the driver is not told to go on.
    """
    ends: dict[Child, Ended] = {}
    while waiting := [child for child in children if child not in ends]:
        ready = select.select(waiting, [], [], HANGS)[0]
        if not ready:
            raise HungError(f"{len(waiting)} drivers said nothing for {HANGS:g} s")
        for child in ready:
            heard = child.hear()
            assert heard is not None
            if isinstance(heard, Ended):
                ends[child] = heard
                continue
            nobody_died(child, heard)
            if not hold(child, heard):
                child.go()
    return ends


def meet(case: Case, how: Callable[[Case], object], references: References, tally: Tally) -> None:
    """Let drivers meet over a case, and judge what came of it."""
    try:
        how(case)
        tally.judge(case, case.judge(references.compute_digests(case.material)))
    except (CaseError, HungError) as error:
        tally.fail(case, error)
