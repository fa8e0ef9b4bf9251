"""Backends of a run's weights: on one machine, over a Ray cluster, or over the ranks of a worker.

`ShardedWeights` does the work of a window. It calls the shards through a `WeightBackend`, which
knows where they are.
"""
