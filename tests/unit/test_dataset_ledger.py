"""Records of a dataset are read under its own name."""

from pathlib import Path

import pytest

from millrace.dataset_ledger import describe_other_name
from millrace.keys.datasets import DatasetKeys
from millrace.storage import open_store

ACCOUNT = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("url", "asked", "recorded", "right"),
    [
        ("s3://bucket", "team/words", "words", "s3://bucket/team"),
        ("s3://bucket/a%3Fb/team", "words", "team/words", "s3://bucket/a%3Fb"),
        ("s3://bucket/team", "words", "team/words", "s3://bucket"),
        (f"r2://{ACCOUNT}/words", "a/b/c", "b/c", f"r2://{ACCOUNT}/words/a"),
        ("s3://bucket", "renamed", "words", None),
        ("s3://team", "words", "team/words", None),
        ("s3://bucket", "words", "ords", None),
        ("s3://bucket", "words", "", None),
    ],
)
def test_the_url_under_which_a_dataset_has_its_name_is_given(
    url: str, asked: str, recorded: str, right: str | None
) -> None:
    text = describe_other_name(open_store(url), DatasetKeys(asked), recorded)
    assert text.startswith(f"{url}/{asked} is ")
    assert f"the dataset {recorded!r}" in text
    if right is None:
        assert "Use the original, or copy the objects to a folder of that name" in text
    else:
        assert f"of {right}: open that URL, and name the dataset {recorded!r}." in text


def test_a_folder_is_given_by_its_url_too(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    assert describe_other_name(store, DatasetKeys("words"), "words") == ""
    text = describe_other_name(store, DatasetKeys("words"), f"{tmp_path.name}/words")
    assert f"of {tmp_path.parent.as_uri()}: open" in text
