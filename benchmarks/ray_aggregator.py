"""Script that merges a window with its weights on a Ray cluster: see `benchmarks.aggregator`.

It reads its order from the first line of its standard input, and prints its figures as JSON.
"""

import json
import sys
import time

from benchmarks.aggregator import run_aggregator


def main() -> None:
    """Merge the window that the order names."""
    folder, width, layers, address = json.loads(sys.stdin.readline())
    figures = run_aggregator(folder, width, layers, address)
    print(json.dumps({**figures, "CPU s": time.process_time()}), flush=True)


if __name__ == "__main__":
    main()
