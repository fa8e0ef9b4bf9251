"""An aggregator that is cancelled, and the next that goes on where it was."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millrace.gradients import (
    begin_run,
    catch_up,
    copy_state,
    iterate_links,
)
from millrace.gradients.merging.links import find_newest_window
from millrace.keys.leases import LeaseKeys
from millrace.storage import exists, open_store
from tests.integration.flows.test_aggregate import RUN, UIDS, model, take_part
from tests.prefect_server import PrefectServer, Worker, wait_until

AGGREGATE = "aggregate-gradients/aggregate-gradients"


@pytest.mark.soak
def test_a_second_aggregator_does_nothing_and_the_next_goes_on_where_one_was_cancelled(
    deployed: PrefectServer, worker: Worker, tmp_path: Path
) -> None:
    store = open_store((tmp_path / "bucket").as_uri())
    start = copy_state(dict(model().named_parameters()))
    begin_run(store, RUN.chain_keys, start, step=40)
    parameters: dict[str, Any] = {
        "bucket": store.url,
        "gradients_bucket": store.url,
        "run": RUN.model_dump(mode="json"),
        "workers": UIDS,
        "until": 3,
        "aggregation": {"lease_timeout": "PT6S"},
    }
    first = deployed.start(AGGREGATE, watch=False, **parameters)
    lease = LeaseKeys(RUN.chain_keys.job, "aggregator")
    wait_until(lambda: exists(store, lease.make_term_key(0)), "the first to have the lease")

    second = deployed.start(AGGREGATE, watch=False, **parameters)
    held = deployed.wait(second.run, "Completed", "Failed", "Crashed")
    assert held.state is not None
    assert "which is alive: let it continue" in (held.state.message or "")
    assert "aggregated-gradients" not in deployed.read_artifacts(second.run)

    with ThreadPoolExecutor(len(UIDS)) as pool:
        once = [pool.submit(take_part, store, store, uid, 1) for uid in UIDS]
        assert {one.result().window for one in once} == {1}
        wait_until(lambda: find_newest_window(store, RUN.chain_keys) == 1, "a window to be merged")
        said = deployed.run_prefect("flow-run", "cancel", str(first.run))
        assert said.returncode == 0, said.stdout + said.stderr
        deployed.wait(first.run, "Cancelled")
        working = [pool.submit(take_part, store, store, uid, 3, broken=3) for uid in UIDS]
        # A window in which a worker is never right lasts its full time. That of window 2, which
        # was open, cannot change any more.
        short = RUN.model_copy(update={"window_length": timedelta(seconds=30)})
        parameters["run"] = short.model_dump(mode="json")
        done = deployed.start(AGGREGATE, **parameters)
        assert done.code == 0, done.output
        assert len({one.result().state for one in working}) == 1
    found = list(iterate_links(store, RUN.chain_keys))
    assert [link.window for link in found] == [1, 2, 3]
    assert [sorted(link.taken) for link in found] == [UIDS, UIDS, ["a", "b"]]
    assert "| 3 | 55 | 2 | 1 format |" in deployed.read_artifacts(done.run)["aggregated-gradients"]
    catch_up(store, RUN.chain_keys, start)
    assert start.digest() == found[-1].state
