"""Limits that several parts of the tracker share."""

MAX_CANDIDATES = 16
"""Number of pieces of a queue, or holders of a piece, that one decision considers."""
