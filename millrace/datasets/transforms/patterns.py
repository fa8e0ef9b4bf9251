"""Regular expressions of RE2, which take time in proportion to the text."""

import pyarrow
from pyarrow import compute


def match_pattern(texts: pyarrow.LargeStringArray, pattern: str) -> list[bool]:
    """Return whether each text contains a match of a regular expression of RE2.

    RE2 takes time in proportion to the text, whatever the expression is.

    Raises:
        ValueError: RE2 does not know the expression, or the expression is too large.
    """
    found = compute.match_substring_regex(texts, pattern=pattern)
    return [match is True for match in found.to_pylist()]
