"""The aggregator as a person starts it, and the weights that it leaves behind."""

import json
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from pydantic import ValidationError

from millrace import errors
from millrace.checkpoints import Saver, iterate_checkpoints, load
from millrace.checkpoints.progress_events import CheckpointDamaged
from millrace.cli import main
from millrace.gradients import (
    AggregationSettings,
    AggregatorSettings,
    ChainError,
    ChainLink,
    Codec,
    ExclusionReason,
    GatherSettings,
    InitialWeights,
    MergeSettings,
    OuterKind,
    OuterOptimizer,
    Participant,
    RunSettings,
    ScoringRules,
    WeightState,
    aggregate_run,
    begin_run,
    catch_up,
    copy_state,
    iterate_links,
    load_newest_state,
)
from millrace.gradients.merging.links import find_newest_window
from millrace.gradients.sync import windows
from millrace.gradients.sync.gather_results import GatherOutcome
from millrace.gradients.weights import save_weights
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.leases import LeaseKeys
from millrace.lease import Holder, Lease, LeaseTerm, StoreClock, acquire
from millrace.progress import Event
from millrace.records import RecordPart, commit_once
from millrace.storage import Store, exists, open_store, put, read

UIDS = ("a", "b", "c")


def model(seed: int = 5) -> torch.nn.Module:
    dice = torch.Generator().manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4))
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=dice))
    return made


def settings_of(store: Store, **changes: object) -> AggregatorSettings:
    run = RunSettings(
        run="runs/one",
        codec=Codec(k=256, bits=4),
        outer=OuterOptimizer(kind=OuterKind.NESTEROV, lr=0.5),
        gather=GatherSettings(poll_interval=timedelta(milliseconds=20), quorum=len(UIDS)),
        window_length=timedelta(minutes=1),
        steps=5,
    )
    whole = AggregatorSettings(
        run=run, store=store.spec, workers=UIDS, aggregation=AggregationSettings(every=2)
    )
    return whole.model_copy(update=changes)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "bucket").as_uri())


@pytest.fixture
def trained(store: Store) -> str:
    """A checkpoint of a training, with its optimizer's state."""
    state = {"model": dict(model().named_parameters()), "optimizer": {"lr": 0.1}}
    with Saver(store, "trained") as saver:
        saver.save(state, step=40).result()
    return "trained"


def take_part(settings: AggregatorSettings, store: Store, uid: str, windows: int) -> str:
    """Train without training: each window moves the weights by what the worker's name says."""
    mine = model()
    participant = Participant.join(settings.run, uid, store, store)
    for count, turn in enumerate(participant.iterate_windows(), start=1):
        participant.load(mine)
        dice = torch.Generator().manual_seed(turn.number * 1000 + ord(uid))
        with torch.no_grad():
            for weight in mine.parameters():
                weight.add_(torch.randn(weight.shape, generator=dice), alpha=0.01)
        participant.submit(mine, tokens=8)
        participant.receive(mine, timeout=timedelta(minutes=1))
        if count == windows:
            break
    participant.load(mine)
    return copy_state(dict(mine.named_parameters())).digest()


def run_windows(store: Store, windows: int, settings: AggregatorSettings) -> list[ChainLink]:
    with ThreadPoolExecutor(len(UIDS)) as pool:
        working = [pool.submit(take_part, settings, store, uid, windows) for uid in UIDS]
        made = list(aggregate_run(settings.model_copy(update={"max_windows": windows})))
        assert len({worker.result() for worker in working}) == 1
    return made


def load_newest(store: Store, settings: AggregatorSettings) -> tuple[WeightState, int]:
    state, window = load_newest_state(store, settings.run.chain_keys)
    catch_up(store, settings.run.chain_keys, state, after=window)
    return state, window


@pytest.fixture
def begun(store: Store) -> AggregatorSettings:
    settings = settings_of(store)
    begin_run(store, settings.run.chain_keys, copy_state(dict(model().named_parameters())), step=40)
    return settings


def test_a_run_begins_with_a_checkpoint_and_goes_on_from_its_own(store, begun):
    first = run_windows(store, 3, begun)
    assert [link.step for link in first] == [45, 50, 55]
    assert all(set(link.taken) == set(UIDS) for link in first)
    taken = first[0].taken["a"]
    assert taken.norm > 0
    assert taken.size > 100
    keys = begun.run.chain_keys
    steps = [found.step for found in iterate_checkpoints(store, keys.job)]
    assert steps == [55, 50, 40]  # after every second window, and at the end

    second = run_windows(store, 4, begun)
    assert [link.window for link in second] == [4, 5, 6, 7]
    state, window = load_newest(store, begun)
    assert window == 7
    assert state.digest() == second[-1].state
    kept = [found.step for found in iterate_checkpoints(store, keys.job)]
    assert kept == [75, 70, 60, 40]  # the last three, and that of the beginning


def test_weights_that_a_killed_aggregator_has_not_saved_are_saved_by_the_next(store, begun):
    with ThreadPoolExecutor(len(UIDS)) as pool:
        working = [pool.submit(take_part, begun, store, uid, 3) for uid in UIDS]
        merging = aggregate_run(begun)
        made = [next(merging) for _ in range(3)]
        merging.close()
        assert len({worker.result() for worker in working}) == 1
    keys = begun.run.chain_keys
    assert [found.step for found in iterate_checkpoints(store, keys.job)] == [50, 40]

    assert list(aggregate_run(begun.model_copy(update={"until": 3}))) == []
    state, window = load_newest_state(store, keys)
    assert (window, state.digest()) == (3, made[-1].state)


def test_it_begins_with_any_checkpoint_once(store, trained):
    begin = InitialWeights(job=trained, tensors="model.")
    alone = RunSettings(run="runs/two", window_length=timedelta(milliseconds=50), gather=QUICK)
    settings = AggregatorSettings(
        run=alone, store=store.spec, workers=("a",), initial_weights=begin
    )
    made = list(aggregate_run(settings))
    assert [link.window for link in made] == [1, 2, 3]  # nobody came, so it was over
    assert {one.reason for link in made for one in link.excluded.values()} == {
        ExclusionReason.MISSING
    }
    state, window = load_newest_state(store, alone.chain_keys)
    assert window == 3
    assert state.digest() == copy_state(dict(model().named_parameters())).digest()
    again = list(aggregate_run(settings.model_copy(update={"max_windows": 1})))
    assert [link.window for link in again] == [4]


QUICK = GatherSettings(poll_interval=timedelta(milliseconds=10))


def test_without_weights_nothing_begins(store, trained):
    settings = settings_of(store)
    with pytest.raises(errors.NotFoundError, match="Set `initial_weights`"):
        list(aggregate_run(settings))
    nothing = settings_of(store, initial_weights=InitialWeights(job=trained, tensors="weights."))
    with pytest.raises(errors.ConfigurationError, match=r"no weights whose names begin with"):
        list(aggregate_run(nothing))
    with pytest.raises(errors.NotFoundError):
        list(aggregate_run(settings_of(store, initial_weights=InitialWeights(job="nobody"))))


def test_one_that_lives_is_left_alone_until_it_is_gone(store, begun):
    elsewhere = Holder(id="e", host="elsewhere", machine="elsewhere", pid=7, started="1")
    job, ttl = begun.run.chain_keys.job, timedelta(seconds=3)
    clock = StoreClock.read(store, job, elsewhere)
    lease = acquire(store, LeaseKeys(job, "aggregator"), elsewhere, ttl, clock)
    assert isinstance(lease, Lease)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(lambda: list(aggregate_run(begun)))
        while not waiting.done():
            lease.beat()
        with pytest.raises(errors.HeldError, match="process 7 on elsewhere"):
            waiting.result()
    ended = begun.model_copy(update={"max_windows": 1})
    brief = ended.run.model_copy(update={"window_length": timedelta(milliseconds=10)})
    lease.release()
    (link,) = aggregate_run(ended.model_copy(update={"run": brief}))
    assert link.window == 1


def take_lease(store: Store, settings: AggregatorSettings) -> None:
    """Begin the next term, as another process does after the lease has ended."""
    term = LeaseTerm(holder=Holder.describe_this_process(), ttl=settings.aggregation.lease_timeout)
    commit_once(store, LeaseKeys(settings.run.chain_keys.job, "aggregator").make_term_key(1), term)


def test_one_whose_lease_another_has_taken_commits_and_opens_nothing(store, begun):
    keys = begun.run.chain_keys
    brief = begun.run.model_copy(update={"window_length": timedelta(milliseconds=10)})
    merging = aggregate_run(begun.model_copy(update={"run": brief}))
    assert next(merging).window == 1
    take_lease(store, begun)
    with pytest.raises(errors.HeldError, match="let that one continue"):
        next(merging)
    assert not exists(store, keys.make_opening_key(2))


def test_one_whose_lease_another_takes_while_a_window_is_open_commits_no_link(
    store, begun, monkeypatch
):
    gather = windows.gather

    def take_over(*arguments: Any, **options: Any) -> GatherOutcome:
        take_lease(store, begun)
        return gather(*arguments, **options)

    monkeypatch.setattr(windows, "gather", take_over)
    brief = begun.run.model_copy(update={"window_length": timedelta(milliseconds=10)})
    with pytest.raises(errors.HeldError, match="let that one continue"):
        next(aggregate_run(begun.model_copy(update={"run": brief})))
    assert exists(store, begun.run.chain_keys.make_opening_key(1))
    assert find_newest_window(store, begun.run.chain_keys) == 0


def test_a_checkpoint_that_is_damaged_or_not_the_chains_is_passed_over(store, begun):
    made = run_windows(store, 4, begun)
    keys = begun.run.chain_keys
    foreign = copy_state(dict(model(9).named_parameters()))
    save_weights(foreign, store, keys.job, step=made[2].step, window=3)  # with other weights
    save_weights(foreign, store, keys.job, step=99, window=4)  # of no step that the chain has
    with Saver(store, keys.job) as saver:
        saver.save({"weights": {}}, step=100).result()  # of nothing
        saver.save({"weights": {}}, step=51, position={"window": 3}).result()  # without moments
    good = next(
        found for found in iterate_checkpoints(store, keys.job) if found.step == made[-1].step
    )
    state, window = load_newest_state(store, keys)
    assert (window, state.digest()) == (4, made[-1].state)

    key = CheckpointKeys(keys.job).make_part_key(good.parts[0].step, good.parts[0].digest)
    body = bytearray(read(store, key))
    body[-1] ^= 1
    put(store, key, bytes(body))
    told: list[Event] = []
    state, window = load_newest_state(store, keys, progress=told.append)
    damaged = [event.step for event in told if isinstance(event, CheckpointDamaged)]
    assert damaged == [100, 99, 60, 55, 51]
    assert window == 2
    catch_up(store, keys, state, after=window)
    assert state.digest() == made[-1].state


def test_without_any_checkpoint_it_says_which_to_bring_back(store, begun):
    keys = begun.run.chain_keys
    (only,) = iterate_checkpoints(store, keys.job)
    put(store, CheckpointKeys(keys.job).make_part_key(only.step, only.parts[0].digest), b"")
    with pytest.raises(ChainError, match="restore the checkpoint that its first link names"):
        load_newest_state(store, keys)


def test_workers_with_buckets_of_their_own_and_a_shared_one(store, begun, tmp_path):
    shared, own = (open_store((tmp_path / name).as_uri()) for name in ("shared", "own"))
    settings = begun.model_copy(
        update={"gradients_store": shared.spec, "worker_stores": {"c": own.spec}, "max_windows": 1}
    )
    with ThreadPoolExecutor(3) as pool:
        working = [
            pool.submit(take_part_in, settings, bucket, store, uid)
            for uid, bucket in (("a", shared), ("b", shared), ("c", own))
        ]
        (link,) = aggregate_run(settings)
        assert len({one.result() for one in working}) == 1
    assert set(link.taken) == set(UIDS)


def take_part_in(settings: AggregatorSettings, bucket: Store, chain: Store, uid: str) -> str:
    mine = model()
    participant = Participant.join(settings.run, uid, bucket, chain)
    next(participant.iterate_windows())
    with torch.no_grad():
        for weight in mine.parameters():
            weight.mul_(1.01 + 0.01 * ord(uid))
    participant.submit(mine)
    return participant.receive(mine, timeout=timedelta(minutes=1)).state


def test_a_run_of_so_many_windows_is_over_for_all(store):
    settings = settings_of(store)
    run = settings.run.model_copy(update={"windows": 2})
    settings = settings.model_copy(update={"run": run})
    begin_run(store, run.chain_keys, copy_state(dict(model().named_parameters())))
    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(take_part, settings, store, uid, 99) for uid in UIDS]
        made = list(aggregate_run(settings))
        assert len({one.result() for one in working}) == 1
    assert [link.window for link in made] == [1, 2]
    assert not list(aggregate_run(settings))


def test_the_commands(store, begun, tmp_path):
    run_windows(store, 3, begun)
    file = tmp_path / "aggregate.yaml"
    file.write_text(
        f"run: {{run: runs/one, window_length: 0.05s, gather: {{poll_interval: 0.01s}}}}\n"
        f"store: {{url: '{store.url}'}}\nworkers: [a, b]\n"
    )
    run = CliRunner().invoke(main, ["gradient", "aggregate", str(file), "--max-windows", "1"])
    assert run.exit_code == 0, run.output
    assert run.output.startswith(
        "window 4, step 85: 0 taken, 2 excluded (2 missing); 0 bytes merged"
    )

    to = (tmp_path / "disk").as_uri()
    run = CliRunner().invoke(main, ["gradient", "catch-up", store.url, "runs/one", "--to", to])
    assert run.exit_code == 0, run.output
    assert "runs/one is at step 85, after window 4" in run.output
    last = list(iterate_links(store, begun.run.chain_keys))[-1]
    content = load(open_store(to), "runs/one").state
    assert WeightState(content["weights"], content["moments"]).digest() == last.state

    run = CliRunner().invoke(main, ["gradient", "catch-up", store.url, "runs/none", "--to", to])
    assert run.exit_code == 1
    assert "the run has not begun" in run.output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": ["a", "a"]}, "'a' is named twice"),
        ({"reserves": ["a"]}, "'a' is named twice"),
        ({"worker_stores": {"z": {"url": "memory://z"}}}, "'z' has a bucket, and is neither"),
        ({"run": {"run": "r", "gather": {"quorum": 4}}}, "4 gradients are needed from 3"),
        ({"run": {"run": "r", "merge": {"rule": "median"}}}, "support: shared"),
        ({"run": {"run": "r", "merge": {"rule": "trimmed mean"}}}, "support: shared"),
        (
            {
                "workers": ["a", "b"],
                "run": {"run": "r", "merge": {"rule": "multi-krum", "faulty": 2}},
            },
            "at least 7, .* takes 2",
        ),
        (
            {"workers": ["a", "b"], "run": {"run": "r", "merge": {"rule": "multi-krum"}}},
            "at least 3",
        ),
        (
            {
                "run": {
                    "run": "r",
                    "codec": {"support": "shared"},
                    "merge": {"rule": "trimmed mean", "faulty": 2},
                }
            },
            "at least 5, .* takes 3",
        ),
        (
            {
                "reserves": ["d", "e"],
                "run": {
                    "run": "r",
                    "gather": {"wanted": 2},
                    "merge": {"rule": "multi-krum"},
                },
            },
            "at least 3, .* takes 2",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(changes, said):
    data = {"run": {"run": "r"}, "store": {"url": "memory://x"}, "workers": list(UIDS)}
    with pytest.raises(ValidationError, match=said):
        AggregatorSettings.model_validate({**data, **changes})


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (OuterOptimizer, {"lr": math.inf}),
        (MergeSettings, {"radius": math.inf}),
        (ScoringRules, {"beta": math.inf}),
        (ScoringRules, {"tau": math.inf}),
    ],
)
def test_numbers_that_a_record_cannot_hold_are_refused(
    model: type[RecordPart], values: dict[str, float]
) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        model.model_validate(values)


def test_settings_that_can_work_are_taken():
    data = {"store": {"url": "memory://x"}, "workers": list(UIDS), "reserves": ["d", "e"]}
    for run in (
        {"codec": {"support": "shared"}, "merge": {"rule": "trimmed mean", "faulty": 1}},
        {"codec": {"k": 4096}, "merge": {"rule": "median"}},
        {"gather": {"wanted": 5}, "merge": {"rule": "multi-krum", "faulty": 1}},
    ):
        AggregatorSettings.model_validate({**data, "run": {"run": "r", **run}})


MILLRACE = (sys.executable, "-c", "from millrace.cli import main; main()")


class Trickle(ThreadingHTTPServer):
    """A bucket that answers a byte now and then, and never to the end."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()
        trickle = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(1 << 20))
                self.end_headers()
                trickle.asked.set()
                with suppress(OSError):
                    while not trickle.over.wait(0.2):
                        self.wfile.write(b" ")

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def trickle() -> Iterator[Trickle]:
    with Trickle() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


@pytest.fixture
def trickled(store: Store, begun: AggregatorSettings, trickle: Trickle, tmp_path: Path) -> Path:
    """The settings of a run one of whose workers has a bucket that trickles."""
    file = tmp_path / "aggregate.yaml"
    bucket = {
        "url": "s3://bucket",
        "endpoint": f"http://127.0.0.1:{trickle.server_port}",
        "region": "auto",
        "credentials": {"access_key_id": "key", "secret_access_key": "secret"},
    }
    settings = {
        "run": {"run": "runs/one", "window_length": "PT0.1S", "gather": {"grace_period": "PT0.5S"}},
        "store": {"url": store.url},
        "workers": ["a", "b"],
        "worker_stores": {"b": bucket},
    }
    file.write_text(json.dumps(settings))
    return file


def test_a_bucket_that_trickles_does_not_keep_the_process_alive(trickled):
    done = subprocess.run(
        [*MILLRACE, "gradient", "aggregate", str(trickled), "--max-windows", "1"],
        capture_output=True,
        text=True,
        timeout=60,  # of a request that would go on for half an hour
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "0 taken, 2 excluded (1 missing, 1 unavailable)" in done.stdout


def test_an_interrupt_ends_the_aggregator_quietly(trickled, trickle):
    text = trickled.read_text().replace("PT0.1S", "PT1H")
    trickled.write_text(text)
    process = subprocess.Popen(
        [*MILLRACE, "gradient", "aggregate", str(trickled)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert trickle.asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert said.strip() == "Stopped. Run it again: it goes on where it was."


def test_a_folder_of_ours_is_no_workers_name(store, begun):
    named = begun.model_copy(update={"workers": ("a", "b", "gathers")})
    with pytest.raises(errors.ConfigurationError, match="or is reserved"):
        list(aggregate_run(named))
