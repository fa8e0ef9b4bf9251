"""Format numbers, and clean texts from outside, for messages and reports."""

import re
import unicodedata
from datetime import timedelta

MAX_LENGTH = 300
"""Largest number of characters of a text from outside in a line of a report."""
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
    if size < 1000:
        return format_count(round(size), "byte")
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} PB"


def format_age(age: timedelta) -> str:
    """Return a time that has passed, in its largest unit: ``3 d``, ``5 h``, ``12 min``, ``0 s``."""
    seconds = max(0, int(age.total_seconds()))
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:,} {unit}"
    return f"{seconds} s"


def shorten_url(url: str) -> str:
    """Return a URL for a message, up to where a key, a password or a token may begin."""
    scheme, colon, rest = url.partition(":")
    if "@" in rest:
        return f"{scheme}://…"
    return f"{scheme}{colon}{re.split('[:?#]', rest, maxsplit=1)[0]}"


def clean_text(text: str, max_length: int = MAX_LENGTH) -> str:
    """Return a text on one line, without unprintable characters, and cut to a length.

    Control characters and characters that change the direction of writing become U+FFFD.
    """
    read = text[: 8 * max_length]  # the rest of a text of megabytes is not read
    shown = replace_unprintable(" ".join(read.split()))
    if len(shown) <= max_length and read == text:
        return shown
    return f"{shown[: max_length - 1]}…"


def replace_unprintable(text: str) -> str:
    """Replace each control and format character by U+FFFD. The length stays the same."""
    if text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(c) in _REPLACED_CATEGORIES else c for c in text)
