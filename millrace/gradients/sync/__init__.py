"""Gathering, merging and chaining of the workers' pseudo-gradients through a bucket."""
