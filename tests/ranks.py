"""Ranks of a process group, as processes."""

import gc
import subprocess
from pathlib import Path

from tests.support.fork_server import RUN_MODULE, get_fork_server

IMPORTED = (
    "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "safetensors.torch", "millrace.checkpoints", "millrace.gradients",
    "millrace.gradients.backends.rank_group", "tests.ranks",
)  # fmt: skip
"""Modules that ranks need; optimizers import the first."""


def run_ranks(module: str, folder: Path, scenario: str, world: int) -> list[tuple[int, str]]:
    """Run a module as each rank, and return their exit codes and all that they print.

    The arguments of the module are the folder, the scenario, the rank and the number of ranks.
    """
    server = get_fork_server(*IMPORTED)
    ranks = [
        server.start(
            RUN_MODULE,
            *(module, str(folder), scenario, str(rank), str(world)),
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.wait(), text) for rank, text in zip(ranks, said, strict=True)]


def leave() -> None:
    """End the process group of this rank, and all that a model of it holds.

    One that is held until the interpreter ends aborts it, at times: gloo's threads want the GIL.
    """
    from torch.distributed import destroy_process_group

    destroy_process_group()
    gc.collect()
