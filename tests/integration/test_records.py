"""A commit on a real store."""

from millrace.records import commit_once
from millrace.storage import open_store
from millrace.testing.faults import Fault
from tests.stores import make_spec
from tests.unit.test_records import Thing


def test_a_commit_whose_answer_was_lost_is_known_to_be_mine(request, r2):
    store = open_store(make_spec("r2", request))
    r2.fail_next(Fault.LOST, 1, method="PUT")
    assert commit_once(store, "a", Thing(name="mine")).mine
    assert r2.count_fired()[Fault.LOST] == 1
