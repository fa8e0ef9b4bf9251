"""Ends of epochs, and savers, while members are killed, are stopped, and the store fails.

Members are processes that race for the same content, each job has one epoch, and all chance comes
from the seed, save what the machine's scheduling adds.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from pydantic import ByteSize

from millrace import errors
from millrace.checkpoints import (
    CooldownOutcome,
    CooldownSettings,
    Membership,
    RetentionSettings,
    Saver,
    SaveSettings,
    apply_retention,
    cool_down,
    find_newest,
    find_newest_verified,
    load,
    open_content,
    plan_retention,
    read_checkpoint,
    verify,
    watch_epoch_end,
)
from millrace.checkpoints.cooldown.membership import make_census
from millrace.keys.checkpoints import CheckpointKeys
from millrace.lease import Holder, StoreClock
from millrace.records import fetch
from millrace.schemas.checkpoint import EpochRecord
from millrace.storage import Store, StoreSpec, list_objects, open_store
from tests.oracle import judge_checkpoints
from tests.soak.blows import ANYWHERE, Blow, Struck, runs, stopped
from tests.soak.place import Place

AT = ("cooldown.agreed", "cooldown.racing", "checkpoint.part", "cooldown.complete")
SAVED = "checkpoint.saved"  # between the metadata and the epoch
ALL = (*AT, SAVED, ANYWHERE)
SHORT = SaveSettings(part_bytes=ByteSize(16_384))
LARGE_SHAPE = (1, 300_000)  # of a tensor whose file has two blocks, since rows are not cut
BELOW = "below"  # prefix in each place
_TTL = timedelta(seconds=3)
_HANGS = 180.0  # seconds
_SIDE_BY_SIDE = 6
_SOURCES = 4

Tell = Callable[[str], None]


@dataclass
class Found:
    """Results of races and saves."""

    races: int = 0
    blows: Counter[str] = field(default_factory=Counter[str])
    stops: int = 0
    all_killed: int = 0
    owned: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    saves: int = 0
    save_kills: int = 0
    wrong: list[str] = field(default_factory=list[str])


def run_races(
    places: Sequence[Place], folder: Path, seed: int, *, races: int, saves: int, tell: Tell
) -> Found:
    """Race so often, and save so often, everywhere in turn.

    Args:
        places: Where to.
        folder: For what the members have.
        seed: Of all chance.
        races: How many.
        saves: How many savers are killed.
        tell: Told a line now and then.
    """
    found, lock = Found(), threading.Lock()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.soak.races", "torch", "millrace.checkpoints.saving"])
    sources = _sources(folder, seed)

    def one(number: int) -> None:
        dice = Random(f"{seed} race {number}")
        race = _Race(context, places[number % len(places)], sources, folder, number, dice)
        race.run()
        with lock:
            _add(found, race)
            if found.races % 50 == 0:
                tell(f"races {found.races}, blows {found.blows.total()}, wrong {len(found.wrong)}")

    def save(number: int) -> None:
        dice = Random(f"{seed} save {number}")
        killed, wrong = _save(context, places[number % len(places)], number, dice)
        with lock:
            found.saves += 1
            found.save_kills += killed
            found.wrong += wrong

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        list(pool.map(one, range(races)))
        list(pool.map(save, range(saves)))
    return found


def make_spec(place: Place) -> StoreSpec:
    """Return the store of the races in a place."""
    return StoreSpec.model_validate(place.make_spec(BELOW))


def summary(found: Found) -> list[str]:
    """Return the lines of the report."""
    at = ", ".join(f"{name} {count}" for name, count in sorted(found.blows.items()))
    ends = ", ".join(f"{name} {count}" for name, count in sorted(found.outcomes.items()))
    last = (
        f"races {found.races}, killed {found.blows.total() - found.stops}, stopped {found.stops}, "
        f"all killed {found.all_killed}, by an owner {found.owned}; "
        f"savers killed {found.save_kills} of {found.saves}; wrong {len(found.wrong)}"
    )
    return [f"blows at {at}", f"members' outcomes: {ends}", *found.wrong, last]


def _add(found: Found, race: "_Race") -> None:
    found.races += 1
    found.blows += Counter(blow.at for blow in race.struck)
    found.stops += sum(not blow.kill for blow in race.struck)
    found.all_killed += race.all_killed
    found.owned += race.confined
    found.outcomes += Counter(race.outcomes)
    found.wrong += [f"{race.job}: {what}" for what in race.wrong]


def _sources(folder: Path, seed: int) -> str:
    """Contents to race for, each a step of one job in a folder."""
    import torch

    url = (folder / "sources").as_uri()
    dice = torch.Generator().manual_seed(seed)
    with Saver(open_store(url), "source", SHORT) as saver:
        for step in range(_SOURCES):
            state = {f"w{i}": torch.randn(3000 + 500 * step, generator=dice) for i in range(7)}
            state["large"] = torch.randn(LARGE_SHAPE, generator=dice)
            saver.save(state, step=step).result()
    return url


class _Race:
    """One end of an epoch, and its recovery if nobody lived to see it."""

    def __init__(
        self,
        context: Any,
        place: Place,
        sources: str,
        folder: Path,
        number: int,
        dice: Random,
    ) -> None:
        self.job = f"races/r{number:04d}"
        self._context, self._sources, self._dice = context, sources, dice
        self._place, self._bucket = make_spec(place), place.open_bucket(BELOW)
        self._folder = folder / self.job
        self._folder.mkdir(parents=True)
        self._step = dice.randrange(_SOURCES)
        self._names = [f"m{n}" for n in range(dice.randint(2, 5))]
        self.confined = number // 3 % 2 == 1  # half of the races, in each kind of place
        self._seed = dice.getrandbits(64)
        # Confined members begin when their owner has seen them all: a member that is killed before
        # would not be in the roster.
        self._watched = context.Event() if self.confined else None
        self.struck: list[Blow] = []
        self.all_killed = False
        self.outcomes: list[str] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        """Race; where members are confined, beside an owner that commits for them."""
        if self._watched is None:
            self._run()
            return
        with ThreadPoolExecutor(1) as pool:
            owner = pool.submit(self._own, self._watched)
            self._run()
            owner.result()

    def _own(self, watched: Any) -> None:
        """Watch the epoch's end from the time when all members live, and let them begin then."""
        store = open_store(self._place)
        clock = StoreClock.read(store, self.job, Holder.describe_this_process())
        census = make_census(store, self.job, clock)
        deadline = time.monotonic() + _HANGS
        while len(census.find_holders()) < len(self._names) and time.monotonic() < deadline:
            time.sleep(0.1)
        watched.set()
        timeout = timedelta(seconds=2 * _HANGS)
        watch_epoch_end(store, self.job, 0, timeout=timeout, members=self._names, clock=clock)

    def _run(self) -> None:
        store = open_store(self._place)
        blows = self._blows()
        self._round(blows)
        said = self._said()
        self.all_killed = not said
        self._look(store)
        if not self._durable(store):  # whoever was killed comes back
            self._round({})
            said = self._said()
        self._judge(store, said)

    def _blows(self) -> dict[str, Blow]:
        dice = self._dice
        way = dice.randrange(5)
        if way == 0:
            return {}
        victims = self._names if way == 1 else dice.sample(self._names, dice.randint(1, 2))
        found: dict[str, Blow] = {}
        for name in victims:
            at = dice.choice([*AT, SAVED, ANYWHERE, "checkpoint.part", "checkpoint.part"])
            number = dice.randrange(1500) if at == ANYWHERE else 1
            if at == "checkpoint.part":
                number = dice.randint(1, 4)
            found[name] = Blow(at, number, kill=way == 1 or dice.random() < 0.8)
        return found

    def _round(self, blows: dict[str, Blow]) -> None:
        """All members race at once; whoever is stopped goes on when the others are through."""
        running: dict[str, BaseProcess] = {}
        gate = self._context.Barrier(len(self._names))
        for name in self._names:
            arguments = (
                self._place.reveal_secrets(), self.job, name, self._seed, self._sources, self._step,
                blows.get(name), str(self._folder / name), gate, self._watched,
            )  # fmt: skip
            process = self._context.Process(target=_member, args=arguments)
            process.start()
            running[name] = process
        deadline = time.monotonic() + _HANGS
        while any(runs(process) for process in running.values()):
            if time.monotonic() > deadline:
                self.wrong.append("a member hangs")
                break
            for process in running.values():
                process.join(0.02)
        for name, process in running.items():
            if stopped(process):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)
            process.join(_HANGS)
            if process.is_alive():
                self.wrong.append(f"{name} does not end")
                process.kill()
                process.join()
            if name in blows and (self._folder / f"{name}.struck").exists():
                self.struck.append(blows[name])
            elif not (self._folder / f"{name}.json").exists():
                self.wrong.append(f"{name} ended with {process.exitcode}")

    def _said(self) -> dict[str, dict[str, Any]]:
        """Return the output of each member that lived."""
        found: dict[str, dict[str, Any]] = {}
        for name in self._names:
            path = self._folder / f"{name}.json"
            if path.exists():
                found[name] = json.loads(path.read_bytes())
        return found

    def _durable(self, store: Store) -> bool:
        try:
            return (
                fetch(store, CheckpointKeys(self.job).make_epoch_key(0), EpochRecord).root
                is not None
            )
        except errors.NotFoundError:
            return False

    def _look(self, store: Store) -> None:
        """Right after the blows: something that is verified, or nothing."""
        complete = find_newest(store, self.job)
        if complete is not None and verify(store, complete):
            self.wrong.append("a damaged checkpoint was committed")

    def _judge(self, store: Store, said: dict[str, dict[str, Any]]) -> None:
        self.outcomes = [one["outcome"] for one in said.values()]
        keys = CheckpointKeys(self.job)
        if not self._durable(store):
            self.wrong.append(f"no checkpoint: {said}")
            return
        epoch = fetch(store, keys.make_epoch_key(0), EpochRecord)
        winners = [
            name for name, one in said.items() if one["outcome"] == CooldownOutcome.COMMITTED
        ]
        if winners and winners != [epoch.member]:
            self.wrong.append(f"{winners} say that they have won, and {epoch.member} has")
        astray = {name: one for name, one in said.items() if one["epoch"] != epoch.member}
        if astray:
            self.wrong.append(f"{epoch.member} has won, and others do not know: {astray}")
        apply_retention(
            store, plan_retention(store, self.job, RetentionSettings(grace=timedelta(0)))
        )
        found = find_newest_verified(store, self.job)
        if found is None or found.root != epoch.root:
            self.wrong.append("what the epoch names cannot be found, or is damaged")
            return
        named = {keys.make_part_key(part.step, part.digest) for part in found.parts}
        there = {stat.key for stat in list_objects(store, keys.make_parts_prefix(self._step))}
        if there != named:
            self.wrong.append(f"{len(there - named)} unnamed, {len(named - there)} missing")
        self.wrong += judge_checkpoints(self._bucket, self.job, is_cleaned=True)


def _member(
    place: dict[str, Any],
    job: str,
    name: str,
    seed: int,
    sources: str,
    step: int,
    blow: Blow | None,
    result: str,
    gate: Any,
    watched: Any | None,
) -> None:
    """A member, in a process of its own."""
    source = open_store(sources)
    checkpoint = read_checkpoint(source, "source", step)
    store = open_store(StoreSpec(**place))
    reads = store if watched is not None else None
    with Membership(store, job, name, _TTL, reads=reads) as membership:
        gate.wait(_HANGS)
        if watched is not None:
            watched.wait(_HANGS)
        cooled = cool_down(
            membership,
            open_content(source, checkpoint),
            epoch=0,
            position={"sample": step},
            seed=seed,
            settings=CooldownSettings(time=timedelta(minutes=5)),
            progress=Struck(blow, Path(f"{result}.struck")),
        )
    said = {
        "outcome": cooled.outcome,
        "reason": cooled.reason,
        "epoch": cooled.epoch.member if cooled.epoch else None,
    }
    Path(f"{result}.json").write_text(json.dumps(said))


def _save(context: Any, place: Place, number: int, dice: Random) -> tuple[int, list[str]]:
    """Kill a saver of a second step; the next one finishes it. How often killed, what is wrong."""
    job = f"saves/s{number:04d}"
    spec = make_spec(place)
    store = open_store(spec)
    keys = CheckpointKeys(job)
    blow = dice.choice(
        [
            Blow("checkpoint.part", dice.randint(1, 8)),
            Blow("checkpoint.part", 9),  # all of them, and the metadata is next
            Blow(ANYWHERE, dice.randrange(60)),
        ]
    )
    killed = 0
    for one in (blow, None):
        process = context.Process(target=_saver, args=(spec.reveal_secrets(), job, number, one))
        process.start()
        process.join(_HANGS)
        killed += process.exitcode == -signal.SIGKILL
        found = find_newest_verified(store, job)
        if found is not None and found.step != 1:
            return killed, [f"{job}: step {found.step} is there"]
    wrong: list[str] = []
    if load(store, job).state["step"] != number:
        wrong.append(f"{job}: another state")
    there = {stat.key for stat in list_objects(store, keys.make_parts_prefix(1))}
    final = find_newest(store, job)
    if final is None or there != {keys.make_part_key(1, part.digest) for part in final.parts}:
        wrong.append(f"{job}: files that no checkpoint names, or missing ones")
    return killed, wrong + judge_checkpoints(place.open_bucket(BELOW), job, is_cleaned=True)


def _saver(place: dict[str, Any], job: str, number: int, blow: Blow | None) -> None:
    import torch

    dice = torch.Generator().manual_seed(number)
    state = {f"w{i}": torch.randn(4000, generator=dice) for i in range(7)} | {"step": number}
    state["large"] = torch.randn(LARGE_SHAPE, generator=dice)
    store = open_store(StoreSpec(**place))
    with Saver(store, job, SHORT, progress=Struck(blow, Path(os.devnull))) as saver:
        saver.save(state, step=1).result()
