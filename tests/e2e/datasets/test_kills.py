"""Run a slice of the soak: kills at every boundary, and two drivers at once. See `tests.soak`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from millrace.testing.rgw import RGW
from tests.soak.case import Case, References
from tests.soak.child import Announcement, DriverExit
from tests.soak.concurrent_drivers import run_concurrent_case, share_work
from tests.soak.faults import make_rgw_store
from tests.soak.kills import KillMatrix
from tests.soak.shared_stores import FolderStore, SharedStore
from tests.soak.source_data import SourceData, make_all_sources
from tests.soak.tally import Tally
from tests.soak.targets import (
    ANY,
    BETWEEN,
    COMPLETE,
    PARTITIONS,
    Target,
    Victim,
    list_combinations,
    make_target,
)
from tests.support.web import Site, serve

SEED = 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SourceData]]:
    with serve(Site()) as site:
        yield make_all_sources(tmp_path_factory.mktemp("sources"), SEED, site)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


def run_with_kills(
    targets: Sequence[Target],
    store: SharedStore,
    sources: list[SourceData],
    references: References,
    folder: Path,
) -> Tally:
    kills = KillMatrix(sources, [store], references, folder / "runs", Random(SEED))
    return kills.kill_all(targets)


def assert_correct(tally: Tally, targets: Sequence[Target]) -> None:
    assert tally.wrong == []
    assert (tally.lost, tally.duplicated, tally.differing) == (0, 0, 0)
    assert tally.kills.total() == len(targets)


def list_targets(victim: Victim) -> list[Target]:
    generator = Random(SEED)
    return [
        make_target(generator, boundary, other)
        for boundary, other in list_combinations()
        if other is victim
    ]


def test_a_driver_killed_at_every_second_boundary_loses_and_doubles_nothing(
    sources: list[SourceData], references: References, tmp_path: Path
) -> None:
    targets = list_targets(Victim.DRIVER)[::2]
    store = FolderStore(tmp_path / "store")
    assert_correct(run_with_kills(targets, store, sources, references, tmp_path), targets)


def test_a_worker_killed_at_any_boundary_is_replaced_and_loses_nothing(
    sources: list[SourceData], references: References, tmp_path: Path
) -> None:
    targets = list_targets(Victim.WORKER)
    store = FolderStore(tmp_path / "store")
    assert_correct(run_with_kills(targets, store, sources, references, tmp_path), targets)


def test_a_driver_without_workers_killed_anywhere_loses_and_doubles_nothing(
    sources: list[SourceData], references: References, tmp_path: Path
) -> None:
    targets = Random(SEED).sample(list_targets(Victim.ALONE), 4)
    store = FolderStore(tmp_path / "store")
    assert_correct(run_with_kills(targets, store, sources, references, tmp_path), targets)


def test_kills_over_a_list_of_urls_lose_and_double_nothing(
    sources: list[SourceData], references: References, tmp_path: Path
) -> None:
    targets = Random(SEED).sample(list_targets(Victim.GROUP), 3)
    urls = [source for source in sources if source.source["kind"] == "urls"]
    store = FolderStore(tmp_path / "store")
    assert_correct(run_with_kills(targets, store, urls, references, tmp_path), targets)


@pytest.mark.soak
def test_a_group_killed_at_the_others_over_a_real_store_loses_and_doubles_nothing(
    rgw: RGW, bucket: str, sources: list[SourceData], references: References, tmp_path: Path
) -> None:
    targets = list_targets(Victim.GROUP)[1::2]
    assert_correct(
        run_with_kills(targets, make_rgw_store(rgw, bucket), sources, references, tmp_path), targets
    )


def test_two_runs_at_once_share_the_work(
    sources: list[SourceData], references: References, tmp_path: Path
) -> None:
    tally, store = Tally(), FolderStore(tmp_path / "store")
    case = Case("share", sources[0], store, tmp_path / "runs", workers=2)
    run_concurrent_case(case, share_work, references, tally)
    assert tally.wrong == []
    assert tally.cases == 1


def test_a_driver_gives_up_when_workers_keep_dying_over_a_partition_and_another_goes_on(
    sources: list[SourceData], references: References, tmp_path: Path
) -> None:
    case = Case("deaths", sources[0], FolderStore(tmp_path / "store"), tmp_path / "runs", 1)
    with case.start() as child:
        while isinstance(message := child.read_message(), Announcement):
            if message.kind == "partition.opened":
                child.kill(message.pid)
            child.release()
    assert isinstance(message, DriverExit)
    assert message.code == 1
    assert "3 workers in a row died over train-00000" in message.tail
    case.run_undisturbed()
    verdict = case.judge(references.compute_digests(case.source))
    assert verdict.is_correct, str(verdict)


def test_the_slice_has_every_boundary() -> None:
    at = {target.boundary for target in list_targets(Victim.DRIVER)}
    assert at >= {
        "plan.committed",
        *PARTITIONS,
        "manifest.computed",
        "index.uploaded",
        COMPLETE,
        ANY,
        BETWEEN,
    }
