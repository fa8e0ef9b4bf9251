"""A slice of the soak: a store that fails, and what comes out all the same. See `tests.soak`."""

from pathlib import Path
from random import Random

import pytest

from millrace.testing.faults import Fault
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.soak.case import Case, References
from tests.soak.faults import bad_weather, r2_place
from tests.soak.kills import Kills
from tests.soak.material import Material, make_all
from tests.soak.place import S3Place
from tests.soak.targets import Target, Victim

SEED = 21


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> list[Material]:
    return make_all(tmp_path_factory.mktemp("sources"), SEED)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def place(rgw: RGW, r2: R2Proxy, bucket: str) -> S3Place:
    # A lost answer costs a second where a key takes one write a second: that is for the soak.
    r2.set_rules(write_interval=0.05)
    return r2_place(rgw, r2, bucket)


@pytest.fixture
def case(place: S3Place, materials: list[Material], tmp_path: Path) -> Case:
    return Case("case", materials[0], place, tmp_path, workers=1, store_source=True)


def assert_right(case: Case, references: References) -> None:
    verdict = case.judge(references.compute_digests(case.material))
    assert verdict.is_correct, str(verdict)


def test_every_kind_of_fault_on_5_percent_of_requests_changes_nothing(
    case: Case, r2: R2Proxy, references: References
) -> None:
    r2.set_faults(bad_weather(SEED, stall_seconds=0.2))
    case.run_undisturbed()
    fired = r2.count_fired()
    r2.reset()
    assert_right(case, references)
    assert all(fired.values()), fired


def test_a_kill_in_bad_weather_changes_nothing(
    place: S3Place,
    r2: R2Proxy,
    materials: list[Material],
    references: References,
    tmp_path: Path,
) -> None:
    targets = [
        Target("plan.committed", Victim.GROUP),
        Target("shard.put", Victim.WORKER, 2),
        Target("shard.committed", Victim.DRIVER, 2),
    ]
    kills = Kills(materials, [place], references, tmp_path, Random(SEED))
    case = kills.make_case(2)
    r2.set_faults(bad_weather(SEED, stall_seconds=0.2))
    missed = kills.kill_in(case, targets)
    fired = r2.count_fired()
    assert kills.tally.wrong == []
    assert missed == []
    assert kills.tally.counted == len(targets)
    assert sum(fired.values()) > 0


def test_a_write_whose_answer_is_lost_is_written_once(
    case: Case, r2: R2Proxy, references: References
) -> None:
    written = ["plan.json", "/lease/", "/shards/", "/commits/", "-end.json", "manifest.json"]
    for key in written:
        r2.fail_next(Fault.LOST, 1, "PUT", key)
    case.run_undisturbed()
    assert r2.count_fired()["lost"] == len(written)
    assert_right(case, references)


def test_a_listing_that_is_cut_off_is_asked_for_again(
    case: Case, r2: R2Proxy, references: References
) -> None:
    r2.fail_next(Fault.CUT, 3, "GET")  # the first ones list the source
    case.run_undisturbed()
    cut = [request["operation"] for request in r2.list_requests() if request["fault"] == "cut"]
    assert cut == ["ListObjectsV2"] * 3
    assert_right(case, references)
