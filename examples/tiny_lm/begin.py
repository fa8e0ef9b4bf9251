"""Make the weights that a campaign begins with: ``python -m examples.tiny_lm.begin URL JOB``."""

import argparse

import torch

from examples.tiny_lm.model import TinyLM
from millrace.checkpoints import Saver
from millrace.storage import Store, open_store


def begin(store: Store, job: str, *, seed: int = 0) -> int:
    """Save a model that has learnt nothing yet, as a job's step 0; how many weights it has."""
    torch.manual_seed(seed)
    model = TinyLM()
    with Saver(store, job) as saver:
        saver.save({"model": model.state_dict()}, step=0)
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the store")
    parser.add_argument("job", help="whose checkpoint it is there")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    weights = begin(open_store(arguments.url), arguments.job, seed=arguments.seed)
    print(f"{arguments.job} at {arguments.url}: step 0 of {weights:,} weights.")
