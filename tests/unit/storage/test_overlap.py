"""Locations are equal if they have the same objects, whatever their URLs."""

from pathlib import Path

import pytest

from millrace.storage import StoreSpec, open_store
from millrace.storage.overlap import locate_prefix

ACCOUNT = "0123456789abcdef" * 2
R2 = f"https://{ACCOUNT}.r2.cloudflarestorage.com"


@pytest.mark.parametrize(
    ("one", "prefix", "other", "endpoint", "is_same"),
    [
        ("s3://bucket/a/b", "", "s3://bucket/a", None, True),
        (f"r2://{ACCOUNT}/bucket/a/b", "", "s3://bucket/a", R2, True),
        ("s3://bucket/a/b", "", "s3://bucket/a", "http://127.0.0.1:9", False),
        ("s3://bucket/a/b", "", "s3://another/a", None, False),
        ("s3://bucket/a/b", "", "s3://bucket/a/c", None, False),
        ("s3://bucket/ab", "", "s3://bucket/a", None, False),
        ("s3://bucket", "a/b", "s3://bucket/a", None, True),
        ("s3://bucket", "", "s3://bucket/a", None, False),
    ],
)
def test_a_bucket_is_the_same_by_each_of_its_urls(
    one: str,
    prefix: str,
    other: str,
    endpoint: str | None,
    is_same: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT", raising=False)
    bucket, path = locate_prefix(open_store(one), prefix)
    other_bucket, above = locate_prefix(open_store(StoreSpec(url=other, endpoint=endpoint)))
    assert (bucket == other_bucket and path.startswith(above)) is is_same


def test_a_folder_is_the_same_by_each_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "b").symlink_to(tmp_path / "real" / "a")
    real, link = (open_store((tmp_path / name).as_uri()) for name in ("real", "link"))
    assert locate_prefix(real) == locate_prefix(link)
    assert locate_prefix(real, "a") == locate_prefix(link, "b")
    assert locate_prefix(open_store("file:///"))[1] == "/"
