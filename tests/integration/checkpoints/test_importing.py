"""Import of checkpoints of other tools from stores and from the Hugging Face Hub."""

import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import HfApi, constants
from pydantic import SecretStr
from safetensors.torch import save

from millrace import errors
from millrace.checkpoints import HubSpec, import_checkpoint, load
from millrace.cli import main
from millrace.storage import Store, open_store, put
from millrace.testing.hub import WRITER, HubServer
from tests.stores import make_spec

WEIGHTS = {"embed": torch.arange(3000.0).reshape(50, 60), "norm": torch.ones(7)}


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return open_store((tmp_path / "bucket").as_uri())


@pytest.mark.contract
@pytest.mark.parametrize("kind", ["local", "rgw", "r2", "gcs"])
def test_weights_in_a_store(
    kind: str, request: pytest.FixtureRequest, target: Store, tmp_path: Path
) -> None:
    spec = make_spec(kind, request)
    store = open_store(spec)
    torch.save(WEIGHTS, tmp_path / "model.bin")
    body = (tmp_path / "model.bin").read_bytes()
    put(store, "runs/step_7/model.bin", body)
    put(store, "runs/step_30/model.safetensors", save(WEIGHTS))
    put(store, "runs/step_30/logs/model.bin", b"x")
    for url, step, name in (
        ("runs", 30, "step_30/model.safetensors"),
        ("runs/step_7", 7, "model.bin"),
        ("runs/step_7/model.bin", 7, "model.bin"),
    ):
        source = spec.model_copy(update={"url": f"{store.url}/{url}"})
        done = import_checkpoint(source, target, "job")
        assert (done.checkpoint.step, done.files) == (step, (name,))
        state = load(target, "job", step=step).state
        assert all(torch.equal(state["model"][key], WEIGHTS[key]) for key in WEIGHTS)
    with pytest.raises(errors.NotFoundError, match=r"has no weights|no file or folder"):
        import_checkpoint(spec.model_copy(update={"url": f"{store.url}/none"}), target, "job")


@pytest.mark.parametrize("kind", ["local", "rgw"])
def test_a_full_temporary_folder_is_a_sentence(
    kind: str,
    request: pytest.FixtureRequest,
    target: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec(kind, request)
    put(open_store(spec), "model.safetensors", save({"w": torch.zeros(1 << 18)}))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(errors.NoSpaceError, match=f"to {disk} .* set TMPDIR to a folder"):
            import_checkpoint(spec, target, "job")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_name_of_a_file_may_be_escaped_in_its_url(
    request: pytest.FixtureRequest, target: Store
) -> None:
    spec = make_spec("rgw", request)
    store = open_store(spec)
    put(store, "my runs/50% #1.safetensors", save(WEIGHTS))
    for name in ("my%20runs/50%25%20%231.safetensors", "my runs/50%25 %231.safetensors"):
        source = spec.model_copy(update={"url": f"{store.url}/{name}"})
        assert import_checkpoint(source, target, "job").files == ("50% #1.safetensors",)


@pytest.mark.parametrize("by_lfs", [False, True])
def test_a_model_of_the_hub(
    by_lfs: bool,
    hub: HubServer,
    target: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", by_lfs)
    repo = hub.make_repo()
    api = HfApi(endpoint=hub.endpoint, token=WRITER)
    for name, body in (("model.safetensors", save(WEIGHTS)), ("config.json", b"{}")):
        api.upload_file(path_or_fileobj=body, path_in_repo=name, repo_id=repo)
    head = api.repo_info(repo).sha
    spec = HubSpec(repo=repo, token=SecretStr(WRITER), endpoint=hub.endpoint)
    done = import_checkpoint(spec, target, "job")
    assert done.source == f"hf://{repo}@{head}"
    assert done.checkpoint.notes == {"imported from": f"{done.source}/model.safetensors"}
    assert torch.equal(load(target, "job").state["model"]["embed"], WEIGHTS["embed"])

    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    shown = CliRunner().invoke(main, ["checkpoint", "import", f"hf://{repo}", "cli", target.url])
    assert shown.exit_code == 0, shown.output
    assert "Step 0 of cli is in" in shown.output
    assert "2 tensors" in shown.output

    api.upload_file(path_or_fileobj=save(WEIGHTS), path_in_repo="a/b.safetensors", repo_id=repo)
    for path in ("a", "a/b.safetensors"):
        done = import_checkpoint(f"hf://{repo}@main/{path}", target, "folder")
        assert done.files == ("b.safetensors",)

    hub.flip(repo, "model.safetensors")
    with pytest.raises(errors.CorruptError, match="other bytes than the Hub lists"):
        import_checkpoint(spec, target, "damaged")
    with pytest.raises(errors.NotFoundError):
        load(target, "damaged")
