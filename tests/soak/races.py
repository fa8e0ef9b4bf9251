"""End epochs and save checkpoints while processes are killed or stopped, and the store fails.

The members of an epoch are processes that race to upload the same content. Each job has one epoch.
All random choices follow from the seed. The scheduling of the processes does not.
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
from tests.oracle import Folder, judge_checkpoints, read_checkpoints
from tests.soak.interruptions import (
    ANY_MOMENT,
    Interrupter,
    Interruption,
    Resumption,
    draw_resumption,
    is_running,
    is_stopped,
    make_resumption_marker,
    start_process,
)
from tests.soak.shared_stores import SharedStore

EVENTS = ("cooldown.agreed", "cooldown.racing", "checkpoint.part", "cooldown.complete")
SAVED = "checkpoint.saved"  # after the metadata, before the record of the epoch
POINTS = (*EVENTS, SAVED, ANY_MOMENT)
SMALL_FILES = SaveSettings(part_bytes=ByteSize(16_384))
LARGE_SHAPE = (1, 300_000)  # of a tensor whose file has two blocks, since a row is not split
PREFIX = "below"  # prefix of the races in each store
_TTL = timedelta(seconds=3)
_HANG_SECONDS = 180.0  # seconds
_CONCURRENCY = 6
_FILES = 9  # of a save, with that of the state
_SOURCE_FOLDER = "sources"
_SOURCES = 4

Report = Callable[[str], None]


@dataclass
class Counts:
    """Counts of races and saves.

    Attributes:
        races: Number of races.
        interruptions: Number of interruptions by event.
        stops: Number of interruptions with SIGSTOP.
        early_resumptions: Number of stopped members that continued beside the others.
        all_killed: Number of races in which all members were killed.
        with_owner: Number of races in which an owner committed for the members.
        outcomes: Number of members by outcome.
        saves: Number of saves.
        save_kills: Number of savers that were killed.
        wrong: Descriptions of the faults.
    """

    races: int = 0
    interruptions: Counter[str] = field(default_factory=Counter[str])
    stops: int = 0
    early_resumptions: int = 0
    all_killed: int = 0
    with_owner: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    saves: int = 0
    save_kills: int = 0
    wrong: list[str] = field(default_factory=list[str])


def run_races(
    stores: Sequence[SharedStore],
    folder: Path,
    seed: int,
    *,
    races: int,
    saves: int,
    report: Report,
) -> Counts:
    """Run so many races and saves, in each store in turn.

    Args:
        stores: Stores of the checkpoints.
        folder: Folder for the source checkpoints and the results of the members.
        seed: Seed of all random choices.
        races: Number of races.
        saves: Number of saves whose saver is killed.
        report: Function that is called with a line of progress.
    """
    found, lock = Counts(), threading.Lock()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.soak.races", "torch", "millrace.checkpoints.saving"])
    sources = _make_sources(folder, seed)

    def run_race(number: int) -> None:
        generator = Random(f"{seed} race {number}")
        race = _Race(context, stores[number % len(stores)], sources, folder, number, generator)
        race.run()
        with lock:
            _add_race(found, race)
            if found.races % 50 == 0:
                total = found.interruptions.total()
                report(f"races {found.races}, interruptions {total}, wrong {len(found.wrong)}")

    def save(number: int) -> None:
        generator = Random(f"{seed} save {number}")
        killed, wrong = _save_with_kill(context, stores[number % len(stores)], number, generator)
        with lock:
            found.saves += 1
            found.save_kills += killed
            found.wrong += wrong

    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        list(pool.map(run_race, range(races)))
        list(pool.map(save, range(saves)))
    if found.save_kills < saves // 2:
        found.wrong.append(f"only {found.save_kills} of {saves} savers were killed")
    return found


def make_spec(shared_store: SharedStore) -> StoreSpec:
    """Return the settings of the races' prefix in a store."""
    return StoreSpec.model_validate(shared_store.make_spec(PREFIX))


def format_summary(found: Counts) -> list[str]:
    """Return the lines of the summary."""
    points = ", ".join(f"{name} {count}" for name, count in sorted(found.interruptions.items()))
    ends = ", ".join(f"{name} {count}" for name, count in sorted(found.outcomes.items()))
    last = (
        f"races {found.races}, killed {found.interruptions.total() - found.stops}, "
        f"stopped {found.stops} (resumed early {found.early_resumptions}), "
        f"all killed {found.all_killed}, with an owner {found.with_owner}; "
        f"savers killed {found.save_kills} of {found.saves}; wrong {len(found.wrong)}"
    )
    return [f"interruptions at {points}", f"members' outcomes: {ends}", *found.wrong, last]


def _add_race(found: Counts, race: "_Race") -> None:
    found.races += 1
    found.interruptions += Counter(interruption.event for interruption in race.interrupted)
    found.stops += sum(not interruption.is_kill for interruption in race.interrupted)
    found.early_resumptions += race.early_resumptions
    found.all_killed += race.all_killed
    found.with_owner += race.is_confined
    found.outcomes += Counter(race.outcomes)
    found.wrong += [f"{race.job}: {what}" for what in race.wrong]


def _make_sources(folder: Path, seed: int) -> str:
    """Save the contents of the races in a folder, each as a step of one job, and return its URL."""
    import torch

    url = (folder / _SOURCE_FOLDER).as_uri()
    generator = torch.Generator().manual_seed(seed)
    with Saver(open_store(url), "source", SMALL_FILES) as saver:
        for step in range(_SOURCES):
            state = {f"w{i}": torch.randn(3000 + 500 * step, generator=generator) for i in range(7)}
            state["large"] = torch.randn(LARGE_SHAPE, generator=generator)
            saver.save(state, step=step).result()
    return url


class _Race:
    """End of an epoch, and a second attempt if no member committed it."""

    def __init__(
        self,
        context: Any,
        shared_store: SharedStore,
        sources: str,
        folder: Path,
        number: int,
        generator: Random,
    ) -> None:
        self.job = f"races/r{number:04d}"
        self._context, self._sources, self._generator = context, sources, generator
        self._spec, self._bucket = make_spec(shared_store), shared_store.open_bucket(PREFIX)
        self._source_bucket = Folder(folder / _SOURCE_FOLDER)
        self._folder = folder / self.job
        self._folder.mkdir(parents=True)
        self._step = generator.randrange(_SOURCES)
        self._names = [f"m{n}" for n in range(generator.randint(2, 5))]
        self.is_confined = number // 3 % 2 == 1  # half of the races in each store
        self._seed = generator.getrandbits(64)
        # Confined members begin after their owner has seen all of them. A member that is killed
        # before would be missing in the roster.
        self._owner_ready = context.Event() if self.is_confined else None
        self.interrupted: list[Interruption] = []
        self.early_resumptions = 0
        self.all_killed = False
        self.outcomes: list[str] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        """Run the race. Confined members have an owner, which commits for them."""
        if self._owner_ready is None:
            self._run_members()
            return
        with ThreadPoolExecutor(1) as pool:
            owner = pool.submit(self._commit_as_owner, self._owner_ready)
            self._run_members()
            owner.result()

    def _commit_as_owner(self, owner_ready: Any) -> None:
        """Wait until all members are alive, let them begin, and commit the epoch for them."""
        store = open_store(self._spec)
        clock = StoreClock.read(store, self.job, Holder.describe_this_process())
        census = make_census(store, self.job, clock)
        deadline = time.monotonic() + _HANG_SECONDS
        while len(census.find_holders()) < len(self._names) and time.monotonic() < deadline:
            time.sleep(0.1)
        owner_ready.set()
        timeout = timedelta(seconds=2 * _HANG_SECONDS)
        watch_epoch_end(store, self.job, 0, timeout=timeout, members=self._names, clock=clock)

    def _run_members(self) -> None:
        store = open_store(self._spec)
        interruptions = self._draw_interruptions()
        self._race_members(interruptions)
        results = self._read_results()
        self.all_killed = not results
        self._check_newest(store)
        if not self._has_root(store):  # the killed members are started again
            self._race_members({})
            results = self._read_results()
        self._judge(store, results)

    def _draw_interruptions(self) -> dict[str, Interruption]:
        """Return random interruptions by the names of the members."""
        generator = self._generator
        choice = generator.randrange(5)
        if choice == 0:
            return {}
        victims = (
            self._names if choice == 1 else generator.sample(self._names, generator.randint(1, 2))
        )
        found: dict[str, Interruption] = {}
        for name in victims:
            event = generator.choice(
                [*EVENTS, SAVED, ANY_MOMENT, "checkpoint.part", "checkpoint.part"]
            )
            number = generator.randrange(1500) if event == ANY_MOMENT else 1
            if event == "checkpoint.part":
                number = generator.randint(1, 4)
            is_kill = choice == 1 or generator.random() < 0.8
            resumption = 0 if is_kill else draw_resumption(generator)
            found[name] = Interruption(event, number, is_kill=is_kill, resumption=resumption)
        return found

    def _race_members(self, interruptions: dict[str, Interruption]) -> None:
        """Run all members at once. Stopped members continue at the latest after the others."""
        running: dict[str, BaseProcess] = {}
        barrier = self._context.Barrier(len(self._names))
        for name in self._names:
            (self._folder / f"{name}.json").unlink(missing_ok=True)  # of the race before
            resumptions = [
                Resumption(self._folder / f"{other}.interrupted", one.resumption)
                for other, one in interruptions.items()
                if other != name
            ]
            arguments = (
                self._spec.reveal_secrets(), self.job, name, self._seed, self._sources, self._step,
                interruptions.get(name), str(self._folder / name), barrier, self._owner_ready,
            )  # fmt: skip
            process = self._context.Process(
                target=_run_member, args=arguments, kwargs={"resumptions": resumptions}
            )
            start_process(process)
            running[name] = process
        deadline = time.monotonic() + _HANG_SECONDS
        while any(is_running(process) for process in running.values()):
            if time.monotonic() > deadline:
                self.wrong.append("a member hangs")
                break
            for process in running.values():
                process.join(0.02)
        for name, process in running.items():
            if is_stopped(process.pid):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)
            process.join(_HANG_SECONDS)
            if process.is_alive():
                self.wrong.append(f"{name} does not end")
                process.kill()
                process.join()
            marker, is_killed = self._folder / f"{name}.interrupted", False
            if name in interruptions and marker.exists():
                self.interrupted.append(interruptions[name])
                self.early_resumptions += make_resumption_marker(marker).exists()
                is_killed = interruptions[name].is_kill
            if not is_killed and not (self._folder / f"{name}.json").exists():
                self.wrong.append(f"{name} ended with {process.exitcode}")

    def _read_results(self) -> dict[str, dict[str, Any]]:
        """Return the result of each member that was not killed, by its name."""
        found: dict[str, dict[str, Any]] = {}
        for name in self._names:
            path = self._folder / f"{name}.json"
            if path.exists():
                found[name] = json.loads(path.read_bytes())
        return found

    def _has_root(self, store: Store) -> bool:
        """Decide whether the epoch has a committed checkpoint."""
        try:
            return (
                fetch(store, CheckpointKeys(self.job).make_epoch_key(0), EpochRecord).root
                is not None
            )
        except errors.NotFoundError:
            return False

    def _check_newest(self, store: Store) -> None:
        """Check that the newest checkpoint, if there is one, is not damaged."""
        complete = find_newest(store, self.job)
        if complete is not None and verify(store, complete):
            self.wrong.append("a damaged checkpoint was committed")

    def _judge(self, store: Store, results: dict[str, dict[str, Any]]) -> None:
        self.outcomes = [each["outcome"] for each in results.values()]
        keys = CheckpointKeys(self.job)
        if not self._has_root(store):
            self.wrong.append(f"no checkpoint: {results}")
            return
        epoch = fetch(store, keys.make_epoch_key(0), EpochRecord)
        winners = [
            name for name, each in results.items() if each["outcome"] == CooldownOutcome.COMMITTED
        ]
        if winners and winners != [epoch.member]:
            self.wrong.append(f"{winners} report that they have committed, but {epoch.member} has")
        mistaken = {name: each for name, each in results.items() if each["epoch"] != epoch.member}
        if mistaken:
            self.wrong.append(f"{epoch.member} has committed, but others report: {mistaken}")
        apply_retention(
            store, plan_retention(store, self.job, RetentionSettings(grace=timedelta(0)))
        )
        found = find_newest_verified(store, self.job)
        if found is None or found.root != epoch.root:
            self.wrong.append("the checkpoint of the epoch cannot be found, or is damaged")
            return
        named = {keys.make_part_key(part.step, part.digest) for part in found.parts}
        stored = {stat.key for stat in list_objects(store, keys.make_parts_prefix(self._step))}
        if stored != named:
            self.wrong.append(f"{len(stored - named)} unnamed, {len(named - stored)} missing")
        self.wrong += judge_checkpoints(self._bucket, self.job, is_cleaned=True)
        self._compare_with_source()

    def _compare_with_source(self) -> None:
        """Compare the committed metadata with that of the members' content."""
        committed = read_checkpoints(self._bucket, self.job)[self._step]
        source = read_checkpoints(self._source_bucket, "source")[self._step]
        for what, list_items in (("files", _list_files), ("tensors", _list_tensors)):
            if (found := list_items(committed)) != (expected := list_items(source)):
                surplus, missing = sorted(found - expected), sorted(expected - found)
                self.wrong.append(f"{what} that the members lack {surplus}, missing {missing}")
        if committed["position"] != {"sample": self._step}:
            self.wrong.append(f"the position is {committed['position']}")


def _list_files(checkpoint: dict[str, Any]) -> set[tuple[str, int]]:
    """Return the digests and sizes of the files of a checkpoint's metadata."""
    return {(part["digest"], part["size"]) for part in checkpoint["parts"]}


def _list_tensors(checkpoint: dict[str, Any]) -> set[str]:
    """Return the tensors of a checkpoint's metadata, with the digests of their files, as JSON."""
    digests = [part["digest"] for part in checkpoint["parts"]]

    def describe(name: str, tensor: dict[str, Any]) -> str:
        chunks = [{**chunk, "part": digests[chunk["part"]]} for chunk in tensor["chunks"]]
        return json.dumps({**tensor, "name": name, "chunks": chunks}, sort_keys=True)

    return {describe(name, tensor) for name, tensor in checkpoint["tensors"].items()}


def _run_member(
    spec: dict[str, Any],
    job: str,
    name: str,
    seed: int,
    sources: str,
    step: int,
    interruption: Interruption | None,
    path_stem: str,
    barrier: Any,
    owner_ready: Any | None,
    *,
    resumptions: Sequence[Resumption],
) -> None:
    """Run a member in this process, and write its result to a file."""
    source = open_store(sources)
    checkpoint = read_checkpoint(source, "source", step)
    store = open_store(StoreSpec(**spec))
    reads = store if owner_ready is not None else None
    with Membership(store, job, name, _TTL, reads=reads) as membership:
        barrier.wait(_HANG_SECONDS)
        if owner_ready is not None:
            owner_ready.wait(_HANG_SECONDS)
        result = cool_down(
            membership,
            open_content(source, checkpoint),
            epoch=0,
            position={"sample": step},
            seed=seed,
            settings=CooldownSettings(time=timedelta(minutes=5)),
            progress=Interrupter(interruption, Path(f"{path_stem}.interrupted"), resumptions),
        )
    member_result = {
        "outcome": result.outcome,
        "reason": result.reason,
        "epoch": result.epoch.member if result.epoch else None,
    }
    Path(f"{path_stem}.json").write_text(json.dumps(member_result))


def _save_with_kill(
    context: Any, shared_store: SharedStore, number: int, generator: Random
) -> tuple[int, list[str]]:
    """Kill a saver, let a second one save the same step, and judge the checkpoint.

    Returns:
        Number of savers that were killed, and the faults.
    """
    job = f"saves/s{number:04d}"
    spec = make_spec(shared_store)
    store = open_store(spec)
    keys = CheckpointKeys(job)
    interruption = generator.choice(
        [
            Interruption("checkpoint.part", generator.randint(1, _FILES - 1)),
            Interruption("checkpoint.part", _FILES),  # the last part before the metadata
            Interruption(ANY_MOMENT, generator.randrange(60)),
        ]
    )
    killed = 0
    for each in (interruption, None):
        process = context.Process(
            target=_run_saver, args=(spec.reveal_secrets(), job, number, each)
        )
        start_process(process)
        process.join(_HANG_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return killed, [f"{job}: a saver hangs"]
        is_killed = each is not None and process.exitcode == -signal.SIGKILL
        killed += is_killed
        if process.exitcode and not is_killed:
            return killed, [f"{job}: a saver ended with {process.exitcode}"]
        if each is not None and each.event != ANY_MOMENT and not is_killed:
            return killed, [f"{job}: the saver was not killed at file {each.number}"]
        found = find_newest_verified(store, job)
        if found is not None and found.step != 1:
            return killed, [f"{job}: step {found.step} exists"]
    wrong: list[str] = []
    if not _are_equal(load(store, job).state, _make_state(number)):
        wrong.append(f"{job}: different state")
    stored = {stat.key for stat in list_objects(store, keys.make_parts_prefix(1))}
    final = find_newest(store, job)
    if final is None or stored != {keys.make_part_key(1, part.digest) for part in final.parts}:
        wrong.append(f"{job}: files are unreferenced or missing")
    return killed, wrong + judge_checkpoints(shared_store.open_bucket(PREFIX), job, is_cleaned=True)


def _run_saver(
    spec: dict[str, Any], job: str, number: int, interruption: Interruption | None
) -> None:
    """Save a checkpoint in this process."""
    state = _make_state(number)
    store = open_store(StoreSpec(**spec))
    with Saver(
        store, job, SMALL_FILES, progress=Interrupter(interruption, Path(os.devnull))
    ) as saver:
        saver.save(state, step=1).result()


def _make_state(number: int) -> dict[str, Any]:
    """Return the state of a save."""
    import torch

    generator = torch.Generator().manual_seed(number)
    state = {f"w{i}": torch.randn(4000, generator=generator) for i in range(7)} | {"step": number}
    state["large"] = torch.randn(LARGE_SHAPE, generator=generator)
    return state


def _are_equal(state: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Decide whether two states of `_make_state` have equal bytes."""
    import torch

    if state.keys() != expected.keys() or state["step"] != expected["step"]:
        return False
    tensors = [name for name in expected if name != "step"]
    return all(
        state[name].dtype == expected[name].dtype and torch.equal(state[name], expected[name])
        for name in tensors
    )
