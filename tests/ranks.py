"""Ranks of a process group, as processes."""

import gc
import subprocess
import sys
from pathlib import Path

from millrace.testing.process import REPOSITORY


def run_ranks(module: str, folder: Path, scenario: str, world: int) -> list[tuple[int, str]]:
    """Run ``python -m MODULE FOLDER SCENARIO RANK WORLD`` for each: how it ended, what it said."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, folder, scenario, str(rank), str(world)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def leave() -> None:
    """End the process group of this rank, and all that a model of it holds.

    One that is held until the interpreter ends aborts it, at times: gloo's threads want the GIL.
    """
    from torch.distributed import destroy_process_group

    destroy_process_group()
    gc.collect()
