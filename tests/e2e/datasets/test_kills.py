"""A slice of the soak: SIGKILL at every boundary, and drivers that meet. See `tests.soak`."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from millrace.testing.rgw import RGW
from tests.soak.case import Case, References
from tests.soak.child import Ended, Said
from tests.soak.faults import rgw_place
from tests.soak.kills import Kills
from tests.soak.material import Material, make_all
from tests.soak.place import LocalPlace, Place
from tests.soak.tally import Tally
from tests.soak.targets import (
    ANY,
    BETWEEN,
    COMPLETE,
    PARTITIONS,
    Target,
    Victim,
    combinations,
    target_at,
)
from tests.soak.together import meet, share

SEED = 20


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> list[Material]:
    return make_all(tmp_path_factory.mktemp("sources"), SEED)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


def killed(
    targets: Sequence[Target],
    place: Place,
    materials: list[Material],
    references: References,
    folder: Path,
) -> Tally:
    kills = Kills(materials, [place], references, folder / "runs", Random(SEED))
    return kills.kill_all(targets)


def assert_right(tally: Tally, targets: Sequence[Target]) -> None:
    assert tally.wrong == []
    assert (tally.lost, tally.doubled, tally.different) == (0, 0, 0)
    assert tally.kills.total() == len(targets)


def boundaries_of(victim: Victim) -> list[Target]:
    dice = Random(SEED)
    return [target_at(dice, boundary, v) for boundary, v in combinations() if v is victim]


def test_a_driver_killed_at_every_second_boundary_loses_and_doubles_nothing(
    materials: list[Material], references: References, tmp_path: Path
) -> None:
    targets = boundaries_of(Victim.DRIVER)[::2]
    place = LocalPlace(tmp_path / "store")
    assert_right(killed(targets, place, materials, references, tmp_path), targets)


def test_a_worker_killed_at_any_boundary_is_replaced_and_loses_nothing(
    materials: list[Material], references: References, tmp_path: Path
) -> None:
    targets = boundaries_of(Victim.WORKER)
    place = LocalPlace(tmp_path / "store")
    assert_right(killed(targets, place, materials, references, tmp_path), targets)


def test_a_driver_without_workers_killed_anywhere_loses_and_doubles_nothing(
    materials: list[Material], references: References, tmp_path: Path
) -> None:
    targets = Random(SEED).sample(boundaries_of(Victim.ALONE), 4)
    place = LocalPlace(tmp_path / "store")
    assert_right(killed(targets, place, materials, references, tmp_path), targets)


def test_a_group_killed_at_the_others_over_a_real_store_loses_and_doubles_nothing(
    rgw: RGW, bucket: str, materials: list[Material], references: References, tmp_path: Path
) -> None:
    targets = boundaries_of(Victim.GROUP)[1::2]
    assert_right(killed(targets, rgw_place(rgw, bucket), materials, references, tmp_path), targets)


def test_two_runs_at_once_share_the_work(
    materials: list[Material], references: References, tmp_path: Path
) -> None:
    tally, place = Tally(), LocalPlace(tmp_path / "store")
    case = Case("share", materials[0], place, tmp_path / "runs", workers=2)
    meet(case, share, references, tally)
    assert tally.wrong == []
    assert tally.cases == 1


def test_a_driver_gives_up_when_workers_keep_dying_over_a_partition_and_another_goes_on(
    materials: list[Material], references: References, tmp_path: Path
) -> None:
    case = Case("deaths", materials[0], LocalPlace(tmp_path / "store"), tmp_path / "runs", 1)
    with case.start() as child:
        while isinstance(said := child.hear(), Said):
            if said.kind == "partition.opened":
                child.kill(said.pid)
            child.go()
    assert isinstance(said, Ended)
    assert said.code == 1
    assert "3 workers in a row died over train-00000" in said.tail
    case.run_undisturbed()
    verdict = case.judge(references.compute_digests(case.material))
    assert verdict.is_correct, str(verdict)


def test_the_slice_has_every_boundary() -> None:
    at = {target.boundary for target in boundaries_of(Victim.DRIVER)}
    assert at >= {
        "plan.committed",
        *PARTITIONS,
        "manifest.sealing",
        "index.put",
        COMPLETE,
        ANY,
        BETWEEN,
    }
