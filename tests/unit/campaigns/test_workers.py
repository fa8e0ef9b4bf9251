"""Opening of the first window, and machines that are not released."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from millrace.campaigns import (
    Training,
    await_workers,
    commit_prewarm_marker,
    delete_prewarm_marker,
    has_joined_worker,
    has_unreleased_machines,
    hold_campaign_lease,
    renew_prewarm_marker,
)
from millrace.checkpoints.cooldown.membership import Membership
from millrace.errors import UnavailableError, WorkerError
from millrace.gradients import begin_run, select_weights
from millrace.keys.members import make_member_lease
from millrace.keys.rentals import RentalKeys
from millrace.records import commit_once
from millrace.storage import Store, StoreSpec, exists, head, put
from tests.support.campaigns.training import RENTED, FakeWorkers, MakeTraining
from tests.support.rentals.parts import make_attempt


def begin(store: Store, training: Training) -> None:
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))


def join(store: Store, training: Training, uid: str) -> None:
    put(store, training.run.gradient_keys.make_start_window_key(uid, 1), b"{}")


def make_older(store: Store, key: str) -> None:
    """Set the time of an object to a minute ago."""
    file = Path(store.url.removeprefix("file://")) / key
    before = file.stat().st_mtime - 60
    os.utime(file, (before, before))


def test_nobody_joins_a_run_that_has_not_begun(store: Store, make_training: MakeTraining) -> None:
    training = make_training()
    assert not has_joined_worker(training)
    begin(store, training)
    assert not has_joined_worker(training)
    join(store, training, "worker-1")
    assert has_joined_worker(training)


def test_the_quorum_opens_the_first_window(store: Store, make_training: MakeTraining) -> None:
    training = make_training(run={"gather": {"quorum": 2}})
    begin(store, training)
    join(store, training, "worker-0")
    join(store, training, "worker-1")
    assert await_workers(training, FakeWorkers(is_over=True)) == 2


def test_one_worker_opens_it_after_the_timeout(store: Store, make_training: MakeTraining) -> None:
    training = make_training(run={"gather": {"quorum": 2}}, join_timeout="PT0.001S")
    begin(store, training)
    join(store, training, "worker-0")
    assert await_workers(training, FakeWorkers()) == 1


def test_workers_of_an_earlier_start_that_have_ended_do_not_open_a_window(
    store: Store, place: StoreSpec, make_training: MakeTraining
) -> None:
    """The leader was killed after a window, and its local workers ended with it."""
    training = make_training(run={"gather": {"quorum": 2}})
    begin(store, training)
    for uid in training.uids:
        join(store, training, uid)
        make_older(store, training.run.gradient_keys.make_start_window_key(uid, 1))
    make_older(store, training.run.chain_keys.make_link_key(0))
    with hold_campaign_lease(place, training.campaign):
        assert not has_joined_worker(training)
        with pytest.raises(WorkerError, match="none has joined the run"):
            await_workers(training, FakeWorkers(is_over=True))
        for uid in training.uids:
            join(store, training, uid)
        assert has_joined_worker(training)
        with (
            Membership(store, training.epoch_job, "worker-0"),
            Membership(store, training.epoch_job, "worker-1"),
        ):
            assert await_workers(training, FakeWorkers()) == 2


def test_a_worker_that_has_joined_and_ended_is_none_of_the_quorum(
    store: Store, place: StoreSpec, make_training: MakeTraining
) -> None:
    training = make_training(run={"gather": {"quorum": 2}}, join_timeout="PT0.001S")
    begin(store, training)
    with (
        hold_campaign_lease(place, training.campaign),
        Membership(store, training.epoch_job, "worker-0"),
    ):
        for uid in training.uids:
            join(store, training, uid)
        assert await_workers(training, FakeWorkers()) == 1


def test_workers_that_live_since_an_earlier_start_open_the_next_window(
    store: Store, place: StoreSpec, make_training: MakeTraining
) -> None:
    """Rented machines train while the leader starts again: they wait for the open window."""
    training = make_training()
    begin(store, training)
    make_older(store, training.run.chain_keys.make_link_key(0))
    with Membership(store, training.epoch_job, "worker-1", timedelta(hours=1)):
        make_older(store, make_member_lease(training.epoch_job, "worker-1").make_term_key(0))
        join(store, training, "worker-1")
        make_older(store, training.run.gradient_keys.make_start_window_key("worker-1", 1))
        with hold_campaign_lease(place, training.campaign):
            assert await_workers(training, FakeWorkers(is_over=True)) == 1
    with (
        hold_campaign_lease(place, training.campaign),
        pytest.raises(WorkerError, match="none has joined the run"),
    ):
        await_workers(training, FakeWorkers(is_over=True))


def test_workers_that_do_not_join_are_not_waited_for_longer(
    store: Store, make_training: MakeTraining
) -> None:
    training = make_training(join_timeout="PT0.001S")
    begin(store, training)
    with pytest.raises(UnavailableError, match=r"raise `training\.join_timeout`"):
        await_workers(training, FakeWorkers())


def test_workers_that_have_ended_are_not_waited_for(
    store: Store, make_training: MakeTraining
) -> None:
    training = make_training()
    begin(store, training)
    with pytest.raises(WorkerError, match=r"none has joined the run\. worker-0 ended with 0"):
        await_workers(training, FakeWorkers(is_over=True))
    with pytest.raises(WorkerError, match="the last lines"):
        await_workers(training, FakeWorkers(failure=WorkerError("the last lines")))


def test_rented_machines_wait_while_files_are_copied(
    store: Store, make_training: MakeTraining
) -> None:
    training = make_training(machines=RENTED)
    assert not has_unreleased_machines(training)
    for _ in range(2):  # a leader that was killed is followed by another
        assert commit_prewarm_marker(training)
        assert exists(store, training.keys.prewarm_marker)
    delete_prewarm_marker(training)
    assert not exists(store, training.keys.prewarm_marker)


def test_a_machine_that_runs_keeps_its_marker_and_gets_no_new_one(
    store: Store, make_training: MakeTraining
) -> None:
    training = make_training(machines=RENTED)
    assert commit_prewarm_marker(training)
    intent = make_attempt(rental=training.campaign).intent
    commit_once(store, RentalKeys(training.campaign).make_intent_key(0), intent)
    assert has_unreleased_machines(training)
    assert commit_prewarm_marker(training)  # its files are not copied yet
    delete_prewarm_marker(training)
    assert not commit_prewarm_marker(training)
    assert not exists(store, training.keys.prewarm_marker)


def test_a_marker_is_renewed_while_the_campaign_prewarms(
    store: Store, make_training: MakeTraining
) -> None:
    training = make_training(machines=RENTED)
    with renew_prewarm_marker(training):
        pass
    assert not exists(store, training.keys.prewarm_marker)
    assert commit_prewarm_marker(training)
    before = head(store, training.keys.prewarm_marker)
    with renew_prewarm_marker(training):
        pass  # its end waits for the first renewal
    assert head(store, training.keys.prewarm_marker) != before


@pytest.mark.parametrize("machines", [{"kind": "local"}, RENTED | {"prewarm": False}])
def test_workers_without_a_prewarm_wait_for_none(
    store: Store, make_training: MakeTraining, machines: dict[str, object]
) -> None:
    training = make_training(machines=machines)
    assert not commit_prewarm_marker(training)
    assert not exists(store, training.keys.prewarm_marker)
