"""Members of an epoch in a folder, for the parts of a member's cooldown."""

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.checkpoints.cooldown import deadline, late_voting
from millrace.checkpoints.cooldown.epoch_view import EpochView
from millrace.schemas.checkpoint import CooldownOutcome, CooldownRecord, Roster, Vote
from millrace.storage import Store, StoreSpec, open_store

JOB = "runs/one"
ROSTER = Roster(job=JOB, epoch=0, members=("a", "b", "c"), seed=7)


class FakeCensus:
    """Census with a settable set of living members."""

    def __init__(self, living: set[str]) -> None:
        self.living, self.reads = living, 0

    def find_holders(self) -> set[str]:
        self.reads += 1
        return self.living


class Clock:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def failed_record(member: str) -> CooldownRecord:
    return CooldownRecord(
        member=member,
        outcome=CooldownOutcome.FAILED,
        reason="",
        sent=0,
        checked=0,
        replaced=0,
        seconds=0.0,
    )


def vote_of(member: str, content: str = "0") -> Vote:
    return Vote(member=member, step=5, root=content * 64, rest="", size=1)


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return open_store(StoreSpec(url=tmp_path.as_uri()))


@pytest.fixture
def census() -> FakeCensus:
    return FakeCensus({"a", "b", "c"})


@pytest.fixture
def view_of(folder: Store, census: FakeCensus) -> Callable[..., EpochView]:
    def make(member: str = "a", roster: Roster = ROSTER) -> EpochView:
        return EpochView(folder, roster, member, census)  # pyright: ignore[reportArgumentType]

    return make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of deadlines and votes."""
    clock = Clock()
    for module in (deadline, late_voting):
        monkeypatch.setattr(module, "time", clock)
    return clock
