"""Workers that join and leave a run between its windows."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from millrace import errors
from millrace.gradients import (
    AggregationSettings,
    AggregatorSettings,
    ChainLink,
    ExclusionReason,
    GatherSettings,
    Participant,
    RegistrationSettings,
    RunSettings,
    WorkerKey,
    aggregate_run,
    begin_run,
    read_newest_roster,
    select_weights,
)
from millrace.gradients.progress_events import RosterChanged, WorkersAwaited
from millrace.gradients.sync.registrations import register
from millrace.progress import Event
from millrace.records import commit_once, encode_record, fetch
from millrace.schemas.registration import LARGEST_NUMBER, Registration, RosterStatus
from millrace.schemas.window import WindowOpening
from millrace.storage import Store, list_objects, open_store, put
from tests.stores import make_spec

RUN = RunSettings(
    run="runs/one",
    steps=5,
    window_length=timedelta(minutes=1),
    gather=GatherSettings(poll_interval=timedelta(milliseconds=20)),
    registration=RegistrationSettings(warm_up=2, missed=2),
)
KEYS = RUN.gradient_keys


def make_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Linear(20, 30)


@pytest.fixture(params=["local", "rgw"])
def store(request: pytest.FixtureRequest) -> Store:
    store = open_store(make_spec(request.param, request))
    begin_run(store, RUN.chain_keys, select_weights(make_model()))
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    store = open_store((tmp_path / "bucket").as_uri())
    begin_run(store, RUN.chain_keys, select_weights(make_model()))
    return store


class Worker:
    """A worker that sends a change of its own in each window, from one window to another."""

    def __init__(self, store: Store, uid: str, *, is_named: bool = False) -> None:
        self.store, self.uid, self.key = store, uid, WorkerKey.generate()
        self.is_named = is_named
        self.joined = threading.Event()
        self.residuals: dict[int, int] = {}  # tensors with values that were not sent, by window

    def join(self) -> Participant:
        participant = Participant.join(
            RUN, self.uid, self.store, self.store, key=self.key, is_named=self.is_named
        )
        self.joined.set()
        return participant

    def send(
        self,
        participant: Participant,
        model: torch.nn.Module,
        window: int,
        *,
        leaves: bool = False,
    ) -> None:
        participant.load(model)
        dice = torch.Generator().manual_seed(window * 1000 + ord(self.uid))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=dice), alpha=0.01)
        participant.submit(model)
        if leaves:
            participant.leave()
        participant.receive(model)

    def take_part(
        self,
        last: int | threading.Event,
        *,
        before: dict[int, threading.Event] | None = None,
        leaves_early: bool = False,
    ) -> None:
        """Send in all windows up to the last one, and leave, before or after it is merged.

        Args:
            last: Number of the last window, or an event after which the next window is the last.
            before: Events that are waited for before windows.
            leaves_early: Whether the worker leaves before its last window is merged.
        """
        participant, model = self.join(), make_model()
        for window in participant.iterate_windows():
            if window.number in (before or {}):
                assert before[window.number].wait(60)
            is_last = window.number == last if isinstance(last, int) else last.is_set()
            self.send(participant, model, window.number, leaves=is_last and leaves_early)
            self.residuals[window.number] = len(participant.state_dict()["kept"])
            if is_last:
                break
        if not (self.is_named or leaves_early):
            participant.leave()


def aggregate(store: Store, run: RunSettings = RUN, **options: object) -> list[ChainLink]:
    settings = AggregatorSettings(run=run, store=store.spec, workers=())
    return list(aggregate_run(settings.model_copy(update=options)))


def list_registrations(store: Store, uid: str) -> list[Registration]:
    stats = list_objects(store, KEYS.make_registration_prefix(uid))
    return [fetch(store, key, Registration) for key in sorted(stat.key for stat in stats)]


def test_workers_join_warm_up_count_and_leave_while_aggregators_follow_each_other(store):
    a, b = Worker(store, "a"), Worker(store, "b")
    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(a.take_part, 8, before={3: b.joined})]
        links = aggregate(store, max_windows=2)
        works.append(pool.submit(b.take_part, 7))
        for _ in range(6):  # each time, another aggregator takes over
            links += aggregate(store, max_windows=1)
        for work in works:
            work.result()
    first = min(link.window for link in links if "b" in {*link.taken, *link.excluded})
    assert first in {3, 4}  # whether or not window 3 was open already
    warm = {link.window for link in links if "b" in link.excluded}
    assert warm == {first, first + 1}
    assert {links[window - 1].excluded["b"].reason for window in warm} == {ExclusionReason.WARM_UP}
    assert [link.window for link in links if "b" in link.taken] == [*range(first + 2, 8)]
    assert {window for window, kept in b.residuals.items() if not kept} == warm
    assert all("a" in link.taken for link in links)
    assert links[-1].excluded == {}
    window, roster = read_newest_roster(store, RUN.chain_keys)
    assert (window, roster["b"].status) == (8, RosterStatus.LEFT)
    assert [one.leaves_after for one in list_registrations(store, "b")] == [None, 7]


def test_a_worker_that_was_started_again_keeps_its_place_and_one_that_left_warms_up(folder):
    a = Worker(folder, "a")
    for _ in range(3):
        participant = a.join()
    assert len(list_registrations(folder, "a")) == 1
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(a.take_part, 3)
        aggregate(folder, max_windows=3)
        work.result()
    put(folder, "runs/one/b/other", b"")  # a folder without a registration
    brief = RUN.model_copy(update={"window_length": timedelta(milliseconds=100)})
    aggregate(folder, brief, max_windows=1)
    assert read_newest_roster(folder, RUN.chain_keys)[1]["a"].status is RosterStatus.LEFT
    a.join()
    assert [one.leaves_after for one in list_registrations(folder, "a")] == [None, 3, None]
    with ThreadPoolExecutor(1) as pool:
        participant = a.join()
        participant.catch_up()
        work = pool.submit(a.send, participant, make_model(), 5)
        (link,) = aggregate(folder, max_windows=1)
        work.result()
    entry = read_newest_roster(folder, RUN.chain_keys)[1]["a"]
    assert (entry.status, entry.since) == (RosterStatus.WARMING_UP, 5)
    assert set(link.taken) == {"a"}  # as nobody else counts


def test_a_worker_that_dies_is_waited_for_in_few_windows(folder):
    a, b = Worker(folder, "a"), Worker(folder, "b")
    brief = RUN.model_copy(update={"window_length": timedelta(seconds=4)})
    b.join()
    heard: list[Event] = []
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(a.take_part, 4)
        assert a.joined.wait(60)
        settings = AggregatorSettings(run=brief, store=folder.spec, workers=(), max_windows=4)
        links = list(aggregate_run(settings, progress=heard.append))
        work.result()
    assert [sorted(link.excluded) for link in links] == [["b"], ["b"], [], []]
    changes = [event for event in heard if isinstance(event, RosterChanged)]
    assert [(one.window, one.joined, one.counting, one.removed) for one in changes] == [
        (1, ("a", "b"), (), ()),
        (3, (), ("a",), ("b",)),
    ]


def test_a_worker_that_was_removed_while_it_was_busy_joins_again(folder, caplog):
    a, b = Worker(folder, "a"), Worker(folder, "b")
    brief = RUN.model_copy(update={"window_length": timedelta(seconds=3)})
    removed, back = threading.Event(), threading.Event()

    def hear(event: Event) -> None:
        if isinstance(event, RosterChanged) and "b" in event.removed:
            removed.set()

    links: list[ChainLink] = []
    with ThreadPoolExecutor(2) as pool:
        works = [
            pool.submit(a.take_part, back),
            pool.submit(b.take_part, back, before={1: removed}),
        ]
        assert a.joined.wait(60)
        assert b.joined.wait(60)
        settings = AggregatorSettings(run=brief, store=folder.spec, workers=(), max_windows=10_000)
        for link in aggregate_run(settings, progress=hear):
            links.append(link)
            if removed.is_set() and "b" in link.taken:
                back.set()
            if all(work.done() for work in works):
                break
        for work in works:
            work.result(0)
    assert [link.window for link in links if "b" not in {*link.taken, *link.excluded}]
    *stays, leaves = [one.leaves_after for one in list_registrations(folder, "b")]
    assert leaves
    assert len(stays) > 1
    assert not any(stays)
    assert "It has registered again, and warms up again." in caplog.text


def test_whoever_leaves_before_the_last_window_is_merged_is_not_waited_for(folder):
    a, b = Worker(folder, "a"), Worker(folder, "b")
    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(a.take_part, 4), pool.submit(b.take_part, 2, leaves_early=True)]
        assert a.joined.wait(60)
        assert b.joined.wait(60)
        links = aggregate(folder, max_windows=4)
        for work in works:
            work.result()
    assert [sorted(link.taken) for link in links] == [["a", "b"], ["a", "b"], ["a"], ["a"]]
    assert [link.excluded for link in links] == [{}] * 4


def test_a_run_that_nobody_joins_waits_and_ends(folder):
    heard: list[Event] = []
    brief = RUN.model_copy(update={"window_length": timedelta(milliseconds=100)})
    settings = AggregatorSettings(
        run=brief, store=folder.spec, workers=(), aggregation=AggregationSettings(idle=2)
    )
    links = list(aggregate_run(settings, progress=heard.append))
    assert [(link.window, link.taken, link.updates) for link in links] == [(1, {}, ()), (2, {}, ())]
    awaited = [event for event in heard if isinstance(event, WorkersAwaited)]
    assert [(one.window, one.found, one.quorum) for one in awaited] == [(1, 0, 1), (2, 0, 1)]


def test_named_workers_and_registered_ones_are_merged_together(folder):
    a, b = Worker(folder, "a"), Worker(folder, "b", is_named=True)
    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(worker.take_part, 3) for worker in (a, b)]
        assert a.joined.wait(60)
        links = aggregate(folder, workers=("b",), max_windows=3)
        for work in works:
            work.result()
    assert [sorted(link.taken) for link in links] == [["b"], ["b"], ["a", "b"]]
    assert list_registrations(folder, "b") == []
    assert set(fetch(folder, RUN.chain_keys.make_opening_key(3), WindowOpening).roster) == {"a"}


def test_what_no_worker_has_signed_joins_nobody(folder):
    a, other = Worker(folder, "a"), WorkerKey.generate()
    wanted = Registration(run=RUN.run, version="1", uid="b", number=1, key=other.public)
    forged = wanted.model_copy(update={"signature": "0" * 128})
    put(folder, KEYS.make_registration_key("b", 1), encode_record(forged, "0" * 32))
    put(folder, KEYS.make_registration_key("c", 1), b"no record")
    of_d = encode_record(other.sign(wanted.model_copy(update={"uid": "d"})), "0" * 32)
    put(folder, KEYS.make_registration_key("e", 1), of_d)
    put(folder, KEYS.make_registration_key("d", 7), of_d)  # another number than it has
    put(folder, f"{KEYS.make_registration_prefix('f')}000000001-f-v2.json", of_d)  # another version
    for uid, number in (("g", '"99999999999999999999"'), ("h", '"' + "9" * 2000 + '"')):
        of_it = wanted.model_copy(update={"uid": uid, "leaves_after": 7})
        body = encode_record(other.sign(of_it), "0" * 32)
        body = body.replace(b'"leaves_after":7', f'"leaves_after":{number}'.encode())
        put(folder, KEYS.make_registration_key(uid, 1), body)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(a.take_part, 1)
        assert a.joined.wait(60)
        aggregate(folder, max_windows=1)
        work.result()
    assert set(read_newest_roster(folder, RUN.chain_keys)[1]) == {"a"}


def test_a_name_belongs_to_the_key_that_registered_it(folder):
    a = Worker(folder, "a")
    a.join()
    with pytest.raises(errors.ConfigurationError, match="registered by another key: join with"):
        Worker(folder, "a").join()
    assert [one.key for one in list_registrations(folder, "a")] == [a.key.public]
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(a.take_part, 1)
        aggregate(folder, max_windows=1)
        work.result()
    for stat in list(list_objects(folder, KEYS.make_registration_prefix("a"))):
        Path(folder.location.bucket, stat.key).unlink()  # as cleaning does
    with pytest.raises(errors.ConfigurationError, match="registered by another key"):
        Worker(folder, "a").join()  # the chain knows it
    a.join()
    assert [one.number for one in list_registrations(folder, "a")] == [2]


def test_an_admitted_name_belongs_to_its_key_from_the_beginning(folder, caplog):
    own, other = WorkerKey.generate(), WorkerKey.generate()

    def admit(**keys: WorkerKey) -> RunSettings:
        admitted = {uid: key.public for uid, key in keys.items()}
        return RUN.model_copy(
            update={"registration": RUN.registration.model_copy(update={"admitted": admitted})}
        )

    run = admit(a=own)
    with pytest.raises(errors.ConfigurationError, match=f"admit a with the key {own.public}"):
        Participant.join(run, "a", folder, folder, key=other)
    with pytest.raises(errors.ConfigurationError, match=f"add its key.*, b: {other.public}"):
        Participant.join(run, "b", folder, folder, key=other)
    assert list_registrations(folder, "a") == list_registrations(folder, "b") == []
    Participant.join(RUN, "a", folder, folder, key=other)  # its settings admit everybody
    brief = run.model_copy(update={"window_length": timedelta(milliseconds=100)})
    aggregate(folder, brief, max_windows=2)
    assert read_newest_roster(folder, RUN.chain_keys)[1] == {}
    assert caplog.text.count("`admitted` has another key for it") == 1
    Participant.join(run, "a", folder, folder, key=own)
    aggregate(folder, brief, max_windows=1)
    assert read_newest_roster(folder, RUN.chain_keys)[1]["a"].key == own.public
    Participant.join(admit(a=other), "a", folder, folder, key=other)
    later = admit(a=other).model_copy(update={"window_length": brief.window_length})
    aggregate(folder, later, max_windows=1)
    assert read_newest_roster(folder, RUN.chain_keys)[1]["a"].key == other.public


def test_a_worker_outlives_a_registration_of_another_key(folder):
    a = Worker(folder, "a")
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(a.take_part, 1)
        aggregate(folder, max_windows=1)
        work.result()
    a.join()
    other = WorkerKey.generate()
    stolen = Registration(run=RUN.run, version="1", uid="a", number=7, key=other.public)
    put(folder, KEYS.make_registration_key("a", 7), encode_record(other.sign(stolen), "0" * 32))
    brief = RUN.model_copy(update={"window_length": timedelta(milliseconds=100)})
    aggregate(folder, brief, max_windows=1)
    assert read_newest_roster(folder, RUN.chain_keys)[1]["a"].key == a.key.public
    a.join()
    aggregate(folder, brief, max_windows=1)
    entry = read_newest_roster(folder, RUN.chain_keys)[1]["a"]
    assert (entry.key, entry.number, entry.since) == (a.key.public, 8, 1)


def test_a_window_that_is_open_keeps_its_roster_and_is_not_waited_for(folder):
    opening = WindowOpening(run=RUN.run, number=1, gather=RUN.gather, window_length="PT0.1S")
    commit_once(folder, RUN.chain_keys.make_opening_key(1), opening)
    Worker(folder, "a").join()
    heard: list[Event] = []
    settings = AggregatorSettings(run=RUN, store=folder.spec, workers=(), max_windows=1)
    (link,) = aggregate_run(settings, progress=heard.append)
    assert (link.taken, link.excluded) == ({}, {})
    assert not [one for one in heard if isinstance(one, RosterChanged | WorkersAwaited)]


def test_a_worker_can_only_leave_a_run_whose_workers_register(folder):
    fixed = RUN.model_copy(update={"registration": None})
    for participant in (
        Participant.join(fixed, "a", folder, folder),
        Participant.join(RUN, "a", folder, folder, is_named=True),
    ):
        with pytest.raises(errors.ConfigurationError, match="a has not registered in runs/one"):
            participant.leave()
    assert list_registrations(folder, "a") == []


def test_the_largest_number_of_a_registration_is_a_sentence(folder):
    key = WorkerKey.generate()
    last = Registration(run=RUN.run, version="1", uid="a", number=LARGEST_NUMBER, key=key.public)
    put(
        folder,
        KEYS.make_registration_key("a", LARGEST_NUMBER),
        encode_record(key.sign(last.model_copy(update={"leaves_after": 1})), "0" * 32),
    )
    with pytest.raises(errors.ConfigurationError, match="largest number: join with another name"):
        Participant.join(RUN, "a", folder, folder, key=key)


def test_a_registration_that_a_killed_process_wrote_is_taken_over(folder):
    key = WorkerKey.generate()
    first = register(RUN, "a", folder, folder, key)
    assert register(RUN, "a", folder, folder, key) == first
