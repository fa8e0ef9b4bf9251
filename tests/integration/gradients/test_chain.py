"""The chain of windows on a real store."""

from millrace.gradients import OuterKind, Transform
from millrace.storage import open_store
from tests.stores import make_spec
from tests.unit.gradients.test_chain import assert_late_ones_agree, run_of


def test_whoever_comes_late_has_the_same_weights(request):
    store = open_store(make_spec("rgw", request))
    assert_late_ones_agree(run_of(store, transform=Transform.DCT, kind=OuterKind.NESTEROV))
