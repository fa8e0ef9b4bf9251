"""A rank of a worker: ``python -m tests.integration.gradients.rank FOLDER SCENARIO RANK WORLD``.

Its model is sharded with FSDP2 on gloo. It takes part in a run in the folder's bucket.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from millrace import errors
from millrace.gradients import (
    Codec,
    GatherSettings,
    Participant,
    RegistrationSettings,
    RunSettings,
    WorkerKey,
    select_weights,
)
from millrace.gradients.backends.rank_group import RankGroup
from millrace.gradients.state import WeightState
from millrace.gradients.sync.change_compressor import ChangeCompressor
from millrace.storage import open_store
from tests.ranks import leave

SETTINGS = RunSettings(
    run="runs/one",
    codec=Codec(k=256, bits=4),
    gather=GatherSettings(poll_interval=timedelta(milliseconds=20)),
    window_length=timedelta(minutes=1),
    windows=2,
    registration=RegistrationSettings(warm_up=0),
)


def model_of() -> torch.nn.Module:
    """A model whose dimensions no number of ranks divides."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(13, 37), torch.nn.GELU(), torch.nn.Linear(37, 1))


def train(model: torch.nn.Module, window: int) -> None:
    """Change a model as training would, in the same way on any number of ranks."""
    dice = torch.Generator().manual_seed(window)
    with torch.no_grad():
        for weight in model.parameters():
            change = 0.01 * torch.randn(weight.shape, generator=dice, dtype=torch.float32)
            if isinstance(weight, dist.tensor.DTensor):
                change = dist.tensor.distribute_tensor(
                    change, weight.device_mesh, weight.placements
                )
            weight.add_(change)


def join(folder: Path, group: dist.ProcessGroup | None = None) -> Participant:
    """Register and join with the key in a file of the folder."""
    store, key = open_store(folder.as_uri()), WorkerKey.load(folder / "worker.key")
    return Participant.join(SETTINGS, "a", store, store, group=group, key=key)


def take_part(
    folder: Path, model: torch.nn.Module, group: dist.ProcessGroup | None = None
) -> WeightState:
    """Two windows, the second by a participant that was started again; the weights after them."""
    left: dict[str, Any] | None = None
    for _ in range(2):
        participant = join(folder, group)
        if left is not None:
            participant.load_state_dict(left)
        turn = next(participant.iterate_windows())
        participant.load(model)
        train(model, turn.number)
        participant.submit(model, tokens=5)
        participant.receive(model)
        left = participant.state_dict()
    return select_weights(model)


def differ(group: dist.ProcessGroup, rank: int) -> None:
    """Each fails in another way: all hear the first one's reason, and go on together."""
    ranks = RankGroup(group)

    def fail() -> None:
        if rank == 0:
            raise errors.NotFoundError("It is not there.")
        raise MemoryError("no more")

    try:
        ranks.run_on_each(fail)
    except errors.NotFoundError as error:
        print(error)

    def fail_here() -> None:
        if rank == 1:
            raise MemoryError("no more")

    try:
        ranks.run_on_each(fail_here)
    except (errors.WorkerError, MemoryError) as error:
        print(error)
    print(ranks.gather_results(lambda: rank), ranks.run_on_first(lambda: rank + 7))


def fails(*_: object) -> torch.Tensor:
    raise MemoryError("no more")


def spoil(folder: Path, model: torch.nn.Module, rank: int, group: dist.ProcessGroup) -> None:
    """One rank's shard is not finite: all hear of it, nothing is sent, and they can go on."""
    participant = join(folder, group)
    participant.load(model)
    if rank == 1:
        weight = next(iter(model.parameters()))
        with torch.no_grad():
            cast("dist.tensor.DTensor", weight).to_local().fill_(float("nan"))
    try:
        participant.submit(model)
    except errors.ConfigurationError as error:
        print(error)
    participant.load(model)
    change = ChangeCompressor._compute_change
    ChangeCompressor._compute_change = fails if rank == 0 else change  # pyright: ignore[reportPrivateUsage]
    try:
        participant.submit(model)
    except (errors.WorkerError, MemoryError) as error:
        print(error)
    ChangeCompressor._compute_change = change
    participant.submit(model)


def sharded(folder: Path, scenario: str, rank: int, world: int) -> None:
    model = model_of()
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    if scenario == "spoil":
        spoil(folder, model, rank, mesh.get_group())
    else:
        torch.set_default_dtype(torch.float64)  # as some scripts do: weights stay what they are
        print(take_part(folder, model, mesh.get_group()).digest())


def main() -> None:
    folder, scenario, rank, world = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{scenario}.group", rank=rank, world_size=world
    )
    if scenario == "differ":
        differ(dist.group.WORLD, rank)
    else:
        sharded(folder, scenario, rank, world)
    leave()


if __name__ == "__main__":
    main()
