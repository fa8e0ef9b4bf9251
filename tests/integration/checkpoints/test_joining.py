"""Members that cannot save a checkpoint do not join its job."""

import logging
from datetime import timedelta
from pathlib import Path

import pytest

from millrace import errors
from millrace.checkpoints import ExpectedUpload, Membership
from millrace.keys.members import make_member_scope
from millrace.storage import list_objects, open_store
from millrace.storage.clients import make_full_key
from millrace.testing.rgw import RGW
from tests.stores import make_spec
from tests.support.policies import open_without

JOB = "runs/one"


@pytest.mark.parametrize("action", ["s3:PutObject", "s3:GetObject", "s3:DeleteObject", ""])
def test_a_member_without_a_right_to_save_does_not_join(
    rgw: RGW, request: pytest.FixtureRequest, action: str
) -> None:
    spec = make_spec("rgw", request)
    whole = open_store(spec)
    scopes = [make_member_scope(JOB, "a"), f"{JOB}/lease"]
    prefixes = [make_full_key(whole, scope) for scope in scopes]
    member = Membership(open_without(rgw, spec, action, prefixes), JOB, "a", reads=whole)
    if not action:
        with member:
            assert len(list(list_objects(whole, ""))) == 1  # the lease
        return
    with pytest.raises(errors.DeniedError, match="read only"):
        member.__enter__()
    left = list(list_objects(whole, ""))
    assert len(left) == (action == "s3:DeleteObject")  # the sample, which the message names


def test_a_member_that_may_only_read_does_not_join(request: pytest.FixtureRequest) -> None:
    with pytest.raises(errors.DeniedError, match="read only"):
        Membership(open_store(make_spec("rgw", request, "read_only")), JOB, "a").__enter__()
    assert not list(list_objects(open_store(make_spec("rgw", request)), ""))


def test_a_folder_without_space_for_the_checkpoint_is_not_joined(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    with pytest.raises(errors.NoSpaceError, match="bytes free, and a checkpoint has"):
        Membership(store, JOB, "a", expected=ExpectedUpload(1 << 60)).__enter__()
    assert not list(list_objects(store, ""))


def test_an_upload_that_takes_too_long_is_warned_of(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """The sample is one request, and a save makes several at once: it may be faster."""
    store = open_store(make_spec("rgw", request))
    expected = ExpectedUpload(1 << 50, 4, timedelta(seconds=1))
    with caplog.at_level(logging.WARNING), Membership(store, JOB, "a", expected=expected):
        pass
    assert "a share of one in 4 of a checkpoint of 1,125,899,906,842,624 bytes takes" in caplog.text
