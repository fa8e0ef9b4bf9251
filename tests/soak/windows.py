"""Aggregate runs of gradients while aggregators are killed or stopped, and the store fails.

The aggregators are processes. The workers run in this process. Their gradients follow from the
window, the worker and the weights alone. Each run must therefore have the same weights after each
window as an undisturbed run.
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
    AggregationSettings,
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
from millrace.gradients.merging.links import find_newest_window, read_link
from millrace.gradients.sync.aggregator import load_or_begin_run
from millrace.storage import Store, StoreSpec, list_objects, open_store
from tests.oracle import compute_weights_digest, judge_checkpoints, read_checkpoints
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
from tests.soak.races import PREFIX, make_spec
from tests.soak.shared_stores import FolderStore, SharedStore

EVENTS = ("gradient.taken", "update.stored", "window.merged", "checkpoint.part", "checkpoint.saved")
REPLAYED = "chain.applied"  # event of an aggregator that continues a run
POINTS = (*EVENTS, REPLAYED, ANY_MOMENT)
UIDS = ("a", "b", "c")
WINDOWS = 4
_EVERY = 2  # windows between two checkpoints
_HANG_SECONDS = 180.0  # seconds
_CONCURRENCY = 4
_CLEAN_END = "its end"  # end of an aggregator that merged all windows
_POLL_SECONDS = 0.3  # interval between two checks

Report = Callable[[str], None]


@dataclass
class Counts:
    """Counts of the runs.

    Attributes:
        runs: Number of runs.
        interruptions: Number of interruptions by event.
        stops: Number of interruptions with SIGSTOP.
        early_resumptions: Number of stopped aggregators that continued beside their successors.
        pairs: Number of runs with two aggregators at once.
        ends: Number of aggregators by the reason of their end.
        wrong: Descriptions of the faults.
    """

    runs: int = 0
    interruptions: Counter[str] = field(default_factory=Counter[str])
    stops: int = 0
    early_resumptions: int = 0
    pairs: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])


def run_windows(
    stores: Sequence[SharedStore], folder: Path, seed: int, *, runs: int, report: Report
) -> Counts:
    """Aggregate so many runs, in each store in turn.

    Args:
        stores: Stores of the runs.
        folder: Folder for the initial weights and the results of the aggregators.
        seed: Seed of all random choices.
        runs: Number of runs.
        report: Function that is called with a line of progress.
    """
    found, lock = Counts(), threading.Lock()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.soak.windows"])
    weights_store = _save_initial_weights(folder)
    undisturbed = _Run(context, FolderStore(folder / "clean"), weights_store, folder, 0, [])
    undisturbed.run()
    expected = undisturbed.states
    if undisturbed.saved_windows != [*range(0, WINDOWS + 1, _EVERY)]:
        undisturbed.wrong.append(f"checkpoints of windows {undisturbed.saved_windows}")
    if undisturbed.wrong:
        found.wrong += [f"undisturbed: {what}" for what in undisturbed.wrong]
        return found

    def run_aggregation(number: int) -> None:
        generator = Random(f"{seed} windows {number}")
        store = stores[number % len(stores)]
        run = _Run(context, store, weights_store, folder, number, _draw_interruptions(generator))
        try:
            run.run()
        except TimeoutError as error:
            run.wrong.append(str(error))
        else:
            if run.states != expected:
                run.wrong.append(f"weights differ from the undisturbed run: {run.states}")
        finally:
            run.kill()
        with lock:
            found.runs += 1
            found.interruptions += Counter(interruption.event for interruption in run.interrupted)
            found.stops += sum(not interruption.is_kill for interruption in run.interrupted)
            found.early_resumptions += run.early_resumptions
            found.pairs += run.is_pair
            found.ends += run.ends
            found.wrong += [f"{run.settings.run.name}: {what}" for what in run.wrong]
            if found.runs % 20 == 0:
                total = found.interruptions.total()
                report(f"runs {found.runs}, interruptions {total}, wrong {len(found.wrong)}")

    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        list(pool.map(run_aggregation, range(1, runs + 1)))
    return found


def format_summary(found: Counts) -> list[str]:
    """Return the lines of the summary."""
    points = ", ".join(f"{name} {count}" for name, count in sorted(found.interruptions.items()))
    ends = ", ".join(f"{name} {count}" for name, count in sorted(found.ends.items()))
    last = (
        f"runs of gradients {found.runs}, "
        f"aggregators killed {found.interruptions.total() - found.stops}, "
        f"stopped {found.stops} (resumed early {found.early_resumptions}), "
        f"two at once {found.pairs}; wrong {len(found.wrong)}"
    )
    return [f"interruptions at {points}", f"aggregators ended by {ends}", *found.wrong, last]


def _draw_interruptions(generator: Random) -> list[Interruption]:
    """Return the interruptions of the first aggregators of a run. None for two at once."""
    choice = generator.randrange(8)
    if choice == 0:
        return []
    first = _draw_interruption(
        generator, generator.choice([*EVENTS, ANY_MOMENT]), is_kill=choice > 1
    )
    if choice % 2 == 0:
        return [first]
    return [
        first,
        _draw_interruption(
            generator, generator.choice([*EVENTS, REPLAYED, REPLAYED, ANY_MOMENT]), is_kill=True
        ),
    ]


def _draw_interruption(generator: Random, event: str, *, is_kill: bool) -> Interruption:
    largest = {"gradient.taken": len(UIDS) * WINDOWS, REPLAYED: 1, "checkpoint.saved": 2}
    if event == ANY_MOMENT:
        number = generator.randrange(3000)
    else:
        number = generator.randint(1, largest.get(event, WINDOWS))
    resumption = 0 if is_kill else draw_resumption(generator)
    return Interruption(event, number, is_kill=is_kill, resumption=resumption)


def _make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 10))


_INITIAL_MODEL = _make_model()


def _save_initial_weights(folder: Path) -> StoreSpec:
    """Save the initial weights of all runs in a folder, and return their store."""
    store = open_store((folder / "begin").as_uri())
    with Saver(store, "trained") as saver:
        saver.save(dict(_INITIAL_MODEL.named_parameters()), step=7).result()
    return store.spec


class _Run:
    """Run of gradients, with its workers and as many aggregators as it needs."""

    def __init__(
        self,
        context: Any,
        shared_store: SharedStore,
        weights_store: StoreSpec,
        folder: Path,
        number: int,
        interruptions: list[Interruption],
    ) -> None:
        run = RunSettings(
            run=f"windows/w{number:04d}",
            codec=Codec(k=256, bits=4),
            outer=OuterOptimizer(kind=OuterKind.NESTEROV, lr=0.7),
            gather=GatherSettings(quorum=len(UIDS), poll_interval=timedelta(milliseconds=50)),
            window_length=timedelta(minutes=3),
            steps=5,
        )
        self.settings = AggregatorSettings(
            run=run, store=make_spec(shared_store), workers=UIDS,
            initial_weights=InitialWeights(job="trained"), initial_weights_store=weights_store,
            until=WINDOWS,
            aggregation=AggregationSettings(every=_EVERY, lease_timeout=timedelta(seconds=3)),
        )  # fmt: skip
        self._bucket = shared_store.open_bucket(PREFIX)
        self._context, self._interruptions = context, interruptions
        self.is_pair = number > 0 and not interruptions
        self._folder = folder / f"results-{number:04d}"
        self._folder.mkdir()
        self._started: list[tuple[BaseProcess, Interruption | None]] = []
        self.interrupted: list[Interruption] = []
        self.early_resumptions = 0
        self.states: list[str] = []
        self.saved_windows: list[int] = []
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self) -> None:
        """Run the workers for all windows, and judge the chain.

        Raises:
            TimeoutError: A window was not merged in time.
        """
        store, keys = open_store(self.settings.store), self.settings.run.chain_keys
        self._aggregate_until(lambda: find_newest_window(store, keys) >= 0)
        participants = [Participant.join(self.settings.run, uid, store, store) for uid in UIDS]
        models = [_make_model() for _ in UIDS]
        for window in range(1, WINDOWS + 1):
            for uid, participant, model in zip(UIDS, participants, models, strict=True):
                next(participant.iterate_windows())
                participant.load(model)
                _change_model(model, window, uid)
                participant.submit(model)
            self._aggregate_until(lambda window=window: find_newest_window(store, keys) >= window)
        for participant, model in zip(participants, models, strict=True):
            participant.catch_up()
            participant.load(model)
        self._wait_for_aggregators()
        self._judge(store, models)

    def kill(self) -> None:
        """Kill the remaining aggregators, also stopped ones."""
        for process, _ in self._started:
            process.kill()

    def _aggregate_until(self, done: Callable[[], bool]) -> None:
        """Start aggregators whenever none is running, until a condition is true."""
        deadline = time.monotonic() + _HANG_SECONDS
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.settings.run.name} hangs")
            running = sum(is_running(process) for process, _ in self._started)
            if not running:
                for _ in range(2 if self.is_pair else 1):
                    self._start_aggregator()
            time.sleep(_POLL_SECONDS)

    def _start_aggregator(self) -> None:
        number = len(self._started)
        interruption = self._interruptions[number] if number < len(self._interruptions) else None
        path_stem = str(self._folder / str(number))
        process = self._context.Process(
            target=_aggregate,
            args=(
                self.settings.model_dump_json(),
                self.settings.store.reveal_secrets(),
                interruption,
                path_stem,
                [
                    Resumption(self._make_marker(before), one.resumption)
                    for before, (_, one) in enumerate(self._started)
                    if one is not None
                ],
            ),
            kwargs={"with_lease": not self.is_pair},
        )
        start_process(process)
        self._started.append((process, interruption))

    def _make_marker(self, number: int) -> Path:
        return self._folder / f"{number}.interrupted"

    def _wait_for_aggregators(self) -> None:
        """Resume the stopped aggregators, wait for all, and read their results."""
        for number, (process, interruption) in enumerate(self._started):
            if is_stopped(process.pid):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)
            process.join(_HANG_SECONDS)
            if process.is_alive():
                self.wrong.append("an aggregator does not end")
                process.kill()
                process.join()
            if interruption is not None and self._make_marker(number).exists():
                self.interrupted.append(interruption)
            self.early_resumptions += make_resumption_marker(self._make_marker(number)).exists()
            result = self._folder / f"{number}.json"
            if result.exists():
                self.ends[json.loads(result.read_bytes())] += 1
            elif process.exitcode != -signal.SIGKILL:
                self.wrong.append(f"an aggregator ended with {process.exitcode}")

    def _judge(self, store: Store, models: Sequence[torch.nn.Module]) -> None:
        keys = self.settings.run.chain_keys
        chain = list(iterate_links(store, keys))
        self.states = [link.state for link in chain]
        if [link.window for link in chain] != list(range(1, WINDOWS + 1)):
            self.wrong.append(f"windows {[link.window for link in chain]}")
        for link in chain:
            if set(link.taken) != set(UIDS):
                self.wrong.append(f"window {link.window} is without {link.excluded}")
        keys_in_prefix = (stat.key for stat in list_objects(store, keys.prefix))
        updates = {key for key in keys_in_prefix if "/" not in key.removeprefix(keys.prefix)}
        if updates != {update.key for link in chain for update in link.updates}:
            self.wrong.append(f"{len(updates)} updates for {len(chain)} windows")
        state, window = load_newest_state(store, keys)
        catch_up(store, keys, state, after=window)
        trained = {copy_state(dict(model.named_parameters())).digest() for model in models}
        expected_digests = {copy_state(state.weights).digest()}
        if state.digest() != chain[-1].state or trained != expected_digests:
            self.wrong.append(
                f"the weights from window {window} on differ from those of the workers"
            )
        self._judge_checkpoints(store, chain)

    def _judge_checkpoints(self, store: Store, chain: Sequence[ChainLink]) -> None:
        """Judge each checkpoint by its window's link, and require the newest one."""
        job = self.settings.run.chain_keys.job
        if not self.is_pair and not self.ends[_CLEAN_END]:  # no aggregator saved its last weights
            list(aggregate_run(self.settings))
        self.wrong += judge_checkpoints(self._bucket, job, is_cleaned=False)
        links = [read_link(store, self.settings.run.chain_keys, 0), *chain]
        for step, checkpoint in sorted(read_checkpoints(self._bucket, job).items()):
            window = checkpoint["position"].get("window")
            if not isinstance(window, int) or not 0 <= window < len(links):
                self.wrong.append(f"the checkpoint of step {step} names window {window}")
                continue
            self.saved_windows.append(window)
            if step != links[window].step:
                self.wrong.append(f"the checkpoint of window {window} is of step {step}")
            elif compute_weights_digest(self._bucket, checkpoint) != links[window].state:
                self.wrong.append(f"the checkpoint of window {window} has other weights")
        newest = 0 if self.is_pair else WINDOWS
        if max(self.saved_windows, default=-1) != newest:
            self.wrong.append(f"the newest checkpoint is of windows {self.saved_windows}")


def _change_model(model: torch.nn.Module, window: int, uid: str) -> None:
    """Change the weights of a model as the training of a worker does."""
    generator = torch.Generator().manual_seed(1000 * window + ord(uid))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.01)


def _aggregate(
    settings: str,
    spec: dict[str, Any],
    interruption: Interruption | None,
    path_stem: str,
    resumptions: Sequence[Resumption],
    *,
    with_lease: bool,
) -> None:
    """Aggregate in this process, with or without a lease, and write the reason of the end."""
    torch.set_num_threads(1)
    aggregator_settings = AggregatorSettings.model_validate_json(settings)
    aggregator_settings = aggregator_settings.model_copy(update={"store": StoreSpec(**spec)})
    marker = Path(f"{path_stem}.interrupted")
    interrupted = Interrupter(interruption, marker, resumptions)
    try:
        if with_lease:
            list(aggregate_run(aggregator_settings, progress=interrupted))
        else:
            list(_merge_without_lease(aggregator_settings))
        end = _CLEAN_END
    except (errors.HeldError, errors.ConflictError) as error:
        end = type(error).__name__
    Path(f"{path_stem}.json").write_text(json.dumps(end))


def _merge_without_lease(settings: AggregatorSettings) -> Iterator[ChainLink]:
    """Merge windows without a lease, so that two aggregators can work at once."""
    store, run = open_store(settings.store), settings.run
    state, after = load_or_begin_run(settings, store)
    workers = [Sender(uid, store) for uid in settings.workers]
    return merge_windows(store, run, workers, state, after=after, until=settings.until)
