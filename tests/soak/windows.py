"""Runs of gradients while their aggregator is killed or stopped, and the store fails.

Aggregators are processes; the workers' side is here. What the workers send follows from the seed
and the weights alone, so that each run must come to the same weights, window by window, as one
that nothing befell.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import torch

from millrace import errors
from millrace.checkpoints import Saver
from millrace.gradients import (
    AggregatorSettings,
    ChainLink,
    Codec,
    GatherSettings,
    InitialWeights,
    OuterKind,
    OuterOptimizer,
    Participant,
    RunSettings,
    Sender,
    aggregate_run,
    catch_up,
    copy_state,
    iterate_links,
    load_newest_state,
    merge_windows,
)
from millrace.gradients.sync.aggregator import load_or_begin_run
from millrace.gradients.sync.chain import find_newest_window
from millrace.storage import Store, StoreSpec, list_objects, open_store
from tests.soak.blows import ANYWHERE, Blow, Struck, stopped

AT = ("gradient.taken", "update.stored", "window.merged", "checkpoint.part", "checkpoint.saved")
AGAIN = "chain.applied"  # only one that was started again replays
ALL = (*AT, AGAIN, ANYWHERE)
UIDS = ("a", "b", "c")
WINDOWS = 4
_HANGS = 180.0  # seconds
_SIDE_BY_SIDE = 4
_FREE = 0.3  # seconds to the next look

Tell = Callable[[str], None]


@dataclass
class Found:
    """Results of the runs."""

    runs: int = 0
    blows: Counter[str] = field(default_factory=Counter[str])
    stops: int = 0
    together: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])


def run_windows(
    places: Sequence[StoreSpec], folder: Path, seed: int, *, runs: int, tell: Tell
) -> Found:
    """Aggregate so many runs, everywhere in turn.

    Args:
        places: Where to.
        folder: For what they begin with, and what the aggregators say.
        seed: Of all chance.
        runs: How many.
        tell: Told a line now and then.
    """
    found, lock = Found(), threading.Lock()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.soak.windows"])
    begin = _begin(folder)
    clean = _Run(context, StoreSpec(url=(folder / "clean").as_uri()), begin, folder, 0, [])
    clean.run()
    wanted = clean.states
    if clean.wrong:
        found.wrong += [f"without any blow: {what}" for what in clean.wrong]
        return found

    def one(number: int) -> None:
        dice = Random(f"{seed} windows {number}")
        place = places[number % len(places)]
        run = _Run(context, place, begin, folder, number, _blows(dice))
        try:
            run.run()
        except TimeoutError as error:
            run.wrong.append(str(error))
        else:
            if run.states != wanted:
                run.wrong.append(f"other weights than without any blow: {run.states}")
        finally:
            run.kill()
        with lock:
            found.runs += 1
            found.blows += Counter(blow.at for blow in run.struck)
            found.stops += sum(not blow.kill for blow in run.struck)
            found.together += run.together
            found.ends += run.ends
            found.wrong += [f"{run.settings.run.name}: {what}" for what in run.wrong]
            if found.runs % 20 == 0:
                blows = found.blows.total()
                tell(f"runs {found.runs}, blows {blows}, wrong {len(found.wrong)}")

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        list(pool.map(one, range(1, runs + 1)))
    return found


def summary(found: Found) -> list[str]:
    """Return the lines of the report."""
    at = ", ".join(f"{name} {count}" for name, count in sorted(found.blows.items()))
    ends = ", ".join(f"{name} {count}" for name, count in sorted(found.ends.items()))
    last = (
        f"runs of gradients {found.runs}, aggregators killed {found.blows.total() - found.stops}, "
        f"stopped {found.stops}, two at once {found.together}; wrong {len(found.wrong)}"
    )
    return [f"blows at {at}", f"aggregators ended by {ends}", *found.wrong, last]


def _blows(dice: Random) -> list[Blow]:
    """Return the blows for the first aggregator of a run, and perhaps the next; none for two."""
    way = dice.randrange(8)
    if way == 0:
        return []
    first = _blow(dice, dice.choice([*AT, ANYWHERE]), kill=way > 1)
    if way % 2 == 0:
        return [first]
    return [first, _blow(dice, dice.choice([*AT, AGAIN, AGAIN, ANYWHERE]), kill=True)]


def _blow(dice: Random, at: str, *, kill: bool) -> Blow:
    if at == ANYWHERE:
        return Blow(at, dice.randrange(3000), kill=kill)
    most = {"gradient.taken": len(UIDS) * WINDOWS, AGAIN: 1, "checkpoint.saved": 2}
    return Blow(at, dice.randint(1, most.get(at, WINDOWS)), kill=kill)


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 10))


_FIRST = _model()


def _begin(folder: Path) -> InitialWeights:
    store = open_store((folder / "begin").as_uri())
    with Saver(store, "trained") as saver:
        saver.save(dict(_FIRST.named_parameters()), step=7).result()
    return InitialWeights(**dict(store.spec), job="trained")


class _Run:
    """A run, from its beginning to its last window, by as many aggregators as it takes."""

    def __init__(
        self,
        context: Any,
        place: StoreSpec,
        begin: InitialWeights,
        folder: Path,
        number: int,
        blows: list[Blow],
    ) -> None:
        run = RunSettings(
            run=f"windows/w{number:04d}",
            codec=Codec(k=256, bits=4),
            outer=OuterOptimizer(kind=OuterKind.NESTEROV, lr=0.7),
            gather=GatherSettings(quorum=len(UIDS), poll_interval=timedelta(milliseconds=50)),
            window=timedelta(minutes=3),
            steps=5,
        )
        self.settings = AggregatorSettings(
            run=run, store=place, workers=UIDS, initial_weights=begin, until=WINDOWS, every=2,
            lease=timedelta(seconds=3),
        )  # fmt: skip
        self._context, self._blows = context, blows
        self.together = number > 0 and not blows
        self._folder = folder / f"said-{number:04d}"
        self._folder.mkdir()
        self._started: list[tuple[BaseProcess, Blow | None]] = []
        self.struck: list[Blow] = []
        self.states: list[str] = []
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        store, keys = open_store(self.settings.store), self.settings.run.chain
        self._until(lambda: find_newest_window(store, keys) >= 0)
        everybody = [Participant.join(self.settings.run, uid, store, store) for uid in UIDS]
        models = [_model() for _ in UIDS]
        for window in range(1, WINDOWS + 1):
            for uid, participant, model in zip(UIDS, everybody, models, strict=True):
                next(participant.iterate_windows())
                participant.load(model)
                _change(model, window, uid)
                participant.submit(model)
            self._until(lambda window=window: find_newest_window(store, keys) >= window)
        for participant, model in zip(everybody, models, strict=True):
            participant.catch_up()
            participant.load(model)
        self._end()
        self._judge(store, models)

    def kill(self) -> None:
        """Kill the aggregators that are left, also those that are stopped."""
        for process, _ in self._started:
            process.kill()

    def _until(self, done: Callable[[], bool]) -> None:
        """See to it that somebody aggregates, until it is done."""
        deadline = time.monotonic() + _HANGS
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.settings.run.name} hangs")
            at_work = sum(
                process.is_alive() and not stopped(process) for process, _ in self._started
            )
            if not at_work:
                for _ in range(2 if self.together else 1):
                    self._start()
            time.sleep(_FREE)

    def _start(self) -> None:
        number = len(self._started)
        blow = self._blows[number] if number < len(self._blows) else None
        said = str(self._folder / str(number))
        process = self._context.Process(
            target=_aggregate,
            args=(
                self.settings.model_dump_json(),
                self.settings.store.reveal_secrets(),
                blow,
                said,
            ),
            kwargs={"alone": not self.together},
        )
        process.start()
        self._started.append((process, blow))

    def _end(self) -> None:
        """Let those go on that were stopped, and wait for all."""
        for number, (process, blow) in enumerate(self._started):
            if stopped(process):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)
            process.join(_HANGS)
            if process.is_alive():
                self.wrong.append("an aggregator does not end")
                process.kill()
                process.join()
            if blow is not None and (self._folder / f"{number}.struck").exists():
                self.struck.append(blow)
            said = self._folder / f"{number}.json"
            if said.exists():
                self.ends[json.loads(said.read_bytes())] += 1
            elif process.exitcode != -signal.SIGKILL:
                self.wrong.append(f"an aggregator ended with {process.exitcode}")

    def _judge(self, store: Store, models: Sequence[torch.nn.Module]) -> None:
        keys = self.settings.run.chain
        chain = list(iterate_links(store, keys))
        self.states = [link.state for link in chain]
        if [link.window for link in chain] != list(range(1, WINDOWS + 1)):
            self.wrong.append(f"windows {[link.window for link in chain]}")
        for link in chain:
            if set(link.taken) != set(UIDS):
                self.wrong.append(f"window {link.window} is without {link.excluded}")
        beside = (stat.key for stat in list_objects(store, keys.prefix))
        updates = {key for key in beside if "/" not in key.removeprefix(keys.prefix)}
        if updates != {update.key for link in chain for update in link.updates}:
            self.wrong.append(f"{len(updates)} updates of {len(chain)} windows")
        state, window = load_newest_state(store, keys)
        catch_up(store, keys, state, after=window)
        trained = {copy_state(dict(model.named_parameters())).digest() for model in models}
        live = {copy_state(state.weights).digest()}
        if state.digest() != chain[-1].state or trained != live:
            self.wrong.append(f"from window {window} on there are other weights than live")


def _change(model: torch.nn.Module, window: int, uid: str) -> None:
    """Change a model as a worker's training would."""
    dice = torch.Generator().manual_seed(1000 * window + ord(uid))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=dice), alpha=0.01)


def _aggregate(
    settings: str, place: dict[str, Any], blow: Blow | None, said: str, *, alone: bool
) -> None:
    """An aggregator, in a process of its own; without a lease, if it is not to be alone."""
    torch.set_num_threads(1)
    whole = AggregatorSettings.model_validate_json(settings)
    whole = whole.model_copy(update={"store": StoreSpec(**place)})
    struck = Struck(blow, Path(f"{said}.struck"))
    try:
        if alone:
            list(aggregate_run(whole, progress=struck))
        else:
            list(_without_lease(whole))
        end = "its end"
    except (errors.HeldError, errors.ConflictError) as error:
        end = type(error).__name__
    Path(f"{said}.json").write_text(json.dumps(end))


def _without_lease(settings: AggregatorSettings) -> Iterator[ChainLink]:
    """As if the lease had let two through."""
    store, run = open_store(settings.store), settings.run
    state, after = load_or_begin_run(settings, store)
    workers = [Sender(uid, store) for uid in settings.workers]
    return merge_windows(store, run, workers, state, after=after, until=settings.until)
