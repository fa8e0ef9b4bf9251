"""The flow aggregate-gradients, with credentials that each reach only what is theirs."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from flows.aggregate_gradients import aggregate_gradients
from millrace import errors
from millrace.checkpoints import Saver
from millrace.gradients import (
    ChainLink,
    Codec,
    GatherSettings,
    Participant,
    RunSettings,
    iterate_links,
    load_newest_state,
)
from millrace.gradients.merging.links import find_newest_window
from millrace.storage import (
    Right,
    Store,
    StoreSpec,
    list_objects,
    open_scoped_store,
    open_store,
    put,
)
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer, wait_until
from tests.support.flows.fixtures import MakeBlock

UIDS = ["a", "b", "c"]
WINDOWS = 3
RUN = RunSettings(
    run="runs/one",
    codec=Codec(k=256, bits=4),
    gather=GatherSettings(poll_interval=timedelta(milliseconds=50), quorum=2, wanted=3),
    window_length=timedelta(minutes=5),
    steps=5,
)


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(40, 30)


def take_part(store: Store, chain: Store, uid: str, windows: int, broken: int = 0) -> ChainLink:
    """Send a change in each window; ``c`` sends no gradient in the one that is to be broken."""
    mine = model()
    wait_until(lambda: find_newest_window(chain, RUN.chain_keys) >= 0, "the run to begin")
    participant = Participant.join(RUN, uid, store, chain)
    for turn in participant.iterate_windows():
        participant.load(mine)
        dice = torch.Generator().manual_seed(turn.number * 1000 + ord(uid))
        with torch.no_grad():
            for weight in mine.parameters():
                weight.add_(torch.randn(weight.shape, generator=dice), alpha=0.01)
        if (uid, turn.number) == ("c", broken):
            put(store, RUN.gradient_keys.make_gradient_key(uid, broken), b"no gradient")
        else:
            participant.submit(mine, tokens=100)
        link = participant.receive(mine, timeout=timedelta(minutes=2))
        if turn.number == windows:
            return link
    raise AssertionError


def test_a_run_is_aggregated_by_credentials_that_reach_no_more_than_they_must(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    role = rgw.create_role("workers")
    shared = rgw.create_bucket(f"{bucket}-gradients")

    def at(name: str, key: Any) -> Store:
        pair = make_credentials(key)
        return open_store(StoreSpec(url=f"s3://{name}", endpoint=rgw.endpoint, credentials=pair))

    whole = at(shared, rgw.full)
    stores = {
        uid: open_scoped_store(
            whole, RUN.gradient_keys.make_worker_prefix(uid), timedelta(minutes=15),
            access=Right.WRITE, role_arn=role,
        )
        for uid in UIDS
    }  # fmt: skip
    with pytest.raises(errors.DeniedError):
        put(stores["a"], RUN.gradient_keys.make_gradient_key("b", 1), b"in the name of another")
    with Saver(at(bucket, rgw.full), "trained") as saver:
        saver.save({"model": dict(model().named_parameters())}, step=40).result()

    running = prefect_api.begin(
        aggregate_gradients,
        bucket=block(bucket, write=rgw.full),
        gradients_bucket=block(shared, read=rgw.read_only),
        run=RUN.model_dump(mode="json"),
        workers=[*UIDS, "gone"],
        worker_buckets=[{"uid": "gone", "bucket": block(f"{bucket}-nowhere", read=rgw.read_only)}],
        initial_weights={
            "job": "trained",
            "tensors": "model.",
            "bucket": block(bucket, read=rgw.read_only),
        },
        until=WINDOWS,
        aggregation={"every": 2},
    )
    chain = at(bucket, rgw.read_only)
    with ThreadPoolExecutor(len(UIDS)) as pool:
        last = {
            future.result().state
            for future in [
                pool.submit(take_part, store, chain, uid, WINDOWS) for uid, store in stores.items()
            ]
        }
    done = running.wait_for_result()

    assert done.code == 0, done.output
    assert prefect_api.read_flow_run(done.run).name == "aggregate-runs/one"
    found = list(iterate_links(chain, RUN.chain_keys))
    assert [link.step for link in found] == [45, 50, 55]
    assert {found[-1].state} == last
    state, window = load_newest_state(chain, RUN.chain_keys)
    assert (window, state.digest()) == (WINDOWS, found[-1].state)
    artifacts = prefect_api.read_artifacts(running.run)
    assert artifacts["progress-aggregate-runs-one"] == 100.0
    report = artifacts["aggregated-gradients"]
    assert "**3 windows** merged, up to window 3 at step 55. 9 gradients of" in report
    assert "| 2 | 50 | 3 | 1 unavailable |" in report
    # A window can end before its listing has: then that is the reason.
    reason = r"Its bucket (is not there|had not answered by the deadline)\."
    assert re.search(rf"\| `gone` \| 0 \|  \| 3 unavailable \| {reason} \|", report)
    warned = "The bucket of gone cannot be read"
    wait_until(
        lambda: warned in prefect_api.read_logs(running.run), "the warning to be in the logs"
    )
    assert "![participation and norms of the windows](data:image/svg+xml;base64," in report
    assert not [stat for stat in list_objects(chain, "") if "clock" in stat.key]
