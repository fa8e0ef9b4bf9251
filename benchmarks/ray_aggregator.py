"""Script that merges a window with its weights on a Ray cluster: see `benchmarks.aggregator`.

It reads its order from the first line of its standard input, and prints its figures as JSON. The
weights stay on the nodes until its standard input ends, so that their CPU time can be read.
"""

import json
import sys

from benchmarks.aggregator import SETTINGS, merge_one_window
from millrace.gradients.backends.ray_cluster import allocate_on_ray


def main() -> None:
    """Merge the window that the order names."""
    folder, width, layers, address = json.loads(sys.stdin.readline())
    weights_per_object = SETTINGS.merge.weights_per_object
    with allocate_on_ray(address, weights_per_object=weights_per_object, reads=64) as allocate:
        print(json.dumps(merge_one_window(folder, width, layers, allocate)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
