"""Save the initial weights of a campaign: ``python -m examples.tiny_lm.begin URL JOB``."""

import argparse

import torch

from examples.tiny_lm.model import TinyLM
from millrace.checkpoints import Saver
from millrace.storage import Store, open_store


def begin(store: Store, job: str, *, seed: int = 0) -> int:
    """Save an untrained model as step 0 of a job, and return its number of weights."""
    torch.manual_seed(seed)
    model = TinyLM()
    with Saver(store, job) as saver:
        saver.save({"model": model.state_dict()}, step=0)
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="URL of the store")
    parser.add_argument("job", help="job of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    weights = begin(open_store(arguments.url), arguments.job, seed=arguments.seed)
    print(f"{arguments.job} at {arguments.url}: step 0 of {weights:,} weights.")
