"""Send SIGKILL to drivers and workers at every event that a driver announces, and between."""

import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from random import Random

from tests.soak.case import Case, CaseError, References, check_worker_alive, require_report
from tests.soak.child import Announcement, Child, DriverExit, HungError
from tests.soak.shared_stores import SharedStore
from tests.soak.source_data import SourceData
from tests.soak.tally import Tally
from tests.soak.targets import (
    ANY,
    BETWEEN,
    COMPLETE,
    DRIVERS_LAST,
    Target,
    Victim,
    draw_targets,
    order_targets,
)

_TARGETS_PER_CASE = 6
_MAX_DEATHS = 2  # of workers in a row on one partition; the third ends the driver


def run_case(case: Case, targets: deque[Target], tally: Tally) -> list[Target]:
    """Run drivers one after another, with kills, until one of them ends by itself.

    Args:
        case: Case of the drivers.
        targets: Planned kills in their order.
        tally: Tally that counts the kills.

    Returns:
        Targets that were not reached.

    Raises:
        CaseError: A driver failed, or a worker was lost that was not killed.
        HungError: A driver sent no message in time.
    """
    missed: list[Target] = []
    while True:
        with case.start() as child:
            driver_exit = _KillRun(case, child, targets, missed, tally).run()
        if driver_exit.code != -signal.SIGKILL:
            require_report(driver_exit)
            return [*missed, *targets]


class _KillRun:
    """Run of one driver until it ends or is killed."""

    def __init__(
        self, case: Case, child: Child, targets: deque[Target], missed: list[Target], tally: Tally
    ) -> None:
        self._case, self._child, self._targets, self._tally = case, child, targets, tally
        self._missed = missed
        self._matching = 0
        self._is_complete = False
        self._killed_workers: dict[int, Target] = {}
        self._deaths: Counter[str] = Counter()
        self._partitions: defaultdict[int, set[str]] = defaultdict(set)  # open ones of a worker

    def run(self) -> DriverExit:
        """Read the driver's announcements, and kill at the targets."""
        child = self._child
        while True:
            message = child.read_message()
            if isinstance(message, DriverExit):
                self._missed += self._killed_workers.values()  # the workers ended before the signal
                return message
            assert message is not None
            self._record(message)
            if not self._matches_target(message):
                child.release()
                continue
            target = self._targets.popleft()
            self._matching = 0
            if (
                target.boundary == BETWEEN
                and (driver_exit := self._release_for(target)) is not None
            ):
                self._missed.append(target)
                return driver_exit
            if target.victim is Victim.WORKER:
                # Counted when the driver reports the loss.
                self._killed_workers[message.pid] = target
                child.kill(message.pid)
                if target.boundary != BETWEEN:
                    child.release()
            else:
                return self._kill_driver(target)

    def _record(self, message: Announcement) -> None:
        """Count the deaths of workers on each partition, as the driver does, and the kills."""
        self._is_complete |= message.kind == COMPLETE
        if message.kind == "worker.lost":
            self._deaths.update(self._get_partitions(message.pid))
            self._partitions.pop(message.pid, None)
            if message.pid not in self._killed_workers:
                check_worker_alive(self._child, message)
            self._tally.count_kill(self._killed_workers.pop(message.pid), self._case.store)
        elif message.partition:
            self._partitions[message.pid].add(message.partition)
            if message.kind == "partition.ended":
                self._partitions[message.pid].discard(message.partition)
            if message.kind == "shard.committed":
                self._deaths.pop(message.partition, None)

    def _matches_target(self, message: Announcement) -> bool:
        """Decide whether the next target is killed at this event."""
        self._skip_missed_targets(message)
        if not self._targets:
            return False
        target = self._targets[0]
        if target.boundary in {ANY, BETWEEN}:
            matches = message.kind != COMPLETE
        else:
            matches = target.boundary == message.kind
        if target.victim is Victim.WORKER:
            matches = matches and self._may_kill_worker(message)
        elif target.boundary not in {ANY, BETWEEN}:
            # The driver must report the losses of killed workers before it is killed.
            matches = matches and not self._killed_workers
        self._matching += matches
        return matches and self._matching >= target.nth

    def _may_kill_worker(self, message: Announcement) -> bool:
        """Decide whether a worker can be killed without ending the driver."""
        if message.pid in {self._child.pid, *self._killed_workers} or message.kind == "worker.lost":
            return False
        dying = Counter(one for pid in self._killed_workers for one in self._get_partitions(pid))
        return all(
            self._deaths[one] + dying[one] < _MAX_DEATHS
            for one in self._get_partitions(message.pid)
        )

    def _get_partitions(self, pid: int) -> set[str]:
        """Return the open partitions of a worker; an empty name for one that is not known yet."""
        return self._partitions[pid] or {""}

    def _skip_missed_targets(self, message: Announcement) -> None:
        """Skip the targets that the driver cannot reach any more once it finalizes the dataset."""
        if message.kind not in {*DRIVERS_LAST, COMPLETE}:
            return
        order = (*DRIVERS_LAST, COMPLETE)
        reachable = {*order[order.index(message.kind) :], ANY, BETWEEN}
        while self._targets and (
            self._targets[0].boundary not in reachable or self._targets[0].victim is Victim.WORKER
        ):
            self._missed.append(self._targets.popleft())
            self._matching = 0

    def _release_for(self, target: Target) -> DriverExit | None:
        """Let the driver work for the delay of a target. Returns its end if it ends before."""
        self._child.release()
        deadline = time.monotonic() + target.delay
        while (remaining := deadline - time.monotonic()) > 0:
            message = self._child.read_message(remaining)
            if isinstance(message, DriverExit):
                return message
            if message is not None:
                self._record(message)
                self._child.release()
        return None

    def _kill_driver(self, target: Target) -> DriverExit:
        """Kill the driver, and count the kill if it was in time."""
        if target.victim is Victim.GROUP:
            self._child.kill_group()
        else:
            self._child.kill(self._child.pid)
        while not isinstance(message := self._child.read_message(), DriverExit):
            if message is not None:
                self._record(message)  # sent before the signal
        self._missed += self._killed_workers.values()
        is_after_completion = self._is_complete and target.boundary != COMPLETE
        if message.code == -signal.SIGKILL and message.report is None and not is_after_completion:
            self._tally.count_kill(target, self._case.store)
        else:
            self._missed.append(target)
        return message


class KillMatrix:
    """Run cases with kills of drivers and workers.

    Args:
        sources: Source data, which the cases use in turn.
        stores: Stores. The first has most of the cases, and each other a sixth.
        references: Digests of undisturbed runs of the source data.
        folder: Folder for the working directories of the drivers.
        generator: Generator of all random choices.
        name: Prefix of the names of the cases.

    Attributes:
        stores: Stores of the next cases.
    """

    def __init__(
        self,
        sources: Sequence[SourceData],
        stores: Sequence[SharedStore],
        references: References,
        folder: Path,
        generator: Random,
        *,
        name: str = "kill",
    ) -> None:
        self._name = name
        self._sources, self.stores = sources, stores
        self.references = references
        self._folder, self._generator = folder, generator
        self._numbers = count()
        self.tally = Tally()

    def run(self, kills: int, *, report: Callable[[str], None] = print) -> Tally:
        """Kill at least so many times, with every combination of a boundary and a victim."""
        return self.kill_all(draw_targets(self._generator, kills), report=report)

    def kill_all(
        self, targets: Iterable[Target], *, report: Callable[[str], None] = print
    ) -> Tally:
        """Kill at all targets, up to six in each case. Missed targets are tried again."""
        pools: dict[bool, list[Target]] = {True: [], False: []}
        for target in targets:
            pools[target.victim is Victim.ALONE].append(target)
        limit = self.tally.cases + 4 + len(pools[True]) + len(pools[False])
        while any(pools.values()) and self.tally.cases < limit:
            is_alone = self._generator.choices(
                [True, False], [len(pools[True]), len(pools[False])]
            )[0]
            chosen, pools[is_alone] = (
                pools[is_alone][:_TARGETS_PER_CASE],
                pools[is_alone][_TARGETS_PER_CASE:],
            )
            case = self.make_case(0 if is_alone else self._generator.randint(1, 3))
            pools[is_alone] += self.run_case_with_kills(case, chosen)
            report(f"{case}: {len(chosen)} kills planned, {self.tally.counted} done so far")
        return self.tally

    def run_case_with_kills(self, case: Case, targets: Iterable[Target]) -> list[Target]:
        """Run a case with kills, judge it, and return the targets that were not reached."""
        try:
            missed = run_case(case, order_targets(self._generator, targets), self.tally)
            verdict = case.judge(self.references.compute_digests(case.source))
        except (CaseError, HungError) as error:
            self.tally.add_failure(case, error)
            return []
        self.tally.add_verdict(case, verdict)
        return missed

    def make_case(self, workers: int) -> Case:
        """Return the next case, with random settings except for its number of workers."""
        number = next(self._numbers)
        store = self.stores[0]
        if self._generator.random() < (len(self.stores) - 1) / 6:
            store = self._generator.choice(self.stores[1:])
        return Case(
            f"{self._name}-{number:04d}",
            self._sources[number % len(self._sources)],
            store,
            self._folder,
            workers=workers,
            uploads=self._generator.randint(1, 3),
            store_source=self._generator.random() < 0.5,
        )
