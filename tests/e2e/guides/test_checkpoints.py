"""The guide to checkpoints, block by block."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import save as save_tensors

from millrace.checkpoints import MemberSettings, Saver, list_steps, load
from millrace.settings import load_settings
from millrace.storage import open_store
from millrace.testing.hub import READER, WRITER, HubServer
from tests.ranks import run_ranks
from tests.support.guides import Guide, follow

R2 = "r2://0123456789abcdef0123456789abcdef/checkpoints"
COOLDOWN = "millrace checkpoint cooldown cooldown.yaml --member node-3"


def test_every_block_of_the_guide_to_checkpoints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    credentials: dict[str, str],
    bucket: str,
    hub: HubServer,
) -> None:
    url, scratch = f"s3://{bucket}/checkpoints", tmp_path / "scratch"
    repo = hub.make_repo()
    HfApi(endpoint=hub.endpoint, token=WRITER).upload_file(
        path_or_fileobj=save_tensors({"w": torch.ones(3)}),
        path_in_repo="model.safetensors",
        repo_id=repo,
    )
    values = {R2: url, "file:///scratch": scratch.as_uri(), "hf://owner/model": f"hf://{repo}"}
    with follow(
        "checkpoints",
        tmp_path / "checkpoints",
        monkeypatch,
        values=values,
        environment=credentials | {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": READER},
    ) as guide:
        model = torch.nn.Linear(13, 7)
        names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        guide.execute(names)
        assert torch.equal(names["found"].state["model"]["weight"], model.weight)  # pyright: ignore[reportAttributeAccessIssue]
        guide.execute(names)

        save_sharded(guide, tmp_path)

        store = open_store(url)
        end_epoch(guide, [{"model": model, "store": store} for _ in range(2)])
        assert list_steps(store, "my-job") == [1000, 1500, 2000]

        end_epoch_by_command(guide, tmp_path / "scratch/checkpoints", model)
        assert load(store, "my-job").checkpoint.step == 2100

        save(scratch, model, 2200)
        shown = guide.run({"80GB": "80KB"}, answer="y")
    assert "Step 2200 of my-job is in" in shown
    assert "Step 0 of base is in" in shown
    assert list_steps(store, "my-job") == [1000, 2000, 2100, 2200]


def save(folder: Path, model: torch.nn.Module, step: int) -> None:
    """Save a checkpoint on a machine's disk."""
    with Saver(open_store(folder.as_uri()), "my-job") as saver:
        saver.save({"model": model.state_dict()}, step=step)


def save_sharded(guide: Guide, folder: Path) -> None:
    """Execute the next block on two ranks, whose model FSDP has sharded."""
    (folder / "fsdp.py").write_text(guide.read_python())
    ended = run_ranks("tests.support.guides_rank", folder, "fsdp", 2)
    assert [(code, text.split()[-1]) for code, text in ended] == [(0, "1000")] * 2, ended


def end_epoch(guide: Guide, members: list[dict[str, object]]) -> None:
    """Execute the next block as several members."""
    each = [{"node-3": f"node-{number}"} for number in range(len(members))]
    with ThreadPoolExecutor(len(members)) as pool:
        for ended in [pool.submit(one) for one in guide.execute_each(members, each)]:
            ended.result()


def end_epoch_by_command(guide: Guide, disk: Path, model: torch.nn.Module) -> None:
    """Write the settings, and end the epoch after with the checkpoints on two machines' disks."""
    save(disk, model, 2100)
    path = guide.write("cooldown.yaml", {"members: 8": "members: 2"})
    assert load_settings(path, MemberSettings).members == 2
    commands = [{"node-3": f"node-{number}"} for number in (3, 4)]
    with ThreadPoolExecutor(2) as pool:
        for shown in pool.map(lambda values: guide.type(COOLDOWN, values), commands):
            assert re.search("^node-[34]: ", shown, re.MULTILINE), shown
