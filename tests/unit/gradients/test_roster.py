"""The registered workers of a window, window after window."""

from collections.abc import Iterable
from datetime import UTC, datetime

import pytest

from millrace.gradients import Codec, OuterOptimizer, RegistrationSettings
from millrace.gradients.sync import roster as roster_module
from millrace.gradients.sync.roster import update_roster
from millrace.schemas.chain import ChainLink, ChainStart, ExcludedWorker, TakenGradient
from millrace.schemas.gradient import ExclusionReason
from millrace.schemas.merge import MergeSettings
from millrace.schemas.registration import Registration, RosterEntry, RosterStatus

START = ChainStart(run="runs/one", job="trained", step=0, root="root", state="state")
SETTINGS = RegistrationSettings(warm_up=2, missed=3, most=4)
MERGED = TakenGradient(
    scale=1, sum_factor=1, share=1, norm=1, digest=f"blake3:{'0' * 64}", size=1, tokens=0,
    written=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip
Roster = dict[str, RosterEntry]


def registered(
    uid: str, number: int = 1, *, key: str = "", leaves_after: int | None = None
) -> dict[str, Registration]:
    key = key or f"{ord(uid[0]):064x}"
    registration = Registration(
        run="runs/one", version="1", uid=uid, number=number, leaves_after=leaves_after, key=key
    )
    return {uid: registration}


def link(window: int, taken: Iterable[str] = (), **excluded: ExclusionReason) -> ChainLink:
    return ChainLink(
        run="runs/one",
        window=window,
        step=window * 5,
        updates=(),
        codec=Codec(),
        names=(),
        shapes=(),
        outer=OuterOptimizer(),
        merge=MergeSettings(),
        scores="",
        taken=dict.fromkeys(taken, MERGED),
        excluded={
            uid: ExcludedWorker(reason=reason, sentence="So.") for uid, reason in excluded.items()
        },
        seconds=1,
        previous="before",
        state="state",
    )


def go_on(
    before: Roster,
    last: ChainStart | ChainLink,
    found: dict[str, Registration] | None = None,
    settings: RegistrationSettings = SETTINGS,
    quorum: int = 1,
    wanted: int | None = None,
) -> Roster:
    window = last.window + 1 if isinstance(last, ChainLink) else 1
    return update_roster(before, last, found or {}, settings, window, quorum=quorum, wanted=wanted)


def make_member(uid: str) -> Roster:
    """A roster after two windows of one worker, which counts."""
    first = go_on({}, START, registered(uid))
    return go_on(go_on(first, link(1, uid)), link(2, uid))


def test_a_worker_counts_after_its_warm_up():
    before = make_member("a")
    joined = go_on(before, link(3, "a"), registered("b"))
    assert joined["b"] == RosterEntry(
        key=f"{ord('b'):064x}", number=1, since=4, status=RosterStatus.WARMING_UP
    )
    second = go_on(joined, link(4, "a", b=ExclusionReason.WARM_UP))
    assert not second["b"].counts
    third = go_on(second, link(5, "a", b=ExclusionReason.WARM_UP))
    assert (third["b"].status, third["b"].counts) == (RosterStatus.ESTABLISHED, True)


@pytest.mark.parametrize("reason", [ExclusionReason.DUPLICATE, ExclusionReason.MISSING])
def test_a_window_without_a_valid_gradient_begins_the_warm_up_again(reason):
    joined = go_on(make_member("a"), link(3, "a"), registered("b"))
    warm = go_on(joined, link(4, "a", b=ExclusionReason.WARM_UP))
    again = go_on(warm, link(5, "a", b=reason))
    assert (again["b"].valid, again["b"].missed, again["b"].counts) == (0, 1, False)
    assert go_on(again, link(6, "a", b=ExclusionReason.WARM_UP))["b"].missed == 0


def test_a_gradient_that_was_not_needed_changes_nothing():
    before = make_member("a")
    assert go_on(before, link(3)) == before


def test_what_the_aggregator_could_not_read_is_not_missed():
    before = make_member("a")
    assert go_on(before, link(3, a=ExclusionReason.UNAVAILABLE)) == before


def test_what_alone_could_not_be_read_is_missed():
    gone = go_on({}, START, registered("a") | registered("b"), quorum=2)
    for window in (1, 2, 3):
        last = link(window, "a", b=ExclusionReason.UNAVAILABLE)
        unawaited = go_on(gone, last, quorum=2, wanted=1)
        assert unawaited["b"].missed == gone["b"].missed
        gone = go_on(gone, last, quorum=2)
    assert gone["b"].status is RosterStatus.REMOVED
    assert gone["a"].is_active


def test_a_gradient_that_a_complete_window_did_not_wait_for_is_not_missed():
    both = go_on({}, START, registered("a") | registered("b"), quorum=2)
    both = go_on(go_on(both, link(1, "ab"), quorum=2), link(2, "ab"), quorum=2)
    late = link(3, "a", b=ExclusionReason.MISSING)
    assert go_on(both, late, wanted=1)["b"].missed == 0
    assert go_on(both, late, wanted=2)["b"].missed == 1
    assert go_on(both, late)["b"].missed == 1
    warm = go_on(go_on(make_member("a"), link(3, "a"), registered("b")), late, wanted=1)
    assert warm["b"].missed == 1  # half of a window is waited for workers that warm up


def test_a_worker_that_complete_windows_do_not_wait_for_is_removed_in_the_end():
    roster = go_on({}, START, registered("a") | registered("b"), quorum=2)
    roster = go_on(go_on(roster, link(1, "ab"), quorum=2), link(2, "ab"), quorum=2)
    missing = {"b": ExclusionReason.MISSING}
    for window in range(3, 32):
        roster = go_on(roster, link(window, "a", **missing), quorum=1, wanted=1)
    assert (roster["b"].absent, roster["b"].missed, roster["b"].counts) == (29, 2, True)
    sent = go_on(roster, link(32, "b", a=ExclusionReason.MISSING), wanted=1)
    assert (sent["b"].absent, sent["b"].missed) == (0, 0)
    unneeded = go_on(roster, link(32, "a"), wanted=1)
    assert (unneeded["b"].absent, unneeded["b"].missed) == (0, 2)
    gone = go_on(roster, link(32, "a", **missing), wanted=1)
    assert gone["b"].status is RosterStatus.REMOVED


def test_an_admitted_name_goes_to_another_key_with_the_settings():
    before = make_member("a")
    other = "f" * 64
    admitted = SETTINGS.model_copy(update={"admitted": {"a": other}})
    said = registered("a")["a"].model_copy(update={"key": other, "number": 2})
    entry = go_on(before, link(3, "a"), {"a": said}, admitted)["a"]
    assert (entry.key, entry.since, entry.status) == (other, 4, RosterStatus.WARMING_UP)


def test_a_gradient_without_a_quorum_was_valid():
    assert go_on(make_member("a"), link(3, a=ExclusionReason.QUORUM))["a"].missed == 0


def test_whoever_warms_up_counts_while_too_few_others_do():
    first = go_on({}, START, registered("a") | registered("b"), quorum=2)
    assert [entry.counts for entry in first.values()] == [True, True]
    assert {entry.status for entry in first.values()} == {RosterStatus.WARMING_UP}
    both = go_on(go_on(first, link(1, "ab"), quorum=2), link(2, "ab"), quorum=2)
    third = go_on(both, link(3, "ab"), registered("c"), quorum=2)
    assert {uid: entry.counts for uid, entry in third.items()} == {"a": True, "b": True, "c": False}


def test_without_a_warm_up_a_worker_counts_at_once():
    none = SETTINGS.model_copy(update={"warm_up": 0})
    joined = go_on(make_member("a"), link(3, "a"), registered("b"), none)
    assert joined["b"].counts


def test_a_worker_that_misses_too_many_windows_is_removed_until_it_registers_again():
    gone = make_member("a")
    for window in (3, 4, 5):
        assert gone["a"].counts
        gone = go_on(gone, link(window, a=ExclusionReason.MISSING), registered("a"))
    assert (gone["a"].status, gone["a"].counts) == (RosterStatus.REMOVED, False)
    assert go_on(gone, link(6), registered("a")) == gone  # the same registration
    assert go_on(gone, link(6), registered("a", 2, key="f" * 64)) == gone  # another worker
    again = go_on(gone, link(6), registered("a", 2))
    assert (again["a"].status, again["a"].since) == (RosterStatus.WARMING_UP, 7)


def test_a_worker_leaves_after_the_window_that_it_names():
    leaving = go_on(make_member("a"), link(3, "a"), registered("a", 2, leaves_after=5))
    assert leaving["a"].counts
    assert go_on(leaving, link(4, "a"))["a"].counts
    left = go_on(leaving, link(5, "a"))
    assert (left["a"].status, left["a"].counts) == (RosterStatus.LEFT, False)
    assert go_on(left, link(6), registered("a", 1)) == left  # an old registration, replayed


def test_a_worker_that_changes_its_mind_stays():
    leaving = go_on(make_member("a"), link(3, "a"), registered("a", 2, leaves_after=9))
    staying = go_on(leaving, link(4, "a"), registered("a", 3))
    assert (staying["a"].leaves_after, staying["a"].since) == (None, 1)


def test_another_key_changes_nothing_of_a_worker():
    before = make_member("a")
    assert go_on(before, link(3, "a"), registered("a", 7, key="f" * 64, leaves_after=3)) == go_on(
        before, link(3, "a")
    )


def test_a_worker_that_has_left_before_it_was_seen_does_not_join():
    assert go_on({}, START, registered("a", 2, leaves_after=1)) == {}


def test_a_full_roster_takes_nobody_until_one_has_left():
    everybody = {**registered("a"), **registered("b"), **registered("c"), **registered("d")}
    full = go_on({}, START, everybody)
    assert set(go_on(full, link(1, "abcd"), registered("e"))) == set("abcd")
    left = go_on(full, link(1, "abcd"), registered("a", 2, leaves_after=1))
    assert go_on(left, link(2, "bcd"), registered("e"))["e"].since == 3


def test_only_admitted_workers_are_in_the_roster():
    admitted = SETTINGS.model_copy(update={"admitted": {"a": f"{ord('a'):064x}"}})
    found = registered("a") | registered("b")
    assert set(go_on({}, START, found, admitted)) == {"a"}
    assert go_on({}, START, registered("a", key="f" * 64), admitted) == {}
    nobody = SETTINGS.model_copy(update={"admitted": {}})
    expelled = go_on(make_member("a"), link(3, "a"), settings=nobody)
    assert expelled["a"].status is RosterStatus.REMOVED


def test_workers_that_have_left_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(roster_module, "MAX_GONE", 1)
    first = go_on({}, START, registered("a"))
    second = go_on(first, link(1, "a"), registered("b"))
    gone = go_on(
        second,
        link(2, "a"),
        registered("a", 2, leaves_after=2) | registered("b", 2, leaves_after=2),
    )
    assert set(gone) == {"b"}


def test_the_worker_that_has_ended_first_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(roster_module, "MAX_GONE", 1)
    first = go_on({}, START, registered("a"))
    second = go_on(first, link(1, "a"), registered("b"))
    left = go_on(second, link(2, "ab"), registered("b", 2, leaves_after=2))
    assert set(go_on(left, link(3, "a"), registered("a", 2, leaves_after=3))) == {"a"}
