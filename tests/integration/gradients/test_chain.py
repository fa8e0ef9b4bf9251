"""The chain of windows on a real store."""

import pytest
import torch

from millrace.gradients import (
    ChainError,
    OuterKind,
    Participant,
    RunSettings,
    Transform,
    begin_run,
    copy_state,
    select_weights,
)
from millrace.gradients.merging.links import find_newest_window
from millrace.gradients.merging.scores import read_newest_scores
from millrace.gradients.scoring.scorer import iterate_scores
from millrace.storage import delete, list_objects, open_store, read
from millrace.storage.clients import make_boto3_client, make_full_key
from tests.stores import make_spec
from tests.unit.gradients.test_chain import assert_late_ones_agree, run_of


def test_whoever_comes_late_has_the_same_weights(request):
    store = open_store(make_spec("rgw", request))
    assert_late_ones_agree(run_of(store, transform=Transform.DCT, kind=OuterKind.NESTEROV))


def test_keys_with_a_slash_at_their_end_are_no_links_and_no_scores(request):
    """obstore lists them like the keys without the slash."""
    store, keys = open_store(make_spec("rgw", request)), RunSettings(run="runs/one").chain_keys
    client = make_boto3_client(store)
    for key in (keys.make_link_key(9), keys.make_scores_key(9)):
        client.put_object(
            Bucket=store.location.bucket, Key=make_full_key(store, f"{key}/"), Body=b"junk"
        )
    assert find_newest_window(store, keys) == -1
    assert read_newest_scores(store, keys) is None
    assert list(iterate_scores(store, keys)) == []


def test_a_worker_that_joins_reads_weights_of_the_disk_as_a_prewarm_left_them(request, tmp_path):
    store, settings = open_store(make_spec("rgw", request)), RunSettings(run="runs/one")
    weights = {"w": torch.randn(64, 64), "b": torch.randn(64)}
    state = copy_state(weights)
    begin_run(store, settings.chain_keys, state)
    parts = [stat.key for stat in list_objects(store) if stat.key.endswith(".safetensors")]
    for key in parts:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(read(store, key))
    delete(store, parts)
    participant = Participant.join(settings, "late", store, store.with_warmed(tmp_path))
    model = torch.nn.Module()
    for name, tensor in weights.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor)))
    participant.load(model)
    assert select_weights(model).digest() == state.digest()
    with pytest.raises(ChainError, match="no undamaged checkpoint"):
        Participant.join(settings, "other", store, store)
