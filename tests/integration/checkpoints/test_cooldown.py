"""The end of an epoch, with members in threads: on every kind of store, and where it goes wrong."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Event as Flag

import pytest
import torch

from millrace import errors, records
from millrace.checkpoints import (
    CooldownOutcome,
    CooldownSettings,
    EpochResult,
    EpochSaver,
    Membership,
    OnTimeout,
    RetentionSettings,
    Saver,
    SaveSettings,
    clear_votes,
    count_epochs_without_checkpoint,
    load,
    plan_retention,
    read_checkpoint,
    verify,
    watch_epoch_end,
)
from millrace.checkpoints.contents import Content, PartContent
from millrace.checkpoints.cooldown.checkpointers import SelectionRule, order_checkpointers
from millrace.checkpoints.cooldown.cooldown import cool_down
from millrace.checkpoints.cooldown.rosters import commit_roster, obtain_roster
from millrace.checkpoints.cooldown.votes import VoteTally
from millrace.checkpoints.snapshot import SnapshotBuffers, StateShards
from millrace.digest import compute_digest, dump_canonical_json
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.keys.members import make_member_lease
from millrace.lease import Holder, StoreClock, acquire
from millrace.records import commit_once, encode_record, fetch
from millrace.schemas.checkpoint import (
    Checkpoint,
    CooldownRecord,
    EpochRecord,
    LateVote,
    Roster,
    Vote,
)
from millrace.storage import Store, create, delete, exists, list_objects, open_store, put, read
from millrace.storage.clients import make_boto3_client, make_full_key
from tests.oracle import judge_checkpoints
from tests.stores import make_spec, open_folder

JOB = "runs/one"
KEYS = CheckpointKeys(JOB)
SMALL = SaveSettings(part_bytes=4096)
QUICK = CooldownSettings(save=SMALL, time=timedelta(minutes=1))
SEED = 7


def state_of(seed: int) -> dict[str, object]:
    dice = torch.Generator().manual_seed(seed)
    model = {
        "w": torch.randn(300, 64, generator=dice),
        "large": torch.randn(1, 300_000, generator=dice),  # one file of two blocks
    }
    return {"model": model, "step": 5}


class Members:
    """Members of a job in this process, each in a thread of its own."""

    def __init__(self, store: Store, names: list[str]) -> None:
        self._stack = ExitStack()
        self.memberships = {
            name: self._stack.enter_context(Membership(store, JOB, name)) for name in names
        }

    def leave(self) -> None:
        self._stack.close()

    def end(
        self,
        epoch: int = 0,
        *,
        settings: CooldownSettings = QUICK,
        state: Callable[[str], dict[str, object]] = lambda _: state_of(0),
        step: int = 5,
        run: str = "",
    ) -> dict[str, EpochResult]:
        """All of them end an epoch; what it came to for each."""

        def one(name: str) -> EpochResult:
            with EpochSaver(self.memberships[name], settings) as saver:
                return saver.end(
                    state(name),
                    epoch=epoch,
                    step=step,
                    run=run,
                    position={"sample": 9},
                    seed=SEED,
                )

        with ThreadPoolExecutor(len(self.memberships)) as pool:
            return dict(zip(self.memberships, pool.map(one, self.memberships), strict=True))


@pytest.fixture
def members(request: pytest.FixtureRequest) -> Iterator[Callable[[Store, list[str]], Members]]:
    with ExitStack() as stack:

        def make(store: Store, names: list[str]) -> Members:
            made = Members(store, names)
            stack.callback(made.leave)
            return made

        yield make


def outcomes(cooled: dict[str, EpochResult]) -> dict[str, CooldownOutcome]:
    return {name: one.outcome for name, one in cooled.items()}


def test_an_epoch_has_one_winner_and_a_checkpoint(store, members) -> None:
    names = ["a", "b", "c", "d"]
    cooled = members(store, names).end()
    chosen = set(order_checkpointers(names, SEED)[:2])
    found = outcomes(cooled)
    # Whoever sees the metadata first ends the epoch: mostly one of those who uploaded.
    (winner,) = (name for name in names if found[name] is CooldownOutcome.COMMITTED)
    assert {found[name] for name in chosen - {winner}} == {CooldownOutcome.LOST}
    assert {found[name] for name in set(names) - chosen - {winner}} <= {CooldownOutcome.NOT_CHOSEN}
    assert all(one.is_durable for one in cooled.values())
    epoch = fetch(store, KEYS.make_epoch_key(0), EpochRecord)
    assert epoch.member == winner
    there = read_checkpoint(store, JOB, 5)
    assert there.root == epoch.root
    assert not verify(store, there)
    loaded = load(store, JOB)
    assert torch.equal(loaded.state["model"]["w"], state_of(0)["model"]["w"])
    assert loaded.checkpoint.position == {"sample": 9}
    assert sum(one.sent for one in cooled.values()) == there.size  # each file by one of them
    assert {name for name in names if cooled[name].sent} <= chosen
    records = {
        name: fetch(store, CooldownKeys(JOB, 0).make_result_key(name), CooldownRecord).outcome
        for name in names
    }
    assert records == found


def test_the_second_epoch_uploads_nothing_that_is_there(folder, members) -> None:
    some = members(folder, ["a", "b"])
    some.end(0)
    again = some.end(1)
    assert sum(one.sent for one in again.values()) == 0
    assert {one.is_durable for one in again.values()} == {True}
    assert judge_checkpoints(open_folder(folder), JOB, is_cleaned=True) == []


def test_a_member_that_went_astray_is_told_and_does_not_commit(folder, members) -> None:
    cooled = members(folder, ["a", "b", "c"]).end(state=lambda name: state_of(int(name == "b")))
    assert cooled["b"].outcome is CooldownOutcome.FAILED
    assert "another content than b" in cooled["b"].reason
    assert CooldownOutcome.COMMITTED in {cooled["a"].outcome, cooled["c"].outcome}
    assert not verify(folder, read_checkpoint(folder, JOB, 5))
    assert cooled["b"].sent == 0


def test_where_no_two_agree_nothing_is_saved(folder, members) -> None:
    cooled = members(folder, ["a", "b"]).end(state=lambda name: state_of(ord(name)))
    assert set(outcomes(cooled).values()) == {CooldownOutcome.FAILED}
    assert all("more than half" in one.reason for one in cooled.values())
    assert not any(one.epoch for one in cooled.values())
    assert not list(list_objects(folder, KEYS.prefix))


def test_another_position_is_another_content(folder, members) -> None:
    names = ["a", "b", "c"]
    made = members(folder, names)

    def one(name: str) -> EpochResult:
        with EpochSaver(made.memberships[name], QUICK) as saver:
            position = {"sample": 1 if name == "c" else 2}
            return saver.end(state_of(0), epoch=0, step=5, position=position)

    with ThreadPoolExecutor(3) as pool:
        cooled = dict(zip(names, pool.map(one, names), strict=True))
    assert cooled["c"].outcome is CooldownOutcome.FAILED
    assert read_checkpoint(folder, JOB, 5).position == {"sample": 2}


def dead(store: Store, name: str) -> None:
    """A member that was killed: its lease stands, and its process is gone."""
    holder = Holder.describe_this_process().model_copy(update={"pid": 2**22 - 1})
    clock = StoreClock.read(store, JOB, holder)
    acquire(store, make_member_lease(JOB, name), holder, timedelta(minutes=1), clock)


def test_who_is_dead_is_replaced_by_the_next(folder, members) -> None:
    names = ["a", "b", "c", "d"]
    first, second, *rest = order_checkpointers(names, SEED)
    roster = Roster(job=JOB, epoch=0, members=tuple(names), seed=SEED)
    commit_once(folder, CooldownKeys(JOB, 0).roster, roster)
    dead(folder, first)
    dead(folder, second)
    cooled = members(folder, rest).end()
    # Whoever comes when all is over has not seen that the dead are dead.
    others = {CooldownOutcome.LOST, CooldownOutcome.NOT_CHOSEN}
    (winner,) = (one for one in cooled.values() if one.outcome is CooldownOutcome.COMMITTED)
    assert {one.outcome for one in cooled.values() if one is not winner} <= others


def test_who_withdraws_is_no_member_any_more(folder, members) -> None:
    with Membership(folder, JOB, "gone"):
        pass
    made = members(folder, ["a", "b"])
    assert obtain_roster(made.memberships["a"], 0).members == ("a", "b")


def test_psyches_chosen_ones_are_not_replaced_but_more_are_elected_in_time(folder, members) -> None:
    names = ["a", "b", "c"]
    (only, *rest) = order_checkpointers(names, SEED, SelectionRule.PSYCHE)
    roster = Roster(job=JOB, epoch=0, members=tuple(names), seed=SEED)
    commit_once(folder, CooldownKeys(JOB, 0).roster, roster)
    dead(folder, only)
    settings = QUICK.model_copy(
        update={
            "choice": SelectionRule.PSYCHE,
            "time": timedelta(milliseconds=1),
            "on_timeout": OnTimeout.ELECT,
            "extensions": 100,
        }
    )
    cooled = members(folder, rest).end(settings=settings)
    assert CooldownOutcome.COMMITTED in outcomes(cooled).values()


def late(policy: OnTimeout, **more: object) -> CooldownSettings:
    """Nobody is chosen, as the one whom Psyche would choose is dead; and there is no time."""
    some = {"choice": SelectionRule.PSYCHE, "time": timedelta(milliseconds=1), "on_timeout": policy}
    return QUICK.model_copy(update={**some, **more})


def without_the_chosen(folder: Store, members, epochs: int) -> Members:
    names = ["a", "b", "c"]
    only = order_checkpointers(names, SEED, SelectionRule.PSYCHE)[0]
    for epoch in range(epochs):
        roster = Roster(job=JOB, epoch=epoch, members=tuple(names), seed=SEED)
        commit_once(folder, CooldownKeys(JOB, epoch).roster, roster)
    dead(folder, only)
    return members(folder, [name for name in names if name != only])


@pytest.mark.parametrize("policy", [OnTimeout.ADVANCE, OnTimeout.EXTEND])
def test_epochs_go_on_without_a_checkpoint_only_so_often(folder, members, policy) -> None:
    some = without_the_chosen(folder, members, 3)
    settings = late(policy, without=2, extensions=1)
    for epoch in (0, 1):
        cooled = some.end(epoch, settings=settings, step=epoch)
        assert set(outcomes(cooled).values()) == {CooldownOutcome.FAILED}
        assert all(one.epoch and one.epoch.root is None for one in cooled.values())
        assert (
            "no checkpoint after" in fetch(folder, KEYS.make_epoch_key(epoch), EpochRecord).reason
        )
    assert count_epochs_without_checkpoint(folder, JOB, 2) == 2
    third = some.end(2, settings=settings, step=2)
    assert all(one.epoch is None for one in third.values())
    assert all("do not train on" in one.reason for one in third.values())


def test_an_upload_goes_on_in_the_background(folder, members) -> None:
    names = ["a", "b"]
    made = members(folder, names)
    settings = QUICK.model_copy(
        update={"time": timedelta(milliseconds=1), "on_timeout": OnTimeout.BACKGROUND}
    )

    def one(name: str) -> tuple[EpochResult, EpochResult | None]:
        with EpochSaver(made.memberships[name], settings) as saver:
            cooled = saver.end(state_of(0), epoch=0, step=5, seed=SEED)
            return cooled, saver.wait()

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(one, names))
    ends = {rest.outcome for _, rest in both if rest is not None}
    assert CooldownOutcome.COMMITTED in ends
    for name, (cooled, rest) in zip(names, both, strict=True):
        record = fetch(folder, CooldownKeys(JOB, 0).make_result_key(name), CooldownRecord)
        assert record.outcome is (rest or cooled).outcome
    assert not verify(folder, read_checkpoint(folder, JOB, 5))
    assert count_epochs_without_checkpoint(folder, JOB, 1) == 0


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_step_that_no_listing_would_find_ends_no_epoch(folder, members, step) -> None:
    with pytest.raises(errors.ConfigurationError, match=f"Step {step} .* from 0 to 9{{18}}"):
        members(folder, ["a"]).end(step=step)
    assert list(list_objects(folder, KEYS.prefix)) == []


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_that_no_roster_can_have_is_refused(folder, members, seed) -> None:
    membership = members(folder, ["a"]).memberships["a"]
    with (
        EpochSaver(membership, QUICK) as saver,
        pytest.raises(errors.ConfigurationError, match=f"The seed {seed} .* from 0 to"),
    ):
        saver.end(state_of(0), epoch=0, step=5, seed=seed)


def test_nowhere_to_save_to_is_no_success(folder) -> None:
    with EpochSaver(None) as saver:
        cooled = saver.end(state_of(0), epoch=0, step=5)
    assert (cooled.outcome, cooled.is_durable) == (CooldownOutcome.NO_DESTINATION, False)


def test_called_off_is_no_success(folder, members) -> None:
    made = members(folder, ["a", "b"])  # b never comes, so a waits
    with EpochSaver(made.memberships["a"], QUICK) as saver:
        saver.cancel()
        cooled = saver.end(state_of(0), epoch=0, step=5)
    assert (cooled.outcome, cooled.is_durable) == (CooldownOutcome.CANCELLED, False)


def test_refused_credentials_are_a_failure_with_a_reason(request, rgw, bucket) -> None:
    spec = make_spec("rgw", request)
    with Membership(open_store(spec), JOB, "a") as membership:
        membership.store = open_store(make_spec("rgw", request, "read_only"))
        with pytest.raises(errors.DeniedError), EpochSaver(membership, QUICK) as saver:
            saver.end(state_of(0), epoch=0, step=5)


@pytest.mark.soak
def test_a_name_is_one_members(folder, members) -> None:
    members(folder, ["a"])
    with pytest.raises(errors.ConflictError, match="a of runs/one already lives"):
        Membership(folder, JOB, "a").__enter__()


def test_a_member_that_comes_back_with_another_content_is_told(folder, members) -> None:
    made = members(folder, ["a", "b"])
    obtain_roster(made.memberships["a"], 0, SEED)
    claim = Vote(member="a", step=4, root="blake3:" + "0" * 64, rest="blake3:" + "0" * 64, size=1)
    commit_once(folder, CooldownKeys(JOB, 0).make_vote_key("a"), claim)
    with EpochSaver(made.memberships["a"], QUICK) as saver:
        cooled = saver.end(state_of(0), epoch=0, step=5)
    assert cooled.outcome is CooldownOutcome.FAILED
    assert "has voted for another content" in cooled.reason


def test_an_unreadable_claim_stops_nobody(folder, members) -> None:
    made = members(folder, ["a", "b", "c"])
    obtain_roster(made.memberships["a"], 0, SEED)
    put(folder, CooldownKeys(JOB, 0).make_vote_key("b"), b"{")
    put(folder, CooldownKeys(JOB, 0).make_result_key("c"), b"{")
    cooled = made.end()
    assert cooled["b"].outcome is CooldownOutcome.FAILED
    assert CooldownOutcome.COMMITTED in {cooled["a"].outcome, cooled["c"].outcome}


def test_a_member_with_a_lease_of_an_impossible_duration_stops_nobody(folder, members) -> None:
    made = members(folder, ["a", "b", "c"])
    record = {"holder": {"id": "a", "host": "h", "machine": "", "pid": 1, "started": ""}}
    body = {"kind": "lease", "version": 1, "nonce": "", "record": record | {"ttl": "-P999999999D"}}
    put(folder, make_member_lease(JOB, "d").make_term_key(0), dump_canonical_json(body))
    cooled = made.end()
    assert sorted(outcomes(cooled).values()).count(CooldownOutcome.COMMITTED) == 1
    seen = watch_epoch_end(folder, JOB, 0, timeout=timedelta(minutes=1), members=["a", "b", "c"])
    assert seen.epoch is not None


def test_a_living_member_without_a_result_holds_up_nobody(folder, members, monkeypatch) -> None:
    made = members(folder, ["a", "b", "c"])
    made.end()
    delete(folder, [CooldownKeys(JOB, 0).make_result_key("c")])
    monkeypatch.setattr("millrace.checkpoints.cooldown.watch._RESULT_WAIT", 0.0)
    polls: list[object] = []
    timeout = timedelta(seconds=10)  # which is reached without the limit
    seen = watch_epoch_end(folder, JOB, 0, timeout=timeout, progress=polls.append)
    assert len(polls) == 1
    assert seen.checkpoint is not None
    assert (set(seen.living), set(seen.ended)) == ({"c"}, {"a", "b"})


def test_votes_of_names_that_are_not_in_the_roster_do_not_count(folder, members) -> None:
    names = ["a", "b", "c", "d", "e"]
    made = members(folder, names)
    obtain_roster(made.memberships["a"], 0, SEED)
    keys = CooldownKeys(JOB, 0)
    wrong = Vote(member="", step=5, root="blake3:" + "f" * 64, rest="x", size=1)
    for name in (f"ghost-{number}" for number in range(6)):
        commit_once(folder, keys.make_vote_key(name), wrong.model_copy(update={"member": name}))
    cooled = made.end()
    assert sorted(outcomes(cooled).values()).count(CooldownOutcome.COMMITTED) == 1
    assert read_checkpoint(folder, JOB, 5).root != wrong.root


def test_a_claim_in_the_name_of_another_is_a_vote_for_nothing(folder, members) -> None:
    made = members(folder, ["a", "b", "c"])
    obtain_roster(made.memberships["a"], 0, SEED)
    keys = CooldownKeys(JOB, 0)
    forged = Vote(member="a", step=5, root="blake3:" + "f" * 64, rest="x", size=1)
    commit_once(folder, keys.make_vote_key("c"), forged)
    cooled = made.end()
    assert cooled["c"].outcome is CooldownOutcome.FAILED
    assert CooldownOutcome.COMMITTED in {cooled["a"].outcome, cooled["b"].outcome}


def junk_of(kind: str, key: str) -> bytes:
    """Write invalid bytes under the key of a record."""
    other = CooldownRecord(
        member="x",
        outcome=CooldownOutcome.FAILED,
        reason="",
        sent=0,
        checked=0,
        replaced=0,
        seconds=0.0,
    )
    pin = encode_record(EpochRecord(job="another", epoch=9, step=9, root=None), "0" * 32)
    return {
        "nothing": b"",
        "cut": pin[:40],
        "huge": b" " * (2 << 20),
        "of another kind": encode_record(other, "0" * 32),
        "of another job": pin,
        "of a later version": pin.replace(b'"version":1', b'"version":9'),
    }[kind]


JUNK = ["nothing", "cut", "huge", "of another kind", "of another job", "of a later version"]


@pytest.mark.parametrize("kind", JUNK)
def test_junk_where_an_epoch_ends_or_its_roster_stands_costs_the_members_nothing(
    folder, members, kind
) -> None:
    made = members(folder, ["a", "b", "c"])
    for key in (KEYS.make_epoch_key(0), CooldownKeys(JOB, 0).roster):
        put(folder, key, junk_of(kind, key))
    for name in ("x", "000001.json.bak", "٣٣٣٣٣٣.json"):
        put(folder, f"{KEYS.epochs}{name}", b"junk")
        put(folder, f"{JOB}/members/{name}", b"junk")
        put(folder, f"{JOB}/members/a/cooldowns/000000/{name}", b"junk")
    cooled = made.end()
    assert all(one.is_durable for one in cooled.values())
    assert not verify(folder, read_checkpoint(folder, JOB, 5))
    assert count_epochs_without_checkpoint(folder, JOB, 1) == 0
    kept = plan_retention(folder, JOB, RetentionSettings(last=1)).kept
    assert list(kept) == [5]
    assert watch_epoch_end(folder, JOB, 0, timeout=timedelta(0)).members == ()


def test_an_epoch_that_names_no_checkpoint_has_not_ended(folder, members) -> None:
    bogus = EpochRecord(job=JOB, epoch=0, step=77, root="blake3:" + "f" * 64, member="x")
    commit_once(folder, KEYS.make_epoch_key(0), bogus)
    made = members(folder, ["a", "b"])
    assert watch_epoch_end(folder, JOB, 0, timeout=timedelta(0)).epoch is None
    cooled = made.end()
    assert {one.epoch.step for one in cooled.values()} == {5}
    assert watch_epoch_end(folder, JOB, 0, timeout=timedelta(0)).checkpoint is not None


def test_a_checkpoint_stays_that_the_votes_of_a_damaged_epoch_name(folder, members) -> None:
    made = members(folder, ["a", "b"])
    for epoch in range(3):
        state = {"model": {"w": torch.full((300, 64), float(epoch))}}
        made.end(epoch, state=lambda _, state=state: state, step=5 + epoch)
    delete(folder, [KEYS.make_epoch_key(1)])
    put(folder, KEYS.make_epoch_key(0), b"junk")
    put(folder, KEYS.make_pin_key(6), b"junk")
    plan = plan_retention(folder, JOB, RetentionSettings(last=1))
    assert plan.kept[5] == "epoch 0 names it"
    assert "cannot be read" in plan.kept[6]


def test_one_member_alone_ends_no_epoch_without_a_checkpoint(folder, members) -> None:
    # Out of time at once; whoever has not voted is waited for a thousand seconds.
    hasty = late(OnTimeout.ADVANCE, extensions=1_000_000)
    patient = QUICK.model_copy(update={"choice": SelectionRule.PSYCHE})
    names = ["a", "b", "c"]
    only = order_checkpointers(names, SEED, SelectionRule.PSYCHE)[0]
    slow = next(name for name in names if name != only)
    roster = Roster(job=JOB, epoch=0, members=tuple(names), seed=SEED)
    commit_once(folder, CooldownKeys(JOB, 0).roster, roster)
    made = members(folder, names)

    def end(name: str) -> EpochResult:
        with EpochSaver(made.memberships[name], hasty if name == slow else patient) as saver:
            return saver.end(state_of(0), epoch=0, step=5, seed=SEED)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(end, slow)
        while not exists(folder, CooldownKeys(JOB, 0).make_late_vote_key(slow)):
            assert not first.done()
        assert not exists(folder, KEYS.make_epoch_key(0))
        others = [pool.submit(end, name) for name in names if name != slow]
        assert all(one.result().is_durable for one in (first, *others))


def test_results_and_late_votes_of_an_earlier_try_end_no_epoch(folder, members) -> None:
    keys, names = CooldownKeys(JOB, 0), ["a", "b", "c"]
    only = order_checkpointers(names, SEED, SelectionRule.PSYCHE)[0]
    *others, hasty = sorted(names, key=lambda name: name != only)
    made = members(folder, names)
    commit_roster(folder, JOB, 0, names, SEED)
    for name in names:
        commit_once(folder, keys.make_result_key(name), cancelled(name))
    for name in others:
        commit_once(folder, keys.make_late_vote_key(name), LateVote(member=name, reason="late"))
    content = SnapshotBuffers().snapshot(StateShards(state_of(0)), SMALL.part_bytes).make_content(5)
    is_late = Flag()

    def read_late(number: int) -> PartContent:
        is_late.wait()
        return content.read(number)

    def end(name: str) -> EpochResult:
        policy = OnTimeout.ADVANCE if name == hasty else OnTimeout.EXTEND
        settings = late(policy, extensions=10**6)
        return cool_down(
            made.memberships[name], replace(content, read=read_late), epoch=0, settings=settings
        )

    with ThreadPoolExecutor(3) as pool:
        try:
            ends = [pool.submit(end, name) for name in others]
            while any(exists(folder, keys.make_late_vote_key(name)) for name in others):
                assert not any(one.done() for one in ends)
            ends.append(pool.submit(end, hasty))
            while not exists(folder, keys.make_late_vote_key(hasty)):
                assert not ends[-1].done()
        finally:
            is_late.set()
        results = dict(zip([*others, hasty], [one.result() for one in ends], strict=True))
    assert all(one.is_durable for one in results.values())
    records = {name: fetch(folder, keys.make_result_key(name), CooldownRecord) for name in names}
    assert {name: one.outcome for name, one in records.items()} == outcomes(results)


@pytest.mark.parametrize("names", [["a", "b"], ["c", "d"]])
def test_members_that_were_killed_after_their_votes_vote_again_without_them(
    folder, members, names
) -> None:
    keys = CooldownKeys(JOB, 0)
    commit_roster(folder, JOB, 0, ["a", "b"], SEED)
    for name in "ab":
        vote = Vote(member=name, step=5, root="blake3:" + "f" * 64, rest="x", size=1)
        commit_once(folder, keys.make_vote_key(name), vote)
    made = members(folder, names)
    failed = made.end()
    assert {one.outcome for one in failed.values()} == {CooldownOutcome.FAILED}
    assert all(f"clear-votes {folder.url} {JOB} 0`" in one.reason for one in failed.values())
    with pytest.raises(errors.ConflictError, match=f"2 members of {JOB} live"):
        clear_votes(folder, JOB, 0)
    made.leave()
    assert clear_votes(folder, JOB, 0) == tuple(sorted({"a", "b", *names}))
    assert all(one.is_durable for one in members(folder, names).end().values())
    assert fetch(folder, keys.roster, Roster).members == tuple(names)


def test_votes_of_an_epoch_that_has_ended_are_not_cleared(folder, members) -> None:
    with pytest.raises(errors.NotFoundError, match="has no votes"):
        clear_votes(folder, JOB, 0)
    made = members(folder, ["a", "b"])
    made.end()
    made.leave()
    before = [stat.key for stat in list_objects(folder)]
    with pytest.raises(errors.ConflictError, match="has ended"):
        clear_votes(folder, JOB, 0)
    assert [stat.key for stat in list_objects(folder)] == before
    delete(folder, [KEYS.make_epoch_key(0)])  # members that died before this commit
    with pytest.raises(errors.ConflictError, match="step 5, is committed"):
        clear_votes(folder, JOB, 0)


def cancelled(member: str) -> CooldownRecord:
    """Return the result of a member that was cancelled."""
    return CooldownRecord(
        member=member, outcome=CooldownOutcome.CANCELLED, reason="", sent=0, checked=0, replaced=0,
        seconds=0.0,
    )  # fmt: skip


def test_a_result_counts_until_its_member_ends_the_epoch_again(folder) -> None:
    keys = CooldownKeys(JOB, 0)
    commit_once(folder, keys.make_result_key("a"), cancelled("a"))
    commit_once(folder, keys.make_late_vote_key("a"), LateVote(member="a", reason="late"))
    tally = VoteTally(folder, keys)
    tally.read_new(["a", "b"], late=True)
    assert tally.ended.keys() == tally.late.keys() == {"a"}
    delete(folder, [keys.make_result_key("a"), keys.make_late_vote_key("a")])
    tally.read_new(["a", "b"], results=False)
    assert tally.ended.keys() == tally.late.keys() == {"a"}
    tally.read_new(["a", "b"], late=True)
    assert tally.ended.keys() == tally.late.keys() == set()


# -- members that write below their own prefixes only


class Confined:
    """Members whose credentials reach their own prefixes only, and the owner of their job."""

    def __init__(self, reads: Store, writes: dict[str, Store]) -> None:
        self._stack = ExitStack()
        self._reads = reads
        self.memberships = {
            name: self._stack.enter_context(Membership(store, JOB, name, reads=reads))
            for name, store in writes.items()
        }

    def leave(self) -> None:
        self._stack.close()

    def end(self, owner: Store, *, settings: CooldownSettings = QUICK, **told: object):
        """All members end epoch 0 while the owner watches; the results, and what it has seen."""

        def one(name: str) -> EpochResult:
            with EpochSaver(self.memberships[name], settings) as saver:
                state = told.get(name, state_of(0))
                return saver.end(state, epoch=0, step=5, run="r", position={"sample": 9})

        def watched():
            names = [*self.memberships, "never-there"]
            while True:
                try:
                    return watch_epoch_end(
                        owner, JOB, 0, timeout=timedelta(minutes=1), members=names
                    )
                except KeyboardInterrupt:  # an owner that was killed is followed by the next
                    continue

        with ThreadPoolExecutor(len(self.memberships) + 1) as pool:
            seen = pool.submit(watched)
            cooled = dict(zip(self.memberships, pool.map(one, self.memberships), strict=True))
            for membership in self.memberships.values():
                membership.__exit__()
            return cooled, seen.result()


def written_by_others(store: Store) -> list[str]:
    return [
        stat.key
        for stat in list_objects(store, f"{JOB}/")
        if not stat.key.startswith((f"{JOB}/members/", f"{JOB}/lease/members/"))
    ]


@pytest.fixture
def confined(request: pytest.FixtureRequest) -> Iterator[Callable[..., Confined]]:
    with ExitStack() as stack:

        def make(reads: Store, writes: dict[str, Store]) -> Confined:
            made = Confined(reads, writes)
            stack.callback(made.leave)
            return made

        yield make


def test_confined_members_write_below_their_own_prefixes_and_the_owner_commits(
    folder, confined
) -> None:
    names = ["a", "b", "c"]
    made = confined(folder, dict.fromkeys(names, folder))
    assert written_by_others(folder) == []
    cooled, seen = made.end(folder)
    found = outcomes(cooled)
    assert list(found.values()).count(CooldownOutcome.COMMITTED) == 1
    assert set(found.values()) <= {
        CooldownOutcome.COMMITTED,
        CooldownOutcome.LOST,
        CooldownOutcome.NOT_CHOSEN,
    }
    assert all(one.is_durable for one in cooled.values())
    assert seen.members == ("a", "b", "c")
    checkpoint = seen.checkpoint
    assert checkpoint is not None
    assert (checkpoint.position, checkpoint.run, checkpoint.notes) == ({"sample": 9}, "r", {})
    assert not verify(folder, checkpoint)
    assert torch.equal(load(folder, JOB).state["model"]["w"], state_of(0)["model"]["w"])
    left = [stat.key for stat in list_objects(folder, f"{JOB}/members/")]
    assert not [key for key in left if "/parts/" in key or key.endswith("draft.json")]
    assert plan_retention(folder, JOB, RetentionSettings(grace=timedelta(0))).removals == ()
    assert judge_checkpoints(open_folder(folder), JOB, is_cleaned=True) == []


def test_what_a_member_leaves_in_its_prefix_costs_only_that_member(folder, confined) -> None:
    names = ["a", "b", "c", "d"]
    made = confined(folder, dict.fromkeys(names, folder))
    liar = order_checkpointers(names, SEED)[0]
    commit_roster(folder, JOB, 0, names, SEED)
    keys = CooldownKeys(JOB, 0)
    content = SnapshotBuffers().snapshot(StateShards(state_of(0)), SMALL.part_bytes).make_content(5)
    for part in content.parts:  # the right size, the right name, and other bytes
        put(folder, keys.make_part_key(liar, part.digest), b"x" * part.size)
    forged = Checkpoint(
        job=JOB, step=5, run="r", position={"sample": 9}, notes={"see": "http://evil"},
        saved=datetime.now(UTC), root=content.root, parts=content.parts[:1], tensors={},
    )  # fmt: skip
    commit_once(folder, keys.make_draft_key(liar), forged)
    put(folder, keys.make_late_vote_key(liar), b"junk")
    cooled, seen = made.end(folder)
    assert seen.checkpoint is not None
    assert not verify(folder, seen.checkpoint)
    assert seen.checkpoint.notes == {}
    honest = {name: one for name, one in cooled.items() if name != liar}
    assert all(one.is_durable for one in honest.values())


def vote_as(store: Store, member: str) -> Content:
    """Vote for the content of step 5 as the honest members do, and return it."""
    content = SnapshotBuffers().snapshot(StateShards(state_of(0)), SMALL.part_bytes).make_content(5)
    rest = compute_digest(dump_canonical_json({"position": {"sample": 9}, "run": "r"}))
    vote = Vote(member=member, step=5, root=content.root, rest=rest, size=content.size)
    commit_once(store, CooldownKeys(JOB, 0).make_vote_key(member), vote)
    return content


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (rb'"position":{"sample":9}', b'"position":{"a":[%s0]}' % (b"[]," * 3_000_000)),
        (rb'"position":{"sample":9}', b'"position":{"a":%s}' % (b"[" * 180 + b"]" * 180)),
        (rb'"size":\d+', b'"size":"%s"' % (b"9" * 40)),
    ],
    ids=["lists", "nesting", "number"],
)
def test_metadata_that_would_end_the_owner_costs_only_its_member(
    folder, confined, field, value
) -> None:
    names = ["a", "b", "c", "d"]
    liar, keys = "a", CooldownKeys(JOB, 0)  # whose metadata is read first
    made = confined(folder, {name: folder for name in names if name != liar})
    commit_roster(folder, JOB, 0, names, SEED)
    content = vote_as(folder, liar)
    draft = Checkpoint(
        job=JOB, step=5, run="r", position={"sample": 9}, notes={}, saved=datetime.now(UTC),
        root=content.root, parts=content.parts, tensors=dict(content.tensors),
    )  # fmt: skip
    body, count = re.subn(field, value, encode_record(draft, "nonce"))
    assert count > 0
    put(folder, keys.make_draft_key(liar), body)
    cooled, seen = made.end(folder)
    assert seen.checkpoint is not None
    assert all(one.is_durable for one in cooled.values())


@pytest.mark.parametrize("what", ["vote", "draft", "parts"])
def test_what_only_its_member_can_read_costs_only_that_member(request, confined, what) -> None:
    store = open_store(make_spec("rgw", request))
    names = ["a", "b", "c", "d"]
    liar, keys = order_checkpointers(names, SEED)[0], CooldownKeys(JOB, 0)
    made = confined(store, {name: store for name in names if name != liar})
    commit_roster(store, JOB, 0, names, SEED)
    content = vote_as(store, liar)
    found = {"vote": [keys.make_vote_key(liar)], "draft": [keys.make_draft_key(liar)]}
    for key in found.get(what) or [keys.make_part_key(liar, part.digest) for part in content.parts]:
        size = next((p.size for p in content.parts if p.digest in key), 1)
        make_boto3_client(store).put_object(
            Bucket=store.location.bucket,
            Key=make_full_key(store, key),
            Body=b"x" * size,
            SSECustomerAlgorithm="AES256",
            SSECustomerKey="k" * 32,
        )
    cooled, seen = made.end(store)
    assert seen.checkpoint is not None
    assert all(one.is_durable for one in cooled.values())


@pytest.mark.parametrize("kind", JUNK)
def test_an_owner_replaces_what_was_damaged_of_its_own(folder, confined, kind) -> None:
    made = confined(folder, dict.fromkeys("ab", folder))
    for key in (KEYS.make_epoch_key(0), CooldownKeys(JOB, 0).roster):
        put(folder, key, junk_of(kind, key))
    _, seen = made.end(folder)
    assert seen.checkpoint is not None
    assert fetch(folder, KEYS.make_epoch_key(0), EpochRecord) == seen.epoch
    assert fetch(folder, CooldownKeys(JOB, 0).roster, Roster).members == ("a", "b")


@pytest.mark.parametrize("after", ["put", "copy", "commit_checkpoint", "commit_once", "delete"])
def test_an_owner_that_is_killed_anywhere_is_followed_by_one_that_ends_the_epoch(
    folder, confined, monkeypatch, after
) -> None:
    from millrace.checkpoints.cooldown import collector

    made = confined(folder, dict.fromkeys("ab", folder))
    if after == "put":
        put(folder, KEYS.make_epoch_key(0), b"junk")
    right, died = getattr(collector, after), []

    def dies(*args: object, **more: object) -> object:
        found = right(*args, **more)
        if not died:
            died.append(after)
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(collector, after, dies)
    cooled, seen = made.end(folder)
    assert died
    assert all(one.is_durable for one in cooled.values())
    assert seen.checkpoint is not None
    assert not verify(folder, seen.checkpoint)
    assert judge_checkpoints(open_folder(folder), JOB, is_cleaned=True) == []


def test_an_epoch_that_ends_while_no_member_lives_holds_up_none_that_comes_back(
    folder, confined
) -> None:
    watch_epoch_end(folder, JOB, 0, timeout=timedelta(0), members=["a"])
    made = confined(folder, {"a": folder})
    with EpochSaver(made.memberships["a"], QUICK) as saver:
        cooled = saver.end(state_of(0), epoch=0, step=5)
    assert cooled.epoch is not None
    assert cooled.epoch.root is None


def test_a_draft_that_the_owner_deletes_meanwhile_is_no_error(
    folder, confined, monkeypatch
) -> None:
    draft = CooldownKeys(JOB, 0).make_draft_key("a")
    made = confined(folder, dict.fromkeys("ab", folder))
    put(folder, draft, b"the draft of this member before it was restarted")
    found = []

    def create_late(store: Store, key: str, body: bytes) -> None:
        try:
            create(store, key, body)
        except errors.ExistsError:
            if key == draft:
                found.append(key)
                delete(folder, [draft])
            raise

    monkeypatch.setattr(records, "create", create_late)
    cooled, seen = made.end(folder)
    assert found == [draft]
    assert all(one.is_durable for one in cooled.values())
    assert seen.checkpoint is not None


def test_late_votes_of_most_members_end_a_confined_epoch_without(folder, confined) -> None:
    confined(folder, dict.fromkeys("ab", folder))
    commit_roster(folder, JOB, 0, ["a", "b"], SEED)
    keys = CooldownKeys(JOB, 0)
    for name in "ab":  # no content is that of more than half: nothing is uploaded
        vote = Vote(member=name, step=5, root=name * 64, rest="", size=1)
        commit_once(folder, keys.make_vote_key(name), vote)
        commit_once(folder, keys.make_late_vote_key(name), LateVote(member=name, reason="no time"))
    seen = watch_epoch_end(folder, JOB, 0, timeout=timedelta(0), members=["a", "b"])
    assert seen.epoch is not None
    assert (seen.epoch.root, seen.checkpoint) == (None, None)


def test_wrong_bytes_under_a_right_name_are_replaced(folder, members) -> None:
    content = SnapshotBuffers().snapshot(StateShards(state_of(0)), SMALL.part_bytes).make_content(5)
    bad = [KEYS.make_part_key(5, part.digest) for part in content.parts[:3]]
    put(folder, bad[0], b"x" * content.parts[0].size)
    put(folder, bad[1], b"")
    put(folder, bad[2], content.read(2).body)
    cooled = members(folder, ["a"]).end()["a"]
    assert (cooled.outcome, cooled.replaced) == (CooldownOutcome.COMMITTED, 2)
    assert read(folder, bad[0]) == content.read(0).body
    assert not verify(folder, read_checkpoint(folder, JOB, 5))


def test_whoever_finds_the_metadata_ends_the_epoch(folder, members) -> None:
    members(folder, ["a", "b"]).end()
    (ended,) = [stat.key for stat in list_objects(folder, KEYS.epochs)]
    delete(folder, [ended])
    again = members(folder, ["c"])
    commit = CooldownKeys(JOB, 0)
    assert fetch(folder, commit.roster, Roster).members == ("a", "b")
    # c is no member of the epoch: the members' leases are still held, and they agreed.
    with EpochSaver(again.memberships["c"], QUICK) as saver:
        cooled = saver.end(state_of(0), epoch=0, step=5, position={"sample": 9})
    assert cooled.is_durable


@pytest.mark.parametrize("kind", ["damaged", "missing"])
@pytest.mark.parametrize("confined_members", [False, True])
def test_an_epoch_whose_step_has_a_bad_file_ends_after_the_file_is_restored(
    folder, members, confined, kind, *, confined_members: bool
) -> None:
    with Saver(folder, JOB, SMALL) as saver:
        saved = saver.save(state_of(0), step=5, run="r", position={"sample": 9}).result()
    key = KEYS.make_part_key(5, saved.parts[0].digest)
    if kind == "damaged":
        put(folder, key, b"x" * saved.parts[0].size)
    else:
        delete(folder, [key])
    if confined_members:
        cooled, _ = confined(folder, dict.fromkeys("abc", folder)).end(folder)
    else:
        cooled = members(folder, ["a", "b", "c"]).end(run="r")
    assert all(one.is_durable for one in cooled.values())
    assert read_checkpoint(folder, JOB, 5) == saved
    assert not verify(folder, saved)


def test_an_epoch_whose_members_are_dead_does_not_end_with_a_damaged_file(folder, members) -> None:
    some = members(folder, ["a", "b"])
    some.end()
    some.leave()
    delete(folder, [stat.key for stat in list_objects(folder, KEYS.epochs)])
    saved = read_checkpoint(folder, JOB, 5)
    key = KEYS.make_part_key(5, saved.parts[0].digest)
    whole = read(folder, key)
    put(folder, key, b"x" * saved.parts[0].size)
    assert watch_epoch_end(folder, JOB, 0, timeout=timedelta(0)).epoch is None
    put(folder, key, whole)
    ended = watch_epoch_end(folder, JOB, 0, timeout=timedelta(0)).epoch
    assert ended is not None
    assert ended.root == saved.root


def test_nothing_unnamed_is_left(folder, members) -> None:
    members(folder, ["a", "b", "c", "d", "e", "f"]).end()
    plan = plan_retention(folder, JOB, RetentionSettings(grace=timedelta(0)))
    assert plan.removals == ()


def test_there_is_no_way_to_skip_the_upload() -> None:
    with pytest.raises(ValueError, match="skip_upload"):
        CooldownSettings(skip_upload=True)  # pyright: ignore[reportCallIssue]


def test_the_end_of_an_epoch_refers_to_no_earlier_files() -> None:
    with pytest.raises(ValueError, match="leave out refer"):
        CooldownSettings(save=SaveSettings(refer=True))


def test_members_wait_for_each_other_until_somebody_has_seen_them_all(folder, members) -> None:
    made = members(folder, ["a", "b"])
    one = made.memberships["a"]
    one.wait_for_members(2, 0, timedelta(0))
    with pytest.raises(errors.UnavailableError, match="2 of 3 members"):
        one.wait_for_members(3, 0, timedelta(0))
    roster = Roster(job=JOB, epoch=0, members=("a", "b", "dead"), seed=SEED)
    commit_once(folder, CooldownKeys(JOB, 0).roster, roster)
    one.wait_for_members(3, 0, timedelta(0))
