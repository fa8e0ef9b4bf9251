"""Run two drivers on one dataset at once, where both work or one of them is stopped."""

import select
import signal
from collections.abc import Callable
from enum import StrEnum

from tests.soak.case import Case, CaseError, References, check_worker_alive, require_report
from tests.soak.child import HANG_SECONDS, Announcement, Child, DriverExit, HungError
from tests.soak.tally import Tally

Hold = Callable[[Child, Announcement], bool]


def share_work(case: Case) -> tuple[int, int]:
    """Make a dataset with two drivers, of which each opens a partition before either continues.

    Returns:
        Numbers of shards that the two drivers made.

    Raises:
        CaseError: A driver failed or made no shard, or both opened the same partition.
    """
    opened: dict[Child, Announcement] = {}

    def hold(child: Child, message: Announcement) -> bool:
        if message.kind != "partition.opened" or len(opened) == 2:
            return False
        opened[child] = message
        if len(opened) == 1:
            return True
        other = next(each for each in opened if each is not child)
        other.release()
        return False

    with case.start() as first, case.start() as second:
        ends = run_drivers([first, second], hold)
    made = tuple(int(require_report(ends[child])["made"]) for child in (first, second))
    if not all(made) or len({message.partition for message in opened.values()}) != 2:
        raise CaseError(f"two drivers did not share the work: they made {made} shards")
    return made[0], made[1]


class Resumption(StrEnum):
    """Time at which a stopped driver continues."""

    MIDWAY = "midway"
    """The driver continues once the other one has opened a partition of it."""
    AFTERWARDS = "afterwards"
    """The driver continues once the other one has ended."""


def take_over(case: Case, *, workers_too: bool, resumption: Resumption) -> None:
    """Stop a driver with SIGSTOP, let another take its partitions over, and resume the first.

    Args:
        case: Case of the drivers.
        workers_too: Whether the workers of the first driver are stopped too.
        resumption: Time at which the first driver continues.

    Raises:
        CaseError: A driver failed, or no partition was taken over.
    """
    opened: set[str] = set()
    with case.start() as first, case.start() as second:
        commits = 0
        while commits < 2:
            message = first.read_message()
            if not isinstance(message, Announcement):
                raise CaseError("the first driver ended before it was stopped")
            if message.kind == "partition.opened":
                opened.add(message.partition)
            elif message.kind == "partition.ended":
                opened.discard(message.partition)
            commits += message.kind == "shard.committed"
            if commits < 2:
                first.release()
        first.stop(workers_too=workers_too)
        first.release()  # the driver reads this after SIGCONT
        taken_over: list[str] = []

        def observe(child: Child, message: Announcement) -> bool:
            if (
                child is second
                and message.kind == "partition.opened"
                and message.partition in opened
            ):
                taken_over.append(message.partition)
                if resumption is Resumption.MIDWAY:
                    first.signal_group(signal.SIGCONT)
            return False

        if resumption is Resumption.MIDWAY:
            ends = run_drivers([second, first], observe)
        else:
            ends = run_drivers([second], observe)
            first.signal_group(signal.SIGCONT)
            ends |= run_drivers([first], observe)
    for child in (first, second):
        require_report(ends[child])
    if not taken_over:
        raise CaseError("the second driver took nothing over")


def run_drivers(children: list[Child], hold: Hold) -> dict[Child, DriverExit]:
    """Release several drivers after each of their events, until all of them have ended.

    Args:
        children: Drivers to run.
        hold: Function that is called with every event. True leaves the driver waiting.

    Returns:
        Ends of the drivers.

    Raises:
        CaseError: A worker was lost that was not killed.
        HungError: No driver sent a message in time.
    """
    ends: dict[Child, DriverExit] = {}
    while waiting := [child for child in children if child not in ends]:
        ready = select.select(waiting, [], [], HANG_SECONDS)[0]
        if not ready:
            raise HungError(f"{len(waiting)} drivers sent no message for {HANG_SECONDS:g} s")
        for child in ready:
            message = child.read_message()
            assert message is not None
            if isinstance(message, DriverExit):
                ends[child] = message
                continue
            check_worker_alive(child, message)
            if not hold(child, message):
                child.release()
    return ends


def run_concurrent_case(
    case: Case, run: Callable[[Case], object], references: References, tally: Tally
) -> None:
    """Run a case with several drivers at once, and add its verdict to a tally."""
    try:
        run(case)
        tally.add_verdict(case, case.judge(references.compute_digests(case.source)))
    except (CaseError, HungError) as error:
        tally.add_failure(case, error)
