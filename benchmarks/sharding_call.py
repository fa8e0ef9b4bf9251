"""Script for one call of the sharding engine or of its flow: see `benchmarks.prefect`.

Usage: ``python -m benchmarks.sharding_call engine|flow PARAMETERS``, with the parameters as JSON.
"""

import json
import sys
import time


def main() -> None:
    """Call the engine or the flow, and print its times in seconds as JSON."""
    system, parameters = sys.argv[1], json.loads(sys.argv[2])
    if system == "engine":
        from millrace.datasets import PipelineSettings, shard_dataset

        imports = time.process_time()
        shard_dataset(PipelineSettings.model_validate(parameters))
    else:
        from flows.shard_dataset import shard_dataset as flow

        imports = time.process_time()
        flow(**parameters)
    ended = time.time()
    json.dump({"ended": ended, "imports": imports, "cpu": time.process_time()}, sys.stdout)


if __name__ == "__main__":
    main()
