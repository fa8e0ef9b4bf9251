"""All blocks of commands, of Python and of settings in README and in the guides have a test."""

import re
from pathlib import Path

import pytest

from millrace.testing.process import REPOSITORY
from tests.support.guides import GUIDES, read_blocks

PAGES = sorted(GUIDES.glob("*.md"))
README = {
    "Install": {"console"},
    "Five minutes to a sharded dataset in your own bucket": {"console", "python"},
    "Terminal or Prefect": {"console"},
    "Demo": {"console"},
}
"""The blocks that `tests/e2e/test_readme.py` and `test_demo.py` execute."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_guide_has_a_test_that_executes_all_of_its_blocks(page: Path):
    languages = {block.language for block in read_blocks(page)}
    assert languages
    assert languages <= {"console", "python", "yaml"}
    fences = re.findall(r"^ *(?:```|~~~)", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(read_blocks(page))  # no block is indented, or fenced otherwise
    test = REPOSITORY / "tests/e2e/guides" / f"test_{page.stem}.py"
    assert re.search(rf'follow\(\s*"{page.stem}"', test.read_text())


def test_every_block_of_readme_is_executed():
    page = (REPOSITORY / "README.md").read_text()
    found: dict[str, set[str]] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        languages = re.findall(r"^```(console|python|yaml|sh|bash)$", section, re.MULTILINE)
        assert len(languages) == len(set(languages)), heading
        if languages:
            found[heading] = set(languages)
    assert found == README
