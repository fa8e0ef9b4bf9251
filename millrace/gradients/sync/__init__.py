"""Exchange of pseudo-gradients through a bucket: the aggregator's windows and a worker's part."""
