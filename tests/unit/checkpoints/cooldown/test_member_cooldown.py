"""Steps of a member's cooldown, which go on in the background where the member can commit."""

from contextlib import ExitStack
from datetime import UTC, datetime

import pytest
import torch

from millrace import errors
from millrace.checkpoints import CooldownOutcome, CooldownSettings, Membership, OnTimeout
from millrace.checkpoints.cooldown.member_cooldown import MemberCooldown
from millrace.checkpoints.snapshot import SnapshotBuffers, StateShards
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.records import commit_once, fetch
from millrace.schemas.checkpoint import Checkpoint, EpochRecord, Vote
from millrace.storage import Store
from tests.unit.checkpoints.cooldown.conftest import JOB, ROSTER, Clock


def begin(membership: Membership, folder: Store) -> MemberCooldown:
    """Begin the end of an epoch that the others have ended without a checkpoint."""
    content = SnapshotBuffers().snapshot(StateShards({"w": torch.ones(3)}), 1 << 12).make_content(5)
    draft = Checkpoint(
        job=JOB,
        step=5,
        run="r",
        position={},
        notes={},
        saved=datetime.now(UTC),
        root=content.root,
        parts=content.parts,
        tensors=dict(content.tensors),
    )
    late = EpochRecord(job=JOB, epoch=0, step=5, root=None, reason="no checkpoint after 9 s")
    commit_once(folder, CheckpointKeys(JOB).make_epoch_key(0), late)
    return MemberCooldown(
        membership,
        folder,
        content,
        draft,
        ROSTER,
        CooldownSettings(on_timeout=OnTimeout.BACKGROUND),
        on_change=lambda: None,
    )


@pytest.mark.parametrize("confined", [False, True])
def test_only_a_member_that_can_commit_goes_on_in_the_background(
    folder: Store, *, confined: bool
) -> None:
    with Membership(folder, JOB, "a", reads=folder if confined else None) as membership:
        cooldown = begin(membership, folder)
        result = cooldown.poll()
        cooldown.upload.stop()
    assert result is not None
    assert result.outcome is CooldownOutcome.FAILED
    assert cooldown.is_in_background is not confined
    assert ("the upload continues" in result.reason) is not confined


def test_an_upload_in_the_background_fails_without_progress(folder: Store, clock: Clock) -> None:
    """Members that live and never vote do not hold up the trainer for ever."""
    with ExitStack() as stack:
        members = {
            name: stack.enter_context(Membership(folder, JOB, name)) for name in ROSTER.members
        }
        cooldown = begin(members["a"], folder)
        stack.callback(cooldown.upload.stop)
        assert cooldown.poll() is not None
        assert cooldown.poll() is None
        clock.now += 359
        assert cooldown.poll() is None
        clock.now += 2
        with pytest.raises(errors.MillraceError, match=r"since b, c did not vote for 360 s"):
            cooldown.poll()

        vote = fetch(folder, CooldownKeys(JOB, 0).make_vote_key("a"), Vote)
        for name in ("b", "c"):  # which makes progress
            other = vote.model_copy(update={"member": name})
            commit_once(folder, CooldownKeys(JOB, 0).make_vote_key(name), other)
        cooldown.poll()
