"""Steps of a member's cooldown, which go on in the background where the member can commit."""

from datetime import UTC, datetime

import pytest
import torch

from millrace.checkpoints import CooldownOutcome, CooldownSettings, Membership, OnTimeout
from millrace.checkpoints.cooldown.member_cooldown import MemberCooldown
from millrace.checkpoints.snapshot import SnapshotBuffers, StateShards
from millrace.keys.checkpoints import CheckpointKeys
from millrace.records import commit_once
from millrace.schemas.checkpoint import Checkpoint, EpochRecord
from millrace.storage import Store
from tests.unit.checkpoints.cooldown.conftest import JOB, ROSTER


@pytest.mark.parametrize("confined", [False, True])
def test_only_a_member_that_can_commit_goes_on_in_the_background(
    folder: Store, *, confined: bool
) -> None:
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
    with Membership(folder, JOB, "a", reads=folder if confined else None) as membership:
        cooldown = MemberCooldown(
            membership,
            folder,
            content,
            draft,
            ROSTER,
            CooldownSettings(on_timeout=OnTimeout.BACKGROUND),
            on_change=lambda: None,
        )
        result = cooldown.poll()
        cooldown.upload.stop()
    assert result is not None
    assert result.outcome is CooldownOutcome.FAILED
    assert cooldown.is_in_background is not confined
    assert ("the upload continues" in result.reason) is not confined
