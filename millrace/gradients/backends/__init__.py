"""Backends of the weights of a run: one machine, a Ray cluster, or the ranks of a worker.

`ShardedWeights` does the work of a window. It calls the shards through a `WeightBackend`, which
knows where they are.
"""
