"""A training loop in a process of its own, which reports each batch with the state after it.

``python -m tests.support.shard_training`` reads a line of JSON on its standard input.
"""

import json
import sys

from millrace.datasets.loader import ShardLoader
from millrace.storage import StoreSpec


def main() -> None:
    call = json.loads(sys.stdin.readline())
    loader = ShardLoader(
        StoreSpec.model_validate(call["store"]),
        "corpus",
        rank=call["rank"],
        world_size=call["world_size"],
        streams=8,
        shuffle_window=20,
        batch_size=13,
    )
    if call["state"]:
        loader.load_state_dict(call["state"])
    for batch in loader:
        pairs = [(sample["__key__"], sample["txt"]) for sample in batch]
        print(json.dumps({"received": pairs, "state": loader.state_dict()}), flush=True)


if __name__ == "__main__":
    main()
