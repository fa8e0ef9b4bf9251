"""The flows import-gradients and import-checkpoint, with credentials from blocks."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from pydantic import SecretStr, ValidationError
from safetensors.torch import save

from blocks import HuggingFaceCredentials
from flows.import_checkpoint import import_checkpoint
from flows.import_gradients import import_gradients
from millrace.checkpoints import Saver, load
from millrace.gradients import Codec, RunSettings, iterate_links
from millrace.storage import StoreSpec, open_store, put
from millrace.testing.credentials import make_credentials
from millrace.testing.hub import READER, WRITER, HubServer
from millrace.testing.rgw import RGW
from tasks.locations import WeightsInput
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
        "initial_weights": {"job": "job"},
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


def test_a_model_of_the_hub_becomes_a_checkpoint_and_a_report(
    prefect_api: PrefectServer, rgw: RGW, hub: HubServer, bucket: str, block: MakeBlock
) -> None:
    repo, weights = hub.make_repo(), {"w": torch.arange(500.0), "b": torch.ones(3)}
    api = HfApi(endpoint=hub.endpoint, token=WRITER)
    api.upload_file(path_or_fileobj=save(weights), path_in_repo="model.safetensors", repo_id=repo)
    HuggingFaceCredentials(token=SecretStr(READER), endpoint=hub.endpoint).save("models")
    token = {"$ref": {"block_document_slug": "hugging-face-credentials/models"}}
    asked = {
        "source": {"url": f"hf://{repo}", "credentials": token},
        "job": "imported",
        "bucket": block(bucket, read=rgw.read_only, write=rgw.full),
        "step": 7,
    }
    done = prefect_api.call(import_checkpoint, **asked)
    assert done.code == 0, done.output
    store = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    found = load(open_store(store), "imported", step=7)
    assert torch.equal(found.state["model"]["w"], weights["w"])
    report = prefect_api.read_artifacts(done.run)["imported-checkpoint"]
    assert "**Step 7** of `imported`" in report
    assert f"from `hf://{repo}@" in report
    assert "| `model.safetensors` |" in report


def test_a_folder_below_the_bucket_of_a_block_is_imported(
    prefect_api: PrefectServer, rgw: RGW, bucket: str, block: MakeBlock, tmp_path: Path
) -> None:
    store = StoreSpec(
        url=f"s3://{bucket}", endpoint=rgw.endpoint, credentials=make_credentials(rgw.full)
    )
    put(open_store(store), "runs/step_30/model.safetensors", save({"w": torch.ones(9)}))
    target = (tmp_path / "there").as_uri()
    read = block(bucket, read=rgw.read_only)
    asked = {"source": {"bucket": read, "prefix": "runs"}, "job": "imported", "bucket": target}
    done = prefect_api.call(import_checkpoint, **asked)
    assert done.code == 0, done.output
    assert load(open_store(target), "imported").checkpoint.step == 30
    asked["source"] = {"bucket": read, "prefix": "nothing"}
    done = prefect_api.call(import_checkpoint, **asked)
    assert done.code == 1
    state = prefect_api.read_flow_run(done.run).state
    assert state is not None
    assert "has no weights: no file that ends with" in (state.message or "")


def test_a_token_of_the_hub_is_for_the_hub() -> None:
    token = HuggingFaceCredentials(token=SecretStr(READER))
    with pytest.raises(ValidationError, match="are for `hf://` URLs"):
        WeightsInput(url="/models/one", credentials=token)
