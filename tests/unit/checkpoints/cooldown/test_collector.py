"""The owner of confined members commits the content and the position that most voted for."""

from datetime import UTC, datetime

import pytest
import torch

from millrace import errors
from millrace.checkpoints import Content, find_newest, read_checkpoint, verify
from millrace.checkpoints.cooldown.collector import Collector
from millrace.checkpoints.cooldown.member_cooldown import make_vote
from millrace.checkpoints.cooldown.rosters import make_roster
from millrace.checkpoints.cooldown.votes import VoteTally
from millrace.checkpoints.find import commit_checkpoint
from millrace.checkpoints.snapshot import SnapshotBuffers, StateShards
from millrace.keys.checkpoints import CheckpointKeys
from millrace.keys.cooldowns import CooldownKeys
from millrace.records import commit_once
from millrace.schemas.checkpoint import Checkpoint, EpochRecord
from millrace.storage import Store, delete, exists, put
from tests.unit.checkpoints.cooldown.conftest import JOB

KEYS, COOLDOWN = CheckpointKeys(JOB), CooldownKeys(JOB, 0)
NAMES = ("a", "b", "c", "d", "e")


def content_of(value: int, step: int = 5) -> Content:
    state = {"w": torch.full((10,), float(value)), "same": torch.ones(5000)}
    return SnapshotBuffers().snapshot(StateShards(state), 1 << 12).make_content(step)


def draft_of(content: Content, sample: int = 9, run: str = "r") -> Checkpoint:
    return Checkpoint(
        job=JOB,
        step=content.parts[0].step,
        run=run,
        position={"sample": sample},
        notes={},
        saved=datetime.now(UTC),
        root=content.root,
        parts=content.parts,
        tensors=dict(content.tensors),
    )


class Owner:
    """Owner of the members' job."""

    def __init__(self, folder: Store) -> None:
        self.folder, self.roster = folder, make_roster(JOB, 0, NAMES, 1)
        self.tally = VoteTally(folder, COOLDOWN)
        self.collector = Collector(folder, JOB, 0, NAMES)

    def advance(self, living: str) -> EpochRecord | None:
        self.tally.read_new(self.roster.members)
        return self.collector.advance(self.roster, self.tally, set(living))


def vote(folder: Store, names: str, draft: Checkpoint) -> None:
    for name in names:
        commit_once(folder, COOLDOWN.make_vote_key(name), make_vote(name, draft))
        commit_once(folder, COOLDOWN.make_draft_key(name), draft)


def upload(folder: Store, member: str, content: Content, *, first: int = 0) -> None:
    for number, part in list(enumerate(content.parts))[first:]:
        put(folder, COOLDOWN.make_part_key(member, part.digest), content.read(number).body)


@pytest.mark.parametrize(
    ("step", "value", "sample"), [(5, 2, 9), (5, 1, 8), (6, 1, 9)], ids=["content", "rest", "step"]
)
def test_votes_of_members_that_return_change_the_majority(
    folder: Store, step: int, value: int, sample: int
) -> None:
    owner, first = Owner(folder), content_of(1)
    vote(folder, "ab", draft_of(first))
    upload(folder, "a", first, first=1)  # one file is missing
    assert owner.advance("ab") is None
    last = content_of(value, step)
    vote(folder, "cde", draft_of(last, sample))
    upload(folder, "a", first)
    upload(folder, "c", last)
    ended = owner.advance("abcde")
    assert ended is not None
    assert (ended.step, ended.root, ended.member) == (step, last.root, "c")
    found = find_newest(folder, JOB)
    assert found is not None
    assert (found.step, found.root, found.position) == (step, last.root, {"sample": sample})
    assert not verify(folder, found)


@pytest.mark.parametrize(("sample", "run"), [(3, "r"), (9, "another")])
def test_a_checkpoint_with_another_position_or_run_is_a_conflict(
    folder: Store, sample: int, run: str
) -> None:
    owner, content = Owner(folder), content_of(1)
    commit_checkpoint(folder, draft_of(content, sample, run))
    vote(folder, "abc", draft_of(content))
    assert owner.advance("abc") is None
    upload(folder, "a", content)
    with pytest.raises(errors.ConflictError, match="another content, position or run"):
        owner.advance("abc")
    assert not exists(folder, KEYS.make_epoch_key(0))


def save(folder: Store, content: Content) -> None:
    for number, part in enumerate(content.parts):
        put(folder, KEYS.make_part_key(part.step, part.digest), content.read(number).body)


def test_a_checkpoint_of_an_earlier_owner_ends_the_epoch(folder: Store) -> None:
    content = content_of(1)
    vote(folder, "abc", draft_of(content))
    save(folder, content)
    commit_checkpoint(folder, draft_of(content))
    ended = Owner(folder).advance("abc")
    assert ended is not None
    assert ended.root == read_checkpoint(folder, JOB, 5).root


@pytest.mark.parametrize("other_step", [False, True])
@pytest.mark.parametrize("kind", ["damaged", "missing"])
def test_a_checkpoint_with_a_bad_file_ends_the_epoch_after_the_file_is_restored(
    folder: Store, kind: str, *, other_step: bool
) -> None:
    content = content_of(1)
    draft = draft_of(content)
    vote(folder, "abc", draft)
    save(folder, content)
    if other_step:  # the metadata refers to a file of an earlier step
        first, *rest = content.parts
        moved = first.model_copy(update={"step": 4})
        put(folder, KEYS.make_part_key(4, first.digest), content.read(0).body)
        delete(folder, [KEYS.make_part_key(5, first.digest)])
        draft = draft.model_copy(update={"parts": (moved, *rest)})
    commit_checkpoint(folder, draft)
    bad = KEYS.make_part_key(draft.parts[0].step, content.parts[0].digest)
    if kind == "damaged":
        put(folder, bad, b"x" * content.parts[0].size)
    else:
        delete(folder, [bad])
    owner = Owner(folder)
    assert owner.advance("abc") is None
    assert not exists(folder, KEYS.make_epoch_key(0))
    upload(folder, "a", content)
    ended = owner.advance("abc")
    assert ended is not None
    found = read_checkpoint(folder, JOB, 5)
    assert (ended.root, found.parts) == (content.root, draft.parts)
    assert not verify(folder, found)
