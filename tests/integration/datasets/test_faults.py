"""Run a slice of the soak: datasets in a store that fails. See `tests.soak`."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from millrace.testing.faults import Fault
from millrace.testing.r2 import R2Proxy
from millrace.testing.rgw import RGW
from tests.soak.case import Case, References
from tests.soak.faults import make_faults, make_r2_store
from tests.soak.kills import KillMatrix
from tests.soak.shared_stores import BucketStore
from tests.soak.source_data import SourceData, make_all_sources
from tests.soak.targets import Target, Victim
from tests.support.web import Site, serve

SEED = 21


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SourceData]]:
    with serve(Site()) as site:
        yield make_all_sources(tmp_path_factory.mktemp("sources"), SEED, site)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def store(rgw: RGW, r2: R2Proxy, bucket: str) -> BucketStore:
    # A lost answer costs a second where a key takes one write a second: that is for the soak.
    r2.set_rules(write_interval=0.05)
    return make_r2_store(rgw, r2, bucket)


@pytest.fixture
def case(store: BucketStore, sources: list[SourceData], tmp_path: Path) -> Case:
    return Case("case", sources[0], store, tmp_path, workers=1, store_source=True)


def assert_correct(case: Case, references: References) -> None:
    verdict = case.judge(references.compute_digests(case.source))
    assert verdict.is_correct, str(verdict)


def test_every_kind_of_fault_on_5_percent_of_requests_changes_nothing(
    case: Case, r2: R2Proxy, references: References
) -> None:
    r2.set_faults(make_faults(SEED, stall_seconds=0.2))
    case.run_undisturbed()
    fired = r2.count_fired()
    r2.reset()
    assert_correct(case, references)
    assert all(fired.values()), fired


@pytest.mark.soak
def test_a_kill_while_the_store_fails_changes_nothing(
    store: BucketStore,
    r2: R2Proxy,
    sources: list[SourceData],
    references: References,
    tmp_path: Path,
) -> None:
    targets = [
        Target("plan.committed", Victim.GROUP),
        Target("shard.uploaded", Victim.WORKER, 2),
        Target("shard.committed", Victim.DRIVER, 2),
    ]
    matrix = KillMatrix(sources, [store], references, tmp_path, Random(SEED))
    case = matrix.make_case(2)
    r2.set_faults(make_faults(SEED, stall_seconds=0.2))
    missed = matrix.run_case_with_kills(case, targets)
    fired = r2.count_fired()
    assert matrix.tally.wrong == []
    assert missed == []
    assert matrix.tally.counted == len(targets)
    assert sum(fired.values()) > 0


def test_a_write_whose_answer_is_lost_is_written_once(
    case: Case, r2: R2Proxy, references: References
) -> None:
    written = ["plan.json", "/lease/", "/shards/", "/commits/", "/end.json", "manifest.json"]
    for key in written:
        r2.fail_next(Fault.LOST, 1, "PUT", key)
    case.run_undisturbed()
    assert r2.count_fired()["lost"] == len(written)
    assert_correct(case, references)


def test_a_listing_that_is_cut_off_is_asked_for_again(
    case: Case, r2: R2Proxy, references: References
) -> None:
    r2.fail_next(Fault.CUT, 3, "GET")  # the first ones list the source
    case.run_undisturbed()
    cut = [request["operation"] for request in r2.list_requests() if request["fault"] == "cut"]
    assert cut == ["ListObjectsV2"] * 3
    assert_correct(case, references)
