"""Numbers in words, and texts from outside, for messages and reports."""

import unicodedata

MAX_LENGTH = 300
"""Characters of a text from outside that a line of a report shows."""
_REPLACED_CATEGORIES = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
    "Zl",
    "Zp",
}  # control, format (as bidi), unassigned


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 shard``, ``1,200 shards``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_size(size: float) -> str:
    """Return a number of bytes with its unit: ``23.4 GB``."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"


def clean_text(text: str, max_length: int = MAX_LENGTH) -> str:
    """Return a text on one line, without what does not print, and cut to a length.

    Control characters and those that change the direction of writing become U+FFFD.
    """
    read = text[: 8 * max_length]  # a text of megabytes is not gone through
    shown = replace_unprintable(" ".join(read.split()))
    if len(shown) <= max_length and read == text:
        return shown
    return f"{shown[: max_length - 1]}…"


def replace_unprintable(text: str) -> str:
    """Replace what a terminal or a page would obey; what is written stays as long as it is."""
    if text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(c) in _REPLACED_CATEGORIES else c for c in text)
