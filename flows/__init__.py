"""Flows: which steps run, in which order, with which parameters. One flow a file."""
