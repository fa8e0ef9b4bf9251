"""Format durations and rates, and make keys of artifacts."""

import re

from millrace.formatting import format_count, format_size

__all__ = ["format_count", "format_duration", "format_rate", "format_size", "make_artifact_key"]


def format_rate(count: float, seconds: float) -> str:
    """Format bytes per second: ``85.0 MB/s``, ``12.3 kB/s``."""
    return f"{format_size(count / max(seconds, 1e-9))}/s"


def format_duration(seconds: float) -> str:
    """Format seconds: ``4 min 12 s``."""
    if 0 < seconds < 0.05:
        return "less than 0.1 s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def make_artifact_key(*parts: str) -> str:
    """Return a key that Prefect takes: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
