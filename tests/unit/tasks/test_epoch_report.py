"""Report of the end of an epoch whose checkpoint is not in the bucket."""

from pathlib import Path

from millrace.checkpoints import EpochStatus, read_checkpoint
from millrace.schemas.checkpoint import CooldownOutcome, CooldownRecord, EpochRecord
from millrace.storage import open_store
from tasks.cooldown import EpochEnd, describe_epoch_end
from tests.support.cleanup.material import BucketBuilder


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


def test_the_rate_of_the_uploads_and_the_replaced_files_are_words_of_their_own(tmp_path: Path):
    store = open_store(tmp_path.as_uri())
    BucketBuilder(store).put_checkpoint("job", 40, [b"0" * 1000])
    checkpoint = read_checkpoint(store, "job", 40)
    epoch = EpochRecord(job="job", epoch=3, step=40, root=checkpoint.root, member="a")
    result = CooldownRecord(
        member="a", outcome=CooldownOutcome.COMMITTED, reason="It came first.", sent=1000,
        checked=0, replaced=1, seconds=2.0,
    )  # fmt: skip
    status = EpochStatus(epoch, checkpoint, ("a",), frozenset(), {"a": result}, 3.0)
    report = str(describe_epoch_end("s3://bucket", "job", 3, EpochEnd(status, {}, {})))
    assert "uploaded at 500 bytes/s by 1 member" in report
    assert "It came first. 1 damaged file replaced." in report
