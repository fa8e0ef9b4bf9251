"""A rank that executes a block of Python: ``python -m tests.support.guides_rank FOLDER NAME RANK
WORLD``. The block is ``FOLDER/NAME.py``; a model, its optimizer, and a store are defined.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from millrace.storage import open_store
from tests.ranks import leave


def main() -> None:
    folder, name, rank, world = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world
    )
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(13, 37), torch.nn.Linear(37, 1))
    for layer in (model[0], model[1], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 13)).sum().backward()
    optimizer.step()
    names = {
        "torch": torch, "model": model, "optimizer": optimizer,
        "store": open_store((folder / "store").as_uri()),
    }  # fmt: skip
    exec((folder / f"{name}.py").read_text(), names)
    print(names["found"].checkpoint.step)
    del model, optimizer
    names.clear()
    leave()


if __name__ == "__main__":
    main()
