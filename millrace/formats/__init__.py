"""Formats of shards."""
