"""A worker whose model is sharded over ranks sends and gets what one rank would."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.gradients import (
    AggregatorSettings,
    ChainLink,
    aggregate_run,
    begin_run,
    select_weights,
)
from millrace.storage import exists, open_store, read
from tests.integration.gradients.rank import SETTINGS, model_of, take_part
from tests.ranks import run_ranks


def begun(folder: Path) -> AggregatorSettings:
    store = open_store(folder.as_uri())
    begin_run(store, SETTINGS.chain_keys, select_weights(model_of()))
    return AggregatorSettings(run=SETTINGS, store=store.spec, workers=())


def ranks(folder: Path, scenario: str, world: int) -> list[str]:
    """Run ranks as processes: what each said."""
    ended = run_ranks("tests.integration.gradients.rank", folder, scenario, world)
    assert [code for code, _ in ended] == [0] * world, ended
    return [said for _, said in ended]


def gradients(folder: Path) -> list[bytes]:
    store = open_store(folder.as_uri())
    return [read(store, SETTINGS.gradient_keys.make_gradient_key("a", window)) for window in (1, 2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ChainLink]]:
    folder = tmp_path_factory.mktemp("alone")
    settings = begun(folder)
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(take_part, folder, model_of())
        made = list(aggregate_run(settings))
        assert working.result().digest() == made[-1].state
    return folder, made


def test_ranks_send_and_get_what_one_would(tmp_path, alone):
    folder, expected = alone
    settings = begun(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(ranks, tmp_path, "whole", 5)  # of which one has no tensor
        made = list(aggregate_run(settings))
        said = working.result()
    assert [link.state for link in made] == [link.state for link in expected]
    assert gradients(tmp_path) == gradients(folder)
    assert {text.splitlines()[-1] for text in said} == {expected[-1].state}


def test_ranks_that_fail_in_two_ways_hear_of_the_first_and_stay_together(tmp_path):
    first, second = (text.splitlines() for text in ranks(tmp_path, "differ", 2))
    assert first == ["It is not there.", "Rank 1 of this worker: no more", "[0, 1] 7"]
    assert second == ["It is not there.", "no more", "[0, 1] 7"]


def test_what_goes_wrong_on_one_rank_all_hear_and_nothing_is_sent(tmp_path):
    begun(tmp_path)
    said = ranks(tmp_path, "spoil", 2)
    assert all("values that are not finite: leave this step out" in text for text in said)
    assert "no more" in said[0]
    assert "Rank 0 of this worker: no more" in said[1]
    assert exists(open_store(tmp_path.as_uri()), SETTINGS.gradient_keys.make_gradient_key("a", 1))
