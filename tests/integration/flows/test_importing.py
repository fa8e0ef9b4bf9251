"""The flow import-gradients, with credentials from a block."""

import torch

from flows.import_gradients import import_gradients
from millrace.checkpoints import Saver
from millrace.gradients import Codec, RunSettings, iterate_links
from millrace.storage import StoreSpec, open_store, put
from millrace.testing.credentials import make_credentials
from millrace.testing.rgw import RGW
from tests.prefect_server import PrefectServer
from tests.support.flows.fixtures import MakeBlock
from tests.support.templar_gradients import write_payload

RUN = RunSettings(run="runs/templar", codec=Codec(bits=32, k=4096))


def test_a_templar_run_becomes_a_chain_and_a_report(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock
) -> None:
    pair = make_credentials(rgw.full)
    store = open_store(StoreSpec(url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=pair))
    templar = open_store(
        StoreSpec(url=f"s3://{bucket}/templar", endpoint=rgw.endpoint, credentials=pair)
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    with Saver(store, "job") as saver:
        saver.save(model.state_dict(), step=0).result()
    for window in (40, 41):
        for uid in (1, 7):
            changes = {name: torch.randn_like(one) for name, one in model.state_dict().items()}
            body = write_payload(changes, k=64, window=window).save()
            put(templar, f"gradient-{window}-{uid}-v2.1.28.pt", body)
    put(templar, "gradient-41-7-v2.1.28.pt", b"no payload")
    whole = block(bucket, read=rgw.read_only, write=rgw.full)
    asked = {
        "templar": {
            "bucket": block(f"{bucket}/templar", read=rgw.read_only),
            "version": "2.1.28", "first_window": 40, "last_window": 41, "k": 64,
        },
        "bucket": whole,
        "run": RUN.model_dump(mode="json"),
        "initial_weights": {"bucket": whole, "job": "job"},
    }  # fmt: skip
    done = prefect_api.call(import_gradients, **asked)
    assert done.code == 0, done.output
    links = list(iterate_links(store, RUN.chain_keys))
    assert [sorted(link.taken) for link in links] == [["templar-1", "templar-7"], ["templar-1"]]
    report = prefect_api.read_artifacts(done.run)["aggregated-gradients"]
    assert "**2 windows** merged, up to window 2" in report
    assert "templar-7" in report

    again = prefect_api.call(import_gradients, **asked)
    assert again.code == 0, again.output
    assert "no window was merged" in prefect_api.read_artifacts(again.run)["aggregated-gradients"]
