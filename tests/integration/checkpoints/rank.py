"""A rank as a process: ``python -m tests.integration.checkpoints.rank FOLDER SCENARIO RANK WORLD``.

It trains a small model with FSDP2 on gloo, and saves it; or loads it, sharded in another way.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from millrace.checkpoints import Ranks, Saver, SaveSettings, load_into
from millrace.checkpoints.progress_events import PartStored
from millrace.progress import Event
from millrace.storage import open_store
from tests.ranks import leave

SETTINGS = SaveSettings(part_bytes=2048, ranks_within=timedelta(seconds=30))
SHORT = SETTINGS.model_copy(update={"ranks_within": timedelta(seconds=1)})


def model_of(mesh_shape: tuple[int, ...]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose dimensions no number of ranks divides, and that trained for two steps."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(13, 37), torch.nn.GELU(), torch.nn.Linear(37, 1))
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(4, 13)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The whole tensors of a state, by their paths. A collective."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": tensor for inner, tensor in full(value).items()}
        elif hasattr(value, "full_tensor"):
            found[name] = value.full_tensor().contiguous()
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


def save(folder: Path, rank: int, *, deadly: bool) -> None:
    model, optimizer = model_of((2, 2))
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments, "lr": 0.01}

    def progress(event: Event) -> None:
        if deadly and rank == 3 and isinstance(event, PartStored):
            os.kill(os.getpid(), signal.SIGKILL)

    store, settings = open_store(folder.as_uri()), SHORT if deadly else SETTINGS
    own = {"generator": torch.full((3,), rank), "seen": 10 * rank}
    with Saver(store, "job", settings, ranks=Ranks.from_group(), progress=progress) as saver:
        saving = saver.save(state, step=7, position={"sample": 5}, own=own)
        if not deadly:
            whole = full({name: state[name] for name in ("model", "optimizer")})
            if rank == 0:
                save_file(whole, folder / "whole.safetensors")
        print(saving.result().root)


def restore(folder: Path, rank: int, world: int) -> None:
    model, optimizer = model_of((world,))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments}
    found = load_into(state, open_store(folder.as_uri()), "job", step=7, rank=rank)
    assert found.state["lr"] == 0.01
    assert found.own["seen"] == 10 * rank
    assert found.own["generator"].tolist() == [rank] * 3
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found.state["model"],
        optim_state_dict=found.state["optimizer"],
    )
    parameters, moments = get_state_dict(model, optimizer)
    whole = full({"model": parameters, "optimizer": moments})
    if rank == 0:
        save_file(whole, folder / "restored.safetensors")


def save_and_refill_uneven(folder: Path, rank: int) -> None:
    """Save 7 rows that tensor parallelism and then FSDP2 have cut, and load them again."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(2, 7))
    fully_shard(parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}), mesh=mesh["dp"])
    state, store = model.state_dict(), open_store(folder.as_uri())
    with Saver(store, "job", SETTINGS, ranks=Ranks.from_group()) as saver:
        saver.save(state, step=7).result()
    whole = full(state)
    if rank == 0:
        save_file(whole, folder / "whole.safetensors")
    before = {name: tensor.to_local().clone() for name, tensor in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    load_into(model.state_dict(), store, "job", step=7)
    assert all(torch.equal(state[name].to_local(), tensor) for name, tensor in before.items())


def main() -> None:
    folder, scenario, rank, world = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{scenario}.group", rank=rank, world_size=world
    )
    if scenario == "restore":
        restore(folder, rank, world)
    elif scenario == "uneven":
        save_and_refill_uneven(folder, rank)
    else:
        save(folder, rank, deadly=scenario == "deadly")
    if scenario != "deadly":
        leave()


if __name__ == "__main__":
    main()
