"""Scores of workers: what a worker's gradient does to the loss, and what follows from it."""
