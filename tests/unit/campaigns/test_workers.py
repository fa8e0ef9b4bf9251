"""Opening of the first window, and machines that are not released."""

import pytest
import torch

from millrace.campaigns import (
    Training,
    await_workers,
    awaits_prewarm,
    begin_prewarm,
    end_prewarm,
    has_joined_worker,
    has_unreleased_machines,
)
from millrace.errors import UnavailableError, WorkerError
from millrace.gradients import begin_run, select_weights
from millrace.storage import Store, put
from tests.support.campaigns.training import RENTED, FakeWorkers, MakeTraining


def begin(store: Store, training: Training) -> None:
    begin_run(store, training.run.chain, select_weights(torch.nn.Linear(3, 2)))


def join(store: Store, training: Training, uid: str) -> None:
    put(store, training.run.gradients.make_start_window_key(uid, 1), b"{}")


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


def test_rented_machines_wait_while_files_are_copied(make_training: MakeTraining) -> None:
    training = make_training(machines=RENTED)
    assert not has_unreleased_machines(training)
    for _ in range(2):  # a leader that was killed is followed by another
        begin_prewarm(training)
        assert awaits_prewarm(training)
    end_prewarm(training)
    assert not awaits_prewarm(training)


@pytest.mark.parametrize("machines", [{"kind": "local"}, RENTED | {"prewarm": False}])
def test_workers_without_a_prewarm_wait_for_none(
    make_training: MakeTraining, machines: dict[str, object]
) -> None:
    training = make_training(machines=machines)
    begin_prewarm(training)
    assert not awaits_prewarm(training)
