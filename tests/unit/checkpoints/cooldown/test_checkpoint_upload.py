"""Upload of a checkpoint by one of several members."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from millrace import errors
from millrace.checkpoints import (
    Content,
    CooldownSettings,
    Membership,
    read_checkpoint,
    verify,
)
from millrace.checkpoints.contents import PartContent, make_content
from millrace.checkpoints.cooldown.checkpoint_upload import CheckpointUpload
from millrace.checkpoints.cooldown.result import EpochResult
from millrace.checkpoints.find import commit_checkpoint
from millrace.checkpoints.progress_events import (
    CheckpointSaved,
    PartStored,
    UploadCompleted,
    UploadStarted,
)
from millrace.digest import compute_digest, hash_blocks
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.progress import Event
from millrace.records import fetch
from millrace.schemas.checkpoint import Checkpoint, CooldownOutcome, Part
from millrace.storage import Store, delete, list_objects, put
from tests.unit.checkpoints.cooldown.conftest import JOB

BODIES = [bytes([number]) * 100 for number in range(4)]
KEYS, COOLDOWN = CheckpointKeys(JOB), CooldownKeys(JOB, 0)


@pytest.fixture
def content() -> Content:
    def read(number: int) -> PartContent:
        return PartContent(memoryview(BODIES[number]), hash_blocks(BODIES[number]))

    parts = tuple(Part(step=5, digest=compute_digest(body), size=len(body)) for body in BODIES)
    return make_content(5, parts, {}, read)


@pytest.fixture
def draft(content: Content) -> Checkpoint:
    return Checkpoint(
        job=JOB,
        step=5,
        run="r",
        position={"sample": 9},
        notes={},
        saved=datetime.now(UTC),
        root=content.root,
        parts=content.parts,
        tensors={},
    )


class Uploader:
    """Upload of the member ``a``."""

    def __init__(
        self, folder: Store, content: Content, draft: Checkpoint, *, confined: bool = False
    ) -> None:
        self.changed = threading.Event()
        self.events: list[Event] = []
        membership = Membership(folder, JOB, "a", reads=folder if confined else None)
        self.upload = CheckpointUpload(
            membership,
            folder,
            content,
            draft,
            COOLDOWN,
            CooldownSettings(),
            on_change=self.changed.set,
            progress=self.events.append,
        )


@pytest.fixture
def uploader_of(folder: Store, content: Content, draft: Checkpoint):
    made: list[Uploader] = []

    def make(*, confined: bool = False) -> Uploader:
        made.append(Uploader(folder, content, draft, confined=confined))
        return made[-1]

    yield make
    for one in made:
        one.upload.stop()


def test_a_member_that_is_no_uploader_sends_nothing(
    folder: Store, uploader_of: Callable[..., Uploader]
) -> None:
    one = uploader_of()
    one.upload.start(["b", "c"])
    assert not one.upload.has_begun
    assert not list(list_objects(folder, ""))


def test_an_uploader_sends_all_files_and_commits(
    folder: Store, uploader_of: Callable[..., Uploader], draft: Checkpoint
) -> None:
    one = uploader_of()
    assert not one.upload.find_files(["a"])
    one.upload.start(["b", "a"])
    assert one.changed.wait(30)
    assert one.upload.find_files(["a"])
    assert one.upload.commit()
    assert not one.upload.commit()  # it is committed
    assert read_checkpoint(folder, JOB, 5).root == draft.root
    assert [type(event) for event in one.events] == [
        UploadStarted,
        *[PartStored] * 4,
        *[UploadCompleted, CheckpointSaved] * 2,
    ]
    assert one.events[0] == UploadStarted(member="a", rank=1, checkpointers=2)
    result = one.upload.add_counts(EpochResult(CooldownOutcome.COMMITTED, "", None))
    assert (result.sent, result.checked, result.replaced) == (400, 0, 0)


def test_the_metadata_of_another_member_does_not_prove_the_files(
    folder: Store, uploader_of: Callable[..., Uploader], draft: Checkpoint
) -> None:
    one, other = uploader_of(), uploader_of()
    one.upload.start(["a"])
    assert one.changed.wait(30)
    one.upload.commit()
    assert not other.upload.is_committed
    damaged, missing = (KEYS.make_part_key(5, part.digest) for part in draft.parts[:2])
    put(folder, damaged, b"x" * 100)
    delete(folder, [missing])
    assert not other.upload.find_files([])
    assert other.upload.is_committed
    other.upload.start(["a"])
    assert other.changed.wait(30)
    assert other.upload.find_files([])
    assert not other.upload.commit()
    assert not verify(folder, read_checkpoint(folder, JOB, 5))
    result = other.upload.add_counts(EpochResult(CooldownOutcome.LOST, "", None))
    assert (result.sent, result.checked, result.replaced) == (100, 300, 1)


def test_files_that_are_lost_before_the_commit_are_uploaded_again(
    folder: Store, uploader_of: Callable[..., Uploader], draft: Checkpoint
) -> None:
    first, *rest = draft.parts
    referred = first.model_copy(update={"step": 4})
    one = uploader_of()
    one.upload.start(["a"])
    assert one.changed.wait(30)
    assert one.upload.find_files(["a"])
    delete(folder, [KEYS.make_part_key(5, part.digest) for part in draft.parts[:2]])
    put(folder, KEYS.make_part_key(4, first.digest), b"x" * 100)
    earlier = draft.model_copy(update={"parts": (referred, *rest)})
    commit_checkpoint(folder, earlier)
    assert not one.upload.commit()
    found = read_checkpoint(folder, JOB, 5)
    assert found.parts == earlier.parts
    assert not verify(folder, found)


@pytest.mark.parametrize("junk", [b"", b"{}", b"junk"])
@pytest.mark.parametrize("confined", [False, True])
def test_damaged_metadata_does_not_complete_the_upload(
    folder: Store, uploader_of: Callable[..., Uploader], *, confined: bool, junk: bytes
) -> None:
    put(folder, KEYS.make_metadata_key(5), junk)
    assert not uploader_of(confined=confined).upload.find_files(["a"])


def test_damaged_metadata_is_replaced_after_the_upload(
    folder: Store, uploader_of: Callable[..., Uploader], draft: Checkpoint
) -> None:
    put(folder, KEYS.make_metadata_key(5), b"")
    one = uploader_of()
    assert not one.upload.find_files(["a"])
    one.upload.start(["a"])
    assert one.changed.wait(30)
    assert one.upload.find_files(["a"])
    assert one.upload.commit()
    assert not verify(folder, read_checkpoint(folder, JOB, draft.step))


def test_another_position_at_the_same_step_is_a_conflict(
    folder: Store, content: Content, draft: Checkpoint, uploader_of: Callable[..., Uploader]
) -> None:
    commit_checkpoint(folder, draft)
    moved = Uploader(folder, content, draft.model_copy(update={"position": {"sample": 8}}))
    with pytest.raises(errors.ConflictError, match="another content or position"):
        moved.upload.find_files(["a"])  # before any upload
    assert not moved.events
    with pytest.raises(errors.ConflictError, match="another content or position"):
        moved.upload.commit()
    assert [type(event) for event in moved.events] == [UploadCompleted]


def test_a_confined_member_uploads_below_its_prefix_with_its_metadata(
    folder: Store, draft: Checkpoint, uploader_of: Callable[..., Uploader]
) -> None:
    one = uploader_of(confined=True)
    one.upload.start(["a"])
    assert one.changed.wait(30)
    keys = {stat.key for stat in list_objects(folder, "")}
    parts = {COOLDOWN.make_part_key("a", part.digest) for part in draft.parts}
    assert keys == {COOLDOWN.make_draft_key("a"), *parts}
    assert fetch(folder, COOLDOWN.make_draft_key("a"), Checkpoint).root == draft.root
    assert not one.upload.find_files(["a"])  # the owner has not committed
    commit_checkpoint(folder, draft)
    assert one.upload.find_files(["a"])


def test_files_of_another_confined_member_are_verified_and_not_sent_again(
    folder: Store, draft: Checkpoint, uploader_of: Callable[..., Uploader]
) -> None:
    for part, body in zip(draft.parts[:3], BODIES, strict=False):
        put(folder, COOLDOWN.make_part_key("b", part.digest), body)
    put(folder, COOLDOWN.make_part_key("b", draft.parts[0].digest), b"x" * 100)  # damaged
    one = uploader_of(confined=True)
    one.upload.find_files(["b"])
    one.upload.start(["b", "a"])
    assert one.changed.wait(30)
    one.upload.stop()
    result = one.upload.add_counts(EpochResult(CooldownOutcome.LOST, "", None))
    assert (result.sent, result.checked, result.replaced) == (100, 300, 1)
    own = {stat.key for stat in list_objects(folder, COOLDOWN.make_parts_prefix("a"))}
    assert own == {COOLDOWN.make_part_key("a", draft.parts[number].digest) for number in (0, 3)}
