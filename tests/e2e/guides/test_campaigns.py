"""The guide to campaigns, block by block: the workers are processes, as the guide says they may."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from blocks import Bucket, BucketRole, HuggingFaceCredentials, VastCredentials
from flows.campaign_command import read_campaign_plan
from flows.campaign_plan import RentedWorkerSettings
from millrace.gradients import RunSettings, iterate_links
from millrace.storage import open_store
from millrace.testing.hub import WRITER, HubServer
from tests.prefect_server import PrefectServer
from tests.support.guides import follow

# What the guide's script leaves to the reader: a model, its loss, and steps of its training.
READER = """
import torch

from examples.tiny_lm.model import LENGTH, TinyLM
from examples.tiny_lm.text import join_samples, sample_rows

torch.set_num_threads(1)
model = TinyLM()
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
rows = torch.arange(4 * (LENGTH + 1)).reshape(4, -1) % 256

def evaluate(model):
    with torch.no_grad():
        return float(model.loss(rows))

def train(model, batch):
    optimizer.zero_grad()
    model.loss(sample_rows(join_samples(batch), 4, LENGTH + 1)).backward()
    optimizer.step()

"""


def test_every_block_of_the_guide_to_campaigns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    hub: HubServer,
    prefect_api: PrefectServer,
) -> None:
    store, repo = tmp_path / "store", hub.make_repo()
    values = {'"s3://somewhere/wiki"': source.as_uri(), "you/wiki": repo}
    smaller = {
        "workers: 8": "workers: 2",
        "epochs: 3": "epochs: 2",
        "windows_per_epoch: 50": "windows_per_epoch: 1",
        "steps: 30": "steps: 3",
        "quorum: 5": "quorum: 2",
    }
    variables = prefect_api.environment.items()
    environment = {name: value for name, value in variables if "PREFECT" in name}
    with (
        saved_blocks(hub, store),
        follow(
            "campaigns", tmp_path / "campaigns", monkeypatch, values=values, environment=environment
        ) as guide,
    ):
        path = guide.write("campaign.yaml", smaller)
        training = read_campaign_plan(path).training
        assert isinstance(training.machines, RentedWorkerSettings)
        settings = yaml.safe_load(path.read_text())
        settings["training"]["machines"] = {"kind": "local"}  # as the comment beside it says
        path.write_text(yaml.safe_dump(settings))

        begin = "python -m examples.tiny_lm.begin URL JOB"
        guide.type(begin, {"URL": store.as_uri(), "JOB": "models/wiki-new"})
        (guide.folder / "train.py").write_text(READER + guide.read_python())
        shown = guide.run()
        validator: dict[str, Any] = {}
        smaller = {"workers=8": "workers=2", "steps=30": "steps=3"}
        guide.execute(validator, {"URL": store.as_uri()} | smaller)
    assert "2 windows trained" in shown
    chain = RunSettings(run="wiki/run").chain_keys
    _, second = iterate_links(open_store(store.as_uri()), chain)
    assert second.taken["worker-1"].samples == validator["batches"].digest
    assert (store / "wiki/model/epochs/000001.json").exists()
    assert hub.count_commits(repo) == 2  # the repository's first, and the weights


@contextmanager
def saved_blocks(hub: HubServer, store: Path) -> Iterator[None]:
    """Save the blocks that the plan names, and delete them afterwards."""
    blocks = {
        "dataset": Bucket(role=BucketRole.DATASET, url=store.as_uri()),
        "vast": VastCredentials(api_key=SecretStr("not used"), server_url="http://127.0.0.1:9"),
        "hugging-face": HuggingFaceCredentials(token=SecretStr(WRITER), endpoint=hub.endpoint),
    }
    for name, block in blocks.items():
        block.save(name, overwrite=True)
    try:
        yield
    finally:
        for name, block in blocks.items():
            type(block).delete(name)
