"""Report of the end of an epoch whose checkpoint is not in the bucket."""

from millrace.checkpoints import EpochStatus
from millrace.schemas.checkpoint import CooldownOutcome, CooldownRecord, EpochRecord
from tasks.cooldown import EpochEnd, describe_epoch_end


def test_a_checkpoint_elsewhere_is_named_with_its_destination():
    epoch = EpochRecord(
        job="job", epoch=3, step=40, root="blake3:" + "0" * 64, member="a",
        destination="hf://owner/name@main",
    )  # fmt: skip
    result = CooldownRecord(
        member="a", outcome=CooldownOutcome.COMMITTED, reason="", sent=5 << 20, checked=0,
        replaced=0, seconds=2.0,
    )  # fmt: skip
    status = EpochStatus(epoch, None, ("a",), frozenset(), {"a": result}, 3.0)
    report = str(describe_epoch_end("s3://bucket", "job", 3, EpochEnd(status, {}, {})))
    assert "ended with **step 40** in `hf://owner/name@main`, committed by `a`." in report
    assert "without a checkpoint" not in report
