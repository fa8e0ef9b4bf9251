"""SIGKILL at every boundary that a driver announces, and between them; of whom is told apart."""

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from random import Random

from tests.soak.case import Case, CaseError, References, finished, nobody_died
from tests.soak.child import Child, Ended, HungError, Said
from tests.soak.material import Material
from tests.soak.place import Place
from tests.soak.tally import Tally
from tests.soak.targets import (
    ANY,
    BETWEEN,
    COMPLETE,
    DRIVERS_LAST,
    Target,
    Victim,
    draw,
    in_order,
)

_A_CASE = 6
_DEATHS = 2  # of workers over one partition in a row; the third is the driver's end


def run_case(case: Case, targets: deque[Target], tally: Tally) -> list[Target]:
    """Let drivers make a dataset, one after another, until one ends; kill what is to be killed.

    Returns:
        The targets whose boundary was not reached any more.
    """
    missed: list[Target] = []
    while True:
        with case.start() as child:
            ended = _Hunt(case, child, targets, missed, tally).run()
        if ended.code != -signal.SIGKILL:
            finished(ended)
            return [*missed, *targets]


class _Hunt:
    """One driver's run, up to its end or its death."""

    def __init__(
        self, case: Case, child: Child, targets: deque[Target], missed: list[Target], tally: Tally
    ) -> None:
        self._case, self._child, self._targets, self._tally = case, child, targets, tally
        self._missed = missed
        self._fitting = 0
        self._complete = False
        self._dead: dict[int, Target] = {}
        self._deaths: Counter[str] = Counter()
        self._of: dict[int, str] = {}

    def run(self) -> Ended:
        child = self._child
        while True:
            said = child.hear()
            if isinstance(said, Ended):
                self._missed += self._dead.values()  # they had ended before they were killed
                return said
            assert said is not None
            self._note(said)
            if not self._fits(said):
                child.go()
                continue
            target = self._targets.popleft()
            self._fitting = 0
            if target.boundary == BETWEEN and (ended := self._let_work(target)) is not None:
                self._missed.append(target)
                return ended
            if target.victim is Victim.WORKER:
                self._dead[said.pid] = target  # counted when the driver says that it was lost
                child.kill(said.pid)
                if target.boundary != BETWEEN:
                    child.go()
            else:
                return self._kill_driver(target)

    def _note(self, said: Said) -> None:
        """Keep the driver's own count of deaths over a partition: it gives up at the third."""
        self._complete |= said.kind == COMPLETE
        if said.kind == "worker.lost":
            self._deaths[self._of.pop(said.pid, "")] += 1
            if said.pid not in self._dead:
                nobody_died(self._child, said)
            self._tally.kill(self._dead.pop(said.pid), self._case.place)
        elif said.partition:
            self._of[said.pid] = said.partition
            if said.kind == "shard.committed":
                self._deaths.pop(said.partition, None)

    def _fits(self, said: Said) -> bool:
        self._skip_those_too_late(said)
        if not self._targets:
            return False
        target = self._targets[0]
        if target.boundary in {ANY, BETWEEN}:
            fits = said.kind != COMPLETE
        else:
            fits = target.boundary == said.kind
        if target.victim is Victim.WORKER:
            fits = fits and self._may_die(said)
        elif target.boundary not in {ANY, BETWEEN}:
            fits = fits and not self._dead  # else nobody would say of them that they were killed
        self._fitting += fits
        return fits and self._fitting >= target.nth

    def _may_die(self, said: Said) -> bool:
        if said.pid in {self._child.pid, *self._dead} or said.kind == "worker.lost":
            return False
        partition = self._of.get(said.pid, "")
        dying = sum(self._of.get(pid) == partition for pid in self._dead)
        return self._deaths[partition] + dying < _DEATHS

    def _skip_those_too_late(self, said: Said) -> None:
        """Skip the boundaries of partitions when finalizing begins: all partitions have ended."""
        if said.kind not in {*DRIVERS_LAST, COMPLETE}:
            return
        order = (*DRIVERS_LAST, COMPLETE)
        ahead = {*order[order.index(said.kind) :], ANY, BETWEEN}
        while self._targets and (
            self._targets[0].boundary not in ahead or self._targets[0].victim is Victim.WORKER
        ):
            self._missed.append(self._targets.popleft())
            self._fitting = 0

    def _let_work(self, target: Target) -> Ended | None:
        """Let it go on for the target's delay, hearing what it says meanwhile."""
        self._child.go()
        until = time.monotonic() + target.delay
        while (rest := until - time.monotonic()) > 0:
            said = self._child.hear(rest)
            if isinstance(said, Ended):
                return said
            if said is not None:
                self._note(said)
                self._child.go()
        return None

    def _kill_driver(self, target: Target) -> Ended:
        if target.victim is Victim.GROUP:
            self._child.kill_group()
        else:
            self._child.kill(self._child.pid)
        while not isinstance(said := self._child.hear(), Ended):
            if said is not None:
                self._note(said)  # said before it died
        self._missed += self._dead.values()
        after_completion = self._complete and target.boundary != COMPLETE
        if said.code == -signal.SIGKILL and said.report is None and not after_completion:
            self._tally.kill(target, self._case.place)
        else:
            self._missed.append(target)
        return said


class Kills:
    """The matrix, case by case.

    Args:
        materials: The sources, taken in turn.
        places: The stores: the first is for most cases, each further one for a sixth.
        references: Undisturbed runs of the materials.
        folder: For the children.
        dice: All chance comes from it.
        name: What the cases' names begin with.
    """

    def __init__(
        self,
        materials: Sequence[Material],
        places: Sequence[Place],
        references: References,
        folder: Path,
        dice: Random,
        *,
        name: str = "kill",
    ) -> None:
        self._name = name
        self._materials, self._places = materials, places
        self.references = references
        self._folder, self._dice = folder, dice
        self._numbers = count()
        self.tally = Tally()

    def run(self, kills: int, *, tell: Callable[[str], None] = print) -> Tally:
        """Kill at least so many times, at every boundary everybody who can be killed there."""
        return self.kill_all(draw(self._dice, kills), tell=tell)

    def kill_all(self, targets: Iterable[Target], *, tell: Callable[[str], None] = print) -> Tally:
        """Kill at all these targets, about six in each case; one that is missed is tried again."""
        pools: dict[bool, list[Target]] = {True: [], False: []}
        for target in targets:
            pools[target.victim is Victim.ALONE].append(target)
        limit = self.tally.cases + 4 + len(pools[True]) + len(pools[False])
        while any(pools.values()) and self.tally.cases < limit:
            alone = self._dice.choices([True, False], [len(pools[True]), len(pools[False])])[0]
            chosen, pools[alone] = pools[alone][:_A_CASE], pools[alone][_A_CASE:]
            case = self.make_case(0 if alone else self._dice.randint(1, 3))
            pools[alone] += self.kill_in(case, chosen)
            tell(f"{case}: {len(chosen)} kills asked for, {self.tally.counted} so far")
        return self.tally

    def kill_in(self, case: Case, targets: Iterable[Target]) -> list[Target]:
        """Run one case and judge it; returns the targets that were not reached."""
        try:
            missed = run_case(case, in_order(self._dice, targets), self.tally)
            verdict = case.judge(self.references.compute_digests(case.material))
        except (CaseError, HungError) as error:
            self.tally.fail(case, error)
            return []
        self.tally.judge(case, verdict)
        return missed

    def make_case(self, workers: int) -> Case:
        """The next case; all but its workers by chance."""
        number = next(self._numbers)
        place = self._places[0]
        if self._dice.random() < (len(self._places) - 1) / 6:
            place = self._dice.choice(self._places[1:])
        return Case(
            f"{self._name}-{number:04d}",
            self._materials[number % len(self._materials)],
            place,
            self._folder,
            workers=workers,
            uploads=self._dice.randint(1, 3),
            store_source=self._dice.random() < 0.5,
        )
