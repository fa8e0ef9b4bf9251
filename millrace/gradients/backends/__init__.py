"""Storage of a run's weights: on one machine, over a Ray cluster, or over ranks."""
