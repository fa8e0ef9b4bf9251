"""The chain of windows on a real store."""

from millrace.gradients import OuterKind, RunSettings, Transform
from millrace.gradients.merging.links import find_newest_window
from millrace.gradients.merging.scores import read_newest_scores
from millrace.gradients.scoring.scorer import iterate_scores
from millrace.storage import open_store
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
