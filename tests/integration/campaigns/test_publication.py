"""The check of a campaign's destination on the Hugging Face Hub."""

import pytest
import torch
from pydantic import SecretStr

from millrace.campaigns import check_publication
from millrace.checkpoints import HubSpec, Saver, StoreDestination, copy_checkpoint, open_destination
from millrace.errors import ConflictError
from millrace.gradients import begin_run, select_weights
from millrace.storage import Store
from millrace.testing.hub import WRITER, HubServer
from tests.support.campaigns.training import MakeTraining


def test_a_repository_with_another_checkpoint_of_the_last_step_is_refused(
    hub: HubServer, store: Store, make_training: MakeTraining
) -> None:
    training = make_training()
    begin_run(store, training.run.chain_keys, select_weights(torch.nn.Linear(3, 2)))
    spec = HubSpec(repo=hub.make_repo(), token=SecretStr(WRITER), endpoint=hub.endpoint)
    check_publication(training, spec, "final")
    with Saver(store, "other") as saver:
        saved = saver.save({"weight": torch.zeros(2)}, step=6 * training.run.steps).result()
    copy_checkpoint(StoreDestination(store), saved, open_destination(spec), "final")
    check_publication(training, spec, "another")
    with pytest.raises(ConflictError, match=r"hf://.*/final/.* is another checkpoint of step"):
        check_publication(training, spec, "final")
