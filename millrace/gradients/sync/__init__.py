"""Gather, merge and chain the pseudo-gradients of a run's workers through a bucket."""
