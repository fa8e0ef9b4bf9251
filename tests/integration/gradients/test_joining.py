"""A worker that cannot send its gradients does not join a run."""

import pytest
import torch

from millrace import errors
from millrace.gradients import Participant, RunSettings, begin_run, select_weights
from millrace.storage import list_objects, open_store
from millrace.storage.clients import make_full_key
from millrace.testing.rgw import RGW
from tests.stores import make_spec
from tests.support.policies import open_without


@pytest.mark.parametrize("action", ["s3:PutObject", "s3:DeleteObject", ""])
def test_a_worker_without_a_right_to_write_does_not_join(
    rgw: RGW, request: pytest.FixtureRequest, action: str
) -> None:
    spec = make_spec("rgw", request)
    whole = open_store(spec)
    settings = RunSettings(run="runs/one")
    begin_run(whole, settings.chain_keys, select_weights(torch.nn.Linear(8, 8)))
    prefix = settings.gradient_keys.make_worker_prefix("a")
    own = open_without(rgw, spec, action, [make_full_key(whole, prefix)])
    if not action:
        participant = Participant.join(settings, "a", own, whole)
        next(participant.iterate_windows())
        participant.submit(torch.nn.Linear(8, 8))
        assert settings.gradient_keys.make_gradient_key("a", 1) in {
            stat.key for stat in list_objects(whole, prefix)
        }
        return
    is_kept = action == "s3:DeleteObject"
    sentence = "allow deletion" if is_kept else "does not let these credentials create objects"
    with pytest.raises(errors.DeniedError, match=sentence):
        Participant.join(settings, "a", own, whole)
    assert len(list(list_objects(whole, prefix))) == is_kept  # which the message names
