"""The reference in docs/ is what the code says."""

from docs.generate import find_stale_pages


def test_the_reference_is_that_of_the_code() -> None:
    stale = find_stale_pages()
    assert stale == [], "docs/reference is stale: run make docs"
