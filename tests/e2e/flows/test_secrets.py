"""No secret in anything that a run of a deployment leaves behind."""

import pytest

from millrace.testing.rgw import RGW
from tests.oracle import S3Bucket
from tests.prefect_server import PrefectServer, Worker, wait_until
from tests.support.flows.fixtures import RUN, SHARD, SHARDING, MakeBlock, make_jsonl, make_texts
from tests.support.flows.planted import Planted, find_leaks, read_run_leaves, read_server_leaves


@pytest.mark.soak
def test_a_run_leaves_no_secret_anywhere(
    deployed: PrefectServer, own_worker: Worker, rgw: RGW, bucket: str, block: MakeBlock,
    planted: Planted,
) -> None:  # fmt: skip
    source = rgw.create_bucket(f"{bucket}-source")
    client = rgw.make_client(rgw.full)
    client.put_object(Bucket=source, Key="rows.jsonl", Body=make_jsonl(make_texts()) + b"no row\n")
    source_block = {"bucket": block(source, read=planted.source), "columns": {"txt": "text"}}
    before = len(rgw.list_requests())

    good = deployed.start_by_command(
        SHARD, dataset="words", source=source_block, sharding=SHARDING, execution=RUN,
        destination=block(bucket, write=planted.destination),
    )  # fmt: skip
    refused = deployed.start_by_command(
        SHARD, dataset="others", source=source_block,
        destination=block(bucket, write=planted.wrong),
    )  # fmt: skip
    # A fault while it runs, with credentials in hand: the same name, cut in another way.
    failed = deployed.start_by_command(
        SHARD, dataset="words", source=source_block, sharding=SHARDING | {"seed": 7},
        destination=block(bucket, write=planted.destination),
    )  # fmt: skip
    # Parameters that the server takes and the flow does not, with blocks among them.
    wrong = deployed.start_by_command(
        SHARD, dataset="words", source=source_block | {"url": "file:///x"},
        destination=block(bucket, write=planted.destination),
    )  # fmt: skip
    runs = (good, refused, failed, wrong)
    for started in (good, refused, failed):  # the last one never came to log
        wait_until(
            lambda run=started.run: "Finished in state" in deployed.read_logs(run), "the last line"
        )
    own_worker.stop()

    assert [started.code for started in runs] == [0, 1, 1, 1], good.output
    served = [line for line in rgw.list_requests()[before:] if " 200 " in line or " 206 " in line]
    assert any(f"GET /{source}/rows.jsonl" in line for line in served), "the source's key opened it"
    assert any(f"PUT /{bucket}/words/" in line for line in served), "so did the destination's"
    places = dict(read_server_leaves(deployed))
    for started in runs:
        places |= {
            f"{what} {started.run}": text for what, text in read_run_leaves(deployed, started.run)
        }
        places[f"the terminal of {started.run}"] = started.output
    places["the worker's output"] = own_worker.log.read_text(errors="replace")
    for path in deployed.home.rglob("*"):
        if path.is_file() and not path.name.startswith("prefect.db"):
            places[f"file {path.name}"] = path.read_text(errors="replace")
    kept = S3Bucket(client, bucket, "words")
    places |= {f"object {name}": kept.read(name).decode("latin-1") for name in kept.list_names()}
    assert len(places) > 1000
    assert find_leaks(places, planted.secrets) == []
